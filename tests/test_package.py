"""The package as a whole: what it imports, what it ships, and how its files hang together."""

from __future__ import annotations

import ast
import email
import inspect
import json
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint import trained
from torch import nn

import replearn

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "replearn"

# ---- what importing it costs --------------------------------------------------------------------

USE_IT = """
import json, sys

sockets = []
sys.addaudithook(lambda event, args: sockets.append(event) if event.startswith("socket.") else None)
for absent in {absent}:
    sys.modules[absent] = None  # as if it were not installed
import torch, safetensors
before = set(sys.modules)
import replearn
imported = sorted(set(sys.modules) - before)

def resnet():
    return replearn.models.CifarResNet(20, width=4)

given = replearn.load(resnet(), "given.safetensors")  # the first thing it does
plan = replearn.plan(resnet(), interval=2, first=2)
model = replearn.replace_(resnet(), plan)
replearn.param_groups(model, weight_decay=1e-4)
planned = sorted(set(sys.modules) - before)
model.load_state_dict(given.state_dict())
replearn.save(model, "run.safetensors")
images = torch.ones(2, 3, 8, 8)
again = replearn.load(resnet().eval(), "run.safetensors").eval()
plain = replearn.deploy(again, example=images)
equal = torch.equal(again(images), given.eval()(images))
small = replearn.compress(resnet().eval(), [images, images], budget="blocks=1")
equal = equal and small.model(images).shape == (2, 10)
model.train()(images).sum().backward()
replearn.costs.predict(resnet(), images, machine=replearn.costs.named_machine("H100"))
outputs = plain(images).flatten().tolist()
print(json.dumps([sorted({{*sockets}} - {{"socket.gethostname"}}), imported, planned, equal, outputs]))
"""


@dataclass
class Bare:
    """What a fresh interpreter did without optional libraries."""

    sockets: list[str]
    imported: list[str]
    planned: list[str]
    equal: bool
    outputs: list[float]
    given: nn.Module
    folder: Path


def optional_imports() -> list[str]:
    """The import names of everything in the extras, NumPy included: neither torch nor safetensors brings it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {requirement.split(">=")[0] for found in extras.values() for requirement in found}
    renamed = {"scikit-learn": "sklearn", "segmentation-models-pytorch": "segmentation_models_pytorch"}
    renamed["mlflow-skinny"] = "mlflow"
    return sorted(renamed.get(name, name) for name in names if not name.startswith("replearn["))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Bare:
    """A process in which neither an optional library nor Triton can be imported."""
    folder = tmp_path_factory.mktemp("bare")
    given = trained()
    replearn.save(given, folder / "given.safetensors")
    command = [sys.executable, "-W", "ignore", "-c", USE_IT.format(absent=[*optional_imports(), "triton"])]
    environment = {"PATH": "", "PYTHONPATH": str(ROOT / "src"), "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return Bare(*json.loads(done.stdout), given, folder)


def outsiders(modules: list[str]) -> set[str]:
    """The installed packages among these modules, apart from our own two dependencies."""
    top = {name.partition(".")[0] for name in modules}
    return top - set(sys.stdlib_module_names) - {"replearn", "torch", "safetensors"}


def test_torch_and_safetensors_are_enough(bare: Bare) -> None:
    assert outsiders(bare.imported) == set()
    assert bare.equal is True
    torch.testing.assert_close(torch.tensor(bare.outputs), bare.given(torch.ones(2, 3, 8, 8)).flatten())
    assert (bare.folder / "run.safetensors").read_bytes() == (bare.folder / "given.safetensors").read_bytes()


def test_importing_the_package_loads_no_part_of_it_but_its_error(bare: Bare) -> None:
    assert [name for name in bare.imported if name.startswith("replearn")] == ["replearn", "replearn.errors"]


def test_loading_planning_and_replacing_load_no_later_layer_and_nothing_slow(bare: Bare) -> None:
    unwanted = ("replearn.experiments", "replearn.cli", "replearn.fast", "replearn.analysis")
    assert not [name for name in bare.planned if name.startswith(unwanted)]
    slow = {"torch._dynamo", "torch._inductor", "torch.distributed.fsdp"}  # seconds each; a plan needs none
    assert slow & set(bare.planned) == set()


def test_the_core_opens_no_socket(bare: Bare) -> None:
    assert bare.sockets == []


# ---- the public names ---------------------------------------------------------------------------


def public_things() -> Iterator[tuple[str, Any]]:
    for module in (replearn, replearn.models):
        for name in module.__all__:
            yield f"{module.__name__}.{name}", getattr(module, name, None)
    for options in replearn.operators.available().values():
        yield f"replearn.operators.{options.__name__}", options
    blocks = replearn.blocks
    for kind in (replearn.Plan, replearn.planning.Target, blocks.Stack, blocks.Anatomy, blocks.Part):
        for name, method in inspect.getmembers(kind, inspect.isroutine):
            if not name.startswith("_"):
                yield f"{kind.__name__}.{name}", method


@pytest.mark.parametrize(("name", "thing"), [pytest.param(*found, id=found[0]) for found in public_things()])
def test_every_public_name_exists_and_has_a_docstring(name: str, thing: Any) -> None:
    assert thing is not None, f"{name} is listed in __all__ and does not exist"
    text = inspect.getdoc(thing) or ""  # a dataclass without one has a made-up signature instead
    assert text, f"{name} has no docstring"
    assert not (inspect.isclass(thing) and text.startswith(f"{thing.__name__}(")), f"{name} has no docstring"


def test_all_is_sorted_and_lists_no_name_twice() -> None:
    assert replearn.__all__ == sorted(set(replearn.__all__))


# ---- how the files hang together ----------------------------------------------------------------


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


FILES = {module_name(file): file for file in sorted(PACKAGE.rglob("*.py"))}


def imports_of(name: str) -> set[str]:
    """Every module that a file imports at run time, at its top or inside a function; ours by their full name."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.ImportFrom):
            found.update(resolved(name, node))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(FILES[name].read_text(encoding="utf-8")))
    return found


def resolved(name: str, node: ast.ImportFrom) -> set[str]:
    """`from .x import y` as the module x, or as x.y where that is a module too."""
    base = node.module or ""
    if node.level:
        package = name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]
        parts = package.split(".")
        base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
    return {f"{base}.{alias.name}" if f"{base}.{alias.name}" in FILES else base for alias in node.names}


def test_imports_point_one_way() -> None:
    """No two modules need each other at run time, not even through others; CycleError names those that do.

    Left out are imports for types, and a file's look at the folder it lies in, which is always loaded first.
    """
    graph = {
        name: {wanted for wanted in imports_of(name) if wanted in FILES and not name.startswith(f"{wanted}.")}
        for name in FILES
    }
    order = list(TopologicalSorter(graph).static_order())
    assert order.index("replearn.errors") < order.index("replearn.planning.planner")


def test_every_file_is_short_enough_to_read_in_one_go() -> None:
    lines = {name: len(file.read_text(encoding="utf-8").splitlines()) for name, file in FILES.items()}
    assert {name: count for name, count in lines.items() if count > 400} == {}


def test_no_file_is_called_utils() -> None:
    words = {"utils", "util", "helpers", "common", "manager", "misc"}
    assert [name for name in FILES if words & set(name.split("."))] == []


# ---- what is shipped ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    pytest.importorskip("hatchling")
    uv = shutil.which("uv", path=sysconfig.get_path("scripts")) or shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not installed")
    out = tmp_path_factory.mktemp("wheel")
    # without build isolation the installed hatchling is used, and nothing is fetched
    command = [uv, "build", "--wheel", "--no-build-isolation", "--offline", "--python", sys.executable]
    done = subprocess.run([*command, "--out-dir", out, ROOT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (file,) = out.glob("*.whl")
    return zipfile.ZipFile(file)


def test_the_wheel_holds_the_package_its_type_marker_and_the_licence(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert "replearn/py.typed" in names
    assert "replearn/experiments/paper_tables.json" in names
    assert {"replearn/experiments/report/assets/page.css", "replearn/experiments/report/assets/page.js"} <= names
    assert {file.relative_to(PACKAGE.parent).as_posix() for file in FILES.values()} <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"replearn"}


def test_the_wheel_requires_torch_and_safetensors_alone(wheel: zipfile.ZipFile) -> None:
    (metadata,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    about = email.message_from_bytes(wheel.read(metadata))
    always = [line for line in about.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {line.split(">=")[0] for line in always} == {"torch", "safetensors"}
    services = {"wandb", "mlflow", "tensorboard"}
    extras = {"vision", "scenes", "hf", "train", "report", "quant", "export", "all"}
    assert set(about.get_all("Provides-Extra", [])) == extras | services
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Version"] == replearn.__version__


def test_constraints_pin_exact_versions_and_name_no_host_or_path() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in pins if line.count("==") != 1 or any(mark in line for mark in "/@ ")] == []
    assert {"torch===", "torchvision==="} <= {line.rstrip("0123456789.") for line in pins}
