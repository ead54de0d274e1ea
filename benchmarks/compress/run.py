"""replearn.compression beside its peers: the same network, blocks, unlabelled images and machine.

    python benchmarks/compress/run.py --published FOLDER --data-root DATA --out compress.jsonl
    python benchmarks/compress/run.py --subjects vit-cifar10 lm-wikitext2 --cache RUNS --data-root DATA --out FILE
    python benchmarks/compress/table.py compress.jsonl

Every second inner block goes; "own choice" takes out as many that a method chooses itself, PRACTISE's from the
first draw and in uncounted seconds. Each method is given the same samples of the training set without labels,
and what it makes is tested once; nothing is chosen on the test set. Methods without training run first.
PRACTISE then takes its 2,000 steps, and each of ours that heals gets the seconds that PRACTISE took on the same
samples, its own fit and its search for a rate included (budget 'equal'). With `--seconds 2 8` all that train
get so many seconds, at `--seconds-images` samples.

With `--epochs 1 5` all that heal get so many epochs over `--epoch-images` samples, closed forms fitted on 2,048 of
them; "removal, healed" is the network without the blocks, trained alike on the same samples in the same order.

Workers share a results file: `--train-only` first, then `--part 0/4` to `--part 3/4` at once.

A finished measurement is a line of the results file, and is skipped when the command is given again: stop it and
go on at will. `--limit 500` starts nothing new after so many seconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from measuring import Measuring
from methods import Budget, Method, all_methods
from networks import TRAINED, train_missing, trained
from practise import STEPS
from results import Results, command, commit
from subjects import PUBLISHED, Subject, evenly, every_second, published

from replearn.experiments.training.fit import device_named


def jobs(options: argparse.Namespace, subject: Subject) -> Iterator[tuple[Method, int, int, str]]:
    """All measurements, seed by seed, so that a run that is cut off leaves whole tables of fewer seeds."""
    every = all_methods()
    chosen = [m for m in every.values() if m.fits(subject) and m.name in (options.methods or every)]
    part, parts = options.part
    for number, seed in enumerate(options.seeds):
        if (subject.net_seed * len(options.seeds) + number) % parts != part:
            continue
        for images in options.images:
            for method in chosen:
                own = "none" if not method.trains else "equal" if method.of else f"{options.steps} steps"
                yield method, images, seed, own
        for epochs in options.epochs:
            for method in chosen:
                if method.of:
                    yield method, options.epoch_images, seed, f"{epochs:g} epochs"
        for seconds in options.seconds:
            for method in chosen:
                if method.trains:
                    yield method, options.seconds_images, seed, f"{seconds:g} s"


def part(text: str) -> tuple[int, int]:
    number, _, total = text.partition("/")
    return int(number), int(total)


def subjects(options: argparse.Namespace, device: torch.device) -> Iterator[Subject]:
    for name in options.subjects:
        if name in PUBLISHED:
            if options.published is None:
                raise SystemExit(f"{name} needs --published FOLDER.")
            yield published(name, options.published, options.data_root, device, options.test_images)
            continue
        train_missing(name, options.net_seeds, options.cache, options.data_root, device, options.net_epochs)
        for seed in options.net_seeds:
            yield from trained(name, seed, options.cache, options.data_root, device, options.test_images)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subjects", nargs="+", choices=[*PUBLISHED, *TRAINED], default=list(PUBLISHED))
    parser.add_argument("--published", type=Path, help="the folder with resnet.py and resnetNN-*.th")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--cache", type=Path, default=Path("runs/compress"), help="of networks trained here")
    parser.add_argument("--net-seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=list(all_methods()), metavar="METHOD")
    parser.add_argument("--images", type=int, nargs="*", default=[500, 100, 1000, 50])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="of the draw of images")
    parser.add_argument("--steps", type=int, default=STEPS, help="of PRACTISE")
    parser.add_argument(
        "--choice-steps", type=int, help="of PRACTISE for each block that it scores, if not --steps"
    )
    parser.add_argument("--seconds", type=float, nargs="*", default=[])
    parser.add_argument("--seconds-images", type=int, default=500)
    parser.add_argument("--epochs", type=float, nargs="*", default=[], help="of healing, on --epoch-images")
    parser.add_argument("--epoch-images", type=int, default=50_000)
    parser.add_argument("--rate", type=float, help="of PRACTISE, instead of the best of three")
    parser.add_argument(
        "--part", type=part, default=(0, 1), help="as 0/4: a fourth of the draws, for one of four workers"
    )
    parser.add_argument("--net-epochs", type=int, help="of training a network, instead of the usual number")
    parser.add_argument("--blocks-out", type=int, help="so many, spread evenly; their results need their own file")
    parser.add_argument("--test-images", type=int, help="the first of the test set; all by default")
    parser.add_argument("--train-only", action="store_true", help="fill the cache, and measure nothing")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which nothing is begun")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--cpu-seconds", action="store_true", help="count this process's CPU time: others work here"
    )
    parser.add_argument("--matmul", default="highest", help="float32 precision, as PyTorch names it")
    parser.add_argument("--commit", help="where there is no git repository")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(words)
    if options.cpu_seconds:
        time.perf_counter = time.process_time  # healing and PRACTISE read the clock by this name
    begin, device = time.perf_counter(), device_named(options.device)
    torch.set_float32_matmul_precision(options.matmul)
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    about = {"test_images": options.test_images, "device": kind, "torch": torch.__version__}
    about |= {"command": command(), "commit": options.commit or commit()}
    about |= {"clock": "cpu"} if options.cpu_seconds else {}
    for subject in subjects(options, device):
        if options.train_only:
            continue
        if options.blocks_out:
            subject = subject.taking_out(evenly(every_second(subject.model, 1), options.blocks_out))
        results, steps = Results(options.out), options.choice_steps or options.steps
        measuring = Measuring(subject, results, about, options.steps, steps, options.rate)
        print(f"{subject.name}, seed {subject.net_seed}: {measuring.trained():.2f}", flush=True)
        if device.type == "cuda":
            warm_up(subject)
        for job in jobs(options, subject):
            if time.perf_counter() - begin > options.limit:
                raise SystemExit("The time is over; the same command goes on from here.")
            measuring.measure(*job)


def warm_up(subject: Subject) -> None:
    """Load libraries and choose algorithms before anything is timed."""
    all_methods()["full"].run(subject, subject.draw(64, 0), Budget())


if __name__ == "__main__":
    main()
