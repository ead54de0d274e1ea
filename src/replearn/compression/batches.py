"""Calibration data as compress reads it: batches of any kind, each for fitting or held out; augmentation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from ..blocks.running import call, cut, size_of
from ..errors import ReplearnError
from ..fitting.observe import HELD_OUT, Reached, tokens_of
from ..fitting.observe import Forward as Forward
from .streaming import Stream

Augment = Callable[[Tensor], Tensor]
MOST = 4 << 30  # bytes of samples to heal with
LABELS = ("label", "labels", "target", "targets")


@dataclass(frozen=True, eq=False)
class Batch:
    """One batch as the model takes it; held-out ones choose and judge, and are never fitted on."""

    inputs: Any
    held_out: bool
    size: int
    copied: bool = False  # an augmented copy of another

    @cached_property
    def tokens(self) -> Tensor | None:
        """Where it holds tokens, (batch, tokens); None where nothing is padding."""
        return tokens_of(self.inputs)


@dataclass(frozen=True, eq=False)
class Data:
    """Batches that can be gone through again, and how a model is run on one."""

    batches: tuple[Batch, ...]
    forward: Forward | None
    num_samples: int
    more: tuple[Batch, ...] = ()  # beyond the samples to fit on, for healing alone
    stream: Stream = field(default_factory=Stream)

    def run(self, model: nn.Module, batch: Batch) -> Any:
        """What the model makes of a batch, which is moved to the device."""
        inputs = moved(batch.inputs, self.stream.device or device_of(model))
        try:
            with self.stream.running(model):
                return self.forward(model, inputs) if self.forward else call(model, inputs)
        except (ReplearnError, Reached, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ReplearnError(
                f"{type(model).__name__} could not be run on a batch of the loader ({type(error).__name__}: "
                f"{error}). "
                "A batch is a tensor, a pair (x, y) of which x is passed, or a dict of keywords; for others give "
                "forward=lambda model, batch: ..."
            ) from error

    def through(self, blocks: Iterable[str]) -> Data:
        """The same, where the weights of these blocks come to the device one after another."""
        return replace(self, stream=replace(self.stream, blocks=tuple(blocks)))

    def held(self) -> tuple[Batch, ...]:
        return tuple(batch for batch in self.batches if batch.held_out)


def read(
    loader: Iterable[Any],
    *,
    forward: Forward | None = None,
    augment: Augment | None = None,
    samples: int = 2048,
    heal: bool = False,
    stream: Stream | None = None,
    model: nn.Module | None = None,
) -> Data:
    """Read at most so many samples, and hold a fifth of them out; `augment` adds copies of the others.

    With `heal`, what follows is read as well, as long as it takes at most 4 GB. A `stream` with a folder puts
    samples there as they are read.

    Raises ReplearnError for no data, for a single sample and for NaN.
    """
    if isinstance(loader, (str, bytes)) or not isinstance(loader, Iterable):
        raise ReplearnError(
            f"The loader is {loader!r}: give batches, as a DataLoader, a list of tensors or a list of dicts."
        )
    given = [loader] if isinstance(loader, (Tensor, Mapping)) else loader
    stream = stream or Stream()
    found: list[tuple[Any, int]] = []
    more: list[Batch] = []
    total, taken = 0, 0
    for item in given:
        inputs = plain(item, forward, model)
        size = size_of(inputs)
        refuse_unusable(inputs, len(found) + len(more), forward)
        room = min(size, samples - total)
        if room > 0:
            found.append((stream.keep(cut(inputs, size, 0, room)), room))
            total += room
        if heal and room < size:
            more.append(Batch(stream.keep(cut(inputs, size, max(room, 0), size)), False, size - max(room, 0)))
        taken += sum(leaf.nbytes for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
        if total >= samples and (not heal or taken > MOST):
            break
    if total < 2:
        raise ReplearnError(
            "The loader is empty: give at least two samples, better 100 or more."
            if not found
            else "The loader holds a single sample, and fits need others to be judged by: give at least two, "
            "better 100 or more."
        )
    batches = list(_split(found))
    if augment is not None:
        made = (augmented(batch, augment) for batch in batches if not batch.held_out)
        batches += [replace(batch, inputs=stream.keep(batch.inputs)) for batch in made]
    return Data(tuple(batches), forward, total, tuple(more), stream)


def plain(item: Any, forward: Forward | None, model: nn.Module | None = None) -> Any:
    """The part of a batch that the model is given: x of a pair, a dict without its labels.

    Of labels from which a Hugging Face model would make its decoder's inputs, those inputs stay.
    """
    if forward is not None:
        return dict(item) if isinstance(item, Mapping) else item
    if isinstance(item, Mapping):
        found = {name: value for name, value in item.items() if name not in LABELS}
        shifted: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)
        if shifted and "labels" in item and not {"decoder_input_ids", "decoder_inputs_embeds"} & item.keys():
            found["decoder_input_ids"] = shifted(item["labels"])
        return found
    if isinstance(item, (tuple, list)):
        if not item:
            raise ReplearnError("A batch of the loader is an empty tuple: give (x, y), or x alone.")
        return plain(item[0], forward, model)
    if hasattr(item, "keys") and hasattr(item, "__getitem__"):  # a Hugging Face BatchEncoding is no Mapping
        return plain({name: item[name] for name in item.keys()}, forward, model)  # noqa: SIM118
    return item


def _split(found: list[tuple[Any, int]]) -> Iterator[Batch]:
    """Every fifth batch is held out; where there are few batches, the last fifth of each."""
    whole = len(found) >= 2 * HELD_OUT or all(size == 1 for _, size in found)
    for number, (inputs, size) in enumerate(found):
        if whole:
            yield Batch(inputs, number % HELD_OUT == 1, size)
            continue
        edge = size - max(1, size // HELD_OUT) if size > 1 else size
        yield Batch(cut(inputs, size, 0, edge), False, edge)
        if edge < size:
            yield Batch(cut(inputs, size, edge, size), True, size - edge)


def augmented(batch: Batch, augment: Augment) -> Batch:
    """A copy with its first floating-point tensor augmented."""
    leaves, spec = tree_flatten(batch.inputs)
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            leaves[at] = made = augment(leaf)
            if not isinstance(made, Tensor) or made.shape != leaf.shape:
                shape = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
                raise ReplearnError(
                    "augment is given the images of a batch and returns as many of the same shape; it turned "
                    f"{tuple(leaf.shape)} into {shape}."
                )
            break
    return Batch(tree_unflatten(leaves, spec), False, batch.size, copied=True)


def copy_into(inputs: Any, buffers: Any) -> bool:
    """Copy the tensors of a batch into those of another; False where they are not alike."""
    pairs = list(zip(tree_leaves(inputs), tree_leaves(buffers), strict=True))
    tensors = [(a, b) for a, b in pairs if isinstance(a, Tensor)]
    if any(a.shape != b.shape or a.dtype != b.dtype for a, b in tensors):
        return False
    for a, b in tensors:
        b.copy_(a)
    return True


def subset(data: Data, most: int, most_held: int | None = None) -> Data:
    """So many samples for fitting, and as many held-out ones or another number of them."""
    kept: list[Batch] = []
    for held_out, limit in ((False, most), (True, most_held or most)):
        count = 0
        for batch in data.batches:
            if batch.held_out == held_out and count < limit and not batch.copied:
                size = min(batch.size, limit - count)
                kept.append(Batch(cut(batch.inputs, batch.size, 0, size), held_out, size))
                count += size
    return Data(tuple(kept), data.forward, sum(batch.size for batch in kept), stream=data.stream)


def refuse_unusable(inputs: Any, number: int, forward: Forward | None) -> None:
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    if not tensors and forward is None:
        raise ReplearnError(
            f"Batch {number} of the loader, a {type(inputs).__name__}, holds no tensor. Join samples into batches "
            "of tensors, as DataLoader(samples, 8, collate_fn=DataCollatorWithPadding(tokenizer)) does."
        )
    if not all(bool(leaf.isfinite().all()) for leaf in tensors if leaf.is_floating_point()):
        raise ReplearnError(f"Batch {number} of the loader holds NaN or infinity: look at how it is made.")


def moved(inputs: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda leaf: leaf.to(device), inputs)


def device_of(model: nn.Module) -> torch.device:
    first = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def image_augment(x: Tensor) -> Tensor:
    """Random crops of images padded by an eighth, and horizontal flips; what is no batch of images stays."""
    if x.dim() != 4:
        return x
    height, width = x.shape[-2:]
    edge = max(1, min(height, width) // 8)
    padded = nn.functional.pad(x, (edge,) * 4)
    tops, lefts = (torch.randint(0, 2 * edge + 1, (len(x),), device=x.device) for _ in range(2))
    flip = torch.rand(len(x), device=x.device) < 0.5
    rows = tops[:, None] + torch.arange(height, device=x.device)
    places = torch.arange(width, device=x.device)
    columns = lefts[:, None] + torch.where(flip[:, None], places.flip(0), places)
    number = torch.arange(len(x), device=x.device)[:, None, None]
    return (
        padded.permute(0, 2, 3, 1)[number, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()
    )


def read_augment(given: Any) -> Augment | None:
    """The augmentation that the user asked for: a function, or 'images' for crops and flips."""
    if given is None or callable(given):
        change: Augment | None = given
        return change
    if given == "images":
        return image_augment
    raise ReplearnError(f"augment={given!r}: give a function of the images, or 'images' for crops and flips.")
