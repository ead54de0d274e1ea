"""Random stacks, placements and operators: it works all the way, or a ReplearnError names the block."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from tiny import Own
from torch import Tensor, nn

import replearn
from replearn import ReplearnError, operators
from replearn.operators._base.options import Options, ReadingOptions
from torture.models import ACTIVATIONS, CONV_NORMS, Basic, Bottleneck


@dataclass(frozen=True)
class Shape:
    """One random model, small enough to print."""

    block: str
    depth: int
    width: int
    groups: int
    dilation: int
    kernel: int
    bias: bool
    norm: str
    activation: str
    container: str
    twins: int  # stacks side by side
    quirk: str
    dtype: torch.dtype

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return quirky(Model(self), self.quirk).to(self.dtype)

    def example(self) -> Tensor:
        size = (3, self.width) if self.block == "own" else (3, 5, self.width)
        size = (3, self.width, 6, 6) if self.block in ("basic", "bottleneck") else size
        return torch.randn(size, generator=torch.Generator().manual_seed(1)).to(self.dtype)


def encoder_layer(shape: Shape) -> nn.Module:
    return nn.TransformerEncoderLayer(
        shape.width, 2, 12, dropout=0.0, norm_first=shape.bias, batch_first=True, bias=shape.kernel == 3
    )


BLOCKS: dict[str, Callable[[Shape], nn.Module]] = {
    "basic": Basic,
    "bottleneck": Bottleneck,
    "transformer": encoder_layer,
    "own": lambda shape: Own(shape.width),
}


class Model(nn.Module):
    """Stacks in containers of several sorts, with a layer that is no block before and after them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        stacks = [[BLOCKS[shape.block](shape) for _ in range(shape.depth)] for _ in range(shape.twins)]
        if shape.container == "list":
            self.stacks: nn.Module = nn.ModuleList(nn.ModuleList(stack) for stack in stacks)
        elif shape.container == "sequence":
            self.stacks = nn.Sequential(*(nn.Sequential(*stack) for stack in stacks))
        else:  # blocks between other modules
            self.stacks = nn.Sequential(*(nn.Sequential(nn.Identity(), *stack, nn.Tanh()) for stack in stacks))

    def forward(self, x: Tensor) -> Tensor:
        for stack in self.stacks:
            for block in stack:
                x = block(x)
        return x


def quirky(model: Model, quirk: str) -> Model:
    """What users do to their models before they come here."""
    stack = [block for block in model.stacks[0] if any(True for _ in block.parameters())]
    if quirk == "frozen":
        for block in stack[1::2]:
            block.requires_grad_(False)
    elif quirk == "tied":  # one parameter of the last block is the first block's
        name = next(iter(dict(stack[0].named_parameters())))
        owner, _, key = name.rpartition(".")
        setattr(stack[-1].get_submodule(owner), key, stack[0].get_parameter(name))
    elif quirk == "hooked":
        stack[1].register_forward_hook(lambda module, args, out: None)
    elif quirk == "repeated" and len(stack) > 3:
        model.stacks[0][-1 if model.stacks[0][-1] is stack[-1] else -2] = stack[1]
    return model


def shapes(block: str) -> st.SearchStrategy[Shape]:
    return st.builds(
        Shape,
        block=st.just(block),
        depth=st.sampled_from([6, 5, 4, 2]),
        width=st.sampled_from([4, 8]),
        groups=st.sampled_from([1, 2]),
        dilation=st.sampled_from([1, 2]),
        kernel=st.sampled_from([1, 3]),
        bias=st.booleans(),
        norm=st.sampled_from(sorted(CONV_NORMS)),
        activation=st.sampled_from(sorted(ACTIVATIONS)),
        container=st.sampled_from(["list", "sequence", "mixed"]),
        twins=st.sampled_from([1, 2]),
        quirk=st.sampled_from(["none", "frozen", "tied", "hooked", "repeated"]),
        dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    )


@st.composite
def any_options(draw: st.DrawFn, block: str) -> Options | None:
    """The default operator, or another that suits the block, or now and then one that does not."""
    kinds = list(operators.available().values())
    suited = [kind for kind in kinds if ("any" if block == "own" else block) in kind.kinds]
    reading = [kind for kind in suited if issubclass(kind, ReadingOptions)]
    kind = draw(st.sampled_from([*reading, *reading, None, *suited, draw(st.sampled_from(kinds))]))
    if kind is None:
        return None
    hints = get_type_hints(kind, localns={"Kind": str})
    chosen: dict[str, Any] = {}
    for field in fields(kind):
        hint = hints[field.name]
        if get_origin(hint) is Literal:
            chosen[field.name] = draw(st.sampled_from(get_args(hint)))
        elif hint is bool:
            chosen[field.name] = draw(st.booleans())
        elif field.name == "rank":
            chosen[field.name] = draw(st.sampled_from([1, 2, 2, 5]))
        elif field.name == "start":
            chosen[field.name] = draw(st.sampled_from(["mean", "previous", "next", "zero", 0.3]))
    if chosen.get("sources") == "none" and chosen["correction"] == "none":
        chosen["correction"] = "full"
    one_sided = chosen.get("start") in ("previous", "next")
    if one_sided and (chosen["coefficients"] == "shared" or chosen["sources"] not in ("both", chosen["start"])):
        chosen["start"] = "mean"
    return kind(**chosen)


placements = st.one_of(
    st.builds(
        lambda interval, first: {"interval": interval, "first": first}, st.integers(2, 4), st.integers(2, 4)
    ),
    st.builds(lambda fraction: {"fraction": fraction}, st.sampled_from([0.1, 0.2, 0.34])),
)


@pytest.mark.parametrize("block", sorted(BLOCKS))
@given(data=st.data())
@settings(max_examples=16, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_a_random_model_goes_all_the_way_or_is_refused_with_the_block_s_name(
    block: str, data: st.DataObject
) -> None:
    shape, placement, options = data.draw(shapes(block)), data.draw(placements), data.draw(any_options(block))
    model, x = shape.build(), shape.example()
    blocks = [name for stack in replearn.find_stacks(model) for name in stack.blocks]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        plan = replearn.plan(model, operator=options, **placement)
    except ReplearnError as error:
        refusal = str(error)
    else:
        refusal = ""
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    if refusal:
        event("refused")
        too_short = shape.depth <= placement.get("first", 2) or not blocks
        assert too_short or any(name in refusal for name in blocks), refusal
        return
    event(f"replaced by {plan.targets[0].operator.name}")
    assert replearn.Plan.from_json(plan.to_json()) == plan

    replearn.replace_(model, plan)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == plan.parameters_after
    optimizer = torch.optim.SGD(replearn.param_groups(model, 1e-4), lr=0.01)
    model.train()(x).float().square().mean().backward()
    optimizer.step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())

    model.eval()
    with torch.no_grad():
        expected = model(x)
    with tempfile.TemporaryDirectory() as folder:
        replearn.save(model, f"{folder}/run.safetensors")
        loaded = replearn.load(shape.build(), f"{folder}/run.safetensors").eval()
    with torch.no_grad():
        assert torch.equal(loaded(x), expected)

    plain = replearn.deploy(loaded, example=x)
    assert not [name for name, module in plain.named_modules() if type(module).__module__.startswith("replearn.")]
    with torch.no_grad():
        assert torch.equal(loaded(x), expected)  # deploying left it alone
