"""Hugging Face ViT and DeiT, in the layout of transformers 5.20 and in the one before it."""

from torch import nn

from ..anatomy import Anatomy, Part, has_parts, is_a, resolve

NORMS = {"norm1": "layernorm_before", "norm2": "layernorm_after"}
NEW = {"proj": "attention.o_proj", "up": "mlp.fc1", "activation": "mlp.activation_fn", "down": "mlp.fc2"}
OLD = {"proj": "attention.output.dense", "up": "intermediate.dense", "down": "output.dense"}
OLD |= {"activation": "intermediate.intermediate_act_fn"}


def describe(block: nn.Module) -> Anatomy | None:
    if not is_a(
        block,
        "transformers.models.vit.modeling_vit.ViTLayer",
        "transformers.models.deit.modeling_deit.DeiTLayer",
    ):
        return None
    new = has_parts(block, NEW["proj"], NEW["up"])
    heads = resolve(block, f"attention.{'' if new else 'attention.'}num_attention_heads")
    parts = {role: Part(path) for role, path in (NORMS | (NEW if new else OLD)).items()}
    return Anatomy("hf_vit", "transformer", parts, num_heads=heads, input="hidden_states")
