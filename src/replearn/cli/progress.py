"""Who watches training: bars on a terminal, now and then a plain line elsewhere. Both write to stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..experiments.training.results import SHARED, Epoch
from ..experiments.training.tasks import Task
from ..experiments.training.tasks.classification import Classification

EVERY = 30.0  # seconds between the plain lines of a run


def summary(title: str, epochs: Sequence[Epoch], task: type[Task] = Classification) -> str:
    """A finished run in one line."""
    metric = task.metric
    last, best = epochs[-1], max(epochs, key=lambda epoch: metric.sign * epoch.measures[metric.key])
    name = "" if metric.unit else f"{metric.name} "
    return (
        f"{title}: {name}{score(last, task)} in epoch {last.epoch} "
        f"(best {best.measures[metric.key]:.2f} in epoch {best.epoch}), {last.seconds:.2f} s/epoch"
    )


def score(epoch: Epoch, task: type[Task]) -> str:
    return task.metric.text(epoch.measures[task.metric.key])


class Watcher:
    """What bars and lines share: which runs there are, and what has been said of them."""

    def __init__(self, num_runs: int, num_epochs: int, task: type[Task] = Classification) -> None:
        self.num_runs, self.num_epochs, self.task = num_runs, num_epochs, task
        self.titles: list[str] = []
        self.epochs: list[list[Epoch]] = []
        self._notes: set[tuple[str, str]] = set()

    def begin(self, runs: Sequence[str]) -> None:
        self.titles = list(runs)
        self.epochs = [[] for _ in runs]

    def step(self, run: int, epoch: int, step: int, steps: int, images_per_second: float, memory: int) -> None:
        pass

    def epoch(self, run: int, epoch: Epoch) -> None:
        self.epochs[run].append(epoch)

    def note(self, run: int, text: str) -> None:
        if text != SHARED and (self.titles[run], text) not in self._notes:
            self._notes.add((self.titles[run], text))
            self.say(f"{self.titles[run]}: {text}")

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        for title, epochs in zip(self.titles, self.epochs, strict=True):
            # a run that is the only one is summed up on stdout, by the command
            if self.num_runs > 1 and epochs and epochs[-1].epoch == self.num_epochs:
                self.say(summary(title, epochs, self.task))

    def close(self) -> None:
        pass


class Lines(Watcher):
    """Plain lines for logs: a run's state at most every half minute, and its end."""

    def begin(self, runs: Sequence[str]) -> None:
        super().begin(runs)
        self._said = [time.monotonic()] * len(runs)

    def epoch(self, run: int, epoch: Epoch) -> None:
        super().epoch(run, epoch)
        if time.monotonic() - self._said[run] >= EVERY and epoch.epoch < self.num_epochs:
            self._said[run] = time.monotonic()
            self.say(
                f"{self.titles[run]}: epoch {epoch.epoch} of {self.num_epochs}, {score(epoch, self.task)}, "
                f"{epoch.images_per_second:,.0f} {self.task.sample}/s"
            )


class Bars(Watcher):
    """A bar for each run that trains now, and one for all runs where there are several."""

    def __init__(
        self, num_runs: int, num_epochs: int, console: Console, task: type[Task] = Classification
    ) -> None:
        super().__init__(num_runs, num_epochs, task)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[about]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            speed_estimate_period=120,
        )
        self._all: TaskID | None = None
        self._tasks: list[TaskID] = []
        self._scores: list[str] = []
        self._done = 0

    def begin(self, runs: Sequence[str]) -> None:
        super().begin(runs)
        self._bars.start()
        if self._all is None and self.num_runs > 1:
            self._all = self._bars.add_task("all runs", total=self.num_runs, about="")
        self._scores = [""] * len(runs)
        self._tasks = [self._bars.add_task(title, total=self.num_epochs, about="") for title in runs]

    def step(self, run: int, epoch: int, step: int, steps: int, images_per_second: float, memory: int) -> None:
        words = [f"epoch {epoch}/{self.num_epochs}", f"{images_per_second:,.0f} {self.task.sample}/s"]
        if memory:
            words.append(f"{memory / 1e9:.1f} GB")
        self._move(run, epoch - 1 + step / steps, "  ".join([*words, self._scores[run]]))

    def epoch(self, run: int, epoch: Epoch) -> None:
        super().epoch(run, epoch)
        self._scores[run] = score(epoch, self.task)
        words = [f"epoch {epoch.epoch}/{self.num_epochs}", f"{epoch.images_per_second:,.0f} {self.task.sample}/s"]
        if epoch.peak_memory:
            words.append(f"{epoch.peak_memory / 1e9:.1f} GB")
        self._move(run, epoch.epoch, "  ".join([*words, self._scores[run]]))

    def _move(self, run: int, epochs: float, about: str) -> None:
        self._bars.update(self._tasks[run], completed=epochs, about=about)
        if self._all is not None:
            parts = [task.completed / self.num_epochs for task in self._bars.tasks if task.id in self._tasks]
            about = f"{self._done} of {self.num_runs} done"
            self._bars.update(self._all, completed=self._done + sum(parts), about=about)

    def say(self, text: str) -> None:
        self._bars.console.print(text, highlight=False, markup=False)

    def end(self) -> None:
        super().end()
        self._done += len(self._tasks)
        for task in self._tasks:
            self._bars.remove_task(task)
        self._tasks = []

    def close(self) -> None:
        self._bars.stop()


@contextmanager
def watching(num_runs: int, num_epochs: int, task: type[Task] = Classification) -> Iterator[Watcher]:
    """Bars if stderr is a terminal that can draw them, else lines."""
    console = Console(stderr=True)
    able = console.is_terminal and not console.is_dumb_terminal
    watcher = Bars(num_runs, num_epochs, console, task) if able else Lines(num_runs, num_epochs, task)
    try:
        yield watcher
    finally:
        watcher.close()
