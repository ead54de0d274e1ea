"""Compress a Llama of 1.2 billion random weights that waits on the CPU, and print the device memory it takes.

    python benchmarks/compress/scale.py --device cuda --out scale.json
    python benchmarks/compress/scale.py --small

Weights come to the device block by block, activations batch by batch. `--small` runs on the CPU: the "device"
cpu:0 is another name of it, so weights are copied as they would be, and counted. Needs transformers.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import replearn

SIZES = {
    "1B": {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 32000},
    "small": {"num_hidden_layers": 8, "hidden_size": 32, "intermediate_size": 96, "vocab_size": 64},
}


def llama(size: str, dtype: torch.dtype) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 32 if size == "1B" else 4}
    return LlamaForCausalLM(LlamaConfig(**SIZES[size], **heads, use_cache=False)).to(dtype).eval()


def texts(batches: int, batch: int, length: int, words: int) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(words, (batch, length), generator=random)} for _ in range(batches)]


def measured(options: argparse.Namespace) -> dict[str, Any]:
    size = "small" if options.small else "1B"
    device = torch.device("cpu:0" if options.small else options.device)
    model = llama(size, torch.float32 if options.small else getattr(torch, options.dtype))
    weights = sum(p.nbytes for p in model.parameters())
    names = [f"model.layers.{i}" for i in range(2, SIZES[size]["num_hidden_layers"] - 1, 4)]
    data = texts(options.batches, options.batch, options.length, SIZES[size]["vocab_size"])
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    begin = time.perf_counter()
    small = replearn.compress(
        model, data, budget=options.budget or names, form=options.form, device=device, offload=options.offload
    )
    seconds = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated(device) if cuda else small.resident
    print(small)
    return {
        "format": "replearn-compress-memory-1",
        "size": size,
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "torch": torch.__version__,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "tokens": options.batches * options.batch * options.length,
        "out": len(small.removed),
        "form": options.form,
        "weights_bytes": weights,
        "resident_weights_bytes": small.resident,
        "peak_bytes": peak,
        "peak_of_weights": round(peak / weights, 3),
        "seconds": round(seconds, 1),
    }


def main(words: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a small model on the CPU")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--form", default="auto")
    parser.add_argument("--budget", help="as blocks=4, to choose; every fourth block by default")
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--offload", type=Path, help="a folder for activations")
    parser.add_argument("--out", type=Path, help="a file for the numbers")
    found = measured(parser.parse_args(words))
    print(json.dumps(found, indent=1))
    out = parser.parse_args(words).out
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main()
