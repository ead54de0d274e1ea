"""The sixth law over two processes: DDP and FSDP2 take the steps that one process takes.

`distributed_worker.py` does the work, in one `torchrun` for all cases; here its results are judged.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from distributed_worker import OPERATORS, REFUSED, cases, same_steps
from scenes import write_camvid, write_coco
from test_engine import fit, measured, spec

from replearn.experiments.training.results import read_result

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("distributed_worker.py")
TIMEOUT = 400  # a hang would be a deadlock; on two free cores the run takes 45 seconds


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the trainer's runs, shared by all pytest workers."""
    folder = tmp_path_factory.getbasetemp()
    return (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "fits"


@pytest.fixture(scope="module")
def results(fits: Path) -> dict[str, dict[str, Any]]:
    """What every case gave. Of several pytest workers the first runs them, and the others read on."""
    folder = fits.parent
    done = folder / "distributed.jsonl"
    with (folder / "distributed.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            write_coco(fits / "data" / "bccd", {"train": 5, "test": 3})
            write_camvid(fits / "data" / "camvid", train=4, test=3)
            done.write_text(launch(fits))
    lines = [line for line in done.read_text().splitlines() if line.startswith("{")]
    return {result["case"]: result for result in map(json.loads, lines)}


def launch(fits: Path) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(WORKER)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FITS": str(fits)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        process.terminate()  # not kill: torchrun then ends its own processes
        output, errors = process.communicate()
        errors += f"\nstopped after {TIMEOUT} seconds"
    # the cases that came through count even if a later one took the processes down
    return output if process.returncode == 0 else f"{output}\n{json.dumps({'case': 'launch', 'error': errors})}"


def result_of(results: dict[str, dict[str, Any]], case: str) -> dict[str, Any]:
    if case not in results:
        pytest.fail(f"the processes ended before this case:\n{results.get('launch', {}).get('error', '')[-4000:]}")
    if "error" in results[case]:
        pytest.fail(results[case]["error"])
    return results[case]


def test_two_processes_run_every_case_to_the_end(results: dict[str, dict[str, Any]]) -> None:
    assert results.keys() == cases().keys()


@pytest.mark.parametrize("case", same_steps())
def test_two_processes_take_the_steps_of_one(results: dict[str, dict[str, Any]], case: str) -> None:
    result = result_of(results, case)
    assert result["moved"] > 1e-2  # there was something to get wrong
    assert result["difference"] < 1e-6


def test_two_processes_with_a_batch_each_agree_on_the_scores(results: dict[str, dict[str, Any]]) -> None:
    assert result_of(results, "shared scores")["scores"] == {"one": 0.5, "two": 1.5}


@pytest.mark.parametrize("case", [name for name in cases() if name.startswith("bfloat16")])
def test_mixed_precision_of_fsdp2_stays_close_and_keeps_a_and_b_in_float32(
    results: dict[str, dict[str, Any]], case: str
) -> None:
    result = result_of(results, case)
    assert result["output"] == "torch.bfloat16"
    assert set(result["coefficients"]) <= {"torch.float32"}
    assert 0 < result["difference"] < 0.2 * result["moved"]


def test_a_sharded_model_is_saved_through_its_full_state_dict(results: dict[str, dict[str, Any]]) -> None:
    result = result_of(results, "saving")
    for hint in ("is sharded", "full_state_dict=True", "replearn.save(model, path, state="):
        assert hint in result["message"]
    assert result["keys"]
    assert result["difference"] < 1e-6


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_is_spread_already_is_refused_with_the_cure(
    results: dict[str, dict[str, Any]], name: str
) -> None:
    result = result_of(results, f"refused: {name}")
    reason, cure = {
        "DDP": ("it is wrapped in DistributedDataParallel", "then wrap the result"),
        "FSDP2": ("it is sharded", "then fully_shard every block, operators included"),
        "one block under FSDP2": ("its submodule blocks.0 is sharded", "then fully_shard every block"),
        "one layer under tensor parallelism": ("its submodule blocks.0.linear1 is sharded", "plain model first"),
    }[name]
    for door in ("plan", "replace_"):
        assert reason in result[door]
        assert cure in result[door]


def test_two_processes_give_the_curve_of_one_and_what_they_saved_resumes_in_one(
    results: dict[str, dict[str, Any]], fits: Path, tmp_path: Path
) -> None:
    result_of(results, "fit and stop")
    settings: Any = {"model": "vit:16:4:2:4", "batch_size": 100}
    one = fit([spec(tmp_path, **settings)], device="cpu")[0]
    two = read_result(fits / "two" / "result.json")
    assert two.hardware["processes"] == 2
    resumed = fit([spec(fits / "stopped", **settings)], device="cpu", resume=True)[0]
    for other in (two, resumed):
        assert other.finished
        for a, b in zip(measured(one), measured(other), strict=True):
            assert a == pytest.approx(b, rel=1e-4)


def test_two_processes_train_both_tasks_and_look_at_every_test_picture(
    results: dict[str, dict[str, Any]], fits: Path
) -> None:
    result_of(results, "fit scenes")
    for name in ("boxes", "masks"):
        result = read_result(fits / name / "result.json")
        assert result.finished
        assert result.hardware["processes"] == 2
    assert read_result(fits / "masks" / "result.json").last.measures["test_overall"] > 0


def test_every_operator_that_reads_neighbours_is_among_the_cases() -> None:
    from replearn import operators
    from replearn.operators._base.options import ReadingOptions

    tried = {make().name for _, make in OPERATORS.values()}
    reading = {name for name, options in operators.available().items() if issubclass(options, ReadingOptions)}
    assert reading - tried <= {"mlp"}  # which is half of attention_mlp
