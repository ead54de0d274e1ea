"""What is measured: a backbone with its batch and its placement, and the candidates that stand side by side."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from ...operators import ReducedBottleneck, Removal
from ...operators._base.options import Options
from ...planning.planner import plan
from ...surgery.replace import replace_
from ..training.architectures import architecture
from ..training.methods import Method, Setting, method_for
from ..training.recipe import Optimizer, Variant

E2E, REMOVAL, REPL = "E2E", "removal", "RepL"
SGD = Optimizer(name="sgd", lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
ADAMW = Optimizer(name="adamw", lr=1e-3, weight_decay=0.05)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A backbone as it is trained: its input, its optimizer, and where blocks are replaced."""

    model: str
    batch_size: int
    size: int = 32
    num_classes: int = 10
    interval: int = 4
    first: int | None = None
    operator: Options | None = None  # the paper's for the kind of block, if not given
    optimizer: Optimizer = SGD

    def build(self) -> nn.Module:
        return architecture(self.model, num_classes=self.num_classes, size=self.size)

    @property
    def title(self) -> str:
        known = self.first or (2 if self.interval == 2 else None)  # else K or 2, by stack
        first = f", first={known}" if known else ""
        operator = f", {self.operator.label()}" if self.operator else ""
        return f"{self.model}{first}{operator}, batch {self.batch_size} of {self.size}x{self.size}"


# The backbones of the paper's training tables. Batches are the paper's for one GPU: it trained CIFAR on one, and
# ImageNet on four (512 and 1024 images in all).
SUITE = (
    Case(model="resnet32", batch_size=1024, first=4),
    Case(model="resnet110", batch_size=1024, first=4),
    Case(model="resnet34", batch_size=128, size=224, num_classes=1000, first=2),
    Case(model="resnet101", batch_size=128, size=224, num_classes=1000, first=2, operator=ReducedBottleneck()),
    Case(model="vit_small_16", batch_size=256, size=224, num_classes=1000, first=2, optimizer=ADAMW),
    Case(model="vit_base_16", batch_size=256, size=224, num_classes=1000, first=2, optimizer=ADAMW),
)
# The other backbones that the paper prints costs of, by name alone.
CASES = (
    *SUITE,
    Case(model="resnet152", batch_size=128, size=224, num_classes=1000, first=2, operator=ReducedBottleneck()),
    Case(model="vit_tiny_16", batch_size=256, size=224, num_classes=1000, first=2, optimizer=ADAMW),
)
SMALL_SUITE = (  # what a CPU can do in a minute
    Case(model="cifar_resnet:20:16", batch_size=32, interval=2),
    Case(model="vit:64:6:4:8", batch_size=32, optimizer=ADAMW),
)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One side of a comparison: how its model is made."""

    label: str
    build: Callable[[], nn.Module]
    method: Method | None = None  # changes what `build` makes, and may change it again before each step

    @property
    def capturable(self) -> bool:
        return self.method is None or self.method.capturable


def candidates(case: Case, *, extra: Sequence[Options] = (), methods: Sequence[str] = ()) -> list[Candidate]:
    """E2E, removal, RepL, further operators and methods."""
    sides = [
        Candidate(label=E2E, build=case.build),
        Candidate(label=REMOVAL, build=partial(replaced, case, Removal())),
        Candidate(label=REPL, build=partial(replaced, case, case.operator)),
    ]
    for options in extra:
        sides.append(Candidate(label=f"{REPL}, {options.label()}", build=partial(replaced, case, options)))
    for name in methods:
        variant = Variant(label=name, method=name, interval=case.interval, first=case.first)
        method = method_for(Setting(variant, seed=0))
        build = partial(lambda method: method.prepare(case.build()), method)
        sides.append(Candidate(label=name, build=build, method=method))
    return sides


def replaced(case: Case, operator: Options | None) -> nn.Module:
    model = case.build()
    return replace_(model, plan(model, case.interval, case.first, operator=operator))
