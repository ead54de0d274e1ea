"""Find the stacks of a model: runs of sibling blocks that share a shape."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from torch import nn

from ..errors import ReplearnError
from .anatomy import Anatomy
from .dataflow import use_of
from .families import describe
from .tracing import runs_nothing


@dataclass(frozen=True, slots=True)
class Stack:
    """A run of repeated sibling blocks, in the order in which they are listed."""

    name: str
    family: str
    block_type: str
    blocks: tuple[str, ...]
    anatomies: tuple[Anatomy, ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self.blocks)


def find_stacks(model: nn.Module) -> tuple[Stack, ...]:
    """Find every stack of the model; touches nothing.

    Blocks of a known family are found by their class. Only if there are none does a generic scan look for runs of
    at least three equal siblings that feed each other, the outermost ones; its stacks say `family="generic"`.
    Where a Hugging Face model says which classes its blocks have, others are no blocks; and single layers, of
    which heads are made, are none beside blocks of several.

    >>> import replearn
    >>> model = replearn.models.resnet32()
    >>> [(stack.name, len(stack)) for stack in replearn.find_stacks(model)]
    [('layer1', 5), ('layer2', 5), ('layer3', 5)]
    """
    if not isinstance(model, nn.Module):
        raise ReplearnError(f"Expected a torch.nn.Module as the first argument, got {type(model).__name__}.")
    modules = list(model.named_modules())
    lists = [(name, module) for name, module in modules if isinstance(module, (nn.Sequential, nn.ModuleList))]
    known = [stack for container in lists for stack in _known_runs(*container) if len(stack) > 1]
    if known:
        return tuple(_outermost(known))
    runs = [stack for container in modules for stack in _equal_runs(*container)]
    blocks = {name for _, module in modules for name in getattr(module, "_no_split_modules", None) or ()}
    fed: dict[Stack, list[Stack]] = {}
    while True:
        declared = [stack for stack in runs if stack.block_type.rpartition(".")[2] in blocks]
        found = list(_outermost(declared or runs))
        fed |= {stack: list(_fed(model, stack)) for stack in found if stack not in fed}
        if all(fed[stack] == [stack] for stack in found):
            own = [stack for stack in found if not _is_layer(model.get_submodule(stack.blocks[0]))]
            return tuple(own or found)
        # without siblings that run side by side: there may be stacks inside of them
        runs = [piece for stack in runs for piece in fed.get(stack, [stack])]
        fed |= {piece: [piece] for stack in found for piece in fed[stack]}


def class_path(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _children(container: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """A module's children with their full names; not named_children, which hides repeated ones."""
    prefix = f"{container}." if container else ""
    return [(prefix + key, child) for key, child in module._modules.items() if child is not None]


def _known_runs(container: str, module: nn.Module) -> list[Stack]:
    """Runs of one family's blocks; a block that changes the shape starts a new run."""
    runs: list[list[tuple[str, nn.Module, Anatomy]]] = []
    before: tuple[str, str, type] | None = None
    children = _children(container, module)
    for name, block in children:
        found = describe(block)
        if found is None:
            before = None
            continue
        key = (found.family, found.kind, type(block))
        if key != before or found.transition:
            runs.append([])
        runs[-1].append((name, block, found))
        before = key
    return [_stack(container, run, whole=len(run) == len(children)) for run in runs]


def _equal_runs(container: str, module: nn.Module) -> list[Stack]:
    """Runs of one class with equal parameter shapes; the first block of a run may differ."""
    runs: list[list[tuple[str, nn.Module, Anatomy]]] = []
    last: nn.Module | None = None
    children = _children(container, module)
    for name, block in children:
        joins = (
            last is not None
            and type(block) is type(last)
            and not runs_nothing(block)
            and (len(runs[-1]) == 1 or _signature(block) == _signature(last))
        )
        if not joins:
            runs.append([])
        runs[-1].append((name, block, Anatomy("generic", "any", input=_first_argument(block))))
        last = block
    return [
        _stack(container, run, whole=len(run) == len(children))
        for run in runs
        if len(run) > 2 and _signature(run[1][1])
    ]


def _fed(model: nn.Module, stack: Stack) -> Iterator[Stack]:
    """The parts of a run whose blocks feed each other; siblings that run side by side, as heads do, are none."""
    owner = stack.blocks[0].rpartition(".")[0]
    use = use_of(model, stack.blocks, training=False)
    if use is None or not use.apart:
        containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
        if use is not None or isinstance(model.get_submodule(owner), containers):
            yield stack  # attributes of a module are a run only where its code is seen to use them as one
        return
    starts = [i for i, pair in enumerate(pairwise(stack.blocks), 1) if pair in use.apart]
    for begin, end in pairwise([0, *starts, len(stack)]):
        if end - begin > 2:
            names = stack.blocks[begin:end]
            run = [(name, model.get_submodule(name), stack.anatomies[0]) for name in names]
            yield _stack(owner, run, whole=False)


def _signature(block: nn.Module) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())


def _is_layer(block: nn.Module) -> bool:
    """Is this one linear map or convolution, with whatever has no matrix around it?"""
    return sum(parameter.dim() > 1 for parameter in block.parameters()) < 2


def _stack(container: str, run: list[tuple[str, nn.Module, Anatomy]], *, whole: bool) -> Stack:
    names = tuple(name for name, _, _ in run)
    span = f"[{names[0].rpartition('.')[2]}..{names[-1].rpartition('.')[2]}]"
    return Stack(
        name=container if whole and container else f"{container}{span}",
        family=run[0][2].family,
        block_type=class_path(run[-1][1]),
        blocks=names,
        anatomies=tuple(found for _, _, found in run),
    )


def _outermost(stacks: list[Stack]) -> Iterator[Stack]:
    """Drop stacks that lie inside a block of another stack."""
    blocks = [f"{name}." for stack in stacks for name in stack.blocks]
    for stack in stacks:
        if not any(stack.blocks[0].startswith(block) for block in blocks):
            yield stack


def _first_argument(block: nn.Module) -> str:
    """The name under which a block's input may be passed."""
    names = [
        name
        for name, parameter in inspect.signature(block.forward).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    return names[0] if names else "x"
