"""Hugging Face decoders of the Llama layout: RMSNorm, gated MLP, `self_attn.o_proj`."""

from torch import nn

from ..anatomy import Anatomy, anatomy, is_a, resolve


def describe(block: nn.Module) -> Anatomy | None:
    if not is_a(
        block,
        "transformers.models.llama.modeling_llama.LlamaDecoderLayer",
        "transformers.models.qwen2.modeling_qwen2.Qwen2DecoderLayer",
        "transformers.models.qwen3.modeling_qwen3.Qwen3DecoderLayer",
        "transformers.models.mistral.modeling_mistral.MistralDecoderLayer",
    ):
        return None
    return anatomy(
        "hf_llama",
        "transformer",
        num_heads=resolve(block, "self_attn.config.num_attention_heads"),
        input="hidden_states",
        proj="self_attn.o_proj",
        norm1="input_layernorm",
        norm2="post_attention_layernorm",
        gate="mlp.gate_proj",
        up="mlp.up_proj",
        activation="mlp.act_fn",
        down="mlp.down_proj",
    )
