"""Who watches training: bars on a terminal, now and then a plain line elsewhere. Both go to stderr."""

from __future__ import annotations

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
        f"{title}: {name}{metric.text(last.measures[metric.key])} in epoch {last.epoch} "
        f"(best {best.measures[metric.key]:.2f} in epoch {best.epoch}), {last.seconds:.2f} s/epoch"
    )


class Watcher:
    """A bar for each run that trains now, with its number among all; without a terminal a line now and then."""

    def __init__(
        self, num_runs: int, num_epochs: int, task: type[Task] = Classification, console: Console | None = None
    ) -> None:
        self.num_runs, self.num_epochs, self.task = num_runs, num_epochs, task
        self.console = console or Console(stderr=True)
        self.draws = self.console.is_terminal and not self.console.is_dumb_terminal
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[about]}"))
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        self.bars = Progress(
            *columns,
            *times,
            console=self.console,
            transient=True,
            speed_estimate_period=120,
            disable=not self.draws,
        )
        self._tasks: list[TaskID] = []
        self._notes: set[tuple[str, str]] = set()
        self._done = 0

    def begin(self, runs: Sequence[str]) -> None:
        self.titles = list(runs)
        self.epochs: list[list[Epoch]] = [[] for _ in runs]
        self._said = [time.monotonic()] * len(runs)
        self.bars.start()
        for number, title in enumerate(runs, self._done + 1):
            place = f"run {number} of {self.num_runs}: " if self.num_runs > 1 else ""
            self._tasks.append(self.bars.add_task(place + title, total=self.num_epochs, about=""))

    def step(self, run: int, epoch: int, step: int, steps: int, images_per_second: float, memory: int) -> None:
        about = self.state(run, epoch, images_per_second, memory)
        self.bars.update(self._tasks[run], completed=epoch - 1 + step / steps, about=about)

    def epoch(self, run: int, epoch: Epoch) -> None:
        self.epochs[run].append(epoch)
        self.step(run, epoch.epoch, 1, 1, epoch.images_per_second, epoch.peak_memory)
        if not self.draws and time.monotonic() - self._said[run] >= EVERY and epoch.epoch < self.num_epochs:
            self._said[run] = time.monotonic()
            self.say(f"{self.titles[run]}: {self.state(run, epoch.epoch, epoch.images_per_second, 0)}")

    def state(self, run: int, epoch: int, speed: float, memory: int) -> str:
        words = [f"epoch {epoch}/{self.num_epochs}", f"{speed:,.0f} {self.task.sample}/s"]
        if memory:
            words.append(f"{memory / 1e9:.1f} GB")
        if self.epochs[run]:
            metric = self.task.metric
            words.append(metric.text(self.epochs[run][-1].measures[metric.key]))
        return "  ".join(words)

    def note(self, run: int, text: str) -> None:
        if text != SHARED and (self.titles[run], text) not in self._notes:
            self._notes.add((self.titles[run], text))
            self.say(f"{self.titles[run]}: {text}")

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=not self.draws)

    def end(self) -> None:
        self._done += len(self.titles)
        for title, epochs in zip(self.titles, self.epochs, strict=True):
            # a run that is the only one is summed up on stdout, by the command
            if self.num_runs > 1 and epochs and epochs[-1].epoch == self.num_epochs:
                self.say(summary(title, epochs, self.task))
        while self._tasks:
            self.bars.remove_task(self._tasks.pop())


@contextmanager
def watching(num_runs: int, num_epochs: int, task: type[Task] = Classification) -> Iterator[Watcher]:
    watcher = Watcher(num_runs, num_epochs, task)
    try:
        yield watcher
    finally:
        watcher.bars.stop()
