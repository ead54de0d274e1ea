"""The methods of training: what each does to a model, against plain re-computations of it."""

from __future__ import annotations

import copy
import io
import math
import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from timm.models.resnet import BasicBlock as TimmBlock
from timm.models.resnet import ResNet as TimmResNet
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, layer_norm, relu

import replearn
from replearn import ReplearnError
from replearn.experiments.training import methods
from replearn.experiments.training.methods import Method, Setting, available, method_for
from replearn.experiments.training.methods.adaptive import Adaptive, Switch
from replearn.experiments.training.methods.base import carried_plan
from replearn.experiments.training.methods.checkpointing import Recomputed
from replearn.experiments.training.methods.skip_attention import skipped_blocks
from replearn.experiments.training.methods.stochastic_depth import Dropped, Scaled, chances_of
from replearn.experiments.training.methods.wrapping import Patch, patches
from replearn.experiments.training.optimizers import make_optimizer
from replearn.experiments.training.recipe import Optimizer, Variant
from replearn.models.cifar_resnet import stage

COMBINED = [
    "repl+stochastic_depth",
    "repl+checkpointing",
    "removal+stochastic_depth",
    "stochastic_depth+checkpointing",
    "repl+stochastic_depth+checkpointing",
]


def resnet(depth: int = 20) -> nn.Module:
    torch.manual_seed(0)
    return replearn.models.CifarResNet(depth, width=4)


def vit(**settings) -> VisionTransformer:
    torch.manual_seed(0)
    default = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 12, "num_heads": 3, "num_classes": 10}
    return VisionTransformer(**default | settings)


MODELS = {"resnet": resnet, "vit": vit}
SMALL = {"resnet": resnet, "vit": lambda: vit(depth=6)}


def named(method: str, **fields) -> Method:
    variant = Variant(label=method, method=method, **{"first": 2} | fields)
    return method_for(Setting(variant, seed=0))


def prepared(method: str, model: nn.Module, **fields) -> tuple[Method, nn.Module]:
    made = named(method, **fields)
    return made, made.prepare(model)


def images(num: int = 8, size: int | tuple[int, int] = 16) -> Tensor:
    torch.manual_seed(1)
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(num, 3, height, width)


def train(method: Method, model: nn.Module, steps: int = 3, rate: float = 0.05) -> list[float]:
    x, y = images(), torch.arange(8)
    optimizer = torch.optim.SGD(replearn.param_groups(model, 1e-4), lr=rate)
    method.start_epoch(model, 0, lambda: x)
    losses = []
    model.train()
    for step in range(steps + 1):
        method.start_step(model, 0, step)
        loss = cross_entropy(model(x), y)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def outputs(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return copy.deepcopy(model).eval()(x)


# ---- every method -----------------------------------------------------------------------------------


def fitting(kind: str) -> list[str]:
    names = [*available(), *COMBINED, "skip_attention+checkpointing"]
    return [name for name in names if kind == "vit" or "skip_attention" not in name]


CASES = [(kind, name) for kind in MODELS for name in fitting(kind)]
FEWER = [(kind, name) for kind, name in CASES if kind == "resnet" or name in available()]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_three_steps_bring_a_finite_loss_down(kind: str, name: str) -> None:
    losses = train(*prepared(name, MODELS[kind](), drop_rate=0.1))
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("kind", "name"), FEWER)
def test_a_copy_and_a_pickle_run_their_own_weights(kind: str, name: str) -> None:
    _, model = prepared(name, SMALL[kind]())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    x = images()
    before = outputs(model, x)
    copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    for other in copies:
        assert torch.equal(other.eval()(x), before)
        assert {id(p) for p in other.parameters()}.isdisjoint(id(p) for p in model.parameters())
        for patch in patches(other, Patch):
            assert patch.module in set(other.modules())


@pytest.mark.parametrize(("kind", "name"), FEWER)
def test_finishing_keeps_the_outputs_and_leaves_no_patch(kind: str, name: str) -> None:
    method, model = prepared(name, SMALL[kind]())
    train(method, model, steps=1)
    before = outputs(model, images())
    model = method.finish(model)
    assert list(patches(model, Patch)) == []
    assert torch.equal(outputs(model, images()), before)
    if method.plan is not None:
        replearn.deploy(model.eval(), example=images())
        assert count(model) == method.plan.parameters_after


def test_the_folder_is_the_list_of_methods_and_each_has_its_files_name() -> None:
    files = {path.stem for path in Path(methods.__file__).parent.glob("*.py")}
    assert set(available()) == files - {"__init__", "base", "carried", "combined", "wrapping"}
    for name, kind in available().items():
        assert kind.__module__.endswith(f".{name}")


# ---- checkpointing ------------------------------------------------------------------------------------


class Saved:
    """Counts the bytes that autograd keeps; what a checkpoint keeps inside is not among them."""

    def __init__(self) -> None:
        self.bytes = 0

    def pack(self, tensor: Tensor) -> Tensor:
        self.bytes += tensor.numel() * tensor.element_size()
        return tensor


def gradients(model: nn.Module, x: Tensor) -> tuple[dict[str, Tensor], int]:
    saved = Saved()
    torch.manual_seed(5)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        loss = cross_entropy(model.train()(x), torch.arange(len(x)))
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, saved.bytes


@pytest.mark.parametrize(
    ("build", "base"),
    [
        (resnet, "e2e"),
        (resnet, "repl"),
        (vit, "repl"),
        (lambda: vit(proj_drop_rate=0.3), "e2e"),
        (vit, "skip_attention"),
    ],
)
def test_checkpointing_changes_neither_gradients_nor_statistics_and_keeps_less(build, base: str) -> None:
    _, plain = prepared(base, build())
    _, model = prepared(f"{base}+checkpointing", build())
    model.load_state_dict(plain.state_dict())
    expected, all_bytes = gradients(plain, images())
    found, kept_bytes = gradients(model, images())
    assert kept_bytes < 0.5 * all_bytes
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
    statistics = dict(plain.named_buffers())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, statistics[name]), name


def test_checkpointing_works_on_every_block_and_operator_but_on_no_empty_place() -> None:
    _, model = prepared("repl+checkpointing", resnet())
    assert len(list(patches(model, Recomputed))) == 9
    _, model = prepared("removal+checkpointing", resnet())
    assert len(list(patches(model, Recomputed))) == 6


# ---- stochastic depth ---------------------------------------------------------------------------------


def test_the_chance_of_being_dropped_grows_linearly_to_the_drop_rate() -> None:
    assert chances_of(4, 0.2) == pytest.approx([0.05, 0.1, 0.15, 0.2])
    _, model = prepared("stochastic_depth", vit(), drop_rate=0.3)
    assert [patch.chance for patch in patches(model, Dropped)] == pytest.approx([0.025 * i for i in range(1, 13)])


def test_blocks_that_change_the_shape_count_and_are_never_dropped() -> None:
    _, model = prepared("stochastic_depth", resnet(), drop_rate=0.9)
    found = {patch.module: patch.chance for patch in patches(model, Dropped)}
    blocks = [block for layer in (model.layer1, model.layer2, model.layer3) for block in layer]
    assert [blocks.index(block) for block in found] == [0, 1, 2, 4, 5, 7, 8]
    assert list(found.values()) == pytest.approx([0.1 * (i + 1) for i in (0, 1, 2, 4, 5, 7, 8)])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_block_that_was_dropped_at_first_trains_on_with_fused_sgd() -> None:
    device = torch.device("cuda")
    layers = nn.ModuleList(nn.Linear(2, 2, device=device) for _ in range(2))
    optimizer = make_optimizer(
        layers, Optimizer(name="sgd", lr=0.1, momentum=0.9, nesterov=False, weight_decay=0.0), device
    )
    before = layers[1].weight.detach().clone()
    for used in (layers[:1], layers):
        optimizer.zero_grad(set_to_none=True)
        sum(layer(torch.ones(1, 2, device=device)).sum() for layer in used).backward()
        optimizer.step()
    gradient = layers[1].weight.grad
    assert gradient is not None
    torch.testing.assert_close(layers[1].weight.detach(), before - 0.1 * gradient)


def test_a_residual_block_is_what_huang_et_al_wrote() -> None:
    plain = resnet().layer1[1]
    _, model = prepared("stochastic_depth", resnet(), drop_rate=0.9)
    block, (patch,) = model.layer1[1], list(patches(model.layer1[1], Dropped))
    x = relu(torch.randn(4, 4, 8, 8))
    branch = plain.bn2(plain.conv2(relu(plain.bn1(plain.conv1(x)))))
    torch.testing.assert_close(block(x), relu(x + branch / (1 - patch.chance)))
    patch.dropped = True
    assert block(x) is x
    torch.testing.assert_close(block.eval()(x), plain.eval()(x), rtol=0, atol=0)


def test_the_scale_stands_behind_a_squeeze_and_excite_layer() -> None:
    torch.manual_seed(0)
    model = TimmResNet(
        TimmBlock, (2, 2, 2, 2), channels=(8, 8, 8, 8), stem_width=8, block_args={"attn_layer": "se"}
    )
    for parameter in (*model.layer1[1].se.parameters(), *model.layer1[1].bn2.parameters()):
        nn.init.normal_(parameter)  # timm starts with a branch of zeros
    plain = copy.deepcopy(model.layer1[1])
    prepared("stochastic_depth", model, drop_rate=0.5)
    x = relu(torch.randn(2, 8, 4, 4))
    branch = plain.se(plain.bn2(plain.conv2(plain.act1(plain.bn1(plain.conv1(x))))))
    torch.testing.assert_close(model.layer1[1](x), relu(x + branch / (1 - 2 / 8 * 0.5)))


@pytest.mark.parametrize("name", ["stochastic_depth", "repl+stochastic_depth"])
def test_a_transformer_block_gives_on_average_what_it_gives_in_evaluation(name: str) -> None:
    _, model = prepared(name, vit(), drop_rate=0.8)
    x = torch.randn(2, 17, 24)
    for block in model.blocks:
        (patch,) = list(patches(block, Dropped))[-1:]
        expected = block.eval()(x)
        block.train()
        patch.dropped = False
        kept = block(x)
        patch.dropped = True
        average = (1 - patch.chance) * kept + patch.chance * block(x)
        torch.testing.assert_close(average, expected)
        patch.dropped = False


def test_a_dropped_block_gets_no_gradient_and_the_others_do() -> None:
    method, model = prepared("repl+stochastic_depth", resnet(), drop_rate=0.9)
    method.start_step(model, 0, 0)
    found = list(patches(model, Dropped))
    assert {patch.dropped for patch in found} == {True, False}
    model(images()).sum().backward()
    for patch in found:
        grads = [parameter.grad is not None for parameter in patch.module.parameters()]
        assert any(grads) != patch.dropped


def test_with_repl_an_operator_is_dropped_with_the_chance_of_its_place() -> None:
    _, whole = prepared("stochastic_depth", resnet(), drop_rate=0.9)
    _, model = prepared("repl+stochastic_depth", resnet(), drop_rate=0.9)
    assert [patch.chance for patch in patches(model, Dropped)] == [p.chance for p in patches(whole, Dropped)]
    operator = model.layer2[1]
    assert isinstance(operator, replearn.operators._base.operator.Operator)
    assert isinstance(vars(operator.norm)["forward"], Scaled)
    _, model = prepared("removal+stochastic_depth", resnet(), drop_rate=0.9)
    assert len(list(patches(model, Dropped))) == 7 - 3


# ---- skip-attention -----------------------------------------------------------------------------------


def test_blocks_3_to_8_of_12_skip_attention_and_other_depths_in_proportion() -> None:
    assert list(skipped_blocks(12)) == [3, 4, 5, 6, 7, 8]
    assert list(skipped_blocks(24)) == list(range(6, 18))
    assert list(skipped_blocks(4)) == [1, 2]


def test_skipped_blocks_lose_attention_and_first_norm_and_everything_else_keeps_its_name() -> None:
    plain = vit()
    _, model = prepared("skip_attention", vit())
    gone = set(plain.state_dict()) - set(model.state_dict())
    new = set(model.state_dict()) - set(plain.state_dict())
    skipped = tuple(f"blocks.{index}." for index in range(3, 9))
    assert gone == {n for n in plain.state_dict() if n.startswith(skipped) and (".attn." in n or ".norm1." in n)}
    assert all(name.startswith(tuple(f"{block}reuse." for block in skipped)) for name in new)
    width = 24
    attention = 4 * width * width + 4 * width + 2 * width
    reuse = 4 * width * width + 3 * width + 2 * width * 26 + 3
    assert count(model) == count(plain) - 6 * attention + 6 * reuse


def mlp(p: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = layer_norm(x, x.shape[-1:], p[f"{name}.norm2.weight"], p[f"{name}.norm2.bias"], 1e-6)
    y = gelu(y @ p[f"{name}.mlp.fc1.weight"].T + p[f"{name}.mlp.fc1.bias"])
    return y @ p[f"{name}.mlp.fc2.weight"].T + p[f"{name}.mlp.fc2.bias"]


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def attend(p: dict[str, Tensor], name: str, x: Tensor, heads: int) -> Tensor:
    y = layer_norm(x, x.shape[-1:], p[f"{name}.norm1.weight"], p[f"{name}.norm1.bias"], 1e-6)
    qkv = y @ p[f"{name}.attn.qkv.weight"].T + p[f"{name}.attn.qkv.bias"]
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
    mixed = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1) @ v
    return mixed.transpose(1, 2).flatten(2) @ p[f"{name}.attn.proj.weight"].T + p[f"{name}.attn.proj.bias"]


def reused(p: dict[str, Tensor], name: str, patches: Tensor, grid: tuple[int, int]) -> Tensor:
    """f, pixel by pixel and channel by channel, as the issue says it."""
    height, width = grid
    y = gelu(patches @ p[f"{name}.reuse.up.weight"].T + p[f"{name}.reuse.up.bias"])
    field = torch.zeros(y.shape[0], height + 4, width + 4, y.shape[-1], dtype=y.dtype)
    field[:, 2:-2, 2:-2] = y.unflatten(1, grid)
    kernel = p[f"{name}.reuse.depthwise.weight"][:, 0]
    total = p[f"{name}.reuse.depthwise.bias"].expand(y.shape[0], height, width, -1)
    for i in range(5):
        for j in range(5):
            total = total + field[:, i : i + height, j : j + width] * kernel[:, i, j]
    y = gelu(total).flatten(1, 2) @ p[f"{name}.reuse.down.weight"].T + p[f"{name}.reuse.down.bias"]
    means = y.mean(1)
    left, middle, right = p[f"{name}.reuse.channels.weight"].flatten()
    zero = torch.zeros_like(means[:, :1])
    before, after = torch.cat((zero, means[:, :-1]), 1), torch.cat((means[:, 1:], zero), 1)
    return y * torch.sigmoid(left * before + middle * means + right * after)[:, None]


@pytest.mark.parametrize(
    "settings", [{}, {"img_size": (16, 24), "reg_tokens": 2}, {"class_token": False, "global_pool": "avg"}]
)
def test_skip_attention_computes_what_its_authors_wrote(settings: dict) -> None:
    _, model = prepared("skip_attention", vit(**settings).double())
    x = images(2, settings.get("img_size", 16)).double()
    taken: list[Tensor] = []
    model.blocks.register_forward_pre_hook(lambda module, args: taken.append(args[0]))
    model.blocks.register_forward_hook(lambda module, args, made: taken.append(made))
    model.eval()(x)
    tokens, found = taken
    p, prefix, grid = model.state_dict(), model.num_prefix_tokens, model.patch_embed.grid_size
    attention = torch.empty(0)
    for index in range(12):
        name = f"blocks.{index}"
        if index in range(3, 9):
            patches = reused(p, name, attention[:, prefix:], grid)
            attention = torch.cat((attention[:, :prefix], patches), 1)
        else:
            attention = attend(p, name, tokens, heads=3)
        tokens = tokens + attention
        tokens = tokens + mlp(p, name, tokens)
    torch.testing.assert_close(found, tokens, rtol=1e-10, atol=1e-12)


def test_a_block_that_skips_attention_says_so_when_it_is_called_alone() -> None:
    _, model = prepared("skip_attention", vit())
    with pytest.raises(ReplearnError, match=r"without the attention output.*skip_attention\+checkpointing"):
        model.blocks[3](torch.randn(2, 17, 24))


# ---- adaptive -----------------------------------------------------------------------------------------


def make_redundant(model: nn.Module, *indices: int) -> None:
    """Let exactly these blocks of a ViT change nothing, and all others turn their input around."""
    with torch.no_grad():
        for index, block in enumerate(model.blocks):
            for parameter in (*block.attn.proj.parameters(), block.mlp.fc2.weight, block.mlp.fc2.bias):
                parameter.zero_()
            if index not in indices:
                block.mlp.fc2.bias.fill_(-3.0 if index % 2 else 3.0)


def masked(model: nn.Module) -> list[str]:
    return [switch.target.name for switch in patches(model, Switch) if switch.replaced]


def test_the_mask_follows_the_score_from_epoch_to_epoch_and_keeps_its_count() -> None:
    method, model = prepared("adaptive", vit(), drop_rate=0.0)
    assert masked(model) == ["blocks.1", "blocks.5", "blocks.9"]
    make_redundant(model, 2, 6, 8)
    assert method.start_epoch(model, 0, images)
    assert masked(model) == ["blocks.2", "blocks.6", "blocks.8"]
    assert not method.start_epoch(model, 1, images)
    make_redundant(model, 3, 7, 10)
    assert method.start_epoch(model, 2, images)
    assert masked(model) == ["blocks.3", "blocks.7", "blocks.10"]
    assert method.plan is not None
    assert [target.name for target in method.plan.targets] == masked(model)


def test_the_mask_never_takes_two_adjacent_blocks_nor_the_ends_of_a_stack() -> None:
    method, _ = prepared("adaptive", resnet(32), interval=2)
    assert isinstance(method, Adaptive)
    legal = [f"layer{layer}.{index}" for layer in (1, 2, 3) for index in (1, 2, 3)]
    numbers = random.Random(0)
    for _ in range(200):
        scores = {name: numbers.random() for name in legal}
        chosen = method.most_redundant(scores)
        assert len(chosen) == 6
        assert chosen <= set(legal)
        for layer in (1, 2, 3):
            places = sorted(int(name[-1]) for name in chosen if name.startswith(f"layer{layer}"))
            assert all(b - a > 1 for a, b in pairwise(places))


def test_a_finished_adaptive_model_is_saved_and_loaded_as_a_replaced_one(tmp_path: Path) -> None:
    method, model = prepared("adaptive", vit())
    make_redundant(model, 2, 6, 8)
    method.start_epoch(model, 0, images)
    model = method.finish(model)
    assert [name for name, module in model.named_modules() if name in ("blocks.2", "blocks.6", "blocks.8")]
    replearn.save(model, tmp_path / "model.safetensors")
    loaded = replearn.load(vit(), tmp_path / "model.safetensors")
    assert torch.equal(outputs(loaded, images()), outputs(model, images()))


def test_adaptive_works_in_a_sequential_and_a_long_stack_can_still_be_copied() -> None:
    """Operators read blocks whose operators read blocks: a copy must not recurse along the whole stack."""
    model = nn.Sequential(stage(3, 2, 40, stride=1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    method, model = prepared("adaptive", model)
    method.start_epoch(model, 0, images)
    copied = copy.deepcopy(model)
    assert torch.equal(outputs(copied, images()), outputs(model, images()))


# ---- combinations and bad input -----------------------------------------------------------------------


def test_a_combination_is_capturable_only_if_all_its_parts_are() -> None:
    assert named("repl+checkpointing").capturable
    assert not named("repl+stochastic_depth").capturable
    assert named("repl+stochastic_depth").leaves_idle
    assert not named("skip_attention+checkpointing").leaves_idle
    assert named("stochastic_depth+e2e+checkpointing").name == "e2e+stochastic_depth+checkpointing"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "dropout",
            "no method 'dropout'.*there are adaptive, checkpointing, e2e, late, removal, repl, skip_attention",
        ),
        ("repl+", r"no method '' \(in 'repl\+'\)"),
        ("repl+repl", "names repl twice"),
        ("skip_attention+repl", r"both decide what the blocks are.*'repl\+checkpointing'"),
        ("checkpointing+adaptive", "adaptive changes the blocks between epochs.*Write 'adaptive' alone"),
    ],
)
def test_a_name_that_means_nothing_is_answered_with_what_to_write(name: str, text: str) -> None:
    with pytest.raises(ReplearnError, match=text):
        named(name)


@pytest.mark.parametrize("rate", [1.0, -0.1, "a lot", True])
def test_a_drop_rate_is_a_number_below_one(rate: object) -> None:
    with pytest.raises(ReplearnError, match=r"drop_rate=.*as 0\.1"):
        named("stochastic_depth", drop_rate=rate)


@pytest.mark.parametrize(
    ("name", "build", "text"),
    [
        ("skip_attention", resnet, "CifarResNet is not a timm VisionTransformer.*another method"),
        ("skip_attention", lambda: vit(depth=2), "2 blocks, too few.*at least 3"),
        ("skip_attention", lambda: vit(dynamic_img_size=True), "dynamic_img_size=False"),
        ("skip_attention", lambda: vit(patch_drop_rate=0.2), "patch_drop_rate=0"),
        (
            "skip_attention",
            lambda: vit(block_fn=ParallelScalingBlock),
            "has a ParallelScalingBlock.*block_fn=Block",
        ),
        ("skip_attention+stochastic_depth", vit, "blocks.2 of this VisionTransformer is a CarryingBlock.*alone"),
        ("checkpointing", lambda: nn.Sequential(nn.Linear(2, 2)), "Sequential has no stack.*replearn_anatomy"),
        ("stochastic_depth", lambda: nn.Linear(2, 2), "Linear has no stack"),
        ("repl", lambda: resnet(8), "CifarResNet"),
        ("adaptive", lambda: nn.Linear(2, 2), "Linear has no stack"),
    ],
)
def test_a_method_that_does_not_fit_the_model_names_it_and_the_cure(name: str, build, text: str) -> None:
    with pytest.raises(ReplearnError, match=text):
        prepared(name, build())


def test_wrapping_a_replaced_model_is_answered_with_the_combination() -> None:
    _, model = prepared("repl", resnet())
    with pytest.raises(ReplearnError, match=r"CifarResNet has replaced blocks.*'repl\+checkpointing'"):
        prepared("checkpointing", model)


def test_a_forward_that_someone_else_exchanged_is_not_overwritten() -> None:
    model = resnet()
    model.layer1[0].forward = lambda x: x
    with pytest.raises(ReplearnError, match="BasicBlock was exchanged already"):
        prepared("checkpointing", model)


class Shrinking(nn.Module):
    """A block that nobody knows and that halves its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[::2]


def test_a_block_that_changes_the_shape_unannounced_is_told_when_it_runs() -> None:
    _, model = prepared("stochastic_depth", nn.Sequential(*(Shrinking() for _ in range(3))))
    with pytest.raises(ReplearnError, match=r"\(4, 8\) into \(2, 8\).*transition"):
        model(torch.randn(8, 8))


# ---- torch.compile ------------------------------------------------------------------------------------


def small_resnet() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(stage(3, 4, 3, stride=1), nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("skip_attention", lambda: vit(depth=3)),
        ("repl+checkpointing", small_resnet),
        ("repl+stochastic_depth", small_resnet),
        ("adaptive", small_resnet),
    ],
)
def test_the_whole_model_compiles_to_one_graph_with_the_same_result(name: str, build) -> None:
    method, model = prepared(name, build(), drop_rate=0.5)
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images()), model(images()))
    for mine, theirs in zip(model.buffers(), compiled.buffers(), strict=True):
        torch.testing.assert_close(theirs, mine)
    if name.startswith("adaptive"):
        model.compile(backend="eager")
        # scored in spite of the compilation; with one legal block there is no other choice
        assert method.start_epoch(model, 0, images) is False


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({"first": 2}, r"interval=4, first=2, basic"),
        ({"interval": 2}, r"interval=2, first=2, basic"),
        ({"operator": replearn.operators.Basic(sources="next")}, r"interval=4, first=4, basic \(next\)"),
    ],
)
def test_weights_with_another_placement_or_operator_are_refused_with_both(changes, asked):
    model = replearn.models.resnet32()
    replearn.replace_(model, replearn.plan(model))
    row = Variant(label="RepL", method="repl", **changes)
    with pytest.raises(
        ReplearnError, match=rf"asks for {asked}, and they were trained with interval=4, first=4, basic\."
    ):
        method_for(Setting(row, seed=0)).prepare(model)
    same = method_for(Setting(Variant(label="RepL", method="repl"), seed=0))
    assert same.prepare(model) is model


def test_a_carried_plan_with_two_first_targets_is_none_with_one() -> None:
    """`plan` takes 2 in short stacks and the interval in others; a row with first=2 has 2 in all of them."""
    torchvision = pytest.importorskip("torchvision")
    with torch.device("meta"):
        model = torchvision.models.resnet34()
    replearn.replace_(model, replearn.plan(model))
    told = "asks for interval=4, first=2, basic, and they were trained with interval=4, first=2 or 4, basic"
    with pytest.raises(ReplearnError, match=told):
        carried_plan(model, Variant(label="RepL", method="repl", first=2))
