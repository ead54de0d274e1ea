"""Hold predicted memory and time against a GPU's: E2E, removal and RepL of three models in two precisions.

    python benchmarks/predicted_memory.py --out benchmarks/results/predicted_memory.json

takes less than a minute on an H200. Activation memory is what the allocator holds at the end of the forward pass
(output and loss included) beyond what it held before; the peak is that of a whole step with AdamW. Without a GPU
there is no allocator to ask: then only predictions are written (`--small` takes tiny models, to try the script).
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import replearn
from replearn import operators

PRECISIONS = ("tf32", "bfloat16")
METHODS: dict[str, Any] = {"e2e": None, "removal": operators.Removal(), "repl": False}  # False: the paper's own
STEPS = 5
FORMAT = "replearn-memory-promise-1"


def resnet34(small: bool, device: str) -> tuple[nn.Module, Any]:
    import torchvision

    with torch.device(device):
        model = torchvision.models.resnet34(num_classes=10 if small else 1000)
        return model, torch.randn(2, 3, 64, 64) if small else torch.randn(64, 3, 224, 224)


def vit_small(small: bool, device: str) -> tuple[nn.Module, Any]:
    import timm

    tiny = {"depth": 4, "embed_dim": 32, "num_heads": 2, "img_size": 32} if small else {}
    with torch.device(device):
        model = timm.create_model("vit_small_patch16_224", **tiny)
        return model, torch.randn(2, 3, 32, 32) if small else torch.randn(64, 3, 224, 224)


def gpt2(small: bool, device: str) -> tuple[nn.Module, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    tiny = {"n_layer": 4, "n_embd": 32, "n_head": 2, "vocab_size": 128, "n_positions": 16} if small else {}
    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, **tiny)
    shape = (2, 16) if small else (8, 512)
    with torch.device(device):
        tokens = torch.randint(100, shape)
        return GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


MODELS = {"resnet34": resnet34, "vit_small_16": vit_small, "gpt2": gpt2}


def loss_of(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return cross_entropy(output, torch.zeros(len(output), dtype=torch.long, device=output.device))
    loss: Tensor = output.loss
    return loss


def measure(model: nn.Module, example: Any, precision: str) -> dict[str, float]:
    """What the allocator and the clock say, after a step that sets libraries up."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def forward() -> tuple[Any, Tensor]:
        half = torch.autocast("cuda", torch.bfloat16) if precision == "bfloat16" else nullcontext()
        with half:
            output = model(**example) if isinstance(example, dict) else model(example)
            return output, loss_of(output)

    def step() -> None:
        _, loss = forward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    step()
    torch.cuda.synchronize()
    before, requested = torch.cuda.memory_allocated(), _requested()
    output, loss = forward()
    torch.cuda.synchronize()
    found = {
        "activation_bytes": torch.cuda.memory_allocated() - before,
        "activation_bytes_requested": _requested() - requested,
    }
    del output, loss
    optimizer.zero_grad(set_to_none=True)
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    tensors = [*model.parameters(), *model.buffers(), *(tensor for tensor in states if tensor.is_cuda)]
    others = torch.cuda.memory_allocated() - sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    torch.cuda.reset_peak_memory_stats()
    step()
    found["peak_bytes"] = torch.cuda.max_memory_allocated() - others
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    found["seconds"] = (time.perf_counter() - begin) / STEPS
    return found


def _requested() -> int:
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def replaced(build: Any, small: bool, device: str, operator: Any) -> tuple[nn.Module, Any]:
    model, example = build(small, device)
    model.train()
    if operator is not None:
        plan = replearn.plan(model, interval=4, first=2, operator=operator or None)
        replearn.replace_(model, plan)
    return model, example


def this_machine(on_gpu: bool) -> replearn.costs.Machine:
    """From the table where the GPU is in it, else measured."""
    name = torch.cuda.get_device_name() if on_gpu else "H200"
    for word in name.replace("-", " ").split():
        try:
            return replearn.costs.named_machine(word)
        except replearn.ReplearnError:
            continue
    return replearn.costs.probe()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--out", type=Path, default=Path("predicted_memory.json"))
    arguments.add_argument("--small", action="store_true")
    given = arguments.parse_args()
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "meta"
    machine = this_machine(on_gpu)
    rows = []
    for name, build in MODELS.items():
        for precision in PRECISIONS:
            for method, operator in METHODS.items():
                model, example = replaced(build, given.small, device, operator)
                cost = replearn.costs.predict(model, example, precision=precision, machine=machine, loss=loss_of)
                predicted = {
                    "activation_bytes": cost.total.activation_bytes,
                    "peak_bytes": cost.peak_bytes,
                    "seconds": cost.total.seconds,
                }
                measured = measure(model, example, precision) if on_gpu else None
                ratio = {key: value / measured[key] for key, value in predicted.items()} if measured else None
                rows.append(
                    {"model": name, "method": method, "precision": precision, "predicted": predicted}
                    | {"measured": measured, "predicted_over_measured": ratio}
                )
                shown = "no allocator here" if ratio is None else f"predicted/measured {ratio}"
                print(f"{name:13} {precision:9} {method:8} {predicted['activation_bytes']:>14,} bytes  {shown}")
                del model, example, cost
                gc.collect()
    about = {
        "device": torch.cuda.get_device_name() if on_gpu else "none: nothing was measured",
        "torch": torch.__version__,
        "machine": machine.name,
        "small": given.small,
        "placement": "interval=4, first=2",
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(
        json.dumps({"format": FORMAT, "about": about, "rows": rows}, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
