"""nn.TransformerEncoder and nn.TransformerDecoder."""

from torch import nn

from ..anatomy import Anatomy, anatomy


def describe(block: nn.Module) -> Anatomy | None:
    if type(block) is nn.TransformerEncoderLayer:
        first, mlp_norm = "src", "norm2"
    elif type(block) is nn.TransformerDecoderLayer:
        first, mlp_norm = "tgt", "norm3"
    else:
        return None
    return anatomy(
        "torch_transformer",
        "transformer",
        num_heads=block.self_attn.num_heads,
        input=first,
        proj="self_attn.out_proj",
        norm1="norm1",
        norm2=mlp_norm,
        up="linear1",
        activation="activation",
        down="linear2",
    )
