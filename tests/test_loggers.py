"""W&B, MLflow and TensorBoard get every epoch of a run, offline here; a missing one names its extra."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sklearn")

from command_line import call

QUICK = ["demo", "--epochs", "2", "--set", "model=cifar_resnet:20:2", "--set", "batch_size=479", "--device", "cpu"]


def test_a_run_is_written_to_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    call("train", *QUICK, "--logger", "wandb", "--out", str(tmp_path))
    wandb.teardown()
    (written,) = tmp_path.rglob("*.wandb")
    text = written.read_bytes()
    assert b"test_accuracy" in text
    assert b"cifar_resnet:20:2" in text


def test_every_run_of_a_comparison_is_written_to_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    words = ["compare", *QUICK, "--methods", "e2e,removal", "--seeds", "0", "--picture", "none"]
    call(*words, "--logger", "mlflow", "--out", str(tmp_path / "runs"))
    client = mlflow.MlflowClient((tmp_path / "store").as_uri())
    runs = client.search_runs([client.get_experiment_by_name("replearn").experiment_id])
    assert sorted(run.data.params["method"] for run in runs) == ["E2E", "removal"]
    for run in runs:
        assert run.info.status == "FINISHED"
        assert [entry.step for entry in client.get_metric_history(run.info.run_id, "test_accuracy")] == [1, 2]


def test_a_run_is_written_to_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    call("train", *QUICK, "--logger", "tensorboard", "--out", str(tmp_path))
    (written,) = tmp_path.rglob("events.out.tfevents.*")
    assert (written.parent / "result.json").exists()
    shown = EventAccumulator(str(written)).Reload()
    assert [entry.step for entry in shown.Scalars("test_accuracy")] == [1, 2]
    assert b"cifar_resnet:20:2" in written.read_bytes()


@pytest.mark.parametrize(
    ("name", "cure"),
    [("wandb", "pip install 'replearn[wandb]'"), ("tape", "--logger tape: there are wandb, mlflow, tensorboard")],
)
def test_a_logger_that_is_not_there_is_told(
    name: str, cure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    assert cure in call("train", *QUICK, "--logger", name, "--out", str(tmp_path), code=2).stderr
