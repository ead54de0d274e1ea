"""timm ViT, DeiT, BEiT, EVA and their relatives: blocks with `attn.proj`, `norm1` and `mlp`."""

from typing import Any

from torch import nn

from ..anatomy import Anatomy, Part, anatomy, is_a, resolve

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
        parts = {"proj": "attn.proj", "norm1": "norm1", "norm2": "norm2"} | mlp_parts(resolve(block, "mlp"))
        return anatomy("timm_vit", "transformer", num_heads=resolve(block, "attn.num_heads"), **parts)
    if is_a(block, "timm.models.vision_transformer.ParallelScalingBlock"):  # one norm, one fused input matrix
        heads = resolve(block, "num_heads")
        return anatomy("timm_vit", "transformer", num_heads=heads, proj="attn_out_proj", norm1="in_norm")
    if is_a(block, "timm.models.gemma4_vit.Gemma4Block"):  # its MLP has a norm on each side, and may clip
        heads = resolve(block, "attn.num_heads")
        return anatomy("timm_vit", "transformer", num_heads=heads, proj="attn.o_proj.linear", norm1="norm1")
    return anatomy("timm_vit", "any") if is_a(block, *OTHERS) else None


def mlp_parts(mlp: Any) -> dict[str, Any]:
    """The matrices of timm's MLPs; none where there is more between them than an activation."""
    if not isinstance(getattr(mlp, "norm", nn.Identity()), nn.Identity):
        return {}
    activation: dict[str, Any] = {"activation": "mlp.act", "down": "mlp.fc2"}
    if is_a(mlp, "timm.layers.mlp.Mlp"):
        return activation | {"up": "mlp.fc1"}
    if is_a(mlp, "timm.layers.mlp.SwiGLU"):
        return activation | {"gate": "mlp.fc1_g", "up": "mlp.fc1_x"}
    if is_a(mlp, "timm.layers.mlp.GluMlp") and isinstance(mlp.fc1, nn.Linear):
        width = mlp.fc1.out_features
        halves = [Part("mlp.fc1", rows=(0, width // 2)), Part("mlp.fc1", rows=(width // 2, width))]
        up, gate = halves if mlp.gate_last else reversed(halves)
        return activation | {"gate": gate, "up": up}
    return {}
