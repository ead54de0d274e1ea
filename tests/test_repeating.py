"""What an operation did with tensors of a kind, it does with others of that kind without asking again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from interpreting import HERE, INTERPRETED, interpret, runs_kernels
from test_narrow_convolutions import distance
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from replearn.fast.graphs import repeating
from replearn.fast.graphs.launch_cache import Launch
from replearn.fast.kernels import layernorm_half as norms
from replearn.fast.kernels import linear_residual as residual
from replearn.fast.kernels import patch_embed as patches
from replearn.fast.kernels import stem as stem

HALF = torch.float16


class Case(NamedTuple):
    room: Any  # the module of the operation
    call: Callable[..., Tensor]  # with its tensors
    usual: Callable[..., Tensor]
    make: Callable[[], list[Any]]


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape, device=HERE) / 8).to(dtype)


CASES = {
    "residual_linear": Case(
        residual,
        residual.residual_linear,
        residual.usual,
        lambda: [tensor(2, 5, 64), tensor(2, 5, 64, dtype=HALF), tensor(64, 64, dtype=HALF), tensor(64), None],
    ),
    "rounded_norm": Case(
        norms,
        lambda x, weight, bias: norms.rounded_norm(x, (64,), weight, bias),
        lambda x, weight, bias: torch.layer_norm(x, (64,), weight, bias),
        lambda: [tensor(3, 64), tensor(64), None],
    ),
    "embed_patches": Case(
        patches,
        lambda images, weight, table: patches.embed(images, weight, table, 1),
        lambda images, weight, table: patches.usual(images, weight, table, 1),
        lambda: [tensor(2, 3, 16, 16), tensor(64, 3, 8, 8, dtype=HALF), tensor(5, 64)],
    ),
    "stem": Case(
        stem,
        lambda images, weight, bias: stem.stem(images, weight, bias, (2, 1, 3, 2, 1), True, 1),
        lambda images, weight, bias: stem.usual(images, weight, bias, (2, 1, 3, 2, 1), True),
        lambda: [tensor(2, 3, 12, 14), tensor(16, 3, 3, 3, dtype=HALF), tensor(16, 1, 1)],
    ),
}


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(repeating, "_runs", {})
    monkeypatch.setattr(stem, "LEAST", 1)
    with torch.no_grad(), torch.autocast(HERE, HALF):
        yield


def check(case: Case, given: list[Any]) -> None:
    assert distance(case.call(*given), case.usual(*given)) < 2e-3


def watched(case: Case, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    asked, fits = [], case.room.fits

    def fitting(*given: Any) -> bool:
        asked.append(given)
        return bool(fits(*given))

    monkeypatch.setattr(case.room, "fits", fitting)
    return asked


@runs_kernels
@pytest.mark.parametrize("name", CASES)
def test_the_second_time_nothing_is_asked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    asked = watched(case, monkeypatch)
    first = case.make()
    check(case, first)
    assert len(asked) == 1
    for _ in range(2):
        check(case, case.make())
    assert len(asked) == 1


def cut(given: list[Any]) -> list[Any]:
    """Fewer rows or images; a residual layer has them twice."""
    return [x[1:] if place == 0 or (place == 1 and len(given) == 5) else x for place, x in enumerate(given)]


def halved(given: list[Any]) -> list[Any]:
    return [given[0].half(), *given[1:]]


def strided(given: list[Any]) -> list[Any]:
    return [torch.stack((given[0], given[0]), -1)[..., 0], *given[1:]]


def odd(given: list[Any]) -> list[Any]:
    """One number behind where a tensor begins."""
    moved = torch.cat((given[0].new_zeros(1), given[0].flatten()))[1:].view_as(given[0])
    assert moved.data_ptr() % 16
    return [moved, *given[1:]]


def other_weight(given: list[Any]) -> list[Any]:
    place = 2 if len(given) == 5 else 1
    turned = torch.stack((given[place], given[place]), -1)[..., 0]
    return [*given[:place], turned, *given[place + 1 :]]


@runs_kernels
@pytest.mark.parametrize("change", [cut, halved, strided, odd, other_weight])
@pytest.mark.parametrize("name", CASES)
def test_tensors_that_look_different_are_asked_about(
    name: str, change: Callable[[list[Any]], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    check(case, case.make())
    asked = watched(case, monkeypatch)
    check(case, change(case.make()))
    assert len(asked) == 1


class Listening(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard.append(str(func))
        return func(*args, **(kwargs or {}))


@runs_kernels
@pytest.mark.parametrize("name", CASES)
def test_modes_gradients_and_another_precision_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    check(case, case.make())
    asked = watched(case, monkeypatch)
    with Listening() as mode:
        check(case, case.make())
    assert any(name in one for one in mode.heard)
    assert len(asked) == 1
    with torch.enable_grad():
        given = case.make()
        given[0].requires_grad_()
        assert case.call(*given).requires_grad
    assert len(asked) == 2
    if name != "residual_linear":  # which goes by its tensors alone
        with torch.autocast(HERE, torch.bfloat16):
            given = [x if x is None or x.dtype is torch.float32 else x.bfloat16() for x in case.make()]
            case.call(*given)
        with torch.autocast(HERE, enabled=False):
            given = [x if x is None else x.float() for x in case.make()]
            check(case, given)
        assert len(asked) == (4 if name != "stem" else 3 + stem.in_these_numbers(given[1]))


@runs_kernels
@pytest.mark.parametrize("name", CASES)
def test_that_no_kernel_takes_it_is_remembered_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    asked = watched(case, monkeypatch)
    for _ in range(3):
        given = case.make()
        wide = other_weight(given) if name in ("residual_linear", "embed_patches") else strided(given)
        if name == "stem":
            wide = [given[0], given[1], given[2].expand(16, 2, 1)[:, :1]]
        check(case, wide)
    assert len(asked) == 1


@pytest.mark.skipif(HERE == "cuda" or INTERPRETED, reason="where no kernel runs")
def test_tensors_without_strides_are_left_to_torch() -> None:
    u, h, weight = torch.randn(4, 64), torch.randn(4, 64), torch.randn(64, 64)
    with torch.autocast(HERE, enabled=False):
        exact = residual.usual(u, h, weight, None, None)
        assert distance(residual.residual_linear(u, h, weight.to_sparse_csr()), exact) < 1e-6
    assert not repeating._runs


@runs_kernels
def test_numbers_of_the_other_sign_are_told() -> None:
    images, weight, table = CASES["embed_patches"].make()
    turned = torch.complex(images, images).conj().imag
    assert turned.is_neg()
    assert distance(patches.embed(turned, weight, table, 1), patches.usual(-images, weight, table, 1)) < 2e-3


@runs_kernels
@pytest.mark.parametrize("name", CASES)
def test_no_tensor_is_kept(name: str) -> None:
    case = CASES[name]
    given: Any = case.make()
    made = case.call(*given)
    assert repeating._runs
    seen = [weakref.ref(x) for x in (*given, made) if x is not None]
    del given, made
    gc.collect()
    assert [ref() for ref in seen] == [None] * len(seen)


@runs_kernels
def test_not_more_is_kept_than_a_model_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeating, "MOST", 3)
    for rows in range(1, 9):
        norms.rounded_norm(tensor(rows, 64), (64,), None, None)
        assert 1 <= len(repeating._runs) <= 3


@runs_kernels
def test_numbers_beside_the_tensors_count() -> None:
    x = tensor(3, 64)
    for epsilon in (1e-5, 1e-1, 1):
        exact = torch.layer_norm(x.float(), (64,), eps=epsilon)
        assert distance(norms.rounded_norm(x, (64,), None, None, epsilon), exact) < 2e-3
    images, weight, bias = CASES["stem"].make()
    for sizes in ((2, 1, 3, 2, 1), (1, 1, 3, 2, 1)):
        for last in (True, False):
            made = stem.stem(images, weight, bias, sizes, last, 1)
            assert distance(made, stem.usual(images, weight, bias, sizes, last)) < 2e-3
            assert made.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


class Compiled:
    """Stands for a kernel that Triton compiled: notes what it is launched with."""

    def __init__(self) -> None:
        self.launched: list[Any] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *given: self.launched.append((grid, given))


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_launch_is_made_again_on_its_gpu_with_other_addresses(
    gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, entered, there = Compiled(), [], torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or nullcontext())
    launch = Launch(kernel=None, grid=(3, 1, 1), device=there, ready=ready, numbers=(7, 0.5), options={})
    again, x, y = launch.again(), torch.ones(2), torch.ones(3)
    entered.clear()
    again(x, y)
    assert ready.launched == [((3, 1, 1), (x.data_ptr(), y.data_ptr(), 7, 0.5))]
    assert entered == ([there] if gpus > 1 else [])


def test_in_the_interpreter() -> None:
    interpret(__file__, "not interpreter and not without_strides")
