"""One measurement: a method on a subject with some samples, what it took and what it gives; kept as a line."""

from __future__ import annotations

import time
from typing import Any

import torch
from latency import interleaved
from methods import Budget, Method, fewer_out
from practise import best_rate
from practise_choice import scores_of
from results import Line, Results
from subjects import Subject
from torch import nn

from replearn.experiments.training.fit import synchronize


class Measuring:
    """Measures one subject's methods, and keeps every line."""

    def __init__(
        self,
        subject: Subject,
        results: Results,
        about: Line,
        steps: int,
        choice_steps: int,
        rate: float | None = None,
    ) -> None:
        self.subject, self.results, self.given_rate = subject, results, rate
        self.steps, self.choice_steps = steps, choice_steps
        self.about = {"subject": subject.name, "net_seed": subject.net_seed, **about}

    def line(self, **key: Any) -> Line | None:
        return self.results.get(**self.about, **key)

    def keep(self, line: Line) -> Line:
        self.results.add({**self.about, **line})
        return line

    def trained(self) -> float:
        known = self.line(kind="trained") or self.keep(
            {
                "kind": "trained",
                "metric": self.subject.metric,
                "score": self.subject.score(self.subject.model),
                "parameters": count(self.subject.model),
            }
        )
        return float(known["score"])

    def rate(self, images: int) -> float:
        """PRACTISE's rate for so many images, from the first network of a kind and the first draw."""
        if self.given_rate is not None:
            return self.given_rate
        key = {**self.about, "kind": "rate", "images": images, "budget": f"{self.steps} steps", "net_seed": None}
        known = self.results.get(**key)
        if known is None:
            torch.manual_seed(0)
            begin = time.perf_counter()
            best, errors = best_rate(self.subject, self.subject.draw(images, 0), self.steps)
            spent = time.perf_counter() - begin
            known = {**key, "rate": best, "errors": errors, "seconds": spent}
            self.results.add(known)
        return float(known["rate"])

    def choice(self, images: int) -> tuple[str, ...]:
        """The blocks that PRACTISE takes out with so many images, from the first draw."""
        key = {"kind": "scores", "images": images, "budget": f"{self.choice_steps} steps"}
        known = self.line(**key)
        if known is None:
            torch.manual_seed(0)
            begin = time.perf_counter()
            scores = scores_of(self.subject, self.subject.draw(images, 0), self.choice_steps)
            known = self.keep({**key, "scores": scores, "seconds": time.perf_counter() - begin})
        found = known["scores"]
        best = sorted(found, key=found.__getitem__)[: len(self.subject.out)]
        return tuple(name for name in found if name in best)

    def out(self, method: Method, images: int) -> tuple[str, ...]:
        if method.chooses and not method.ours:
            return self.choice(images)
        if not method.fewer:
            return self.subject.out
        known = self.line(kind="fewer") or self.keep(
            {"kind": "fewer", "out": fewer_out(self.subject, self.subject.draw(64, 0))}
        )
        return tuple(known["out"])

    def measure(self, method: Method, images: int, seed: int, budget: str) -> None:
        key = {"kind": "method", "method": method.name, "images": images, "seed": seed, "budget": budget}
        if self.line(**key) is not None:
            return
        subject = self.subject.taking_out(self.out(method, images))
        allowed = self.allowed(method, images, seed, budget)
        if allowed is None:
            print(f"left out, its part without training takes the time: {key}", flush=True)
            return
        samples = subject.draw(images, seed)
        torch.manual_seed(seed)
        device = samples.device
        synchronize(device)
        begin, cpu = time.perf_counter(), time.process_time()
        made = method.run(subject, samples, allowed)
        synchronize(device)
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        before, after = interleaved([subject.model, made], samples[:64])
        score = subject.score(made)
        self.keep(
            {
                **key,
                "ours": method.ours,
                "trains": method.trains,
                "metric": subject.metric,
                "score": score,
                "seconds": round(seconds, 3),
                "cpu_seconds": round(cpu, 3),
                "threads": torch.get_num_threads(),
                "latency_ms": round(after, 4),
                "latency_before_ms": round(before, 4),
                "parameters": count(made),
                "parameters_before": count(subject.model),
                "blocks_out": len(subject.out),
                "rate": allowed.rate or None,
            }
        )
        place = f"{subject.name} {images} images, seed {seed}, {method.name} ({budget})"
        print(f"{place}: {score:.2f} in {seconds:.1f} s, latency {after / before:.3f}", flush=True)

    def allowed(self, method: Method, images: int, seed: int, budget: str) -> Budget | None:
        """What a method may take; None where its seconds are less than its part without training takes."""
        if not method.trains:
            return Budget()
        if budget.endswith(" epochs"):
            return Budget(epochs=float(budget.removesuffix(" epochs")))
        seconds = None if budget in ("equal", f"{self.steps} steps") else float(budget.removesuffix(" s"))
        if not method.of:
            return Budget(seconds, steps=self.steps, rate=self.rate(images))
        alike = {"kind": "method", "images": images, "seed": seed}
        if seconds is None:
            peer = "PRACTISE, fewer out" if method.fewer else "PRACTISE"
            seconds = self.known(method=peer, budget=f"{self.steps} steps", **alike)["seconds"]
        fit = self.known(method=method.of, budget="none", **alike)["seconds"]
        return Budget(seconds, fit_seconds=fit) if fit < seconds else None

    def known(self, **key: Any) -> Line:
        found = self.line(**key)
        if found is None:
            raise SystemExit(f"Measure {key['method']} first: a budget depends on its seconds.")
        return found


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
