"""Attention over few tokens against torch's own: in Triton's interpreter here, for real on a GPU."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_runs import noting_runs
from interpreting import HERE, INTERPRETED, interpret, runs_kernels
from test_narrow_convolutions import bfloat16_in_the_interpreter, distance, gradients, needs_gpu
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import replearn
from replearn import operators, short
from replearn.fast.kernels import attention_short as operation
from replearn.fast.kernels._triton import attention_short_tiles as tiles
from replearn.fast.kernels.attention_short import packed_attention
from replearn.fast.train.attention_short import find_short, short_attention

pytest.importorskip("timm")
from timm.models.vision_transformer import Attention, VisionTransformer

__all__ = ["bfloat16_in_the_interpreter"]  # a fixture, for every test of this file too


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Which of our kernels were launched, in order."""
    from replearn.fast.kernels._triton import attention_short as kernels

    found: list[str] = []
    plain = kernels.launch

    def noted(kernel: Any, tensors: tuple[Tensor, ...], *how: Any) -> None:
        found.append("forward" if len(tensors) == 2 else "backward")
        plain(kernel, tensors, *how)

    monkeypatch.setattr(kernels, "launch", noted)
    return found


def drawn(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape, device=HERE).to(dtype)


def exactly(qkv: Tensor, heads: int, grad: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Attention and its gradient in float64, written out."""
    exact = qkv.detach().double().requires_grad_()
    batch, tokens, packed = qkv.shape
    q, k, v = exact.view(batch, tokens, 3, heads, -1).permute(2, 0, 3, 1, 4)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
    out = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, packed // 3)
    return out.detach(), torch.autograd.grad(out, exact, grad.double())[0]


def check(qkv: Tensor, heads: int, causal: bool, tolerance: float) -> None:
    qkv.requires_grad_()
    out = packed_attention(qkv, heads, causal=causal)
    grad = torch.randn_like(out)
    out.backward(grad)
    expected, back = exactly(qkv, heads, grad, causal)
    assert out.dtype is qkv.dtype
    assert qkv.grad is not None
    # a single token has a gradient in v alone: nothing to divide by in q and k
    said = f"{tuple(qkv.shape)}, {heads} heads, causal {causal}"
    assert distance(out.detach(), expected) < tolerance, said
    for found, wanted in zip(qkv.grad.chunk(3, -1), back.chunk(3, -1), strict=True):
        assert (found.double() - wanted).norm() < 2 * tolerance * (wanted.norm() + 0.1), said


# the interpreter cuts bfloat16 off where a GPU rounds
TOLERANCES = {torch.float16: 1e-3, torch.bfloat16: 1.6e-2 if INTERPRETED else 8e-3}


@runs_kernels
@pytest.mark.parametrize(("causal", "dtype"), [(False, torch.bfloat16), (True, torch.float16)])
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "width"),
    [(2, 17, 3, 64), (1, 64, 2, 32), (3, 5, 6, 16), (1, 33, 1, 128), (2, 16, 5, 32), (1, 32, 4, 64)],
)
def test_values_and_gradients_are_those_of_exact_attention(
    batch: int, tokens: int, heads: int, width: int, causal: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    check(drawn(batch, tokens, 3 * heads * width, dtype=dtype), heads, causal, TOLERANCES[dtype])


@runs_kernels
def test_every_number_of_tokens_is_right() -> None:
    torch.manual_seed(0)
    for tokens in range(1, 65):
        check(drawn(1, tokens, 3 * 16), 1, tokens % 2 == 0, 1.5e-3)


@runs_kernels
@pytest.mark.parametrize("heads", [3, 4])
def test_every_way_of_cutting_the_work_gives_the_same(heads: int) -> None:
    from replearn.fast.kernels._triton.attention_short import launch_attend, launch_attend_back

    torch.manual_seed(0)
    qkv, grad = drawn(2, 17, 3 * heads * 16), drawn(2, 17, heads * 16)
    made = [torch.empty_like(grad) for _ in range(3)]
    back = [torch.empty_like(qkv) for _ in range(3)]
    for index, (together, warps) in enumerate([(1, 1), (2, 2), (3, 4)]):  # 2 of 3 and 3 of 4 don't divide: 1
        tile = tiles.Tile(heads=together, num_warps=warps)
        launch_attend(qkv, made[index], heads, False, tile)
        launch_attend_back(qkv, grad, back[index], heads, False, tile)
    for one, other in zip((*made[1:], *back[1:]), (made[0], made[0], back[0], back[0]), strict=True):
        assert distance(one, other) < 1e-3


@runs_kernels
def test_tensors_may_lie_in_any_order() -> None:
    torch.manual_seed(0)
    qkv, grad = drawn(2, 6, 96), drawn(2, 6, 32)
    expected = torch.autograd.grad(packed_attention(qkv.requires_grad_(), 2), qkv, grad)[0]
    turned = grad.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert torch.equal(torch.autograd.grad(packed_attention(qkv, 2), qkv, turned)[0], expected)
    other = qkv.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    assert torch.equal(torch.autograd.grad(packed_attention(other, 2), other, grad)[0], expected)
    one = torch.autograd.grad(packed_attention(qkv, 2).sum(), qkv)[0]  # a gradient of stride 0
    assert torch.equal(one, torch.autograd.grad(packed_attention(qkv, 2), qkv, torch.ones_like(grad))[0])


@runs_kernels
def test_large_scores_overflow_nowhere_and_memory_beyond_is_never_read() -> None:
    torch.manual_seed(0)
    around = torch.full((4, 17, 3 * 16), float("nan"), dtype=torch.float16, device=HERE)
    around[1:3] = 60 * drawn(2, 17, 3 * 16)
    qkv = around[1:3].detach().requires_grad_()
    out = packed_attention(qkv, 1)
    out.sum().backward()
    assert out.isfinite().all()
    assert qkv.grad is not None
    assert qkv.grad.isfinite().all()
    assert distance(out.detach(), exactly(qkv, 1, torch.ones_like(out))[0]) < 1e-3


@runs_kernels
def test_the_operations_keep_torchs_contract() -> None:
    qkv = drawn(1, 5, 96).requires_grad_()
    torch.library.opcheck(operation.attend, (qkv, 2, False))
    torch.library.opcheck(operation.attend_back, (qkv.detach(), drawn(1, 5, 32), 2, True))


@runs_kernels
def test_torch_func_gets_torchs_own(launches: list[str]) -> None:
    qkv = drawn(2, 1, 5, 96)
    found = torch.func.vmap(lambda one: packed_attention(one, 2))(qkv)
    assert launches == []
    assert distance(found[0], packed_attention(qkv[0], 2)) < 1e-3
    assert launches == ["forward"]


# ---- which attention --------------------------------------------------------------------------------------------


def test_elsewhere_it_is_torchs_own_attention() -> None:
    qkv = torch.randn(2, 5, 3 * 2 * 16)
    q, k, v = qkv.view(2, 5, 3, 2, 16).permute(2, 0, 3, 1, 4)
    for causal in (False, True):
        expected = scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).reshape(2, 5, 32)
        assert torch.equal(packed_attention(qkv, 2, causal=causal), expected)


def test_what_has_no_heads_is_refused() -> None:
    with pytest.raises(replearn.ReplearnError, match=r"\(2, 5, 96\) is not .*3 x 5 heads.*qkv\(x\), not yet cut"):
        packed_attention(torch.zeros(2, 5, 96), 5)
    with pytest.raises(replearn.ReplearnError, match="Give it queries, keys and values"):
        packed_attention(torch.zeros(2, 3, 2, 5, 16), 2)


def test_what_the_kernels_take() -> None:
    def taken(shape: tuple[int, ...] = (2, 17, 192), width: int = 64, dtype: Any = torch.bfloat16) -> bool:
        with FakeTensorMode():  # shapes without memory
            return operation.fits(torch.empty(shape, dtype=dtype), 3, width)

    assert taken()
    assert taken(dtype=torch.float16)
    assert taken((2, 64, 192))
    assert not taken((2, 65, 192))
    assert not taken((2, 0, 192))
    assert not taken((0, 17, 192))
    assert not taken((17, 192))
    assert not taken(width=48)
    assert not taken(dtype=torch.float32)
    assert taken((58254, 64, 192))
    assert not taken((58255, 64, 192))  # 2**31 numbers of q, k and v
    with torch.autocast("cpu", torch.bfloat16):
        assert taken(dtype=torch.float32)
        assert not taken(dtype=torch.float64)
        assert not taken(dtype=torch.int64)


def vit(**settings: Any) -> VisionTransformer:
    how = {"img_size": 8, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 5}
    return VisionTransformer(**{**how, **settings})


def test_a_models_attention_is_exchanged_and_comes_back() -> None:
    model = vit()
    keys, seen = list(model.state_dict()), list(model.parameters())
    attention = [block.attn for block in model.blocks]
    assert set(find_short(model)) == set(attention)
    with short_attention(model):
        assert all(type(one) is not Attention and isinstance(one, Attention) for one in attention)
        with short_attention(model):
            pass
        assert all(type(one) is not Attention for one in attention)  # an inner one takes nothing away
        assert list(model.state_dict()) == keys
        copies = (copy.deepcopy(attention[0]), pickle.loads(pickle.dumps(attention[0])))
        assert {type(one) for one in copies} == {Attention}
        assert all(torch.equal(one.qkv.weight, attention[0].qkv.weight) for one in copies)
    assert {type(one) for one in attention} == {Attention}
    with pytest.raises(RuntimeError), short_attention(model):
        model(torch.zeros(1, 5, 8, 8))
    assert {type(one) for one in attention} == {Attention}
    assert all(one is other for one, other in zip(model.parameters(), seen, strict=True))


class Own(Attention):
    """Somebody's attention, with ideas of its own."""


def test_other_attention_stays() -> None:
    def found(**settings: Any) -> int:
        return len(find_short(nn.Sequential(Attention(**{"dim": 32, "num_heads": 2, **settings}))))

    assert found() == 1
    assert found(scale_norm=True, norm_layer=nn.LayerNorm, proj_drop=0.1, qkv_bias=True) == 1
    assert found(qk_norm=True, norm_layer=nn.LayerNorm) == 0
    assert found(num_heads=4) == 0  # 8 wide
    assert find_short(nn.Sequential(Own(32, 2))) == []
    changed = Attention(32, 2)
    changed.fused_attn = False
    assert find_short(changed) == []
    changed = Attention(32, 2)
    changed.gate = nn.Linear(32, 32)
    assert find_short(changed) == []
    shared = Attention(32, 2)
    assert find_short(nn.Sequential(shared, nn.Sequential(shared))) == [shared]


def test_without_timm_there_is_nothing_to_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    model = vit()
    monkeypatch.delitem(sys.modules, "timm.models.vision_transformer")
    assert find_short(model) == []
    with short_attention(model):
        assert type(model.blocks[0].attn) is Attention
    assert "timm.models.vision_transformer" not in sys.modules  # nobody went to get it


@runs_kernels
def test_dropout_masks_and_more_tokens_are_left_to_timm(launches: list[str]) -> None:
    x, mask = drawn(1, 5, 32), torch.ones(5, 5, device=HERE).tril().bool()
    attention = Attention(32, 2).to(HERE).half()
    dropping = Attention(32, 2, attn_drop=0.5).to(HERE).half()
    model = nn.ModuleList([attention, dropping])
    expected = attention(x, attn_mask=mask)
    with short_attention(model):
        assert torch.equal(attention(x, attn_mask=mask), expected)
        dropping(x)
        attention(drawn(1, 65, 32))
        attention.float()(x.float())
        attention.half()
        assert launches == []
        assert distance(attention(x, is_causal=True).detach(), expected) < 2e-3
        dropping.eval()(x)
        assert launches == ["forward"] * 2


# ---- models -----------------------------------------------------------------------------------------------------


def subject(operator: Any = None, **settings: Any) -> tuple[nn.Module, Tensor, Tensor]:
    """A model with its input, and what float32 says of its gradients."""
    torch.manual_seed(0)
    model: nn.Module = vit(**settings)
    if operator is not None:
        replearn.replace_(model, replearn.plan(model, targets=["blocks.1"], operator=operator))
    model.to(HERE)
    x = torch.randn(2, 3, 8, 8, device=HERE)
    return model, x, gradients(model, x, dtype=None).double()


@runs_kernels
@pytest.mark.parametrize("name", [None, "Projection", "HeadWise", "AttentionMLP", "WholeBlock"])
def test_a_model_learns_the_same(name: str | None, launches: list[str]) -> None:
    model, x, exact = subject(getattr(operators, name)() if name else None)
    plain = distance(gradients(model, x), exact)
    with short_attention(model):
        assert distance(gradients(model, x), exact) < 1.3 * plain
    layers = 3 if name in (None, "WholeBlock") else 2  # an operator's own counts
    assert launches == ["forward"] * layers + ["backward"] * layers


@runs_kernels
def test_a_compiled_model_notices_and_learns_the_same(launches: list[str]) -> None:
    model, x, exact = subject(depth=1)
    plain = distance(gradients(model, x), exact)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    launches.clear()
    gradients(model, x, compiled)
    assert launches == []
    with short_attention(model):
        assert distance(gradients(model, x, compiled), exact) < 1.3 * plain
    assert launches == ["forward", "backward"]
    gradients(model, x, compiled)
    assert launches == ["forward", "backward"]  # and notices when they are gone


@runs_kernels
def test_a_recomputed_block_computes_what_it_did(launches: list[str]) -> None:
    model, x, _ = subject()
    with short_attention(model):
        expected = gradients(model, x)
        launches.clear()
        found = gradients(model, x, lambda x: checkpoint(model, x, use_reentrant=False))
    assert launches.count("forward") == 2 * launches.count("backward") == 6
    torch.testing.assert_close(found, expected)


def test_a_run_uses_them_where_its_recipe_lets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Size] = []

    def noted(x: Tensor, heads: int, width: int) -> bool:
        seen.append(x.shape)
        return False

    monkeypatch.setattr(short.layers, "kernels_take", noted)
    notes = noting_runs(tmp_path, monkeypatch, "short_attention", model="vit:32:3:2:8", short_attention=True)
    assert "Triton" not in notes("off", short_attention=False)
    assert "Triton" not in notes("precise", precision="float32")
    assert "Triton" not in notes("eager", compile=False)
    assert seen == []
    assert "3 attention layers by Triton kernels, up to 64 tokens" in notes("on")
    assert len(seen) == 3


@runs_kernels
def test_kernels_are_left_alone_where_derivatives_go_forward() -> None:
    qkv = drawn(2, 5, 3 * 16)
    assert operation.kernels_take(qkv, 1, 16)
    with forward_ad.dual_level():
        assert not operation.kernels_take(qkv, 1, 16)


def test_the_kernels_run_in_tritons_interpreter() -> None:
    interpret(__file__, "values or every or order or large or contract or func or left or learns or recomputed")


# ---- on a GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("width", tiles.WIDTHS)
@pytest.mark.parametrize("tokens", [9, 17, 64])
def test_real_sizes_agree_and_repeat_to_the_bit(tokens: int, width: int) -> None:
    torch.manual_seed(0)
    qkv, grad = (drawn(256, tokens, parts * 3 * width, dtype=torch.bfloat16) for parts in (3, 1))
    check(qkv, 3, False, 8e-3)
    first, second = (
        (out, torch.autograd.grad(out, qkv, grad)[0]) for out in (packed_attention(qkv, 3) for _ in range(2))
    )
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("backend", ["captured", "compiled"])
@pytest.mark.parametrize("label", ["E2E", "RepL"])
def test_fifty_steps_with_our_kernels_are_fifty_of_torchs(backend: Any, label: str) -> None:
    from replearn.experiments.bench.cases import ADAMW, Case, candidates
    from replearn.experiments.bench.steps import TrainingStep, losses, precision_of

    slow = replace(ADAMW, lr=1e-4)  # at a large rate on random labels, rounding alone decides where training goes
    case = Case(model="vit:64:6:4:8", batch_size=64, optimizer=slow)
    side = next(side for side in candidates(case) if side.label == label)
    with precision_of(backend):
        ours = losses(TrainingStep(case, side, backend, torch.device("cuda")), 50)
        theirs = losses(TrainingStep(case, side, backend, torch.device("cuda"), short=False), 50)
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("backend", ["captured", "compiled"])
def test_a_step_runs_our_kernels_and_no_other_attention(backend: Any) -> None:
    from torch.profiler import ProfilerActivity, profile

    from replearn.experiments.bench.cases import ADAMW, Case, candidates
    from replearn.experiments.bench.steps import TrainingStep, precision_of

    case = Case(model="vit_tiny_8", batch_size=64, optimizer=ADAMW)
    with precision_of(backend):
        step = TrainingStep(case, candidates(case)[0], backend, torch.device("cuda"))
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            step.body()
            torch.cuda.synchronize()
    counts = {event.key: event.count for event in found.key_averages()}
    assert counts["attend_kernel"] == counts["attend_back_kernel"] == len(find_short(step.model)) == 12
    assert not [name for name in counts if "scaled_dot_product" in name or "flash" in name]
