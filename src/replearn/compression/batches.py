"""Calibration data of compress: batches of any kind, for fitting or held out, and augmentation."""

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
from .offload import Offloader

Augment = Callable[[Tensor], Tensor]
MAX_HEALING_BYTES = 4 << 30  # of the samples to heal with
LABELS = ("label", "labels", "target", "targets")


@dataclass(frozen=True, eq=False)
class Batch:
    """One batch as the model takes it; held-out batches are for choosing and measuring, never for fitting."""

    inputs: Any
    held_out: bool
    size: int
    copied: bool = False  # an augmented copy of another batch

    @cached_property
    def tokens(self) -> Tensor | None:
        """A mask (batch, tokens) that is False at padding; None without padding."""
        return tokens_of(self.inputs)


@dataclass(frozen=True, eq=False)
class Data:
    """Calibration batches, and how a model is run on one."""

    batches: tuple[Batch, ...]
    forward: Forward | None
    num_samples: int
    extra: tuple[Batch, ...] = ()  # after the samples to fit on, for healing alone
    offloader: Offloader = field(default_factory=Offloader)

    def run(self, model: nn.Module, batch: Batch) -> Any:
        """Run a model on a batch, which is moved to the device."""
        inputs = to_device(batch.inputs, self.offloader.device or device_of(model))
        try:
            with self.offloader.loaded_in_turn(model):
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

    def offload_blocks(self, blocks: Iterable[str]) -> Data:
        """The same data, with the weights of these blocks loaded to the device one block at a time."""
        return replace(self, offloader=replace(self.offloader, blocks=tuple(blocks)))

    def held_out(self) -> tuple[Batch, ...]:
        return tuple(batch for batch in self.batches if batch.held_out)


def read(
    loader: Iterable[Any],
    *,
    forward: Forward | None = None,
    augment: Augment | None = None,
    samples: int = 2048,
    heal: bool = False,
    offloader: Offloader | None = None,
    model: nn.Module | None = None,
) -> Data:
    """Read at most `samples` samples and hold a fifth of them out; `augment` adds copies of the others.

    With `heal`, samples after those are read too, up to 4 GB in all. Samples are stored as the `offloader` says.

    Raises ReplearnError for no data, for a single sample and for NaN.
    """
    if isinstance(loader, (str, bytes)) or not isinstance(loader, Iterable):
        raise ReplearnError(
            f"The loader is {loader!r}: give batches, as a DataLoader, a list of tensors or a list of dicts."
        )
    items = [loader] if isinstance(loader, (Tensor, Mapping)) else loader
    offloader = offloader or Offloader()
    parts: list[tuple[Any, int]] = []
    extra: list[Batch] = []
    total, num_bytes = 0, 0
    for item in items:
        inputs = model_inputs(item, forward, model)
        size = size_of(inputs)
        check_batch(inputs, len(parts) + len(extra), forward)
        taken = max(min(size, samples - total), 0)
        if taken:
            parts.append((offloader.store(cut(inputs, size, 0, taken)), taken))
            total += taken
        if heal and taken < size:
            extra.append(Batch(offloader.store(cut(inputs, size, taken, size)), False, size - taken))
        num_bytes += sum(leaf.nbytes for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
        if total >= samples and (not heal or num_bytes > MAX_HEALING_BYTES):
            break
    if total < 2:
        raise ReplearnError(
            "The loader is empty: give at least two samples, better 100 or more."
            if not parts
            else "The loader holds a single sample, and fits need others to be judged by: give at least two, "
            "better 100 or more."
        )
    batches = list(_split(parts))
    if augment is not None:
        copies = (augment_batch(batch, augment) for batch in batches if not batch.held_out)
        batches += [replace(batch, inputs=offloader.store(batch.inputs)) for batch in copies]
    return Data(tuple(batches), forward, total, tuple(extra), offloader)


def model_inputs(item: Any, forward: Forward | None, model: nn.Module | None = None) -> Any:
    """The model's inputs in a batch: x of a pair, a dict without its labels.

    If a Hugging Face model makes its decoder's inputs from the labels, these inputs are added.
    """
    if forward is not None:
        return dict(item) if isinstance(item, Mapping) else item
    if isinstance(item, Mapping):
        inputs = {name: value for name, value in item.items() if name not in LABELS}
        shifted: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)
        if shifted and "labels" in item and not {"decoder_input_ids", "decoder_inputs_embeds"} & item.keys():
            inputs["decoder_input_ids"] = shifted(item["labels"])
        return inputs
    if isinstance(item, (tuple, list)):
        if not item:
            raise ReplearnError("A batch of the loader is an empty tuple: give (x, y), or x alone.")
        return model_inputs(item[0], forward, model)
    if hasattr(item, "keys") and hasattr(item, "__getitem__"):  # as BatchEncoding, which is not a Mapping
        return model_inputs({name: item[name] for name in item.keys()}, forward, model)  # noqa: SIM118
    return item


def _split(parts: list[tuple[Any, int]]) -> Iterator[Batch]:
    """Hold out every fifth batch; of few batches, the last fifth of each."""
    by_batch = len(parts) >= 2 * HELD_OUT or all(size == 1 for _, size in parts)
    for number, (inputs, size) in enumerate(parts):
        if by_batch:
            yield Batch(inputs, number % HELD_OUT == 1, size)
            continue
        edge = size - max(1, size // HELD_OUT) if size > 1 else size
        yield Batch(cut(inputs, size, 0, edge), False, edge)
        if edge < size:
            yield Batch(cut(inputs, size, edge, size), True, size - edge)


def augment_batch(batch: Batch, augment: Augment) -> Batch:
    """A copy of the batch with its first floating-point tensor augmented."""
    leaves, spec = tree_flatten(batch.inputs)
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            leaves[at] = augmented = augment(leaf)
            if not isinstance(augmented, Tensor) or augmented.shape != leaf.shape:
                shape = tuple(augmented.shape) if isinstance(augmented, Tensor) else type(augmented).__name__
                raise ReplearnError(
                    "augment is given the images of a batch and returns as many of the same shape; it turned "
                    f"{tuple(leaf.shape)} into {shape}."
                )
            break
    return Batch(tree_unflatten(leaves, spec), False, batch.size, copied=True)


def copy_into(inputs: Any, buffers: Any) -> bool:
    """Copy the tensors of a batch into those of another; False if shapes or dtypes differ."""
    pairs = list(zip(tree_leaves(inputs), tree_leaves(buffers), strict=True))
    tensors = [(a, b) for a, b in pairs if isinstance(a, Tensor)]
    if any(a.shape != b.shape or a.dtype != b.dtype for a, b in tensors):
        return False
    for a, b in tensors:
        b.copy_(a)
    return True


def subset(data: Data, num_fitting: int, num_held_out: int | None = None) -> Data:
    """At most so many samples for fitting, and so many held-out ones (by default the same number)."""
    kept: list[Batch] = []
    for held_out, limit in ((False, num_fitting), (True, num_held_out or num_fitting)):
        count = 0
        for batch in data.batches:
            if batch.held_out == held_out and count < limit and not batch.copied:
                size = min(batch.size, limit - count)
                kept.append(Batch(cut(batch.inputs, batch.size, 0, size), held_out, size))
                count += size
    return Data(tuple(kept), data.forward, sum(batch.size for batch in kept), offloader=data.offloader)


def check_batch(inputs: Any, number: int, forward: Forward | None) -> None:
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    if not tensors and forward is None:
        raise ReplearnError(
            f"Batch {number} of the loader, a {type(inputs).__name__}, holds no tensor. Join samples into batches "
            "of tensors, as DataLoader(samples, 8, collate_fn=DataCollatorWithPadding(tokenizer)) does."
        )
    if not all(bool(leaf.isfinite().all()) for leaf in tensors if leaf.is_floating_point()):
        raise ReplearnError(f"Batch {number} of the loader holds NaN or infinity: look at how it is made.")


def to_device(inputs: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda leaf: leaf.to(device), inputs)


def device_of(model: nn.Module) -> torch.device:
    first = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def image_augment(x: Tensor) -> Tensor:
    """Random crops of images padded by an eighth, and horizontal flips; other tensors are returned unchanged."""
    if x.dim() != 4:
        return x
    height, width = x.shape[-2:]
    edge = max(1, min(height, width) // 8)
    padded = nn.functional.pad(x, (edge,) * 4)
    tops, lefts = (torch.randint(0, 2 * edge + 1, (len(x),), device=x.device) for _ in range(2))
    flip = torch.rand(len(x), device=x.device) < 0.5
    rows = tops[:, None] + torch.arange(height, device=x.device)
    columns = torch.arange(width, device=x.device)
    columns = lefts[:, None] + torch.where(flip[:, None], columns.flip(0), columns)
    number = torch.arange(len(x), device=x.device)[:, None, None]
    return (
        padded.permute(0, 2, 3, 1)[number, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()
    )


def as_augment(augment: Any) -> Augment | None:
    """The user's augmentation: a function, or 'images' for crops and flips."""
    if augment is None or callable(augment):
        function: Augment | None = augment
        return function
    if augment == "images":
        return image_augment
    raise ReplearnError(f"augment={augment!r}: give a function of the images, or 'images' for crops and flips.")
