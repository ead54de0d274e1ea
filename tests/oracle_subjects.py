"""Tiny real models, in float64, and where each keeps the weights that the oracle names by role."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
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
    small = {key: value for key, value in SMALL.items() if "drop" not in key}
    model = LlamaModel(LlamaConfig(vocab_size=11, **small))
    for name, module in list(model.named_modules()):
        if double_norms and isinstance(module, LlamaRMSNorm):
            model.set_submodule(name, nn.RMSNorm(DIM, eps=module.variance_epsilon))
    return model


SMALL: dict[str, Any] = {"hidden_size": DIM, "intermediate_size": HIDDEN, "num_hidden_layers": 3}
SMALL |= {"num_attention_heads": HEADS, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


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


FOUR, EIGHT, TOKENS = (2, 4, 5, 4), (2, 8, 5, 4), (2, 3, DIM)
BASIC, BOTTLENECK, GROUPED = Block("basic"), Block("bottleneck"), Block("bottleneck", groups=2)
TRANSFORMER = Block("transformer", heads=HEADS, activation="gelu", norm_eps=1e-6)
RMS = replace(TRANSFORMER, activation="silu", norm="rms")
ENCODER = layers(norm1="norm1", norm2="norm2", proj="self_attn.out_proj", up="linear1", down="linear2")
ENCODER |= thirds("self_attn.in_proj_weight", "self_attn.in_proj_bias")
TIMM = layers(norm1="norm1", norm2="norm2", proj="attn.proj", up="mlp.fc1", down="mlp.fc2")
TIMM |= thirds("attn.qkv.weight", "attn.qkv.bias")
TORCHVISION = layers(norm1="ln_1", norm2="ln_2", proj="self_attention.out_proj", up="mlp.0", down="mlp.3")
TORCHVISION |= thirds("self_attention.in_proj_weight", "self_attention.in_proj_bias")
GPT2 = layers(norm1="ln_1", norm2="ln_2") | thirds("attn.c_attn.weight", "attn.c_attn.bias", transposed=True)
GPT2 |= transposed(layers(proj="attn.c_proj", up="mlp.c_fc", down="mlp.c_proj"))
LLAMA = layers(norm1="input_layernorm", norm2="post_attention_layernorm", proj="self_attn.o_proj")
LLAMA |= layers(**{role: f"self_attn.{role}_proj" for role in "qkv"})
LLAMA |= layers(**{role: f"mlp.{role}_proj" for role in ("gate", "up", "down")})
BERT = layers(norm1="attention.output.LayerNorm", norm2="output.LayerNorm", proj="attention.output.dense")
BERT |= layers(q="attention.self.query", k="attention.self.key", v="attention.self.value")
BERT |= layers(up="intermediate.dense", down="output.dense")
HF_VIT = layers(norm1="layernorm_before", norm2="layernorm_after", up="mlp.fc1", down="mlp.fc2")
HF_VIT |= layers(q="attention.q_proj", k="attention.k_proj", v="attention.v_proj", proj="attention.o_proj")
ODD: dict[str, Role] = {name: name for name in ("inner.weight", "inner.bias", "size")}
NO_ROTATION = (torch.ones(1, 3, DIM // HEADS).double(), torch.zeros(1, 3, DIM // HEADS).double())


def cifar() -> nn.Module:
    return replearn.models.CifarResNet(32, width=4)


def vision_basic() -> nn.Module:
    return basic_blocks(torchvision.models.resnet.BasicBlock)


def timm_basic() -> nn.Module:
    return basic_blocks(timm.models.resnet.BasicBlock)


def odd() -> nn.Module:
    return nn.Sequential(Odd(), Odd(), Odd())


def of_blocks(name: str, build: Callable[[], nn.Module], block: Block, *thorough: str) -> Subject:
    """Three residual blocks of which the second is replaced."""
    return Subject(name, build, "1", block, CONVS, FOUR if block is BASIC else EIGHT, thorough=thorough)


def of_encoder(name: str, changes: dict[str, Any], **settings: Any) -> Subject:
    block = replace(TRANSFORMER, norm_eps=1e-5, **changes)
    return Subject(f"nn.TransformerEncoder{name}", lambda: encoder(**settings), "layers.1", block, ENCODER, TOKENS)


LAYER = "encoder.layers.encoder_layer"
LLAMA_BLOCK = replace(RMS, causal=True)
STOCK_LLAMA = Subject("llama with its own norms", lambda: llama(False), "layers.1", LLAMA_BLOCK, LLAMA, TOKENS)
SUBJECTS = [
    Subject("cifar", cifar, "layer1.2", BASIC, CONVS, FOUR, thorough=("basic", "whole_block")),
    Subject("cifar after a transition", cifar, "layer2.1", BASIC, CONVS, EIGHT),
    of_blocks("torchvision basic", vision_basic, BASIC),
    of_blocks("timm basic", timm_basic, BASIC),
    of_blocks("torchvision bottleneck", bottlenecks, BOTTLENECK),
    of_blocks("grouped bottleneck", lambda: bottlenecks(groups=2), GROUPED, "bottleneck", "reduced_bottleneck"),
    of_blocks("dilated bottleneck", lambda: bottlenecks(dilation=2), Block("bottleneck", dilation=2)),
    of_blocks("bottleneck after a transition", lambda: bottlenecks(transition=True), BOTTLENECK),
    of_blocks("timm grouped bottleneck", timm_bottlenecks, GROUPED),
    Subject(
        *("timm ViT", timm_vit, "blocks.1", TRANSFORMER, TIMM, TOKENS),
        thorough=("projection", "head_wise", "mlp", "attention_mlp"),
    ),
    Subject(
        *("timm with a packed SwiGLU", timm_swiglu, "1", replace(RMS, norm_eps=torch.finfo(torch.float64).eps)),
        *({role: where for role, where in TIMM.items() if "up" not in role} | halves("mlp.fc1"), TOKENS),
    ),
    of_encoder(", norms first", {}, norm_first=True, activation=nn.functional.gelu),
    of_encoder(", norms last", {"activation": "relu", "post_norm": True}, activation="relu"),
    of_encoder(" without biases", {"activation": "relu"}, norm_first=True, bias=False),
    Subject("torchvision ViT", torchvision_vit, f"{LAYER}_1", TRANSFORMER, TORCHVISION, TOKENS),
    Subject(
        *("GPT-2", gpt2, "h.1", replace(TRANSFORMER, activation="gelu_tanh", norm_eps=1e-5, causal=True)),
        *(GPT2, TOKENS),
        thorough=("projection", "head_wise", "mlp"),
    ),
    Subject(
        *("Llama", llama, "layers.1", LLAMA_BLOCK, LLAMA, TOKENS, {"position_embeddings": NO_ROTATION}),
        thorough=("projection", "mlp"),
    ),
    Subject("BERT", bert, "encoder.layer.1", replace(TRANSFORMER, norm_eps=1e-12, post_norm=True), BERT, TOKENS),
    Subject("Hugging Face ViT", hf_vit, "layers.1", replace(TRANSFORMER, norm_eps=1e-12), HF_VIT, TOKENS),
    Subject(
        "a block nobody knows",
        lambda: nn.Sequential(Odd(), Odd(), Odd()),
        "1",
        Block("any"),
        ODD,
        TOKENS,
        thorough=("whole_block",),
    ),
]
