"""The zoo: a table of tiny models, one or more of every family, with a batch that each of them takes.

`builds()` is what the contract tests walk: every family with every operator that suits its blocks. To add a
family to all of them, add an entry here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import replearn
from replearn import operators
from replearn.blocks.running import call
from replearn.fast.verify import tensors_in
from replearn.operators._base.options import Options

NO_MLP = ("mlp", "attention_mlp")  # operators that need the MLP's own matrices
VARIANTS = (  # of families that an entry without a variant looks at closely
    *("hf_deit", "hf_qwen3", "hf_roberta", "timm_beit", "timm_cait", "timm_convit", "timm_deit"),
    *("timm_eva_post_norm", "timm_relpos", "timm_resnet_d", "timm_resnext", "timm_sam", "timm_vit_post_norm"),
    *("timm_vit_scaled", "timm_xcit", "torchvision_dilated", "torchvision_wide"),
)
FEW = ("attention_mlp", "basic", "bottleneck", "projection", "whole_block")


@dataclass(frozen=True)
class Entry:
    """One tiny model: how to build it, what it takes, and what must be found in it."""

    name: str
    family: str
    kind: str
    build: Callable[[], nn.Module] = field(repr=False)
    batch: Callable[[], Any] = field(repr=False)
    stacks: tuple[int, ...]  # the number of blocks of each stack
    without: tuple[str, ...] = ()  # operators that suit the kind of block, but not these blocks

    def suits(self, options: type[Options]) -> bool:
        return self.kind in options.kinds and options.name not in self.without

    def fresh(self, seed: int = 0) -> nn.Module:
        """A new model with weights by this seed, in eval mode, away from special values."""
        torch.manual_seed(seed)
        model = self.build()
        shake_(model, 0.02)
        return model.eval()

    def replaced(self, options: Options | None = None, seed: int = 0) -> nn.Module:
        """A new model with the second block of every stack replaced, and nothing left at its start."""
        model = self.fresh(seed)
        replearn.replace_(model, replearn.plan(model, first=2, operator=options))
        shake_(model, 0.02)
        return model


def images(size: int = 8, channels: int = 3) -> Tensor:
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(1))


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(0, 32, (2, 5), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids}


def sequence() -> Tensor:
    return torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def shake_(model: nn.Module, size: float) -> None:
    """Move every parameter and running statistic a little, so that none sits at zero or one."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=size)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.add_(torch.randn_like(buffer), alpha=size)
        if name.endswith("running_var"):
            buffer.mul_(1 + 10 * size * torch.rand_like(buffer))


@torch.no_grad()
def outputs(model: nn.Module, batch: Any) -> list[Tensor]:
    """Everything with values that a model returns for a batch."""
    return [tensor for tensor in tensors_in(call(model, batch)) if tensor.is_floating_point()]


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((one - other).abs().max() / one.abs().max().clamp_min(1e-30))


def everything(model: nn.Module, versions: bool = True) -> dict[str, Any]:
    """All that a plan or a refused load could have touched, in a form that compares bit for bit."""
    modules = dict(model.named_modules(remove_duplicate=False))
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    return {
        "state": {name: (id(t), versions and t._version, bits(t)) for name, t in tensors.items()},
        "gradients": {name: (p.requires_grad, p.grad) for name, p in model.named_parameters()},
        "modules": {name: (id(module), module.training, sorted(vars(module))) for name, module in modules.items()},
        "hooks": {
            (name, hooks): list(vars(module)[hooks])
            for name, module in modules.items()
            for hooks in vars(module)
            if "hooks" in hooks
        },
        "random": bits(torch.get_rng_state()),
    }


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().resolve_conj().contiguous().flatten().view(torch.uint8).numpy().tobytes()


class Staged(nn.Module):
    """A small convolutional net around given stages: what a real backbone looks like from outside."""

    def __init__(self, stages: list[nn.Module], width: int, out: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.stages = nn.ModuleList(stages)
        self.head = nn.Linear(out, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


# torchvision


def torchvision_basic() -> nn.Module:
    from torchvision.models.resnet import BasicBlock, conv1x1

    down = nn.Sequential(conv1x1(8, 12, 2), nn.BatchNorm2d(12))
    one = nn.Sequential(*(BasicBlock(8, 8) for _ in range(3)))
    two = nn.Sequential(BasicBlock(8, 12, 2, down), *(BasicBlock(12, 12) for _ in range(3)))
    return Staged([one, two], 8, 12)


def torchvision_bottleneck(groups: int = 1, base_width: int = 64, dilation: int = 1) -> nn.Module:
    from torchvision.models.resnet import Bottleneck, conv1x1

    settings: Any = {"groups": groups, "base_width": base_width, "dilation": dilation}
    down = nn.Sequential(conv1x1(8, 16), nn.BatchNorm2d(16))
    first = Bottleneck(8, 4, 1, down, **settings)
    return Staged([nn.Sequential(first, *(Bottleneck(16, 4, **settings) for _ in range(3)))], 8, 16)


def torchvision_vit() -> nn.Module:
    from torchvision.models.vision_transformer import VisionTransformer

    return VisionTransformer(8, 4, num_layers=4, num_heads=2, hidden_dim=16, mlp_dim=24, num_classes=4)


# timm


def timm_resnet(block: str, **settings: Any) -> nn.Module:
    from timm.models import resnet

    settings = {"layers": (4, 3, 1, 1), "channels": (4, 8, 8, 8), "stem_width": 4, **settings}
    return resnet.ResNet(getattr(resnet, block), num_classes=4, **settings)


def timm_vit(block: str = "Block", **settings: Any) -> nn.Module:
    from timm.models import vision_transformer

    settings = {"block_fn": getattr(vision_transformer, block), "mlp_ratio": 2, "num_classes": 4, **settings}
    return vision_transformer.VisionTransformer(8, 4, embed_dim=16, depth=4, num_heads=2, **settings)


def timm_model(module: str, name: str, **settings: Any) -> nn.Module:
    settings = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 4, "num_heads": 2, **settings}
    return timm_generic(module, name, **settings)


def timm_swiglu(mlp: str, **settings: Any) -> nn.Module:
    import timm.layers

    return timm_vit(mlp_layer=getattr(timm.layers, mlp), **settings)


def timm_generic(module: str, name: str, **settings: Any) -> nn.Module:
    return getattr(importlib.import_module(f"timm.models.{module}"), name)(num_classes=4, **settings)


# Hugging Face

SMALL = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 24}
VISION = {**SMALL, "image_size": 8, "patch_size": 4, "num_labels": 4}
TEXT = {**SMALL, "vocab_size": 32, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 1}
DECODER = {**TEXT, "pad_token_id": 1, "num_key_value_heads": 1, "tie_word_embeddings": False}
WINDOW = {**DECODER, "sliding_window": 4, "tie_word_embeddings": True}


def hugging_face(model: str, config: str, **settings: Any) -> nn.Module:
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**settings))


def gpt2() -> nn.Module:
    settings = {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_inner": 24, "vocab_size": 32, "n_positions": 32}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    return hugging_face("GPT2LMHeadModel", "GPT2Config", **settings, **ends)


# torch, and a user's own


def encoder(norm_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 24, norm_first=norm_first, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=not norm_first)


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 24, batch_first=True), 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x, x.flip(1), tgt_mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1]))


class Residual(nn.Module):
    """A block that no family knows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.body = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(self.norm(x))


class Listed(nn.Module):
    """Calls the blocks of a ModuleList with keywords, and unpacks the tuples that they return."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            (x,) = block(hidden=x, scale=1.0)
        return self.head(x)


class Scaled(nn.Module):
    """Takes its input as a keyword, beside a setting, and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.attention = nn.Linear(16, 16)
        self.up = nn.Linear(16, 24)
        self.act = nn.GELU()
        self.down = nn.Linear(24, 16)

    def forward(self, hidden: Tensor, scale: float = 1.0) -> tuple[Tensor, ...]:
        hidden = hidden + scale * self.attention(self.norm(hidden).mean(1, keepdim=True))
        return (hidden + self.down(self.act(self.up(self.norm(hidden)))),)


class Declared(Scaled):
    """The same with its anatomy written down."""

    replearn_anatomy = replearn.anatomy(
        *("mine", "transformer"), num_heads=2, input="hidden", returns="tuple",
        proj="attention", norm1="norm", norm2="norm", up="up", activation="act", down="down",
    )  # fmt: skip


def cifar() -> nn.Module:
    return replearn.models.CifarResNet(20, num_classes=4, width=8)


def residuals() -> nn.Module:
    return nn.Sequential(*(Residual() for _ in range(4)))


def entries() -> Iterator[Entry]:
    yield Entry("cifar_resnet", "cifar_resnet", "basic", cifar, images, (3, 3, 3))
    for name, make, kind, stacks in (
        ("torchvision_basic", torchvision_basic, "basic", (3, 4)),
        ("torchvision_bottleneck", torchvision_bottleneck, "bottleneck", (4,)),
        ("torchvision_resnext", lambda: torchvision_bottleneck(groups=2), "bottleneck", (4,)),
        ("torchvision_wide", lambda: torchvision_bottleneck(base_width=128), "bottleneck", (4,)),
        ("torchvision_dilated", lambda: torchvision_bottleneck(dilation=2), "bottleneck", (4,)),
    ):
        yield Entry(name, "torchvision_resnet", kind, make, images, stacks)
    yield Entry("torchvision_vit", "torchvision_vit", "transformer", torchvision_vit, images, (4,))
    yield from timm_entries()
    yield from hugging_face_entries()
    for name, norm_first in (("encoder_pre_norm", True), ("encoder_post_norm", False)):
        yield Entry(name, "torch_transformer", "transformer", lambda n=norm_first: encoder(n), sequence, (4,))
    yield Entry("decoder", "torch_transformer", "transformer", Translator, sequence, (4,))
    yield Entry("declared_tuple", "mine", "transformer", lambda: Listed(Declared), sequence, (4,))
    yield Entry("generic_tuple", "generic", "any", lambda: Listed(Scaled), sequence, (4,), without=("removal",))
    yield Entry("sequential", "generic", "any", residuals, sequence, (4,))


def timm_entries() -> Iterator[Entry]:
    for name, block, settings in (
        ("timm_resnet", "BasicBlock", {}),
        ("timm_resnet_d", "Bottleneck", {"stem_type": "deep", "avg_down": True}),
        ("timm_seresnet", "BasicBlock", {"block_args": {"attn_layer": "se"}}),
        ("timm_resnext", "Bottleneck", {"cardinality": 2, "base_width": 64}),
    ):
        kind = "basic" if block == "BasicBlock" else "bottleneck"
        make = lambda b=block, s=settings: timm_resnet(b, **s)  # noqa: E731
        yield Entry(name, "timm_resnet", kind, make, lambda: images(16), (4, 3))
    scaled: dict[str, Any] = {"init_values": 0.5, "qk_norm": True, "class_token": False, "global_pool": "avg"}
    sam = {"window_size": 2, "neck_chans": 8}
    for name, make, without in (
        ("timm_vit", timm_vit, ()),
        ("timm_vit_scaled", lambda: timm_vit(**scaled), ()),
        ("timm_vit_swiglu_packed", lambda: timm_swiglu("SwiGLUPacked"), ()),
        ("timm_vit_swiglu_norm", lambda: timm_swiglu("SwiGLU", scale_mlp_norm=True), NO_MLP),
        ("timm_vit_post_norm", lambda: timm_vit("ResPostBlock"), ()),
        ("timm_vit_parallel", lambda: timm_vit("ParallelScalingBlock"), NO_MLP),
        ("timm_deit", lambda: timm_model("deit", "VisionTransformerDistilled"), ()),
        ("timm_beit", lambda: timm_model("beit", "Beit", init_values=0.1), ()),
        ("timm_cait", lambda: timm_model("cait", "Cait", init_values=0.5), ()),
        ("timm_eva", lambda: timm_model("eva", "Eva", swiglu_mlp=True, use_rot_pos_emb=True), ()),
        ("timm_eva_post_norm", lambda: timm_model("eva", "Eva", use_post_norm=True, qkv_fused=False), ()),
        ("timm_relpos", lambda: timm_model("vision_transformer_relpos", "VisionTransformerRelPos"), ()),
        ("timm_xcit", lambda: timm_model("xcit", "Xcit", img_size=16, patch_size=8), ()),
        ("timm_sam", lambda: timm_model("vision_transformer_sam", "VisionTransformerSAM", **sam), ()),
        ("timm_convit", lambda: timm_model("convit", "ConVit"), ()),
    ):
        size = 16 if name == "timm_xcit" else 8
        yield Entry(name, "timm_vit", "transformer", make, lambda s=size: images(s), (4,), without)
    for block in ("ParallelThingsBlock", "DiffParallelScalingBlock"):
        yield Entry(f"timm_{block}", "timm_vit", "any", lambda b=block: timm_vit(b), images, (4,))
    convnext = {"depths": (4, 1, 3, 1), "dims": (8, 8, 8, 8)}
    swin = {"img_size": 8, "patch_size": 2, "embed_dim": 8, "depths": (4, 2), "num_heads": (2, 2)}
    mixer = {"img_size": 8, "patch_size": 4, "num_blocks": 4, "embed_dim": 16}
    for name, make, size, stacks in (
        ("convnext", lambda: timm_generic("convnext", "ConvNeXt", **convnext), 32, (4, 3)),
        ("swin", lambda: timm_generic("swin_transformer", "SwinTransformer", window_size=2, **swin), 8, (4,)),
        ("mixer", lambda: timm_generic("mlp_mixer", "MlpMixer", **mixer), 8, (4,)),
    ):
        yield Entry(name, "generic", "any", make, lambda s=size: images(s), stacks)


def hugging_face_entries() -> Iterator[Entry]:
    def vision() -> dict[str, Tensor]:
        return {"pixel_values": images()}

    for name, family, model, config, settings, batch in (
        ("hf_vit", "hf_vit", "ViTForImageClassification", "ViTConfig", VISION, vision),
        ("hf_deit", "hf_vit", "DeiTForImageClassification", "DeiTConfig", VISION, vision),
        ("hf_bert", "hf_bert", "BertForSequenceClassification", "BertConfig", TEXT, tokens),
        ("hf_roberta", "hf_bert", "RobertaModel", "RobertaConfig", {**TEXT, "pad_token_id": 1}, tokens),
        ("hf_llama", "hf_llama", "LlamaForCausalLM", "LlamaConfig", DECODER, tokens),
        ("hf_qwen2", "hf_llama", "Qwen2ForCausalLM", "Qwen2Config", DECODER, tokens),
        ("hf_qwen3", "hf_llama", "Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 8}, tokens),
        ("hf_mistral", "hf_llama", "MistralForCausalLM", "MistralConfig", {**WINDOW, "head_dim": 8}, tokens),
    ):
        make = lambda m=model, c=config, s=settings: hugging_face(m, c, **s)  # noqa: E731
        yield Entry(name, family, "transformer", make, batch, (4,))
    yield Entry("hf_gpt2", "hf_gpt2", "transformer", gpt2, tokens, (4,))


ZOO = {entry.name: entry for entry in entries()}


def builds() -> Iterator[tuple[Entry, type[Options]]]:
    """Every model with an operator that suits its blocks, and every operator on a model of every family."""
    seen: set[tuple[str, str]] = set()
    for entry in ZOO.values():
        for options in operators.available().values():
            if entry.suits(options) and (options.name in FEW or entry.name not in VARIANTS):
                proves = {("", entry.name), (options.name, entry.family)}
                if not proves <= seen:
                    yield entry, options
                seen |= proves
