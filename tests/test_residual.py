"""Residual layers in one kernel against torch's operations: in Triton's interpreter here, for real on a GPU."""

from __future__ import annotations

import copy
import pickle
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interpreting import HERE, interpret, runs_kernels
from test_narrow_convolutions import distance, needs_gpu
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import replearn
from replearn.deployment.absorb import ABSORBED
from replearn.experiments.bench.inference_counts import count
from replearn.fast import inference as streamlining
from replearn.fast.graphs.replay import Replayed
from replearn.fast.kernels import layernorm_half as norms
from replearn.fast.kernels import linear_residual as operation
from replearn.fast.kernels._triton import linear_residual_tiles as tiles
from replearn.fast.kernels.layernorm_half import rounded_norm
from replearn.fast.kernels.linear_residual import can_be_cut, residual_linear
from replearn.fast.kernels.patch_embed import embed
from replearn.fast.passes import layernorm_half as rounding

pytest.importorskip("timm")
from timm.models.vision_transformer import VisionTransformer


def layer(rows: int, inner: int, width: int, bias: bool = True, branch: bool = True) -> dict[str, Tensor | None]:
    dtype = torch.float16

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device=HERE)

    return {
        "u": drawn(1, rows, width),
        "h": drawn(1, rows, inner).to(dtype),
        "weight": (drawn(width, inner) / inner**0.5).to(dtype),
        "bias": drawn(width) if bias else None,
        "branch": (drawn(width, width) / width**0.5).to(dtype) if branch else None,
    }


def exactly(u: Any, h: Any, weight: Any, bias: Any, branch: Any) -> Tensor:
    made = u.double() + h.double() @ weight.double().t()
    made = made if bias is None else made + bias.double()
    return made if branch is None else made + u.to(h.dtype).double() @ branch.double().t()


def small_vit(width: int = 64) -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(
        img_size=8, patch_size=4, embed_dim=width, depth=5, num_heads=2, mlp_ratio=2, num_classes=10
    ).to(HERE)


def replaced() -> nn.Module:
    model = small_vit()
    return replearn.replace_(model, replearn.plan(model, first=2)).eval()


def images(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 8, 8, device=HERE)


def sums_in(form: Any) -> list[Any]:
    return [node for node in form.model.graph.nodes if node.target is residual_linear]


@runs_kernels
@torch.no_grad()
@pytest.mark.parametrize(("rows", "inner", "width"), [(1, 64, 64), (37, 192, 64), (130, 64, 128), (5, 128, 192)])
@pytest.mark.parametrize(("bias", "branch"), [(True, True), (True, False), (False, True), (False, False)])
def test_values_are_those_of_an_exact_layer(rows: int, inner: int, width: int, bias: bool, branch: bool) -> None:
    given: Any = layer(rows, inner, width, bias=bias, branch=branch)
    assert operation.fits(**given)
    for _ in range(2):  # the second launch takes the kernel that the first one compiled
        found = residual_linear(**given)
        assert found.dtype is torch.float32
        assert found.shape == given["u"].shape
        assert distance(found, exactly(**given)) < 2e-6


@runs_kernels
@torch.no_grad()
@pytest.mark.parametrize("tile", [tiles.FEW, tiles.FEW_BRANCHED, tiles.TALL, tiles.WIDE])
def test_every_tile_gives_the_same(tile: tiles.Tile) -> None:
    from replearn.fast.kernels._triton.linear_residual import launch

    given: Any = layer(131, 128, 128)
    out = torch.full_like(given["u"], float("nan"))
    launch(given["u"], given["h"], given["weight"], given["bias"], given["branch"], out, tile)
    assert distance(out, exactly(**given)) < 2e-6


@runs_kernels
@torch.no_grad()
def test_a_part_of_a_tensor_that_begins_anywhere() -> None:
    given: Any = layer(6, 64, 64)
    odd = torch.randn(given["u"].numel() + 1, device=HERE)[1:].view_as(given["u"])
    assert distance(residual_linear(**given | {"u": odd}), exactly(**given | {"u": odd})) < 2e-6


def test_the_kernel_reads_every_tensor_from_a_place_that_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(operation, "kernels", lambda: SimpleNamespace(launch=lambda *given: seen.extend(given)))
    monkeypatch.setattr(norms, "kernels", operation.kernels)
    given = {name: odd(tensor) for name, tensor in layer(6, 64, 64).items()}
    operation.compute(**given)
    norms.compute(given["u"], given["bias"], given["bias"], 1, torch.float16)
    tensors = [tensor for tensor in seen if isinstance(tensor, Tensor)]
    assert len(tensors) == (5 + 1) + (3 + 1)
    assert {tensor.data_ptr() % 16 for tensor in tensors} == {0}
    numbers = [one for one in seen if not isinstance(one, (Tensor, tiles.Tile))]
    assert [type(number) for number in numbers] == [float]  # Triton makes another kernel for an integer


def odd(tensor: Any) -> Any:
    """The same numbers, one place behind where a tensor begins."""
    made = torch.cat((tensor.new_zeros(1), tensor.flatten()))[1:].view_as(tensor)
    assert made.data_ptr() % 16
    return made


def test_tiles_cover_every_layer_that_they_are_for() -> None:
    for width, inner in product(range(tiles.WIDTH, 1600, tiles.WIDTH), (64, 192, 384, 1536)):
        for rows, branched in product((1, 197, 5000, 12608), (True, False)):
            tile = tiles.tile_for(rows, inner, width, branched=branched)
            assert width % tile.columns == 0 == inner % tile.inner
            assert not branched or width % tile.inner == 0
    assert not can_be_cut(96, 64)
    assert not can_be_cut(64, 96)


def test_what_the_kernel_does_not_take_torch_computes() -> None:
    given: Any = layer(3, 64, 64)
    fine = {name: None if value is None else value.float() for name, value in given.items()}
    expected = exactly(**fine)
    assert not operation.fits(**fine)
    assert torch.allclose(residual_linear(**fine).double(), expected, atol=1e-5)
    with torch.autocast(HERE, torch.bfloat16):  # a layer in float32, as autocast takes it
        assert distance(residual_linear(**fine), expected) < 2e-2
    leaf = given["weight"].requires_grad_()
    with torch.autocast(HERE, torch.float16):
        residual_linear(**given).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.abs().sum() > 0


@runs_kernels
def test_no_gradient_is_lost_and_no_trace_needs_this_package() -> None:
    given: Any = layer(3, 64, 64)
    assert operation.fits(**given)
    given["h"].requires_grad_()
    assert not operation.fits(**given)
    with torch.no_grad():
        assert operation.fits(**given)

    class Layer(nn.Module):
        def forward(self, u: Tensor, h: Tensor) -> Tensor:
            return residual_linear(u, h, given["weight"], given["bias"].half())

    with torch.no_grad():
        u, h = given["u"], given["h"].detach()
        program = torch.export.export(Layer(), (u, h), strict=False)
        traced = torch.jit.trace(Layer(), (u, h))
    assert "replearn" not in str(program.graph)
    assert "replearn::" not in str(traced.graph)
    together = torch.func.vmap(lambda one, two: residual_linear(one, two, given["weight"]))(u, h)
    assert distance(together, u.double() + F.linear(h.double(), given["weight"].double())) < 2e-3
    with torch.no_grad(), forward_ad.dual_level():
        made = residual_linear(forward_ad.make_dual(u, torch.ones_like(u)), h, given["weight"])
        tangent = forward_ad.unpack_dual(made).tangent
    assert tangent is not None
    assert torch.equal(tangent, torch.ones_like(u))


@runs_kernels
@pytest.mark.parametrize("change", ["cut", "strided", "half stream", "rows", "another dtype", "empty"])
@torch.no_grad()
def test_the_kernel_is_not_given_what_it_would_misread(change: str) -> None:
    given: Any = layer(4, 64, 64)
    rest = {
        "cut": lambda: layer(4, 96, 64),
        "strided": lambda: given | {"h": torch.randn(1, 64, 4, device=HERE).half().transpose(1, 2)},
        "half stream": lambda: given | {"u": given["u"].half()},
        "rows": lambda: given | {"u": given["u"][:, :1]},
        "another dtype": lambda: given | {"h": given["h"].bfloat16()},
        "empty": lambda: layer(0, 64, 64),
    }[change]()
    assert not operation.fits(**rest)


@runs_kernels
def test_a_deployed_transformer_has_one_operation_where_a_block_ends() -> None:
    model, x = replaced(), images()
    base = small_vit().eval()
    plain: Any = replearn.fast.streamline(base, x, flatten=True, graph=False, dtype=torch.float16)
    form: Any = replearn.deploy(model, x, merge=True, flatten=True, graph=False, dtype=torch.float16)
    assert len(sums_in(plain)) == 2 * 5 - 1  # not that of a token that is picked, whose rows lie apart
    assert len(sums_in(form)) == 2 * 4 - 1
    assert [len(node.args) for node in sums_in(form)].count(5) == len(form.model.meta[ABSORBED]) == 1
    for owner, made in ((base, plain), (model, form)):
        with torch.no_grad():
            exact, found = owner(x), made(x)
            assert distance(found.float(), exact) < 5e-3
            assert distance(made(x[:1]).float(), exact[:1]) < 5e-3
        made(x).float().sum().backward()  # by torch's own operations
        with torch.no_grad():
            assert distance(made(x).float(), found.float()) < 5e-3
    stored = {str(node.args[2].target) for node in sums_in(form)}
    assert {form.model.get_parameter(name).dtype for name in stored} == {torch.float16}


@runs_kernels
def test_a_deployed_transformer_copies_pickles_and_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "FEW", 0)
    torch.manual_seed(0)
    base = VisionTransformer(img_size=16, patch_size=8, embed_dim=64, depth=4, num_heads=2).to(HERE)
    model = replearn.replace_(base, replearn.plan(base, first=2)).eval()
    x = torch.randn(2, 3, 16, 16, device=HERE)
    form: Any = replearn.deploy(model, x, merge=True, flatten=True, graph=False, dtype=torch.float16)
    called = [node.target for node in form.model.graph.nodes if node.op == "call_function"]
    assert {residual_linear, embed, rounded_norm} <= set(called)
    again: Any = pickle.loads(pickle.dumps(form))
    assert [node.target for node in again.model.graph.nodes if node.op == "call_function"] == called
    with torch.no_grad():
        expected = form(x)
        for other in (again, copy.deepcopy(form)):
            assert torch.equal(other(x), expected)
        compiled: Any = torch.compile(form, backend="aot_eager", fullgraph=True)
        assert distance(compiled(x).float(), expected.float()) < 5e-3


@runs_kernels
@torch.no_grad()
def test_an_operator_of_a_width_that_the_kernel_does_not_take() -> None:
    model, x = small_vit(96), images()
    replearn.replace_(model, replearn.plan(model, first=2)).eval()
    form: Any = replearn.deploy(model, x, merge=True, flatten=True, graph=False, dtype=torch.float16)
    assert sums_in(form) == []
    assert len(form.model.meta[ABSORBED]) == 1
    assert distance(form(x).float(), model(x)) < 5e-3


@runs_kernels
def test_an_operator_that_is_taken_up_costs_no_launch() -> None:
    x = images(1)
    base = small_vit()
    removed, kept = (
        replearn.replace_(copy.deepcopy(base), replearn.plan(base, first=2, operator=options)).eval()
        for options in (replearn.operators.Removal(), replearn.operators.Projection())
    )
    one, other = (
        count(replearn.deploy(model, x, merge=True, flatten=True, graph=False, dtype=torch.float16), x)
        for model in (removed, kept)
    )
    assert (one.launches, one.dispatches) == (other.launches, other.dispatches)
    assert other.flops - one.flops == 2 * 5 * 64 * 64


@runs_kernels
def test_a_compiler_is_given_torchs_own_operations() -> None:
    form: Any = replearn.deploy(
        replaced(), images(), merge=True, flatten=True, graph=False, dtype=torch.float16, compile=True
    )
    assert sums_in(form) == []


@runs_kernels
def test_sums_of_anything_else_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    x = images()
    narrow: Any = replearn.fast.streamline(small_vit(96).eval(), x, flatten=True, graph=False, dtype=torch.float16)
    assert sums_in(narrow) == []
    monkeypatch.setattr(streamlining, "kernels_run_on", lambda device: False)
    assert (
        sums_in(replearn.fast.streamline(small_vit().eval(), x, flatten=True, graph=False, dtype=torch.float16))
        == []
    )


class Block(nn.Module):
    """u + linear(h), where h is written to before the sum, or the layer or its weight are used elsewhere too."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.last = how, nn.Linear(64, 64), nn.Linear(64, 64)
        self.act = nn.Hardswish(inplace=True)
        self.bias = nn.Parameter(torch.randn(1) if how == "one number" else torch.randn(64))

    def forward(self, u: Tensor) -> Tensor:
        h = self.first(u)
        v = F.linear(h, self.last.weight, self.bias)
        if self.how == "written":
            h = h.mul_(2)
        elif self.how == "written by a module":
            h = self.act(h)
        y = v + v if self.how == "doubled" else u + v
        if self.how == "seen":
            return y * v
        if self.how == "tied":
            return y * self.last.weight.sum(0)
        if self.how == "twice":
            return y + F.linear(self.first(y), self.last.weight)
        return y + h.mean()


@runs_kernels
@torch.no_grad()
@pytest.mark.parametrize(
    ("how", "sums", "kind"),
    [
        ("written", 0, torch.float16), ("written by a module", 0, torch.float16), ("tied", 1, torch.float32),
        ("twice", 2, torch.float16), ("one number", 1, torch.float16), ("seen", 0, torch.float16),
        ("doubled", 0, torch.float16),
    ],
)  # fmt: skip
def test_sums_that_stay_what_they_are(how: str, sums: int, kind: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Block(how).to(HERE).eval(), torch.randn(2, 3, 64, device=HERE)
    form: Any = replearn.fast.streamline(model, x, flatten=True, graph=False, dtype=torch.float16)
    assert len(sums_in(form)) == sums
    assert form.model.get_parameter("last_weight").dtype is kind
    with torch.autocast(HERE, torch.float16):
        expected = model(x)
    assert distance(form(x), expected) < 5e-4


def test_shapes_are_known_without_running_it() -> None:
    with FakeTensorMode():
        given: Any = layer(3, 64, 128)
        made = torch.ops.replearn.residual_linear(*given.values())
    assert (made.shape, made.dtype) == ((1, 3, 128), torch.float32)


def test_in_the_interpreter() -> None:
    interpret(__file__, "exact_layer or every_tile or anywhere or misread or no_gradient or deployed or taken_up "
                        "or compiler or stay or width")  # fmt: skip


@needs_gpu
@pytest.mark.cuda
@pytest.mark.parametrize(("batch", "dtype"), [(1, torch.float16), (64, torch.float16), (32, torch.bfloat16)])
def test_on_a_gpu_a_vit_is_what_torch_makes_of_it(batch: int, dtype: torch.dtype) -> None:
    from replearn.experiments.bench.inference_sides import make_sides

    device = torch.device("cuda")
    sides = make_sides("vit_small_16", 224, device, 2)
    x = torch.randn(batch, 3, 224, 224, device=device)
    form: Any = replearn.deploy(sides.replaced, x, merge=True, flatten=True, graph=False, dtype=dtype)
    assert [len(node.args) for node in sums_in(form)].count(5) == 3
    with torch.inference_mode():
        exact, found = sides.replaced(x), form(x)
        rough = replearn.deploy(sides.replaced, dtype=dtype)(x)
        assert distance(found.float(), exact) < 1.5 * distance(rough.float(), exact)
        replay = Replayed(form)
        assert torch.equal(replay(x), found)
        assert torch.equal(replay(x), found)
