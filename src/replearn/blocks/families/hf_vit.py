"""Hugging Face ViT and DeiT, in the layout of transformers 5.20 and in the one before it."""

from torch import nn

from ..anatomy import Anatomy, anatomy, holds, is_a, resolve


def describe(block: nn.Module) -> Anatomy | None:
    if not is_a(
        block,
        "transformers.models.vit.modeling_vit.ViTLayer",
        "transformers.models.deit.modeling_deit.DeiTLayer",
    ):
        return None
    if holds(block, "attention.o_proj", "mlp.fc1"):
        return anatomy(
            "hf_vit",
            "transformer",
            num_heads=resolve(block, "attention.num_attention_heads"),
            input="hidden_states",
            proj="attention.o_proj",
            norm1="layernorm_before",
            norm2="layernorm_after",
            up="mlp.fc1",
            activation="mlp.activation_fn",
            down="mlp.fc2",
        )
    return anatomy(
        "hf_vit",
        "transformer",
        num_heads=resolve(block, "attention.attention.num_attention_heads"),
        input="hidden_states",
        proj="attention.output.dense",
        norm1="layernorm_before",
        norm2="layernorm_after",
        up="intermediate.dense",
        activation="intermediate.intermediate_act_fn",
        down="output.dense",
    )
