"""The trainer: golden steps, resuming, runs together, two processes, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")

from official_layouts import write_imagenet

from replearn import ReplearnError, load, models, plan
from replearn.experiments.training.fit import Interrupted, fit
from replearn.experiments.training.optimizers import make_optimizer, rate_at, set_rate
from replearn.experiments.training.recipe import Augment, Optimizer, Recipe, Schedule, Variant, recipe_from_dict
from replearn.experiments.training.results import Result, read_result
from replearn.experiments.training.run import Run, RunSpec
from replearn.experiments.training.state import read_state
from replearn.experiments.training.step import autocast_for, step_body
from replearn.experiments.training.trained import Trained
from replearn.operators import Basic, Removal

VARIANTS = {
    "e2e": Variant(label="E2E", method="e2e"),
    "removal": Variant(label="removal", method="removal", interval=2),
    "repl": Variant(label="RepL", method="repl", interval=2),
    "adaptive": Variant(label="adaptive", method="adaptive", interval=2),
    "late": Variant(label="late", method="late", interval=2, operator=Basic(correction="full")),
    "stochastic_depth": Variant(label="SD", method="stochastic_depth", drop_rate=0.5),
    "repl+stochastic_depth": Variant(label="RepL+SD", method="repl+stochastic_depth", interval=2, drop_rate=0.5),
    "checkpointing": Variant(label="checkpointing", method="checkpointing"),
    "repl+checkpointing": Variant(label="RepL+C", method="repl+checkpointing", interval=2),
    "skip_attention": Variant(label="skip attention", method="skip_attention"),
}


def recipe(**changes: object) -> Recipe:
    base = Recipe(
        name="tiny",
        table="",
        model="cifar_resnet:20:4",
        data=("digits",),
        variants=tuple(VARIANTS.values()),
        epochs=2,
        batch_size=400,
        optimizer=Optimizer(lr=0.1),
        schedule=Schedule(warmup_epochs=1),
        augment={"digits": Augment(pad=1, pad_mode="zeros")},
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def spec(out: Path, variant: str = "repl", seed: int = 0, **changes: object) -> RunSpec:
    return RunSpec(recipe=recipe(**changes), variant=VARIANTS[variant], data="digits", seed=seed, out=out)


def same_checkpoints(*folders: Path) -> None:
    one, other = (read_state(folder / "checkpoint.safetensors")[0] for folder in folders)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def measured(result: Result) -> list[tuple[float, ...]]:
    return [tuple(epoch.measures.values()) for epoch in result.epochs]


class StopAt:
    """A progress that interrupts training before an epoch's step, as Ctrl-C would."""

    def __init__(self, epoch: int) -> None:
        self.at = epoch

    def begin(self, runs: object) -> None: ...
    def step(self, *args: object) -> None: ...
    def note(self, *args: object) -> None: ...
    def end(self) -> None: ...

    def epoch(self, run: int, epoch: object) -> None:
        if epoch.epoch == self.at:  # type: ignore[attr-defined]
            raise KeyboardInterrupt


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_method_trains_digits_and_leaves_its_files(variant: str, tmp_path: Path) -> None:
    changes = {"model": "vit:16:4:2:2", "optimizer": Optimizer(name="adamw", lr=3e-3)}
    changes = changes if variant == "skip_attention" else {}
    (result,) = fit([spec(tmp_path, variant, **changes)], device="cpu")
    assert result.finished
    assert len(result.epochs) == 2
    assert result.epochs[1].measures["train_loss"] < result.epochs[0].measures["train_loss"]
    assert read_result(tmp_path / "result.json") == result
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2]
    assert recipe_from_dict(json.loads((tmp_path / "recipe.json").read_text())) == recipe(**changes)
    assert (result.plan is not None) == (variant.startswith(("repl", "removal", "adaptive", "late")))
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("variant", "where"),
    [
        ("repl", "between epochs"),
        ("adaptive", "inside an epoch"),
        ("late", "between epochs"),
        ("late", "inside an epoch"),
        ("repl+stochastic_depth", "inside an epoch"),
    ],
)
def test_a_resumed_run_is_bit_equal_to_one_never_stopped(variant: str, where: str, tmp_path: Path) -> None:
    whole = fit([spec(tmp_path / "whole", variant)], device="cpu")[0]
    step = None if where == "between epochs" else 4  # 3 steps an epoch: after the fourth, in the second epoch
    resumed = stopped_and_resumed(spec(tmp_path / "stopped", variant), step)
    assert measured(resumed) == measured(whole)
    same_checkpoints(tmp_path / "whole", tmp_path / "stopped")


def test_late_replacement_trains_whole_first_and_goes_on_with_operators_fitted_to_its_blocks(
    tmp_path: Path,
) -> None:
    whole, late, gone = (
        fit(
            [RunSpec(recipe=recipe(), variant=row, data="digits", seed=0, out=tmp_path / row.label)], device="cpu"
        )[0]
        for row in (
            VARIANTS["e2e"],
            VARIANTS["late"],
            dataclasses.replace(VARIANTS["late"], label="gone", operator=Removal()),
        )
    )
    assert late.epochs[0].measures == gone.epochs[0].measures == whole.epochs[0].measures
    assert gone.parameters < late.parameters < whole.parameters
    assert gone.flops < late.flops < whole.flops
    model = models.CifarResNet(20, width=4, in_channels=1)
    planned = plan(model, 2, operator=Basic(correction="full"))
    assert late.parameters == planned.parameters_after
    assert any("fitted in" in note for note in late.notes)
    kept = load(model, tmp_path / "late" / "model.safetensors")
    assert sum(p.numel() for p in kept.parameters()) == late.parameters


def interrupt_at_step(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    plain, taken = Run.step, [0]

    def step(self: Run) -> None:
        taken[0] += 1
        if taken[0] == number:
            signal.raise_signal(signal.SIGINT)  # the step is finished all the same
        plain(self)

    monkeypatch.setattr(Run, "step", step)


def stopped_and_resumed(made: RunSpec, step: int | None = None, device: str = "cpu", **settings: bool) -> Result:
    """The result of a run that is interrupted in a step, or after its first epoch, and then goes on."""
    with pytest.MonkeyPatch.context() as stopping:
        if step is not None:
            interrupt_at_step(stopping, step)
        with pytest.raises(Interrupted, match=r"checkpoint\.safetensors"):
            fit([made], device=device, progress=StopAt(1) if step is None else None, **settings)
    return fit([made], device=device, resume=True, **settings)[0]


def test_runs_trained_together_are_those_trained_alone(tmp_path: Path) -> None:
    kinds = [("repl", 0), ("repl", 1), ("e2e", 0)]
    together = fit([spec(tmp_path / f"t{v}{s}", v, s) for v, s in kinds], device="cpu")
    for (variant, seed), result in zip(kinds, together, strict=True):
        alone = fit([spec(tmp_path / f"a{variant}{seed}", variant, seed)], device="cpu")[0]
        assert measured(alone) == measured(result)
    assert measured(together[0]) != measured(together[1])


def test_each_optimizer_is_torch_s_with_the_recipe_s_settings() -> None:
    layer = torch.nn.Linear(1, 1)
    for name, kind in (("sgd", torch.optim.SGD), ("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam)):
        settings = Optimizer(name=name, lr=0.5, momentum=0.8, weight_decay=0.1, betas=(0.8, 0.9))  # type: ignore[arg-type]
        made = make_optimizer(layer, settings, torch.device("cpu"))
        set_rate(made, 0.25)
        assert type(made) is kind
        (group,) = made.param_groups
        assert (group["lr"], group["weight_decay"]) == (0.25, 0.1)
        rest = {"momentum": 0.8, "nesterov": True} if name == "sgd" else {"betas": (0.8, 0.9)}
        assert rest.items() <= group.items()


def test_unknown_optimizers_and_schedules_are_refused() -> None:
    with pytest.raises(ReplearnError, match="no optimizer 'lamb'"):
        make_optimizer(torch.nn.Linear(1, 1), Optimizer(name="lamb"), torch.device("cpu"))  # type: ignore[arg-type]
    with pytest.raises(ReplearnError, match="no schedule 'linear'"):
        rate_at(Schedule(name="linear"), 1, 8, 2)  # type: ignore[arg-type]


def test_golden_rates_of_each_schedule() -> None:
    def rates(schedule: Schedule) -> list[float]:
        return [round(rate_at(schedule, step, 8, 2), 6) for step in range(8)]

    assert rates(Schedule(name="constant")) == [1.0] * 8
    assert rates(Schedule(name="cosine", warmup_epochs=1)) == [0.5, 1.0, 1.0, 0.933013, 0.75, 0.5, 0.25, 0.066987]
    assert rates(Schedule(name="poly", power=1.0)) == [1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]


def test_coefficients_take_no_weight_decay_and_vectors_only_if_asked() -> None:
    import replearn

    model = replearn.models.CifarResNet(20, width=4)
    replearn.replace_(model, replearn.plan(model, 2))
    held = make_optimizer(model, Optimizer(weight_decay=0.1), torch.device("cpu")).param_groups
    names = {id(p): n for n, p in model.named_parameters()}
    free = {names[id(p)] for group in held if not group["weight_decay"] for p in group["params"]}
    assert free == {f"layer{i}.1.{c}" for i in (1, 2, 3) for c in "ab"}
    held = make_optimizer(model, Optimizer(decay_vectors=False), torch.device("cpu")).param_groups
    assert all(p.dim() > 1 for group in held if group["weight_decay"] for p in group["params"])


def test_accumulation_clipping_and_label_smoothing_train(tmp_path: Path) -> None:
    plain = fit([spec(tmp_path / "a", model="vit:16:3:2:4")], device="cpu")[0]
    parts = fit([spec(tmp_path / "b", model="vit:16:3:2:4", accumulate=2)], device="cpu")[0]
    assert parts.last.measures["train_loss"] == pytest.approx(plain.last.measures["train_loss"], rel=1e-4)
    other = fit([spec(tmp_path / "c", model="vit:16:3:2:4", clip_norm=0.01, label_smoothing=0.1)], device="cpu")[0]
    assert other.last.measures["train_loss"] != pytest.approx(plain.last.measures["train_loss"], rel=1e-3)


def test_float16_scales_the_loss_and_resumes_bit_equal(tmp_path: Path) -> None:
    changes: dict[str, object] = {"precision": "float16", "clip_norm": 1.0}
    whole = fit([spec(tmp_path / "whole", **changes)], device="cpu")[0]
    resumed = stopped_and_resumed(spec(tmp_path / "stopped", **changes))
    assert measured(whole) == measured(resumed)
    assert read_state(tmp_path / "whole" / "checkpoint.safetensors")[1]["scaler"]["scale"] == 2.0**16


def test_a_float16_step_that_overflows_is_left_out() -> None:
    model = torch.nn.Linear(2, 2)
    before = model.weight.detach().clone()
    scaler = torch.amp.GradScaler("cpu")
    cpu, optimizer = torch.device("cpu"), torch.optim.SGD(model.parameters(), lr=1.0)
    for size, moves in ((float("inf"), False), (1.0, True)):
        losses = [lambda size=size: (model(torch.ones(1, 2)) * size).sum()]
        step_body(model, optimizer, lambda losses=losses: losses, autocast_for(cpu, low=False), scaler=scaler)()
        assert torch.equal(before, model.weight) != moves
    assert scaler.get_scale() == 2.0**15


def test_nan_stops_the_run_and_names_the_last_good_state(tmp_path: Path) -> None:
    first = dataclasses.replace(spec(tmp_path), recipe=recipe(epochs=3))
    with pytest.raises(Interrupted):
        fit([first], device="cpu", progress=StopAt(1))
    tensors, about = read_state(tmp_path / "checkpoint.safetensors")
    from replearn.experiments.training.state import write_state

    tensors["model/fc.weight"].fill_(float("nan"))
    write_state(tmp_path / "checkpoint.safetensors", tensors, about)
    with pytest.raises(
        ReplearnError, match=r"training loss is nan in epoch 2.*last good state is .*lower the learning"
    ):
        fit([first], device="cpu", resume=True)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    fit([spec(tmp_path)], device="cpu")
    with pytest.raises(ReplearnError, match=r"belongs to another run \(its seed differ\)"):
        fit([spec(tmp_path, seed=1)], device="cpu", resume=True)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    fit([spec(tmp_path)], device="cpu")
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ReplearnError, match=r"can't be read.*Delete it to start anew"):
        fit([spec(tmp_path)], device="cpu", resume=True)


def test_bad_input_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ReplearnError, match="nothing to train"):
        fit([])
    with pytest.raises(ReplearnError, match=r"larger than digits, which has \d+ training images"):
        fit([spec(tmp_path / "x", batch_size=100_000)], device="cpu")
    with pytest.raises(ReplearnError, match="There is no device 'warp'"):
        fit([spec(tmp_path / "x")], device="warp")
    with pytest.raises(ReplearnError, match="can't be built for 8x8 images"):
        fit([spec(tmp_path / "x", model="vit:16:4:2:16")], device="cpu")
    with pytest.raises(ReplearnError, match="There is no model 'resnet9000'"):
        fit([spec(tmp_path / "x", model="resnet9000")], device="cpu")
    with pytest.raises(ReplearnError, match=r"images of 3 channels; these have 1\. Write timm:NAME"):
        fit([spec(tmp_path / "x", model="torchvision:efficientnet_b0")], device="cpu")
    with pytest.raises(ReplearnError, match="There is no data set 'imagenot'"):
        fit([dataclasses.replace(spec(tmp_path / "x"), data="imagenot")], device="cpu")
    with pytest.raises(ReplearnError, match=r"recipe has no field 'epoch'; its fields are .*epochs"):
        recipe_from_dict({**recipe().to_dict(), "epoch": 3})
    with pytest.raises(ReplearnError, match=r"no operator 'magic'"):
        recipe_from_dict(
            {**recipe().to_dict(), "variants": [{"label": "x", "method": "repl", "operator": {"name": "magic"}}]}
        )
    if not torch.cuda.is_available():
        with pytest.raises(ReplearnError, match=r"no GPU here.*device='cpu'"):
            fit([spec(tmp_path / "x")], device="cuda")


def test_a_full_disk_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", small]).returncode:
        pytest.skip("a small tmpfs can't be mounted here")
    try:
        fit([spec(small / "run", epochs=1)], device="cpu")
        good = (small / "run/checkpoint.safetensors").read_bytes()
        (small / "filler").write_bytes(
            b"0" * max(0, os.statvfs(small).f_bavail * os.statvfs(small).f_bsize - 8192)
        )
        larger = spec(small / "run", epochs=1)
        with pytest.raises(ReplearnError, match=r"Can't (write|save)"):
            fit([larger], device="cpu")
        assert (small / "run/checkpoint.safetensors").read_bytes() == good
        assert not [path for path in (small / "run").iterdir() if path.name.startswith(".")]
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_captured_step_trains_as_the_plain_one(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from replearn.experiments.training import run as run_module

    changes = {"precision": precision, "epochs": 17, "model": "cifar_resnet:20:16"}
    captured = fit([spec(tmp_path / "a", **changes)], device="cuda", deterministic=True)[0]
    assert "step captured as a CUDA graph" in captured.notes

    def refuse(*args: object) -> None:
        raise RuntimeError("not today")

    monkeypatch.setattr(run_module, "CapturedStep", refuse)
    plain = fit([spec(tmp_path / "b", **changes)], device="cuda", deterministic=True)[0]
    assert any("not captured" in note for note in plain.notes)
    for a, b in zip(measured(captured), measured(plain), strict=True):
        assert a[0] == pytest.approx(b[0], rel=2e-2 if precision == "bfloat16" else 1e-3)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_resumed_run_is_bit_equal_on_a_gpu_in_deterministic_mode(tmp_path: Path) -> None:
    whole = fit([spec(tmp_path / "whole")], device="cuda", deterministic=True)[0]
    resumed = stopped_and_resumed(spec(tmp_path / "stopped"), 4, device="cuda", deterministic=True)
    assert measured(resumed) == measured(whole)
    same_checkpoints(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_runs_that_share_a_gpu_do_not_disturb_each_other(tmp_path: Path) -> None:
    changes = {"model": "vit:64:4:4:4", "epochs": 4}
    together = fit(
        [spec(tmp_path / f"t{n}", seed=n, **changes) for n in range(4)], device="cuda", deterministic=True
    )
    for number, result in enumerate(together):
        made = spec(tmp_path / f"a{number}", seed=number, **changes)
        alone = fit([made], device="cuda", deterministic=True)[0]
        for a, b in zip(measured(alone), measured(result), strict=True):
            assert a[0] == pytest.approx(b[0], rel=1e-3)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_run_is_not_charged_with_what_those_before_it_left(tmp_path: Path) -> None:
    peaks = [fit([spec(tmp_path / name)], device="cuda")[0].peak_memory for name in "abcd"]
    assert max(peaks[1:]) - min(peaks[1:]) < 2**20  # cuBLAS alone would keep 68 MB for a stream of each


def test_a_streamed_set_trains_and_resumes_bit_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from replearn.experiments.training import data

    write_imagenet(tmp_path / "data" / "imagenet", train=8, val=3)
    plain = data.load

    def loose(name: str, root: Path | None) -> object:
        # a shipped recipe refuses a set that is not whole; this one is made by hand
        return dataclasses.replace(plain(name, root, strict_counts=False), workers=0)

    monkeypatch.setattr(data, "load", loose)
    augment = {"imagenet": Augment(resize=32, mixup=0.2)}

    def streamed(out: str) -> RunSpec:
        made = spec(tmp_path / out, batch_size=4, augment=augment)
        return dataclasses.replace(made, data="imagenet", data_root=tmp_path / "data")

    whole = fit([streamed("whole")], device="cpu")[0]
    assert whole.finished
    assert whole.epochs[0].images_per_second > 0
    resumed = stopped_and_resumed(streamed("stopped"), 6)  # 4 steps an epoch: in the second one
    assert measured(resumed) == measured(whole)
    run = Trained(whole, streamed("x").recipe, torch.nn.Identity(), torch.zeros(1), tmp_path / "data")
    images, labels = run.test(4)
    assert (images.shape, labels.bincount().tolist()) == ((4, 3, 32, 32), [2, 2])
    assert [len(batch[1]) for batch in run.train_batches(6, 4)] == [4, 2]


def test_a_second_process_in_a_runs_folder_is_told_who_trains_there(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib; from replearn.experiments.training.run_files import locked\n"
        f"with locked(pathlib.Path({str(tmp_path)!r})): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ReplearnError, match=rf"is being trained by process {other.pid} on .* since"):
            fit([spec(tmp_path, "e2e", epochs=1)], device="cpu")
        other.kill()
    assert fit([spec(tmp_path, "e2e", epochs=1)], device="cpu")[0].finished
