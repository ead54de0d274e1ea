"""Record the inputs and outputs of blocks on calibration data, and measure their similarity."""

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
class Observation:
    """One recorded call of a block: its arguments, its output, and the input of its last activation."""

    x: Tensor
    y: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    preactivation: Tensor | None = None  # the input of the block's last activation
    tokens: Tensor | None = None  # False at padding
    held_out: bool = False

    def run(self, module: nn.Module) -> Tensor:
        """Another module's output for the same arguments."""
        return first(module(*self.args, **self.kwargs))


def observe(
    model: nn.Module,
    target: Target,
    data: Iterable[Any],
    forward: Forward | None = None,
    *,
    held_out: bool | None = None,
    split: bool = True,
) -> Iterator[Observation]:
    """The call of a target on every batch; with `held_out`, on the held-out batches alone or on the others alone.

    The second of every five batches is held out; of a single batch the last fifth, unless `split=False`. The model
    runs up to the target and no further.

    Raises ReplearnError for data that does not fit, and for activations that are not finite.
    """
    batches = iter(data)
    first_batches = list(islice(batches, 2))
    if not first_batches:
        raise ReplearnError("The calibration data is empty: give at least one batch.")
    single = len(first_batches) == 1 and split
    with _recording(model.get_submodule(target.name), target) as recorded:
        for number, batch in enumerate(chain(first_batches, batches)):
            if not single and held_out is not None and held_out != (number % HELD_OUT == 1):
                continue
            recorded.clear()
            run_to(model, batch, forward or call, number)
            recorded["tokens"] = tokens_of(batch)
            seen = _checked(recorded, target, number, number % HELD_OUT == 1)
            yield from (part for part in (_split(seen) if single else [seen]) if held_out in (None, part.held_out))


def run_to(model: nn.Module, batch: Any, forward: Forward, number: int) -> Any:
    """Run the model on a batch; returns None if a hook ended the run."""
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
    """Raised by hooks to end a model's run when the block of interest has run."""


def _split(seen: Observation) -> list[Observation]:
    size = len(seen.x)
    edge = size - max(1, size // HELD_OUT)
    if edge < 1:
        raise ReplearnError("The calibration data is one batch with a single sample: give more.")
    return [
        Observation(**{**cut(vars(seen), size, begin, end), "held_out": held_out})
        for begin, end, held_out in ((0, edge, False), (edge, size, True))
    ]


def _checked(recorded: dict[str, Any], target: Target, number: int, held_out: bool) -> Observation:
    if "y" not in recorded:
        raise ReplearnError(f"Calibration batch {number} never reached {target.name}.")
    if not len(recorded["x"]):
        raise ReplearnError(f"Calibration batch {number} has no samples: leave empty batches out.")
    if not isinstance(recorded["y"], Tensor) or recorded["x"].shape != recorded["y"].shape:
        output = tuple(recorded["y"].shape) if isinstance(recorded["y"], Tensor) else type(recorded["y"]).__name__
        raise ReplearnError(
            f"{target.name} turns {tuple(recorded['x'].shape)} into {output}; "
            "only blocks that keep the shape can be fitted."
        )
    seen = Observation(**recorded, held_out=held_out)
    if not bool(torch.isfinite(seen.x).all()) or not bool(torch.isfinite(seen.y).all()):
        raise ReplearnError(
            f"{target.name}: its activations hold NaN or infinity on calibration batch {number}; check the "
            "batch and the weights."
        )
    return seen


@contextmanager
def _recording(block: nn.Module, target: Target) -> Iterator[dict[str, Any]]:
    """Inside, hooks record one call of the block and end the model's run."""
    recorded: dict[str, Any] = {}
    anatomy = target.anatomy

    def before_block(module: nn.Module, args: Any, kwargs: Any) -> None:
        x = args[0] if args else kwargs[anatomy.input]
        kept = x.clone()  # the block may write its result into its input
        recorded["x"] = kept
        recorded["args"] = tuple(kept if value is x else repeatable(value) for value in args)
        recorded["kwargs"] = {name: kept if v is x else repeatable(v) for name, v in kwargs.items()}

    def after_block(module: nn.Module, args: Any, output: Any) -> None:
        recorded["y"] = first(output)
        raise Reached

    def before_activation(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        recorded["preactivation"] = args[0].clone()  # the last call counts; it may work in place

    with ExitStack() as hooks:
        hooks.enter_context(block.register_forward_pre_hook(before_block, with_kwargs=True))
        hooks.enter_context(block.register_forward_hook(after_block))
        if anatomy.kind in ("basic", "bottleneck"):
            activation = resolve(block, anatomy.parts["activation"].path)
            if isinstance(activation, nn.Module):
                hooks.enter_context(activation.register_forward_pre_hook(before_activation))
        yield recorded


def tokens_of(inputs: Any) -> Tensor | None:
    """A mask (batch, tokens) that is False at padding, from the attention_mask; None without padding.

    Samples that are masked entirely count as unpadded. None for batches with decoder inputs, which it misses.
    """
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or any(name.startswith("decoder_") for name in inputs):
        return None
    found = mask > 0
    found = found | ~found.any(-1, keepdim=True)
    return None if bool(found.all()) else found


def unpadded(value: Tensor, tokens: Tensor | None) -> Tensor:
    """The rows of a value (batch, tokens, channels) without padding; values of other shapes unchanged."""
    if tokens is None or value.shape[:-1] not in (tokens.shape, tokens.flatten().shape):
        return value
    return value.flatten(0, -2)[tokens.flatten().to(value.device)]


def first(output: Any) -> Any:
    return output[0] if isinstance(output, (tuple, list)) else output


def repeatable(value: Any) -> Any:
    """An argument for repeated calls: None for a cache of keys and values, which would grow with every call."""
    return None if hasattr(value, "get_seq_length") else value


@torch.no_grad()
def block_similarity(model: nn.Module, blocks: Mapping[str, str], batch: Any) -> dict[str, float]:
    """Mean cosine similarity of each block's output to its input; high means redundant.

    `blocks` maps names of blocks to the names of their inputs. Runs the model once in eval mode without gradients;
    modes, buffers, hooks and the random state stay as they are.
    A block that runs several times is scored by the mean, one that changes the shape by the worst score.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ReplearnError(
            f"similarity needs a model with values, and this {type(model).__name__} is on the meta device. "
            "Plan by interval or fraction, or on the model itself."
        )
    found: dict[str, list[float]] = {name: [] for name in blocks}
    inputs: list[Tensor] = []

    def before(argument: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs.append((args[0] if args else kwargs[argument]).clone())  # a block may write into its input

    def after(name: str, module: nn.Module, args: Any, output: Any) -> None:
        found[name].append(_cosine(inputs.pop(), first(output)))

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


def _cosine(x: Tensor, y: Any) -> float:
    """The mean over the batch; -1, the lowest possible, if the shape changes."""
    if not isinstance(y, Tensor) or y.shape != x.shape:
        return -1.0
    rows = max(1, len(x)) if x.dim() > 1 else 1
    return float(cosine_similarity(x.float().reshape(rows, -1), y.float().reshape(rows, -1), dim=1).mean())
