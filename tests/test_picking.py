"""One token is computed where a classifier looks at one, and the outputs are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interpreting import HERE, distance, small_vit
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import replearn
from replearn.fast.graph_module import FlatGraph
from replearn.fast.inlining import flatten, note_values_
from replearn.fast.passes import layernorm_half
from replearn.fast.passes._context import Context
from replearn.fast.passes.token_slice import apply_

pytest.importorskip("timm")


def picked(model: nn.Module, x: Tensor, dtype: torch.dtype | None = None) -> FlatGraph:
    """The flat graph with its token picked early; shapes that were noted are those that a run finds."""
    flat = flatten(model, x)
    note_values_(flat, x, dtype)
    apply_(flat, Context())
    noted = [node.meta["value"].shape for node in flat.graph.nodes if "value" in node.meta]
    note_values_(flat, x, dtype)
    assert [node.meta["value"].shape for node in flat.graph.nodes if "value" in node.meta] == noted
    return flat


def whole(flat: FlatGraph) -> list[str]:
    """The functions and methods that compute values of all tokens."""
    made = [node for node in flat.graph.nodes if node.op in ("call_function", "call_method")]
    values = [(node, node.meta.get("value")) for node in made]
    return [getattr(node.target, "__name__", node.target) for node, x in values if x is not None and x.dim() == 3]


def same(model: nn.Module, flat: FlatGraph, x: Tensor) -> None:
    for images in (x, x[:1]):
        assert distance(flat(images.clone()).detach(), model(images.clone()).detach()) < 1e-6


def flops(model: nn.Module, x: Tensor) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    return counter.get_total_flops()


@pytest.mark.parametrize("changes", [{}, {"init_values": 0.5}, {"pre_norm": True}, {"no_embed_class": True}])
def test_after_the_last_attention_one_token_is_left(changes: dict[str, Any]) -> None:
    model, x = small_vit(**changes), torch.randn(2, 3, 16, 16, device=HERE)
    flat = picked(model, x)
    same(model, flat, x)
    nodes = list(flat.graph.nodes)
    last = max(nodes.index(node) for node in nodes if node.target is F.scaled_dot_product_attention)
    behind = [node for node in nodes[last + 1 :] if node.target in (F.linear, torch.layer_norm, F.gelu)]
    assert len(behind) == 7  # proj, norm2, fc1, gelu, fc2, norm, head
    assert {node.meta["value"].dim() for node in behind} == {2}


@pytest.mark.parametrize("how", ["deploy", "streamline"])
def test_it_is_part_of_what_is_deployed(how: str) -> None:
    model, x = small_vit(), torch.randn(2, 3, 16, 16, device=HERE)
    if how == "deploy":
        replearn.replace_(model, replearn.plan(model, first=2))
        form = replearn.deploy(model.eval(), x, flatten=True)
    else:
        form = replearn.fast.streamline(model, x, flatten=True)
    assert distance(form(x).detach(), model(x).detach()) < 1e-5
    layer = 2 * 2 * 4 * 64 * 64
    assert flops(flatten(replearn.deploy(model) if how == "deploy" else model, x), x) - flops(form, x) >= 3 * layer


class Head(nn.Module):
    """Tokens through a layer, in some way, to a class."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.norm = how, nn.LayerNorm((5, 8) if how == "norm over two dimensions" else 8)
        self.layer, self.head, self.mixing = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(5, 5)
        self.row, self.rows, self.place = (nn.Parameter(torch.randn(s)) for s in (8, (1, 5, 8), (1, 1, 8)))
        self.table = nn.Parameter(torch.randn(5, 8))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "in place":
            return self.head((F.silu(x, inplace=True) + self.layer(x))[:, 0])
        if self.how == "written before":
            z = x + 1
            z.add_(self.layer(z))
            return self.head(z[:, 0] + self.layer(z)[:, 0])
        if self.how == "keywords":
            y = torch.layer_norm(F.linear(input=x, weight=self.layer.weight), (8,), eps=0.1)
            return self.head(torch.sub(input=y, other=2.5)[:, 2])
        if self.how == "a bias for each token":
            return self.head(F.linear(x, self.layer.weight, self.table)[:, 1])
        y = self.layer(x)
        ways: dict[str, Callable[[], Tensor]] = {
            "plain": lambda: y[:, 0],
            "norm over two dimensions": lambda: self.norm(y)[:, 0],
            "rows": lambda: F.gelu(self.norm(y) * self.row + 2 * (self.rows - y) + 1)[:, 0],
            "a table": lambda: (y + self.table)[:, 0],
            "tokens are mixed": lambda: self.mixing(y.transpose(1, 2)).transpose(1, 2)[:, 0],
            "written after": lambda: y[:, 0].add_(1) + y[:, 0],
            "two tokens": lambda: y[:, 0] + y[:, 1],
            "one token twice": lambda: y[:, 0] * self.norm(y)[:, 0],
            "the last token": lambda: self.norm(y)[:, -1],
            "all tokens": lambda: y.mean(1) + y[:, 0],
            "a shape": lambda: y[:, 0].view(y.shape[0], 8),
        }
        return self.head(ways[self.how]())


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        ("plain", []),
        ("rows", []),
        ("the last token", []),
        ("one token twice", []),
        ("keywords", []),
        ("written after", ["linear"]),
        ("a bias for each token", ["linear"]),
        ("norm over two dimensions", ["linear", "layer_norm"]),
        ("a table", ["linear", "add"]),
        ("tokens are mixed", ["linear", "transpose", "linear", "transpose"]),
        ("two tokens", ["linear"]),
        ("all tokens", ["linear"]),
        ("a shape", ["linear"]),
        ("in place", ["silu"]),
        ("written before", ["add", "linear", "add_"]),
    ],
)
def test_what_is_computed_for_all_tokens(how: str, kept: list[str]) -> None:
    model, x = Head(how).eval(), torch.randn(3, 5, 8)
    flat = picked(model, x)
    same(model, flat, x)
    assert whole(flat) == kept
    same(model, picked(model, x[:1]), x)


@pytest.mark.parametrize("how", ["a shape taken off", "keywords", "few arguments", "all arguments"])
def test_a_norm_that_is_called_in_another_way(how: str) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.layer = nn.Parameter(torch.randn(64)), nn.Linear(64, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = {
                "a shape taken off": lambda: F.layer_norm(x, x.shape[-1:]),
                "keywords": lambda: torch.layer_norm(x, normalized_shape=[64], weight=self.weight, eps=0.1),
                "few arguments": lambda: torch.layer_norm(x, [64]),
                "all arguments": lambda: torch.layer_norm(x, [64], self.weight, None, 0.1, False),
            }[how]()
            return self.layer(y[:, 0]) + self.layer(torch.layer_norm(x, [64])).mean(1)

    model, x = Head().to(HERE).eval(), torch.randn(2, 5, 64, device=HERE)
    flat = flatten(model, x)
    note_values_(flat, x, torch.float16)
    apply_(flat, Context())
    layernorm_half.apply_(flat, Context(dtype=torch.bfloat16, graph=True))
    assert distance(flat(x).detach(), model(x).detach()) < 1e-6
