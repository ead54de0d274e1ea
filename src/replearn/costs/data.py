"""The costs of training a model and of running it deployed, as data and as text."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..errors import ReplearnError
from ..planning.table import shown, text_table
from .machines import Machine

STATES = {"sgd": 0, "sgd_momentum": 1, "lion": 1, "rmsprop": 1, "adagrad": 1, "adam": 2, "adamw": 2}


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a model in one training step, and once deployed.

    FLOPs are torch's: two for a multiply and add, elementwise work not counted. Activations are what autograd
    saves for the backward pass, each storage once, without parameters and the batch itself. Seconds are a
    roofline's, and 0 without a machine. A deployed model runs forward in eval mode, with its operators as plain
    modules and, for the time, without BatchNorms, which `deploy` folds.
    """

    parameters: int = 0
    trainable: int = 0
    forward_flops: int = 0
    backward_flops: int = 0
    activation_bytes: int = 0
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    seconds: float = 0.0
    deployed_parameters: int = 0
    deployed_flops: int = 0
    deployed_seconds: float = 0.0
    blocks: int = 0  # blocks that are not operators, where they are counted

    @property
    def training_flops(self) -> int:
        """Forward and backward."""
        return self.forward_flops + self.backward_flops

    @property
    def memory_bytes(self) -> int:
        """Weights, gradients, optimizer state and activations added up."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes


@dataclass(frozen=True, slots=True)
class ModelCost:
    """The cost of a model.

    `peak_bytes` is the peak memory of a training step, from a replay of its allocations, and at least weights,
    gradients, optimizer state and activations together: a loop that clears gradients after the forward pass holds
    all four. A GPU needs more for the workspaces of its libraries and for fragmentation.
    """

    model: str
    total: Cost
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Promise:
    """The predicted costs before and after a plan; `print` shows a table. Without a plan, `after` is `before`."""

    before: ModelCost
    after: ModelCost
    precision: str
    optimizer: str
    machine: Machine | None = None
    example: str = ""  # the shapes of the batch

    def __str__(self) -> str:
        return promise_table(self)

    def ratio(self, quantity: str) -> float:
        """After over before, of an attribute of `Cost` (`memory_bytes`, `seconds`, ...) or of `peak_bytes`."""
        whole = quantity == "peak_bytes"
        before, after = (getattr(cost if whole else cost.total, quantity) for cost in (self.before, self.after))
        return float(after / before) if before else 1.0


def optimizer_states(optimizer: str) -> int:
    """Numbers that an optimizer keeps for each trainable parameter."""
    if optimizer not in STATES:
        raise ReplearnError(f"optimizer={optimizer!r} is not known; write one of {', '.join(STATES)}.")
    return STATES[optimizer]


def promise_table(promise: Promise) -> str:
    """Costs of training and of deployment side by side, each before and after, with the assumptions."""
    before, after = promise.before.total, promise.after.total

    def row(name: str, spell: Callable[[float], str], training: str, deployed: str = "") -> tuple[str, ...]:
        numbers = [(getattr(before, n), getattr(after, n)) for n in (training, deployed) if n]
        return name, *_cells(numbers[0], spell), *(_cells(numbers[1], spell) if deployed else ("",) * 3)

    rows = [
        row("parameters", count, "trainable", "deployed_parameters"),
        row("FLOPs", flops, "training_flops", "deployed_flops"),
    ]
    if promise.machine is not None:
        rows.append(row("time", duration, "seconds", "deployed_seconds"))
    parts = (("weights", "parameter"), ("gradients", "gradient"), ("optimizer state", "optimizer"))
    rows += [row(name, size, f"{part}_bytes") for name, part in (*parts, ("activations", "activation"))]
    rows.append(row("memory, added up", size, "memory_bytes"))
    peak = _cells((promise.before.peak_bytes, promise.after.peak_bytes), size)
    rows.append(("peak memory", *peak, "", "", ""))
    head = ("", "training", "after", "ratio", "deployed", "after", "ratio")
    batch = f"a batch of {shown(promise.example)}" if promise.example else "one batch"
    machine = promise.machine
    where = "times are not predicted without a machine"
    if machine is not None:
        where = f"times of {shown(machine.name)} ({shown(machine.source)})"
    return "\n".join(
        [
            f"predicted for {batch}, {promise.precision}, {promise.optimizer}; {where}",
            "training: one step; deployed: one forward pass, operators as plain modules",
            "",
            *text_table(head, rows, right=range(1, 7)),
        ]
    )


def _cells(numbers: tuple[float, float], spell: Callable[[float], str]) -> tuple[str, str, str]:
    before, after = numbers
    return spell(before), spell(after), f"{after / before:.3f}" if before else ""


def count(number: float) -> str:
    return f"{number:,.0f}"


def flops(number: float) -> str:
    return _scaled(number, 1000.0, ("", "K", "M", "G", "T", "P", "E"))


def size(number: float) -> str:
    return _scaled(number, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB"))


def duration(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _scaled(number: float, step: float, units: Iterable[str]) -> str:
    *smaller, largest = units
    for unit in smaller:
        if abs(number) < step:
            return f"{number:.4g} {unit}".rstrip()
        number /= step
    return f"{number:.4g} {largest}"
