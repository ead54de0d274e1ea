"""Watch blocks of a model at work on calibration data: what goes in, what comes out, and how alike these are."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from ..blocks.anatomy import resolve
from ..blocks.running import call, cut, unchanged
from ..errors import ReplearnError, class_and_line
from ..planning.data import Target

Forward = Callable[[nn.Module, Any], Any]
HELD_OUT = 5  # every fifth batch is kept for choosing and for the reported errors


@dataclass(frozen=True, eq=False)
class Seen:
    """One call of a block: its arguments, its output, and the values that an operator can aim at."""

    x: Tensor
    y: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    preactivation: Tensor | None = None  # what the block's last activation was given
    tokens: Tensor | None = None  # where the batch is no padding
    held_out: bool = False

    def through(self, module: nn.Module) -> Tensor:
        """What another module makes of the same call."""
        return first(module(*self.args, **self.kwargs))


def observe(
    model: nn.Module,
    target: Target,
    data: Iterable[Any],
    forward: Forward | None = None,
    *,
    held_out: bool | None = None,
    split: bool = True,
) -> Iterator[Seen]:
    """Every batch's call of a target, as the model stands now; with `held_out`, only those or only the others.

    The second of every five batches is held out; where there is one batch, the last fifth of it, unless
    `split=False`. The model is run up to the target and no further.

    Raises ReplearnError for data that does not fit, and for activations that are not finite.
    """
    batches = iter(data)
    ahead = list(islice(batches, 2))
    if not ahead:
        raise ReplearnError("The calibration data is empty: give at least one batch.")
    alone = len(ahead) == 1 and split
    with _watching(model.get_submodule(target.name), target) as caught:
        for number, batch in enumerate(chain(ahead, batches)):
            if not alone and held_out is not None and held_out != (number % HELD_OUT == 1):
                continue
            caught.clear()
            run_to(model, batch, forward or call, number)
            caught["tokens"] = tokens_of(batch)
            seen = _checked(caught, target, number, number % HELD_OUT == 1)
            yield from (part for part in (_split(seen) if alone else [seen]) if held_out in (None, part.held_out))


def run_to(model: nn.Module, batch: Any, forward: Forward, number: int) -> Any:
    """Run the model on a batch; stops quietly where a watched block was reached."""
    try:
        return forward(model, batch)
    except Reached:
        return None
    except ReplearnError:
        raise
    except Exception as error:
        raise ReplearnError(
            f"{type(model).__name__} could not be run on calibration batch {number} ({class_and_line(error)}). "
            "Batches are passed as the model takes them: a tensor, a tuple of arguments or a dict of keywords; "
            "for others give forward=lambda model, batch: ..."
        ) from error


class Reached(Exception):
    """What was looked for has run; the rest of the model need not."""


def _split(seen: Seen) -> list[Seen]:
    size = len(seen.x)
    edge = size - max(1, size // HELD_OUT)
    if edge < 1:
        raise ReplearnError("The calibration data is one batch with a single sample: give more.")
    return [
        Seen(**{**cut(vars(seen), size, begin, end), "held_out": held_out})
        for begin, end, held_out in ((0, edge, False), (edge, size, True))
    ]


def _checked(caught: dict[str, Any], target: Target, number: int, held_out: bool) -> Seen:
    if "y" not in caught:
        raise ReplearnError(f"Calibration batch {number} never reached {target.name}.")
    if not len(caught["x"]):
        raise ReplearnError(f"Calibration batch {number} has no samples: leave empty batches out.")
    if not isinstance(caught["y"], Tensor) or caught["x"].shape != caught["y"].shape:
        made = tuple(caught["y"].shape) if isinstance(caught["y"], Tensor) else type(caught["y"]).__name__
        raise ReplearnError(
            f"{target.name} turns {tuple(caught['x'].shape)} into {made}; "
            "only blocks that keep the shape can be fitted."
        )
    seen = Seen(**caught, held_out=held_out)
    if not bool(torch.isfinite(seen.x).all()) or not bool(torch.isfinite(seen.y).all()):
        raise ReplearnError(
            f"{target.name}: its activations hold NaN or infinity on calibration batch {number}; check the "
            "batch and the weights."
        )
    return seen


@contextmanager
def _watching(block: nn.Module, target: Target) -> Iterator[dict[str, Any]]:
    """Hooks that note one call of the block and end the model's run; gone afterwards."""
    caught: dict[str, Any] = {}
    anatomy = target.anatomy

    def entered(module: nn.Module, args: Any, kwargs: Any) -> None:
        x = args[0] if args else kwargs[anatomy.input]
        kept = x.clone()  # the block may write its result into its input
        caught["x"] = kept
        caught["args"] = tuple(kept if value is x else repeatable(value) for value in args)
        caught["kwargs"] = {name: kept if v is x else repeatable(v) for name, v in kwargs.items()}

    def left(module: nn.Module, args: Any, made: Any) -> None:
        caught["y"] = first(made)
        raise Reached

    def before_activation(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        caught["preactivation"] = args[0].clone()  # the last call counts; it may work in place

    with ExitStack() as hooks:
        hooks.enter_context(block.register_forward_pre_hook(entered, with_kwargs=True))
        hooks.enter_context(block.register_forward_hook(left))
        if anatomy.kind in ("basic", "bottleneck"):
            activation = resolve(block, anatomy.parts["activation"].path)
            if isinstance(activation, nn.Module):
                hooks.enter_context(activation.register_forward_pre_hook(before_activation))
        yield caught


def tokens_of(inputs: Any) -> Tensor | None:
    """Where a batch holds tokens, (batch, tokens), by its attention_mask; None where nothing is padding.

    A sample that is masked as a whole counts as a whole. Batches for a decoder too have positions of two kinds.
    """
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or any(name.startswith("decoder_") for name in inputs):
        return None
    found = mask > 0
    found = found | ~found.any(-1, keepdim=True)
    return None if bool(found.all()) else found


def unpadded(value: Tensor, tokens: Tensor | None) -> Tensor:
    """The rows of features (batch, tokens, channels) that are no padding; values of other shapes as they are."""
    if tokens is None or value.shape[:-1] not in (tokens.shape, tokens.flatten().shape):
        return value
    return value.flatten(0, -2)[tokens.flatten().to(value.device)]


def first(made: Any) -> Any:
    return made[0] if isinstance(made, (tuple, list)) else made


def repeatable(value: Any) -> Any:
    """An argument as it can be given again: a cache of keys and values would grow with every call."""
    return None if hasattr(value, "get_seq_length") else value


@torch.no_grad()
def block_similarity(model: nn.Module, blocks: Mapping[str, str], batch: Any) -> dict[str, float]:
    """Mean cosine similarity of each block's output to its input; high means redundant.

    `blocks` gives each block's name and that of its input argument. Runs the model once in eval mode
    without gradients and leaves no trace on it: modes, buffers, hooks and the random state are as before.
    A block that runs several times is scored by the mean, one that changes the shape by the worst score.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ReplearnError(
            f"similarity needs a model with values, and this {type(model).__name__} is on the meta device. "
            "Plan by interval or fraction, or on the model itself."
        )
    found: dict[str, list[float]] = {name: [] for name in blocks}
    given: list[Tensor] = []

    def before(argument: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        given.append((args[0] if args else kwargs[argument]).clone())  # a block may write into its input

    def after(name: str, module: nn.Module, args: Any, made: Any) -> None:
        found[name].append(_cosine(given.pop(), first(made)))

    with ExitStack() as hooks, unchanged(model, private=True):
        for name, argument in blocks.items():
            block = model.get_submodule(name)
            hooks.enter_context(block.register_forward_pre_hook(partial(before, argument), with_kwargs=True))
            hooks.enter_context(block.register_forward_hook(partial(after, name)))
        run_to(model, batch, call, 0)
    for name, scores in found.items():
        if not scores:
            raise ReplearnError(f"The calibration batch never reached {name}: pass one that runs every block.")
    return {name: sum(scores) / len(scores) for name, scores in found.items()}


def _cosine(given: Tensor, made: Any) -> float:
    """The mean over the batch; -1, the worst there is, if the shape changes."""
    if not isinstance(made, Tensor) or made.shape != given.shape:
        return -1.0
    rows = max(1, len(given)) if given.dim() > 1 else 1
    return float(cosine_similarity(given.float().reshape(rows, -1), made.float().reshape(rows, -1), dim=1).mean())
