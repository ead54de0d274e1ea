"""One token is computed where a classifier looks at one, and the outputs are the same."""

from __future__ import annotations

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


def test_gradients_are_the_same() -> None:
    model, x = small_vit(), torch.randn(2, 3, 16, 16, device=HERE)
    flat = picked(model, x)
    weights = list(model.parameters())  # which the flat graph shares
    ours, theirs = (torch.autograd.grad(form(x).square().sum(), weights) for form in (flat, model))
    assert all(distance(mine, other) < 1e-5 for mine, other in zip(ours, theirs, strict=True))


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
        y = self.layer(x)
        if self.how == "norm over two dimensions":
            y = self.norm(y)
        elif self.how == "rows":
            y = F.gelu(self.norm(y) * self.row + 2 * (self.rows - y) + 1)
        elif self.how == "a table":
            y = y + self.table
        elif self.how == "tokens are mixed":
            y = self.mixing(y.transpose(1, 2)).transpose(1, 2)
        elif self.how == "in place":
            y = F.silu(x, inplace=True) + y
        elif self.how == "written before":
            z = x + 1
            y = self.layer(z)
            z.add_(y)
            return self.head(z[:, 0] + self.layer(z)[:, 0])
        elif self.how == "written after":
            first = y[:, 0]
            first.add_(1)
            return self.head(first + y[:, 0])
        elif self.how == "two tokens":
            return self.head(y[:, 0] + y[:, 1])
        elif self.how == "keywords":
            y = torch.layer_norm(F.linear(input=x, weight=self.layer.weight), (8,), eps=0.1)
            return self.head(torch.sub(input=y, other=2.5)[:, 2])
        elif self.how == "a bias for each token":
            return self.head(F.linear(x, self.layer.weight, self.table)[:, 1])
        elif self.how == "one token twice":
            return self.head(y[:, 0] * self.norm(y)[:, 0])
        elif self.how == "the last token":
            return self.head(self.norm(y)[:, -1])
        elif self.how == "all tokens":
            return self.head(y.mean(1) + y[:, 0])
        elif self.how == "a shape":
            return self.head(y[:, 0].view(y.shape[0], 8))
        return self.head(y[:, 0])


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
