"""Tiny real models, in float64, and where each keeps the weights that the oracle names by role."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import timm.models.resnet
import timm.models.vision_transformer
import torch
import torchvision.models.resnet
import torchvision.models.vision_transformer
from oracle import Block, Tensors
from timm.layers import GluMlp
from torch import Tensor, nn
from transformers import BertConfig, GPT2Config, LlamaConfig, ViTConfig
from transformers.models.bert.modeling_bert import BertModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Model
from transformers.models.llama.modeling_llama import LlamaModel, LlamaRMSNorm
from transformers.models.vit.modeling_vit import ViTModel

import replearn

DIM, HEADS, HIDDEN = 8, 2, 12  # of the transformers; their own names for it vary
Role = str | tuple[str, Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Subject:
    """A model, the block to replace, and its weights by role: a parameter's name, or name and cut."""

    name: str
    build: Callable[[], nn.Module]
    target: str
    block: Block
    roles: Mapping[str, Role]
    input: tuple[int, ...]
    call: Mapping[str, Any] = field(default_factory=dict)  # what the block's own code needs besides x
    thorough: tuple[str, ...] = ()  # the operators that are tried with every combination of options here

    @property
    def neighbours(self) -> tuple[str, str]:
        start, index = re.fullmatch(r"(.*?)(\d+)", self.target).groups()
        return f"{start}{int(index) - 1}", f"{start}{int(index) + 1}"

    def model(self) -> nn.Module:
        """A float64 model with random values, of which any block may be replaced.

        Blocks are shared between the models of a subject, which no test changes; a deep copy of all
        of them for each of the many cases would take longer than the cases.
        """
        root = parent = with_own_children(made(self))
        for key in self.target.split(".")[:-1]:
            child = with_own_children(parent._modules[key])
            parent._modules[key] = child
            parent = child
        return root

    def by_role(self, parameters: Tensors) -> dict[str, Tensor]:
        found = {}
        for role, where in self.roles.items():
            name, cut = (where, lambda tensor: tensor) if isinstance(where, str) else where
            if name in parameters:
                found[role] = cut(parameters[name])
        return found

    def example(self) -> Tensor:
        return torch.randn(self.input, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def __hash__(self) -> int:
        return hash(self.name)


def with_own_children(module: Any) -> Any:
    """The same module, but exchanging a child of it leaves the original as it was."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin


@cache
def made(subject: Subject) -> nn.Module:
    return randomised(subject.build().double(), seed=0)


@torch.no_grad()
def randomised(module: nn.Module, seed: int) -> nn.Module:
    """Random values in every parameter and in every BatchNorm's statistics: no zero hides a term."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not tensor.dtype.is_floating_point:
            continue
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        if name.endswith("running_var"):
            tensor.copy_(0.5 + noise.abs())
        elif tensor.dim() < 2:
            tensor.copy_(1 + 0.3 * noise)
        else:
            tensor.copy_(0.4 * noise)
    return module


# --- CNNs ---------------------------------------------------------------------------------------------

CONVS: dict[str, Role] = {f"conv{i}": f"conv{i}.weight" for i in (1, 2, 3)}
CONVS |= {f"bn{i}": f"bn{i}.weight" for i in (1, 2, 3)} | {f"bn{i}_bias": f"bn{i}.bias" for i in (1, 2, 3)}


def shortcut(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs))


def bottlenecks(groups: int = 1, dilation: int = 1, transition: bool = False) -> nn.Module:
    """torchvision's, with 8 channels outside and 4 per group inside."""
    kind = torchvision.models.resnet.Bottleneck
    same: dict[str, Any] = {"base_width": 128, "groups": groups, "dilation": dilation}
    first = kind(4, 2, downsample=shortcut(4, 8), **same) if transition else kind(8, 2, **same)
    return nn.Sequential(first, kind(8, 2, **same), kind(8, 2, **same))


def timm_bottlenecks() -> nn.Module:
    kind = timm.models.resnet.Bottleneck
    return nn.Sequential(*(kind(8, 2, cardinality=2, base_width=128) for _ in range(3)))


def basic_blocks(kind: Any) -> nn.Module:
    return nn.Sequential(kind(4, 4), kind(4, 4), kind(4, 4))


# --- transformers -------------------------------------------------------------------------------------


def layers(**named: str) -> dict[str, Role]:
    """The weight and the bias of each named layer."""
    return {
        role + suffix: f"{path}{ending}"
        for role, path in named.items()
        for suffix, ending in (("", ".weight"), ("_bias", ".bias"))
    }


def thirds(weight: str, bias: str, transposed: bool = False) -> dict[str, Role]:
    """q, k and v as the thirds of one fused matrix."""

    def cut(i: int, tensor: Tensor) -> Tensor:
        tensor = tensor.t() if transposed and tensor.dim() == 2 else tensor
        return tensor[i * DIM : (i + 1) * DIM]

    found: dict[str, Role] = {}
    for i, role in enumerate("qkv"):
        found[role] = weight, lambda tensor, i=i: cut(i, tensor)
        found[f"{role}_bias"] = bias, lambda tensor, i=i: cut(i, tensor)
    return found


def transposed(table: dict[str, Role]) -> dict[str, Role]:
    """Conv1D keeps (in, out)."""
    return {role: name if role.endswith("_bias") else (name, Tensor.t) for role, name in table.items()}


def halves(name: str) -> dict[str, Role]:
    """The gate and the up matrix as the halves of one."""
    found: dict[str, Role] = {}
    for suffix, ending in (("", ".weight"), ("_bias", ".bias")):
        found[f"gate{suffix}"] = name + ending, lambda tensor: tensor[:HIDDEN]
        found[f"up{suffix}"] = name + ending, lambda tensor: tensor[HIDDEN:]
    return found


def timm_vit() -> nn.Module:
    return timm.models.vision_transformer.VisionTransformer(
        img_size=4, patch_size=2, num_classes=3, embed_dim=DIM, depth=3, num_heads=HEADS, mlp_ratio=1.5
    )


class PackedSwiGLU(GluMlp):
    """timm's GluMlp, with the arguments that timm's Block gives an MLP."""

    def __init__(self, in_features: int, hidden_features: int, act_layer: Any, **settings: Any) -> None:
        super().__init__(in_features, hidden_features, act_layer=nn.SiLU, gate_last=False, **settings)


def timm_swiglu() -> nn.Module:
    kind = timm.models.vision_transformer.Block
    settings: dict[str, Any] = {"mlp_ratio": 3.0, "mlp_layer": PackedSwiGLU, "norm_layer": nn.RMSNorm}
    return nn.Sequential(*(kind(DIM, HEADS, **settings) for _ in range(3)))


def encoder(**settings: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(DIM, HEADS, HIDDEN, dropout=0.0, batch_first=True, **settings)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def torchvision_vit() -> nn.Module:
    return torchvision.models.vision_transformer.VisionTransformer(4, 2, 3, HEADS, DIM, HIDDEN, num_classes=3)


def gpt2() -> nn.Module:
    no_dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    small = {"vocab_size": 11, "n_positions": 8, "n_embd": DIM, "n_layer": 3, "n_head": HEADS, "n_inner": HIDDEN}
    return GPT2Model(GPT2Config(**small, **no_dropout, bos_token_id=0, eos_token_id=0))


def llama(double_norms: bool = True) -> nn.Module:
    """LlamaRMSNorm works in float32 whatever it is given, so 1e-10 needs torch's RMSNorm in its place."""
    config = LlamaConfig(
        vocab_size=11, hidden_size=DIM, intermediate_size=HIDDEN, num_hidden_layers=3, num_attention_heads=HEADS
    )
    model = LlamaModel(config)
    for name, module in list(model.named_modules()):
        if double_norms and isinstance(module, LlamaRMSNorm):
            model.set_submodule(name, nn.RMSNorm(DIM, eps=module.variance_epsilon))
    return model


SMALL: dict[str, Any] = {
    "hidden_size": DIM,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def bert() -> nn.Module:
    return BertModel(BertConfig(vocab_size=11, max_position_embeddings=8, **SMALL))


def hf_vit() -> nn.Module:
    return ViTModel(ViTConfig(image_size=4, patch_size=2, **SMALL))


# --- neither ------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """A block that no family knows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.size = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.size * torch.tanh(self.inner(x))


IMAGES, TOKENS = (2, 8, 5, 4), (2, 3, DIM)
FOUR = (2, 4, 5, 4)
GELU = Block("transformer", heads=HEADS, activation="gelu")
ENCODER = layers(norm1="norm1", norm2="norm2", proj="self_attn.out_proj", up="linear1", down="linear2")
ENCODER |= thirds("self_attn.in_proj_weight", "self_attn.in_proj_bias")
NO_ROTATION = (torch.ones(1, 3, DIM // HEADS).double(), torch.zeros(1, 3, DIM // HEADS).double())
LLAMA = layers(
    norm1="input_layernorm",
    norm2="post_attention_layernorm",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    proj="self_attn.o_proj",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
)

STOCK_LLAMA = Subject(
    name="llama with its own norms",
    build=lambda: llama(double_norms=False),
    target="layers.1",
    block=Block("transformer", heads=HEADS, activation="silu", norm="rms", norm_eps=1e-6, causal=True),
    roles=LLAMA,
    input=TOKENS,
)

SUBJECTS = [
    Subject(
        name="cifar",
        build=lambda: replearn.models.CifarResNet(32, width=4),
        target="layer1.2",
        block=Block("basic"),
        roles=CONVS,
        input=FOUR,
        thorough=("basic", "whole_block"),
    ),
    Subject(
        name="cifar after a transition",
        build=lambda: replearn.models.CifarResNet(32, width=4),
        target="layer2.1",
        block=Block("basic"),
        roles=CONVS,
        input=IMAGES,
    ),
    Subject(
        name="torchvision basic",
        build=lambda: basic_blocks(torchvision.models.resnet.BasicBlock),
        target="1",
        block=Block("basic"),
        roles=CONVS,
        input=FOUR,
    ),
    Subject(
        name="timm basic",
        build=lambda: basic_blocks(timm.models.resnet.BasicBlock),
        target="1",
        block=Block("basic"),
        roles=CONVS,
        input=FOUR,
    ),
    Subject(
        name="torchvision bottleneck",
        build=bottlenecks,
        target="1",
        block=Block("bottleneck"),
        roles=CONVS,
        input=IMAGES,
    ),
    Subject(
        name="grouped bottleneck",
        build=lambda: bottlenecks(groups=2),
        target="1",
        block=Block("bottleneck", groups=2),
        roles=CONVS,
        input=IMAGES,
        thorough=("bottleneck", "reduced_bottleneck"),
    ),
    Subject(
        name="dilated bottleneck",
        build=lambda: bottlenecks(dilation=2),
        target="1",
        block=Block("bottleneck", dilation=2),
        roles=CONVS,
        input=IMAGES,
    ),
    Subject(
        name="bottleneck after a transition",
        build=lambda: bottlenecks(transition=True),
        target="1",
        block=Block("bottleneck"),
        roles=CONVS,
        input=IMAGES,
    ),
    Subject(
        name="timm grouped bottleneck",
        build=timm_bottlenecks,
        target="1",
        block=Block("bottleneck", groups=2),
        roles=CONVS,
        input=IMAGES,
    ),
    Subject(
        name="timm ViT",
        build=timm_vit,
        target="blocks.1",
        block=Block("transformer", heads=HEADS, activation="gelu", norm_eps=1e-6),
        roles=layers(norm1="norm1", norm2="norm2", proj="attn.proj", up="mlp.fc1", down="mlp.fc2")
        | thirds("attn.qkv.weight", "attn.qkv.bias"),
        input=TOKENS,
        thorough=("projection", "head_wise", "mlp", "attention_mlp"),
    ),
    Subject(
        name="timm with a packed SwiGLU",
        build=timm_swiglu,
        target="1",
        block=Block(
            "transformer", heads=HEADS, activation="silu", norm="rms", norm_eps=torch.finfo(torch.float64).eps
        ),
        roles=layers(norm1="norm1", norm2="norm2", proj="attn.proj", down="mlp.fc2")
        | thirds("attn.qkv.weight", "attn.qkv.bias")
        | halves("mlp.fc1"),
        input=TOKENS,
    ),
    Subject(
        name="nn.TransformerEncoder, norms first",
        build=lambda: encoder(norm_first=True, activation=nn.functional.gelu),
        target="layers.1",
        block=GELU,
        roles=ENCODER,
        input=TOKENS,
    ),
    Subject(
        name="nn.TransformerEncoder, norms last",
        build=lambda: encoder(activation="relu"),
        target="layers.1",
        block=Block("transformer", heads=HEADS, activation="relu", post_norm=True),
        roles=ENCODER,
        input=TOKENS,
    ),
    Subject(
        name="nn.TransformerEncoder without biases",
        build=lambda: encoder(norm_first=True, bias=False),
        target="layers.1",
        block=Block("transformer", heads=HEADS, activation="relu"),
        roles=ENCODER,
        input=TOKENS,
    ),
    Subject(
        name="torchvision ViT",
        build=torchvision_vit,
        target="encoder.layers.encoder_layer_1",
        block=Block("transformer", heads=HEADS, activation="gelu", norm_eps=1e-6),
        roles=layers(norm1="ln_1", norm2="ln_2", proj="self_attention.out_proj", up="mlp.0", down="mlp.3")
        | thirds("self_attention.in_proj_weight", "self_attention.in_proj_bias"),
        input=TOKENS,
    ),
    Subject(
        name="GPT-2",
        build=gpt2,
        target="h.1",
        block=Block("transformer", heads=HEADS, activation="gelu_tanh", causal=True),
        roles=layers(norm1="ln_1", norm2="ln_2")
        | transposed(layers(proj="attn.c_proj", up="mlp.c_fc", down="mlp.c_proj"))
        | thirds("attn.c_attn.weight", "attn.c_attn.bias", transposed=True),
        input=TOKENS,
        thorough=("projection", "head_wise", "mlp"),
    ),
    Subject(
        name="Llama",
        build=llama,
        target="layers.1",
        block=STOCK_LLAMA.block,
        roles=LLAMA,
        input=TOKENS,
        call={"position_embeddings": NO_ROTATION},
        thorough=("projection", "mlp"),
    ),
    Subject(
        name="BERT",
        build=bert,
        target="encoder.layer.1",
        block=Block("transformer", heads=HEADS, activation="gelu", norm_eps=1e-12, post_norm=True),
        roles=layers(
            norm1="attention.output.LayerNorm",
            norm2="output.LayerNorm",
            q="attention.self.query",
            k="attention.self.key",
            v="attention.self.value",
            proj="attention.output.dense",
            up="intermediate.dense",
            down="output.dense",
        ),
        input=TOKENS,
    ),
    Subject(
        name="Hugging Face ViT",
        build=hf_vit,
        target="layers.1",
        block=Block("transformer", heads=HEADS, activation="gelu", norm_eps=1e-12),
        roles=layers(
            norm1="layernorm_before",
            norm2="layernorm_after",
            q="attention.q_proj",
            k="attention.k_proj",
            v="attention.v_proj",
            proj="attention.o_proj",
            up="mlp.fc1",
            down="mlp.fc2",
        ),
        input=TOKENS,
    ),
    Subject(
        name="a block nobody knows",
        build=lambda: nn.Sequential(Odd(), Odd(), Odd()),
        target="1",
        block=Block("any"),
        roles={"inner.weight": "inner.weight", "inner.bias": "inner.bias", "size": "size"},
        input=TOKENS,
        thorough=("whole_block",),
    ),
]
