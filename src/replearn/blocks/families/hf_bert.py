"""Hugging Face BERT: post-norm layers, whose LayerNorms follow the residual sum."""

from torch import nn

from ..anatomy import Anatomy, anatomy, is_a, resolve


def describe(block: nn.Module) -> Anatomy | None:
    if not is_a(
        block,
        "transformers.models.bert.modeling_bert.BertLayer",
        "transformers.models.roberta.modeling_roberta.RobertaLayer",
    ):
        return None
    return anatomy(
        "hf_bert",
        "transformer",
        num_heads=resolve(block, "attention.self.num_attention_heads"),
        input="hidden_states",
        proj="attention.output.dense",
        norm1="attention.output.LayerNorm",
        norm2="output.LayerNorm",
        up="intermediate.dense",
        activation="intermediate.intermediate_act_fn",
        down="output.dense",
    )
