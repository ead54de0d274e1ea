"""Runs in every process of `torchrun`: trains replaced models, spread over processes and alone, and compares.

A case trains one replaced model twice from the same start: alone on the whole batch, and wrapped on this
process's half of it. The loss is a mean, so both must take the same steps. Rank 0 prints a line of JSON per
case. `test_distributed.py` starts this file and reads the lines; by hand, name parts of the cases you want:

    torchrun --standalone --nproc_per_node=2 tests/distributed_worker.py "head-wise | FSDP2"
"""

from __future__ import annotations

import copy
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import replearn
from replearn import operators
from replearn.experiments.training.methods.adaptive import agreed
from replearn.operators._base.operator import Operator

STEPS = 2
FITS = Path(os.environ.get("FITS", "fits"))  # where the trainer's runs go, and where data/ is that they read
Result = dict[str, Any]

# Widths are odd where they can be: on two processes every shard is then uneven, and a single coefficient
# leaves one process with nothing.
CHANNELS, MIDDLE, TOKEN, HIDDEN = 9, 5, 10, 13


class Bottleneck(nn.Module):
    """With GroupNorm, which does not look at the rest of the batch."""

    replearn_anatomy = replearn.anatomy(
        "mine", "bottleneck", conv1="conv1", conv2="conv2", conv3="conv3", norm="norm", activation="relu"
    )

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(CHANNELS, MIDDLE, 1, bias=False)
        self.conv2 = nn.Conv2d(MIDDLE, MIDDLE, 3, padding=1, bias=False)
        self.conv3 = nn.Conv2d(MIDDLE, CHANNELS, 1, bias=False)
        self.norm = nn.GroupNorm(3, CHANNELS)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv3(self.relu(self.conv2(self.relu(self.conv1(x)))))
        out: Tensor = self.relu(x + self.norm(y))
        return out


class Net(nn.Module):
    """A stem, five blocks and a head: a small CNN, or an encoder over patches that are cut already."""

    def __init__(self, stem: nn.Module, block: Callable[[], nn.Module], head: nn.Module, *pixels: int) -> None:
        super().__init__()
        self.stem, self.head, self.pixels = stem, head, pixels
        self.blocks = nn.ModuleList(block() for _ in range(5))
        self.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        out: Tensor = self.head(x.mean(self.pixels))
        return out


def cnn(block: Callable[[], nn.Module]) -> tuple[nn.Module, Tensor]:
    net = Net(nn.Conv2d(3, CHANNELS, 3, padding=1), block, nn.Linear(CHANNELS, 4), 2, 3)
    return net, torch.randn(8, 3, 6, 6)


def basic() -> tuple[nn.Module, Tensor]:
    return cnn(partial(replearn.models.cifar_resnet.BasicBlock, CHANNELS, CHANNELS, 1))


def bottleneck() -> tuple[nn.Module, Tensor]:
    return cnn(Bottleneck)


def vit(hidden: int = HIDDEN) -> tuple[nn.Module, Tensor]:
    settings: Any = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
    block = partial(nn.TransformerEncoderLayer, TOKEN, 2, hidden, **settings)
    return Net(nn.Linear(7, TOKEN), block, nn.Linear(TOKEN, 4), 1), torch.randn(8, 5, 7)


OPERATORS: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor]], Callable[..., Any]]] = {
    "basic": (basic, operators.Basic),
    "basic low-rank": (basic, partial(operators.Basic, correction="low-rank", rank=2)),
    "bottleneck": (bottleneck, operators.Bottleneck),
    "reduced bottleneck": (bottleneck, operators.ReducedBottleneck),
    "projection": (vit, operators.Projection),
    "projection full": (vit, partial(operators.Projection, correction="full")),
    "head-wise": (vit, operators.HeadWise),
    "attention + MLP": (vit, partial(operators.AttentionMLP, attention="head_wise")),
    "attention + MLP low-rank": (vit, partial(operators.AttentionMLP, correction="low-rank", rank=2)),
    "whole block": (vit, operators.WholeBlock),
    "whole CNN block": (basic, operators.WholeBlock),
    "even attention + MLP": (partial(vit, 12), partial(operators.AttentionMLP, attention="head_wise")),
}


def unreplaced(operator: str) -> tuple[nn.Module, Tensor, Any]:
    """The same model, batch and options in every process."""
    make, options = OPERATORS[operator]
    torch.manual_seed(0)
    return *make(), options


def replaced(
    operator: str, stop_gradient: bool, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, Tensor, Tensor]:
    """A replaced model, ready to be trained, its batch and the labels."""
    model, x, options = unreplaced(operator)
    replearn.replace_(model, replearn.plan(model, interval=2, operator=options(stop_gradient=stop_gradient)))
    with torch.no_grad():
        for parameter in model.parameters():  # away from starting values whose gradients vanish
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.train()
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            # Statistics of half a batch are not those of the whole, so no two processes could take the steps
            # of one, and SyncBatchNorm does not run on a CPU. With fixed statistics they can.
            layer.running_mean.normal_(std=0.1)
            layer.running_var.uniform_(0.5, 1.5)
            layer.eval()
    return model.to(dtype), x.to(dtype), torch.arange(len(x)) % 4


# The ways to spread a model over processes


def fsdp(model: nn.Module, operators_too: bool = True, **options: Any) -> nn.Module:
    """Every block, every operator and the root in a shard group of their own."""
    for block in model.blocks:
        if operators_too or not isinstance(block, Operator):
            fully_shard(block, **options)
    return fully_shard(model, **options)


def checkpointed(model: nn.Module) -> nn.Module:
    model.checkpointed = True
    return fsdp(model)


def compiled(model: nn.Module) -> nn.Module:
    for name, block in list(model.blocks.named_children()):
        model.blocks._modules[name] = torch.compile(block, backend="eager", fullgraph=True)
    return fsdp(model)


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": DistributedDataParallel,
    "FSDP2": fsdp,
    "FSDP2 whole after forward": partial(fsdp, reshard_after_forward=False),
    "FSDP2 operators in the root": partial(fsdp, operators_too=False),
    "FSDP2 checkpointed": checkpointed,
}


# Training


def make_optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    groups = replearn.param_groups(model, weight_decay=1e-2)
    if name == "SGD":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(groups, lr=1e-2)


def train(model: nn.Module, optimizer: str, x: Tensor, labels: Tensor) -> None:
    updates = make_optimizer(model, optimizer)
    for _ in range(STEPS):
        updates.zero_grad()
        cross_entropy(model(x), labels).backward()
        if optimizer == "AdamW":  # as it is used
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        updates.step()


def train_accumulating(model: nn.Module, optimizer: str, x: Tensor, labels: Tensor, keep_whole: bool) -> None:
    """Two half batches to a step, communicating once, with the blocks left whole in between if asked."""
    updates = make_optimizer(model, optimizer)
    for _ in range(STEPS):
        updates.zero_grad()
        for last, half, half_labels in zip((False, True), x.chunk(2), labels.chunk(2), strict=True):
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last or not keep_whole)
            (cross_entropy(model(half), half_labels) / 2).backward()
        updates.step()


def mine(tensor: Tensor) -> Tensor:
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def difference(one: nn.Module, other: nn.Module) -> float:
    """The largest difference of any parameter or buffer, over all processes."""
    states = [{clean(name): whole(tensor) for name, tensor in m.state_dict().items()} for m in (one, other)]
    if states[0].keys() != states[1].keys():
        raise AssertionError(f"the state dicts' keys differ by {states[0].keys() ^ states[1].keys()}")
    largest = torch.tensor([float((states[0][n].double() - t.double()).abs().max()) for n, t in states[1].items()])
    largest = largest.max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def clean(name: str) -> str:
    return name.removeprefix("module.").replace("_orig_mod.", "")


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


# The cases


def steps(
    operator: str, wrap: Callable[[nn.Module], nn.Module], stop_gradient: bool, optimizer: str = "SGD"
) -> Result:
    # The bias of an attention's keys has no gradient but rounding, of which Adam makes steps of any size: in
    # float64 the rounding stays far below Adam's epsilon.
    alone, x, labels = replaced(operator, stop_gradient, torch.float32 if optimizer == "SGD" else torch.float64)
    start, wrapped = copy.deepcopy(alone), wrap(copy.deepcopy(alone))
    train(alone, optimizer, x, labels)
    train(wrapped, optimizer, mine(x), mine(labels))
    return {"difference": difference(wrapped, alone), "moved": difference(start, alone)}


def accumulation(operator: str, stop_gradient: bool, keep_whole: bool) -> Result:
    alone, x, labels = replaced(operator, stop_gradient)
    start, wrapped = copy.deepcopy(alone), fsdp(copy.deepcopy(alone))
    train(alone, "SGD", x, labels)
    train_accumulating(wrapped, "SGD", mine(x), mine(labels), keep_whole)
    return {"difference": difference(wrapped, alone), "moved": difference(start, alone)}


def tensor_parallel(stop_gradient: bool) -> Result:
    """Both processes see the whole batch, and each holds half of every MLP that is not replaced."""
    alone, x, labels = replaced("even attention + MLP", stop_gradient)  # torch's own layers can't do uneven ones
    start, wrapped = copy.deepcopy(alone), copy.deepcopy(alone)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in wrapped.blocks:
        if not isinstance(block, Operator):
            parallelize_module(block, mesh, {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()})
    for model in (alone, wrapped):
        train(model, "SGD", x, labels)
    return {"difference": difference(wrapped, alone), "moved": difference(start, alone)}


def mixed_precision(operator: str) -> Result:
    """FSDP2's bfloat16 policy: everything is computed in bfloat16, and a and b are kept in float32."""
    alone, x, labels = replaced(operator, stop_gradient=False)
    start = copy.deepcopy(alone)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrapped = fsdp(copy.deepcopy(alone), mp_policy=policy)
    train(alone, "SGD", x, labels)
    train(wrapped, "SGD", mine(x), mine(labels))
    found = [p for m in wrapped.modules() if isinstance(m, Operator) for p in m.coefficients()]
    return {
        "difference": difference(wrapped, alone),
        "moved": difference(start, alone),
        "coefficients": sorted({str(parameter.dtype) for parameter in found}),
        "output": str(wrapped(mine(x)).dtype),
    }


def saving() -> Result:
    """A sharded model is refused with a cure; the cure works."""
    alone, x, labels = replaced("attention + MLP low-rank", stop_gradient=True)
    wrapped = fsdp(copy.deepcopy(alone))
    train(alone, "SGD", x, labels)
    train(wrapped, "SGD", mine(x), mine(labels))
    full = get_model_state_dict(wrapped, options=StateDictOptions(full_state_dict=True))
    expected = alone.state_dict()
    apart = max(float((full[name] - tensor).abs().max()) for name, tensor in expected.items())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.safetensors"
        message = refusal(replearn.save, wrapped, path)
        replearn.save(wrapped, path, state=full)
        loaded = replearn.load(unreplaced("attention + MLP low-rank")[0], path)
    return {
        "message": message,
        "keys": full.keys() == expected.keys(),
        "difference": max(apart, difference(loaded, alone)),
    }


def refusals(wrap: Callable[[nn.Module], nn.Module]) -> Result:
    plain, _, _ = unreplaced("projection")
    plan = replearn.plan(plain)
    wrapped = wrap(plain)
    return {"plan": refusal(replearn.plan, wrapped), "replace_": refusal(replearn.replace_, wrapped, plan)}


def refusal(function: Callable[..., Any], *args: Any) -> str:
    try:
        function(*args)
    except replearn.ReplearnError as error:
        return str(error)
    return "not refused"


def one_sharded_block(model: nn.Module) -> nn.Module:
    fully_shard(model.blocks[0])
    return model


def one_parallel_block(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model.blocks[0], mesh, {"linear1": ColwiseParallel()})
    return model


REFUSED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": DistributedDataParallel,
    "FSDP2": fsdp,
    "one block under FSDP2": one_sharded_block,
    "one layer under tensor parallelism": one_parallel_block,
}


def same_steps() -> dict[str, Callable[[], Result]]:
    """The cases in which the wrapped model must take the steps of the model alone, by name."""
    found: dict[str, Callable[[], Result]] = {}
    for held, gradient in ((True, "stop-gradient"), (False, "gradient")):
        for place, operator in enumerate(list(OPERATORS)[:-1]):  # each operator with both, and both with each
            name = ("DDP", "FSDP2")[(place + held) % 2]
            found[f"{operator} | {name} | {gradient}"] = partial(steps, operator, WRAPS[name], held)
        for operator in ("basic", "head-wise", "whole block"):
            for name in list(WRAPS)[2:]:
                if not held or "after forward" in name or operator == "basic":
                    found[f"{operator} | {name} | {gradient}"] = partial(steps, operator, WRAPS[name], held)
        for operator in ("basic", "projection"):
            name = f"{operator} | FSDP2 accumulating, blocks kept whole | {gradient}"
            found[name] = partial(accumulation, operator, held, True)
            for name in ("DDP", "FSDP2"):
                case = partial(steps, operator, WRAPS[name], held, "AdamW")
                found[f"{operator} | {name} | {gradient} | AdamW"] = case
        found[f"even attention + MLP | tensor parallel | {gradient}"] = partial(tensor_parallel, held)
    found["basic | FSDP2 accumulating | gradient"] = partial(accumulation, "basic", False, False)
    found["basic | FSDP2 compiled | gradient"] = partial(steps, "basic", compiled, False)
    return found


def fit_and_stop() -> Result:
    """The trainer, and one run that stops in its second epoch because one process alone is told to."""
    import pytest
    import test_engine as engine

    settings: Any = {"model": "vit:16:4:2:4", "batch_size": 100}
    engine.fit([engine.spec(FITS / "two", **settings)], device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            engine.interrupt_at_step(patch, 18)
        with pytest.raises(engine.Interrupted):
            engine.fit([engine.spec(FITS / "stopped", **settings)], device="cpu")
    return {}


def fit_scenes() -> Result:
    import test_detection as detection
    import test_segmentation as segmentation
    from scenes import any_count

    with any_count():
        for task, name in ((detection, "boxes"), (segmentation, "masks")):
            task.fit([task.spec(FITS / name, FITS / "data", epochs=1)], device="cpu")
    return {}


def shared_scores() -> Result:
    """Each process has scores of its own batch; they go on with the mean."""
    rank = dist.get_rank()
    return {"scores": agreed({"one": float(rank), "two": 3.0 * (1 - rank)})}


def cases() -> dict[str, Callable[[], Result]]:
    rest: dict[str, Callable[[], Result]] = {"saving": saving, "shared scores": shared_scores}
    rest |= {"fit and stop": fit_and_stop, "fit scenes": fit_scenes}
    rest |= {f"refused: {name}": partial(refusals, wrap) for name, wrap in REFUSED.items()}
    # none with BatchNorm: its statistics stay in float32, which does not fit the rest on a CPU
    lower = ("reduced bottleneck", "attention + MLP low-rank", "whole block")
    rest |= {f"bfloat16: {operator}": partial(mixed_precision, operator) for operator in lower}
    return same_steps() | rest


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    for name, case in cases().items():
        if sys.argv[1:] and not any(part in name for part in sys.argv[1:]):
            continue
        began = time.monotonic()
        try:
            result = case()
        except Exception:
            result = {"error": traceback.format_exc()}
        if dist.get_rank() == 0:
            print(json.dumps({"case": name, **result, "seconds": round(time.monotonic() - began, 2)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
