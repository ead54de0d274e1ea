"""nn.TransformerEncoder and nn.TransformerDecoder."""

from torch import nn

from ..anatomy import Anatomy, anatomy, is_a, resolve


def describe(block: nn.Module) -> Anatomy | None:
    if is_a(block, "torch.nn.modules.transformer.TransformerEncoderLayer"):
        first, mlp_norm = "src", "norm2"
    elif is_a(block, "torch.nn.modules.transformer.TransformerDecoderLayer"):
        first, mlp_norm = "tgt", "norm3"
    else:
        return None
    return anatomy(
        "torch_transformer",
        "transformer",
        num_heads=resolve(block, "self_attn.num_heads"),
        input=first,
        proj="self_attn.out_proj",
        norm1="norm1",
        norm2=mlp_norm,
        up="linear1",
        activation="activation",
        down="linear2",
    )
