"""Models of the libraries, tiny, with the shapes that a drawing decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from .models import Shape


class Logits(nn.Module):
    """A Hugging Face model that takes and gives one tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.model(input_ids=tokens).logits
        return out


def hugging_face(name: str, **settings: Any) -> nn.Module:
    import transformers

    model = getattr(transformers, name)
    return Logits(model(model.config_class(**settings)))


def llama(shape: Shape) -> nn.Module:
    return hugging_face(
        "LlamaForCausalLM", vocab_size=32, hidden_size=shape.width * 2, intermediate_size=24,
        num_hidden_layers=shape.depth, num_attention_heads=shape.heads,
        num_key_value_heads=max(1, shape.heads // shape.groups), max_position_embeddings=32,
        tie_word_embeddings=shape.bias, attention_bias=shape.norm_first, use_cache=False,
        bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip


def gpt2(shape: Shape) -> nn.Module:
    return hugging_face(
        "GPT2LMHeadModel", vocab_size=32, n_embd=shape.width, n_layer=shape.depth, n_head=shape.heads,
        n_positions=32, tie_word_embeddings=shape.bias, use_cache=False, bos_token_id=0, eos_token_id=1,
        pad_token_id=1, resid_pdrop=shape.dropout, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip


def bert(shape: Shape) -> nn.Module:
    return hugging_face(
        "BertForMaskedLM", vocab_size=32, hidden_size=shape.width, num_hidden_layers=shape.depth,
        num_attention_heads=shape.heads, intermediate_size=24, max_position_embeddings=32,
        hidden_dropout_prob=shape.dropout, pad_token_id=1,
    )  # fmt: skip


def vit(shape: Shape) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        8, 4, num_classes=4, embed_dim=shape.width, depth=shape.depth, num_heads=shape.heads, mlp_ratio=2,
        qkv_bias=shape.bias, init_values=0.1 if shape.norm_first else None,
    )  # fmt: skip


def resnet(shape: Shape) -> nn.Module:
    from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

    block = Bottleneck if shape.norm_first else BasicBlock
    return ResNet(block, [shape.depth, 2, 1, 1], num_classes=4, width_per_group=64 if block is BasicBlock else 4)


LIBRARIES: dict[str, Callable[[Any], nn.Module]] = {
    "llama": llama, "gpt2": gpt2, "bert": bert, "vit": vit, "resnet": resnet,
}  # fmt: skip
