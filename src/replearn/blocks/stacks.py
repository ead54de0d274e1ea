"""Find the stacks of a model: runs of sibling blocks that share a shape."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from torch import nn

from ..errors import ReplearnError
from .anatomy import Anatomy
from .dataflow import find_use
from .families import describe
from .tracing import is_container


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

    Blocks of a known family are found by their class. Only if there are none, a generic scan looks for the
    outermost runs of at least three equal siblings that feed each other; its stacks have `family="generic"`. Where
    a Hugging Face model names the classes of its blocks (`_no_split_modules`), no other class counts. Runs of
    single layers count only if there are no other runs.

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
    classes = {name for _, module in modules for name in getattr(module, "_no_split_modules", None) or ()}
    pieces: dict[Stack, list[Stack]] = {}
    while True:
        declared = [stack for stack in runs if stack.block_type.rpartition(".")[2] in classes]
        found = list(_outermost(declared or runs))
        pieces |= {stack: list(_split_parallel(model, stack)) for stack in found if stack not in pieces}
        if all(pieces[stack] == [stack] for stack in found):
            # a single layer has at most one matrix or kernel, as a linear layer and its norm
            blocks = {stack: model.get_submodule(stack.blocks[0]) for stack in found}
            larger = [stack for stack in found if sum(p.dim() > 1 for p in blocks[stack].parameters()) > 1]
            return tuple(larger or found)
        # there may be stacks inside of siblings that run in parallel
        runs = [piece for stack in runs for piece in pieces.get(stack, [stack])]
        pieces |= {piece: [piece] for stack in found for piece in pieces[stack]}


def class_path(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _children(container: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """A module's children with their full names; not named_children, which hides repeated ones."""
    prefix = f"{container}." if container else ""
    return [(prefix + key, child) for key, child in module._modules.items() if child is not None]


def _known_runs(container: str, module: nn.Module) -> list[Stack]:
    """Runs of one family's blocks; a block that changes the shape starts a new run."""
    runs: list[list[tuple[str, nn.Module, Anatomy]]] = []
    last: tuple[str, str, type] | None = None
    children = _children(container, module)
    for name, block in children:
        anatomy = describe(block)
        if anatomy is None:
            last = None
            continue
        key = (anatomy.family, anatomy.kind, type(block))
        if key != last or anatomy.transition:
            runs.append([])
        runs[-1].append((name, block, anatomy))
        last = key
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
            and not is_container(block)
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


def _split_parallel(model: nn.Module, stack: Stack) -> Iterator[Stack]:
    """The parts of a run whose blocks feed each other; siblings that run in parallel, as heads do, are dropped."""
    owner = stack.blocks[0].rpartition(".")[0]
    use = find_use(model, stack.blocks, training=False)
    if use is None or not use.parallel:
        containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
        if use is not None or isinstance(model.get_submodule(owner), containers):
            yield stack  # attributes of a module count only if a trace shows that its code runs them in order
        return
    starts = [i for i, pair in enumerate(pairwise(stack.blocks), 1) if pair in use.parallel]
    for begin, end in pairwise([0, *starts, len(stack)]):
        if end - begin > 2:
            names = stack.blocks[begin:end]
            run = [(name, model.get_submodule(name), stack.anatomies[0]) for name in names]
            yield _stack(owner, run, whole=False)


def _signature(block: nn.Module) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())


def _stack(container: str, run: list[tuple[str, nn.Module, Anatomy]], *, whole: bool) -> Stack:
    names = tuple(name for name, _, _ in run)
    span = f"[{names[0].rpartition('.')[2]}..{names[-1].rpartition('.')[2]}]"
    return Stack(
        name=container if whole and container else f"{container}{span}",
        family=run[0][2].family,
        block_type=class_path(run[-1][1]),
        blocks=names,
        anatomies=tuple(anatomy for _, _, anatomy in run),
    )


def _outermost(stacks: list[Stack]) -> Iterator[Stack]:
    """Drop stacks that lie inside a block of another stack."""
    blocks = [f"{name}." for stack in stacks for name in stack.blocks]
    for stack in stacks:
        if not any(stack.blocks[0].startswith(block) for block in blocks):
            yield stack


def _first_argument(block: nn.Module) -> str:
    """The keyword by which a block's input may be passed."""
    names = [
        name
        for name, parameter in inspect.signature(block.forward).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    return names[0] if names else "x"
