"""timm ViT, DeiT, BEiT, EVA and their relatives: blocks with `attn.proj`, `norm1` and `mlp`."""

from typing import Any

from torch import nn

from ..anatomy import Anatomy, Part, holds, is_a, resolve

BLOCKS = (
    "timm.models.vision_transformer.Block",
    "timm.models.vision_transformer.ResPostBlock",
    "timm.models.vision_transformer.ParallelScalingBlock",
    "timm.models.vision_transformer.DiffParallelScalingBlock",
    "timm.models.vision_transformer_relpos.RelPosBlock",
    "timm.models.vision_transformer_relpos.ResPostRelPosBlock",
    "timm.models.beit.Block",
    "timm.models.cait.LayerScaleBlock",
    "timm.models.eva.EvaBlock",
    "timm.models.eva.EvaBlockPostNorm",
)


def describe(block: nn.Module) -> Anatomy | None:
    if not is_a(block, *BLOCKS):
        return None
    if holds(block, "attn.proj", "norm1", "norm2", "mlp"):
        parts = {"proj": Part("attn.proj"), "norm1": Part("norm1"), "norm2": Part("norm2")}
        parts |= mlp_parts(resolve(block, "mlp"))
        return Anatomy("timm_vit", "transformer", parts, num_heads=resolve(block, "attn.num_heads"))
    if holds(block, "attn_out_proj", "in_norm"):  # ParallelScalingBlock: one norm, one fused matrix
        parts = {"proj": Part("attn_out_proj"), "norm1": Part("in_norm")}
        return Anatomy("timm_vit", "transformer", parts, num_heads=resolve(block, "num_heads"))
    return Anatomy("timm_vit", "any")


def mlp_parts(mlp: Any) -> dict[str, Part]:
    """The matrices of timm's MLPs; none where there is more between them than an activation."""
    if not isinstance(getattr(mlp, "norm", nn.Identity()), nn.Identity):
        return {}
    activation = {"activation": Part("mlp.act"), "down": Part("mlp.fc2")}
    if is_a(mlp, "timm.layers.mlp.Mlp"):
        return activation | {"up": Part("mlp.fc1")}
    if is_a(mlp, "timm.layers.mlp.SwiGLU"):
        return activation | {"gate": Part("mlp.fc1_g"), "up": Part("mlp.fc1_x")}
    if is_a(mlp, "timm.layers.mlp.GluMlp") and isinstance(mlp.fc1, nn.Linear):
        width = mlp.fc1.out_features
        halves = [Part("mlp.fc1", rows=(0, width // 2)), Part("mlp.fc1", rows=(width // 2, width))]
        up, gate = halves if mlp.gate_last else reversed(halves)
        return activation | {"gate": gate, "up": up}
    return {}
