"""The sides of the inference comparison, each ready to run on one backend."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...deployment.deploy import deploy
from ...errors import ReplearnError
from ...fast.graphs.replay import Replayed
from ...fast.inference import Autocast, compile_, streamline
from ...fast.inlining import graph_of
from ...planning.planner import plan
from ...surgery.replace import replace_
from ..training.architectures import architecture

E2E, DYNAMIC, DEPLOYED = "E2E", "RepL dynamic", "RepL deployed"
# what the paper times, and the same as CUDA graphs (graph alone is fp32)
DEFAULT = ("fp32", "amp", "channels_last", "graph", "channels_last+graph", "amp+graph")
# by name alone: compiling takes minutes
COMPILED = ("channels_last+compile", "channels_last+compile+graph", "amp+compile", "amp+compile+graph")
FUSED = ("channels_last+fuse", "channels_last+fuse+graph", "amp+fuse", "amp+fuse+graph")
BACKENDS = (*DEFAULT, *COMPILED, *FUSED)


@dataclass(frozen=True, eq=False)
class Sides:
    """A model end to end, and replaced, both with settled BatchNorm statistics."""

    end_to_end: nn.Module
    replaced: nn.Module
    num_targets: int
    num_blocks: int

    def built(self, backend: str, kinds: tuple[str, ...], images: Tensor) -> dict[str, nn.Module]:
        """The sides as this backend runs them; E2E and deployed RepL each in the fastest form that they have."""
        last, dtype = has(backend, "channels_last"), self.dtype_of(backend)
        form: dict[str, Any] = {"channels_last": last, "dtype": dtype, "compile": has(backend, "compile")}
        form |= {"graph": has(backend, "graph") and images.is_cuda, "fuse": has(backend, "fuse")}
        if self.traceable(images):
            form |= {"example": images, "flatten": True}
        elif has(backend, "fuse"):
            raise ReplearnError(
                f"{backend} is for flat graphs: leave backends with fuse out for a model that can't be traced."
            )
        layout = torch.channels_last if last else torch.preserve_format
        makers: dict[str, Callable[[], nn.Module]] = {
            E2E: lambda: streamline(self.end_to_end, **form),
            DYNAMIC: lambda: copy.deepcopy(self.replaced).to(memory_format=layout),  # type: ignore[call-overload]
            DEPLOYED: lambda: deploy(self.replaced, **form, merge=True),
        }
        return {kind: on(makers[kind](), backend, dtype) for kind in kinds}

    def traceable(self, images: Tensor) -> bool:
        """Can both be flattened? If not, neither is."""
        sides = (self.end_to_end, deploy(self.replaced))
        return not any(isinstance(graph_of(side, images), str) for side in sides)

    def dtype_of(self, backend: str) -> torch.dtype | None:
        """What autocast computes in on this backend."""
        half = torch.float16 if next(self.end_to_end.parameters()).is_cuda else torch.bfloat16
        return half if has(backend, "amp") else None


def on(model: nn.Module, backend: str, dtype: torch.dtype | None) -> nn.Module:
    if isinstance(model, Replayed):
        model = model.model  # for all sides alike it is made again below, of what was compiled
    if dtype is not None and not isinstance(model, Autocast):
        model = Autocast(model, dtype)
    if has(backend, "compile"):
        compile_(model, dynamic=False)
    return Replayed(model) if has(backend, "graph") else model


def has(backend: str, part: str) -> bool:
    """True if a backend such as `amp+graph` has this part: amp, channels_last, compile, fuse, graph."""
    return part in backend.split("+")


def make_sides(name: str, size: int, device: torch.device, first: int | None, **more: Any) -> Sides:
    """The model with random weights, since speed does not depend on them; `more` is what `plan` takes."""
    torch.manual_seed(0)
    base = architecture(name, num_classes=10 if size < 64 else 1000, size=size)
    chosen = plan(base, first=first, **more)
    other = replace_(copy.deepcopy(base), chosen)
    images = torch.randn(4, 3, size, size)
    for model in (base, other):
        with torch.no_grad():  # once in train mode, so that running statistics are not those of a fresh layer
            model.train()(images)
        model.to(device).eval()
    return Sides(base, other, len(chosen.targets), chosen.num_blocks)


def runner(model: Any, images: Tensor, mode: Any = torch.inference_mode) -> Callable[[], object]:
    """What is timed: one forward pass as a user calls it, a replay with the copies of its inputs and outputs."""

    def run() -> object:
        with mode():
            return model(images)

    return run
