"""Files that somebody made on purpose: each with the door that must refuse it."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import replearn
from replearn.experiments.training.pretrained import load_pretrained_
from replearn.experiments.training.results import read_result
from replearn.experiments.training.state import read_state
from replearn.surgery.tensor_file import write_file

Case = tuple[str, str, Callable[[], object]]
MARK = "was_run"  # a file that hostile code would leave behind


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mix(x))


def small_model() -> nn.Module:
    """The smallest model with a plan, so that all bytes of its checkpoint can be tried."""
    torch.manual_seed(0)
    return nn.Sequential(*(Own() for _ in range(3)))


class RunsCode:
    """What a pickle can hold: a call of anything, made when it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder / MARK),)


def crafted(folder: Path, good: bytes) -> Iterator[Case]:
    """Every case, with what was checked afterwards: that no code in it ran."""
    for kind, what, load in _all(folder, good):
        yield kind, what, _harmless(load, folder / MARK)


def _harmless(load: Callable[[], object], mark: Path) -> Callable[[], object]:
    def run() -> object:
        try:
            return load()
        finally:
            if mark.exists():
                mark.rmdir()
                raise RuntimeError("code in the file was run")

    return run


def _all(folder: Path, good: bytes) -> Iterator[Case]:
    length = int.from_bytes(good[:8], "little")
    header, body = json.loads(good[8 : 8 + length]), good[8 + length :]

    def checkpoint(name: str, data: bytes) -> Callable[[], object]:
        path = folder / f"{name}.safetensors"
        path.write_bytes(data)
        return lambda: replearn.load(small_model(), path)

    def rewritten(name: str, change: Callable[[dict[str, Any]], None], tail: bytes = body) -> Callable[[], object]:
        entries = json.loads(json.dumps(header))
        change(entries)
        text = json.dumps(entries).encode()
        return checkpoint(name, len(text).to_bytes(8, "little") + text + tail)

    weights = [name for name in header if name != "__metadata__"]

    def swap(entries: dict[str, Any]) -> None:
        one, other = [n for n in weights if n.endswith("mix.weight")][:2]
        entries[one]["data_offsets"], entries[other]["data_offsets"] = (
            entries[other]["data_offsets"], entries[one]["data_offsets"],
        )  # fmt: skip

    yield "header", "two tensors swapped", rewritten("swapped", swap)
    yield "header", "a huge shape", rewritten("huge", lambda e: e[weights[0]].update(shape=[2**40, 2**20]))
    yield "header", "a negative shape", rewritten("negative", lambda e: e[weights[0]].update(shape=[-3, 3]))
    yield (
        "header",
        "offsets beyond the end",
        rewritten("beyond", lambda e: e[weights[0]].update(data_offsets=[0, 2**50])),
    )
    yield "header", "overlapping offsets", rewritten("overlap", lambda e: e[weights[0]].update(e[weights[1]]))
    yield "header", "a name twice", checkpoint("twice", good.replace(weights[0].encode(), weights[1].encode()))
    yield "header", "length of 2^63", checkpoint("long", (2**63).to_bytes(8, "little") + good[8:])
    yield "header", "length of 90 MB", checkpoint("longish", (90 * 2**20).to_bytes(8, "little") + good[8:])
    yield "header", "a big-endian length", checkpoint("endian", length.to_bytes(8, "big") + good[8:])
    turned = b"".join(body[i : i + 4][::-1] for i in range(0, len(body), 4))
    yield "header", "big-endian values", checkpoint("values", good[: 8 + length] + turned)
    for climb in ("../../outside", "/etc/passwd", "..\\outside", "a/../../b", "\0"):
        name = f"climb{abs(hash(climb))}"
        yield (
            "names",
            f"a tensor called {climb!r}",
            rewritten(name, lambda e, c=climb: e.update({c: e.pop(weights[0])})),
        )  # type: ignore[misc]
    yield from _bombs(folder, header, rewritten)
    yield from _disguised(folder, checkpoint)
    yield from _signed(folder)
    yield from _results(folder)
    yield from _weights(folder)


def _bombs(folder: Path, header: dict[str, Any], rewritten: Any) -> Iterator[Case]:
    """JSON that grows when it is read; the checksum is that of a checkpoint, so the reader comes to it late."""
    texts = {
        "deep": "[" * 100_000,
        "deep objects": '{"a":' * 50_000,
        "wide": "[" + "[]," * 9_000_000 + "[]]",
        "a long number": "9" * 5_000_000,
        "a number": "1e999999999",
    }
    for name, text in texts.items():
        for field in ("plan", "aliases"):
            what = f"{name} JSON in {field}"
            yield (
                "bombs",
                what,
                rewritten(f"bomb-{name}-{field}", lambda e, f=field, t=text: e["__metadata__"].update({f: t})),
            )
        yield "bombs", f"{name} JSON as a plan", lambda t=text: replearn.Plan.from_json(t)  # type: ignore[misc]


def _signed(folder: Path) -> Iterator[Case]:
    """Files with a right checksum, as an attacker who reads our code would write: the contents must be refused."""
    tensors = load_file(folder / "whole.safetensors")
    plan = json.loads(json.dumps({"replearn_plan": 1}))

    def signed(name: str, about: dict[str, str], **more: torch.Tensor) -> Callable[[], object]:
        path = folder / f"signed-{name}.safetensors"
        write_file(path, {**tensors, **more}, {"format": "replearn-checkpoint-1", **about})
        return lambda: replearn.load(small_model(), path)

    yield "signed", "no plan", signed("none", {"aliases": "{}"})
    yield "signed", "an empty plan", signed("empty", {"plan": json.dumps(plan), "aliases": "{}"})
    yield "signed", "a deep plan", signed("deep", {"plan": "[" * 100_000, "aliases": "{}"})
    yield "signed", "a wide plan", signed("wide", {"plan": "[" + "[]," * 4_000_000 + "[]]", "aliases": "{}"})
    path = folder / "run.safetensors"
    write_file(path, {}, {"format": "replearn-run-2", "about": "[" * 100_000})
    yield "signed", "a deep run's state", lambda: read_state(path)
    sparse = folder / "sparse.safetensors"
    entry = {"dtype": "U8", "shape": [2**37], "data_offsets": [0, 2**37]}
    text = json.dumps({"__metadata__": {"format": "replearn-checkpoint-1"}, "x": entry}).encode()
    sparse.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(sparse, 8 + len(text) + 2**37)  # 128 GiB that take no space
    yield "signed", "a sparse file of 128 GiB", lambda: replearn.load(small_model(), sparse)


def _disguised(folder: Path, checkpoint: Any) -> Iterator[Case]:
    hostile = pickle.dumps(RunsCode(folder))
    yield "disguised", "a pickle as a checkpoint", checkpoint("pickle", hostile)
    saved = folder / "torch.safetensors"
    torch.save({"weight": RunsCode(folder)}, saved)
    yield "disguised", "torch.save as a checkpoint", lambda: replearn.load(small_model(), saved)
    yield "disguised", "torch.save as a run's state", lambda: read_state(saved)
    yield "disguised", "YAML as a checkpoint", checkpoint("yaml", b"!!python/object/apply:os.system ['true']\n")
    yield "disguised", "nothing", checkpoint("nothing", b"")
    plain = folder / "plain.safetensors"
    save_file({"x": torch.zeros(2)}, plain)
    yield "disguised", "a plain safetensors file", lambda: replearn.load(small_model(), plain)
    yield "disguised", "a folder", lambda: replearn.load(small_model(), folder)
    pipe = folder / "pipe.json"
    os.mkfifo(pipe)
    yield "disguised", "a pipe as a checkpoint", lambda: replearn.load(small_model(), pipe)
    yield "disguised", "a pipe as a result", lambda: read_result(pipe)


def _results(folder: Path) -> Iterator[Case]:
    texts: dict[str, bytes] = {
        "a pickle": pickle.dumps(RunsCode(folder)),
        "YAML": b"!!python/object/apply:os.system ['true']\n",
        "deep": b"[" * 200_000,
        "wrong fields": b'{"format": "replearn-result-1", "epochs": [{"x": 1}]}',
        "no epochs": b'{"format": "replearn-result-1"}',
        "a list": b"[1, 2]",
        "half a character": b'"\\ud800"',
        "other bytes": bytes(range(256)),
        "another version": b'{"format": "replearn-result-99"}',
    }
    for name, data in texts.items():
        path = folder / f"{name.replace(' ', '-')}.json"
        path.write_bytes(data)
        yield "results", f"{name} as a result", lambda p=path: read_result(p)  # type: ignore[misc]
    large = folder / "large.json"
    large.touch()
    os.truncate(large, 2**37)
    yield "results", "a sparse result of 128 GiB", lambda: read_result(large)


def _weights(folder: Path) -> Iterator[Case]:
    """Pretrained weights of others: what is no weight is refused, and the model is left as it was."""
    good = small_model().state_dict()
    weight = next(iter(good.values()))
    odd: dict[str, Any] = {
        "quantized": torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8),
        "sparse": weight.to_sparse(),
        "on meta": weight.to("meta"),
        "int8": weight.to(torch.int8),
        "complex": weight.to(torch.complex64),
        "NaN": torch.full_like(weight, float("nan")),
        "of another shape": torch.zeros(7),
        "no tensor": "x",
        "code": RunsCode(folder),
    }
    files: dict[str, Any] = {f"a weight that is {name}": {**good, next(iter(good)): odd[name]} for name in odd}
    files |= {"integer keys": {3: torch.ones(2)}, "a list": [1, 2], "nothing": {}}
    for name, state in files.items():
        path = folder / f"weights-{name.replace(' ', '-')}.pth"
        torch.save(state, path)
        yield "weights", name, lambda p=path: _unchanged(p)  # type: ignore[misc]
    for name, data in {"cut": b"\x80\x02}q\x00(X\x01.", "empty stack": b"\x80\x02N0.", "empty": b""}.items():
        path = folder / f"weights-{name.replace(' ', '-')}.pth"
        path.write_bytes(data)
        yield "weights", f"a pickle: {name}", lambda p=path: _unchanged(p)  # type: ignore[misc]


def _unchanged(path: Path) -> None:
    model = small_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        load_pretrained_(model, str(path))
    finally:
        if any(not torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()):
            raise RuntimeError("the model was changed")
