"""torchvision VisionTransformer: encoder blocks around nn.MultiheadAttention."""

from torch import nn

from ..anatomy import Anatomy, anatomy, is_a, resolve


def describe(block: nn.Module) -> Anatomy | None:
    if not is_a(block, "torchvision.models.vision_transformer.EncoderBlock"):
        return None
    return anatomy(
        "torchvision_vit",
        "transformer",
        num_heads=resolve(block, "num_heads"),
        input="input",
        proj="self_attention.out_proj",
        norm1="ln_1",
        norm2="ln_2",
        up="mlp.0",
        activation="mlp.1",
        down="mlp.3",
    )
