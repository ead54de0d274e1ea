"""Single-field edits of a result.json, and odd files beside it: reports and comparisons go on, or refuse.

    python -m torture.edits

Every field of a committed result is taken out and set to values of other kinds. `report` builds its page from a
folder with the edited run and a good one, and `compare --from` its table; either goes on or raises ReplearnError.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from replearn import ReplearnError
from replearn.cli.runs import results_below
from replearn.experiments.report.page import build_report
from replearn.experiments.training.compare import compare
from replearn.experiments.training.packed import unpack

from .ledger import RESULTS, open_ledger

GONE = object()
VALUES = (GONE, None, -1, 1e308, True, "x", "<script>alert(1)</script>", [], {}, [[0]])


def demo(method: str) -> Any:
    """The committed result of seed 0."""
    path = RESULTS / "demo_digits.jsonl"
    for result in unpack(path.read_text(encoding="utf-8"), str(path)):
        if not isinstance(result, ReplearnError) and (result.variant["method"], result.seed) == (method, 0):
            return json.loads(result.to_json())
    raise RuntimeError(f"{path} has no {method}")


def fields(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every field; of a list, to its first and last entry."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield (*path, key)
            yield from fields(value, (*path, key))
    elif isinstance(data, list):
        for place in sorted({0, len(data) - 1}) if data else ():
            yield (*path, place)
            yield from fields(data[place], (*path, place))


def edited(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    made = copy.deepcopy(data)
    place = made
    for key in path[:-1]:
        place = place[key]
    if value is GONE:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return made


def replaced(result: Path, put: Callable[[Path], object]) -> None:
    result.unlink()
    put(result)


def model_named(run: Path, name: str) -> None:
    data = json.loads((run / "result.json").read_text())
    data["recipe"]["model"] = name
    (run / "result.json").write_text(json.dumps(data))


def folder_without_a_name(run: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(run.parent) + b"/half-\xff"))
    folder.mkdir()
    shutil.copy(run / "result.json", folder)


ODD: dict[str, Callable[[Path], object]] = {  # what may lie in a run's folder, and should not
    "a link out of the folder": lambda run: replaced(
        run / "result.json", lambda path: path.symlink_to("/etc/passwd")
    ),
    "a pipe as a result": lambda run: replaced(run / "result.json", os.mkfifo),
    "a folder as a result": lambda run: replaced(run / "result.json", Path.mkdir),
    "a deep result": lambda run: (run / "result.json").write_text("[" * 100_000),
    "a model of six million layers": lambda run: model_named(run, "cifar_resnet:6000002:1"),
    "a model in another folder": lambda run: model_named(run, "hf:/etc"),
    "a folder whose name is no text": folder_without_a_name,
    "half a character": lambda run: (run / "result.json").write_bytes(b'"\xff'),
}


def trial(root: Path, good: Any, case: Any) -> str:
    """One edit (path, value), or one of ODD by name, beside a good run."""
    run = root / "runs" / "repl" / "seed-0"
    shutil.rmtree(root / "runs", ignore_errors=True)
    (root / "runs" / "e2e" / "seed-0").mkdir(parents=True)
    (root / "runs" / "e2e" / "seed-0" / "result.json").write_text(json.dumps(demo("e2e")), encoding="utf-8")
    run.mkdir(parents=True)
    (run / "result.json").write_text(json.dumps(good), encoding="utf-8")
    if isinstance(case, str):
        ODD[case](run)
    else:
        (run / "result.json").write_text(json.dumps(edited(good, *case)), encoding="utf-8")
    return look(root)


def look(root: Path) -> str:
    """'told' if the page names a file that it can't use, 'read' if not, 'refused' if there is no page."""
    try:
        report = build_report(root / "runs", root / "page.html")
        page = (root / "page.html").read_text(encoding="utf-8")
        if "<script>alert(1)" in page:
            raise RuntimeError("a field's text is run by the page")
        outcome = "told" if report.collection.unread else "read"
    except ReplearnError:
        outcome = "refused"
    try:
        compare(results_below(root / "runs"))
    except ReplearnError:
        return f"{outcome}, comparison refused"
    return f"{outcome}, compared"


def main() -> int:
    warnings.simplefilter("ignore")
    good = demo("repl")
    edits = [(path, value) for path in fields(good) for value in VALUES]
    cases: list[Any] = [*edits, *ODD]
    ledger = open_ledger("edits", len(cases), 900, fields=len(edits) // len(VALUES))
    with tempfile.TemporaryDirectory() as place:
        while ledger.open:
            case = cases[ledger.done]
            try:
                ledger.count("odd files" if isinstance(case, str) else "fields", trial(Path(place), good, case))
            except Exception as error:
                what = case if isinstance(case, str) else f"{case[0]} = {case[1]!r}"
                ledger.note("faults", f"{what}: {type(error).__name__}: {str(error)[:200]}")
            ledger.finish_case()
    return ledger.report()


if __name__ == "__main__":
    sys.exit(main())
