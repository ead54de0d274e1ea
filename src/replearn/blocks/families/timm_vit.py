"""timm ViT, DeiT, BEiT, EVA and their relatives: blocks with `attn.proj`, `norm1` and `mlp`."""

from typing import Any

from torch import nn

from ..anatomy import Anatomy, Part, is_a, resolve

BLOCKS = (
    "timm.models.vision_transformer.Block",
    "timm.models.vision_transformer.ResPostBlock",
    "timm.models.vision_transformer_relpos.RelPosBlock",
    "timm.models.vision_transformer_relpos.ResPostRelPosBlock",
    "timm.models.vision_transformer_sam.Block",
    "timm.models.beit.Block",
    "timm.models.cait.LayerScaleBlock",
    "timm.models.convit.Block",
    "timm.models.deepseek_vit.DeepseekVitBlock",
    "timm.models.eva.EvaBlock",
    "timm.models.eva.EvaBlockPostNorm",
    "timm.models.xcit.XCABlock",
)
# without one square output projection of their own: several in parallel, or one fused with the MLP's
OTHERS = (
    "timm.models.vision_transformer.ParallelThingsBlock",
    "timm.models.vision_transformer.DiffParallelScalingBlock",
)


def describe(block: nn.Module) -> Anatomy | None:
    if is_a(block, *BLOCKS):
        parts = {"proj": Part("attn.proj"), "norm1": Part("norm1"), "norm2": Part("norm2")}
        parts |= mlp_parts(resolve(block, "mlp"))
        return Anatomy("timm_vit", "transformer", parts, num_heads=resolve(block, "attn.num_heads"))
    if is_a(block, "timm.models.vision_transformer.ParallelScalingBlock"):  # one norm, one fused input matrix
        parts = {"proj": Part("attn_out_proj"), "norm1": Part("in_norm")}
        return Anatomy("timm_vit", "transformer", parts, num_heads=resolve(block, "num_heads"))
    if is_a(block, "timm.models.gemma4_vit.Gemma4Block"):  # its MLP has a norm on each side, and may clip
        parts = {"proj": Part("attn.o_proj.linear"), "norm1": Part("norm1")}
        return Anatomy("timm_vit", "transformer", parts, num_heads=resolve(block, "attn.num_heads"))
    return Anatomy("timm_vit", "any") if is_a(block, *OTHERS) else None


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
