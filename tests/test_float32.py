"""TF32 by torch's older switches and its newer ones: what we need is set, and a user's own comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny
import torch

import replearn
from replearn.costs.precision import convolves_in_tf32, float32_products, get_or_none, matmul_precision
from replearn.fast.verify import exact

BACKENDS: Any = torch.backends
SWITCHES = (BACKENDS.cuda.matmul, BACKENDS.mkldnn.matmul, BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn)
GETTERS = (torch.get_float32_matmul_precision, lambda: BACKENDS.cudnn.allow_tf32)


def set_to(switch: Any, precision: str) -> Callable[[], None]:
    return lambda: setattr(switch, "fp32_precision", precision)


STATES: dict[str, Callable[[], None]] = {
    "as torch begins": lambda: None,
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "no convolutions": lambda: setattr(BACKENDS.cudnn, "allow_tf32", False),
    "newer, products": set_to(BACKENDS.cuda.matmul, "tf32"),
    "newer, convolutions": set_to(BACKENDS.cudnn.conv, "ieee"),
    "newer, all on": set_to(BACKENDS, "tf32"),
    "newer, all off": set_to(BACKENDS, "ieee"),
}


@pytest.fixture(params=STATES.values(), ids=STATES)
def users_own(request: Any) -> Iterator[None]:
    before = [switch.fp32_precision for switch in SWITCHES]
    request.param()
    yield
    BACKENDS.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    BACKENDS.cudnn.allow_tf32 = True
    for switch, precision in zip(SWITCHES, before, strict=True):
        switch.fp32_precision = precision


def state() -> list[Any]:
    return [*(switch.fp32_precision for switch in (BACKENDS, *SWITCHES)), BACKENDS.cudnn.benchmark]


@pytest.mark.usefixtures("users_own")
@pytest.mark.parametrize("tf32", [False, True])
def test_products_are_as_asked_and_the_users_switches_come_back(tf32: bool) -> None:
    before, spoken = state(), [get_or_none(getter) for getter in GETTERS]
    with float32_products(tf32=tf32, benchmark=True):
        inside = state()
        assert matmul_precision() == ("high" if tf32 else "highest")  # who asks the old way is answered
        assert BACKENDS.cudnn.allow_tf32 is convolves_in_tf32() is tf32
    assert inside[1:] == [*["tf32" if tf32 else "ieee"] * 4, True]
    assert state() == before
    with pytest.raises(ZeroDivisionError), float32_products(tf32=tf32):
        raise ZeroDivisionError
    assert state() == before
    for getter, value in zip(GETTERS, spoken, strict=True):
        assert value is None or getter() == value


@pytest.mark.usefixtures("users_own")
def test_outputs_are_compared_without_tf32_and_without_a_search() -> None:
    BACKENDS.cudnn.benchmark = True
    try:
        with exact():
            assert state()[1:] == [*["ieee"] * 4, False]
        assert BACKENDS.cudnn.benchmark
    finally:
        BACKENDS.cudnn.benchmark = False


@pytest.mark.usefixtures("users_own")
def test_a_model_is_deployed_and_compared() -> None:
    before = state()
    replearn.deploy(tiny.replaced(tiny.resnet()).eval(), torch.randn(2, 3, 32, 32))
    assert state() == before


def test_what_followed_the_switch_for_all_follows_it_again() -> None:
    product, before = BACKENDS.cuda.matmul, BACKENDS.cuda.matmul.fp32_precision
    product.fp32_precision = "none"
    try:
        with exact():
            assert product.fp32_precision == "ieee"
        BACKENDS.fp32_precision = "tf32"
        assert product.fp32_precision == "tf32"
    finally:
        BACKENDS.fp32_precision = "none"
        product.fp32_precision = before
