"""Hugging Face GPT-2: its Conv1D layers keep their weights as (in, out)."""

from torch import nn

from ..anatomy import Anatomy, Part, anatomy, is_a, resolve


def describe(block: nn.Module) -> Anatomy | None:
    if not is_a(block, "transformers.models.gpt2.modeling_gpt2.GPT2Block"):
        return None
    return anatomy(
        "hf_gpt2",
        "transformer",
        num_heads=resolve(block, "attn.num_heads"),
        input="hidden_states",
        proj=Part("attn.c_proj", transposed=True),
        norm1="ln_1",
        norm2="ln_2",
        up=Part("mlp.c_fc", transposed=True),
        activation="mlp.act",
        down=Part("mlp.c_proj", transposed=True),
    )
