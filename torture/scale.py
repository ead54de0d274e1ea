"""Large models: a 70B Llama planned on meta, the cost of planning by blocks, a 1B model replaced and deployed.

    python -m torture.scale

Each case runs in a process of its own, so that its peak memory is its own. Limits: 10 s and 2 GiB for the plan,
4 GiB above the model's own weights for the 1B model, and planning that is linear in the number of blocks.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .ledger import open_ledger

GIB = 2**30
BLOCKS = (50, 100, 200, 400, 800)
CASES = ("plan 70B", *(f"plan {count} blocks" for count in BLOCKS), "deploy 1B")


def llama(layers: int, **shape: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, use_cache=False, **shape))


def memory(line: str) -> int:
    """VmRSS or VmHWM of this process, in bytes; getrusage would count what its parent had, too."""
    for entry in Path("/proc/self/status").read_text().splitlines():
        if entry.startswith(line):
            return int(entry.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {line}")


def plan_large() -> dict[str, Any]:
    import replearn

    with torch.device("meta"):
        model = llama(
            100, hidden_size=7168, intermediate_size=26624, num_attention_heads=56, num_key_value_heads=8,
            vocab_size=128256,
        )  # fmt: skip
    begin = time.perf_counter()
    plan = replearn.plan(model, interval=4, first=2)
    seconds = time.perf_counter() - begin
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "targets": len(plan.targets),
        "seconds": round(seconds, 2),
        "peak_gib": round(memory("VmHWM") / GIB, 2),
        "good": seconds < 10 and memory("VmHWM") < 2 * GIB,
    }


def plan_blocks(count: int) -> dict[str, Any]:
    import replearn

    with torch.device("meta"):
        model = llama(
            count,
            hidden_size=256,
            intermediate_size=512,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=512,
        )
    replearn.plan(model, interval=4, first=2)  # the first one imports
    times = []
    for _ in range(7):
        begin = time.process_time()
        replearn.plan(model, interval=4, first=2)
        times.append(time.process_time() - begin)
    return {"blocks": count, "seconds": round(min(times), 4), "ms_per_block": round(1000 * min(times) / count, 3)}


def deploy_large() -> dict[str, Any]:
    import replearn

    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
    with torch.device("meta"):
        model = llama(16, vocab_size=128256, tie_word_embeddings=True, **shape).bfloat16()
    model = model.to_empty(device="cpu")
    fill_(model)
    model.tie_weights()
    own = sum(p.numel() * p.element_size() for p in model.parameters())
    example = {"input_ids": torch.arange(8)[None]}
    base = memory("VmRSS")
    begin = time.perf_counter()
    replearn.replace_(model, replearn.plan(model, interval=4, first=2))
    plain = replearn.deploy(model.eval(), example=example)
    seconds = time.perf_counter() - begin
    above = memory("VmHWM") - base
    return {
        "parameters": sum(p.numel() for p in plain.parameters()),
        "weights_gib": round(own / GIB, 2),
        "resident_before_gib": round(base / GIB, 2),
        "above_gib": round(above / GIB, 2),
        "seconds": round(seconds, 1),
        "good": above < 4 * GIB and base >= own,
    }


@torch.no_grad()
def fill_(model: nn.Module) -> None:
    """Weights of an ordinary size, quickly."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.uniform_(-0.02, 0.02)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    for name, module in model.named_modules():
        if isinstance(module, LlamaRotaryEmbedding):  # its table is not part of the weights
            model.set_submodule(name, LlamaRotaryEmbedding(module.config))


def run_case(case: str) -> dict[str, Any]:
    if case == "plan 70B":
        return plan_large()
    if case == "deploy 1B":
        return deploy_large()
    return plan_blocks(int(case.split()[1]))


def linear(rows: list[dict[str, Any]]) -> bool:
    """The last block costs no more than twice what a block of the smallest model costs."""
    return len(rows) < 2 or bool(rows[-1]["ms_per_block"] < 2 * rows[0]["ms_per_block"])


def main() -> int:
    if "--case" in sys.argv:
        print(json.dumps(run_case(sys.argv[sys.argv.index("--case") + 1])))
        return 0
    ledger = open_ledger("scale", len(CASES), 600, plan_seconds=10, plan_gib=2, deploy_gib_above=4)
    while ledger.open:
        case = CASES[ledger.done]
        command = [sys.executable, "-W", "ignore", "-m", "torture.scale", "--case", case]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400)
        if done.returncode:
            ledger.note("faults", f"{case}: {done.stderr[-500:]}")
        else:
            row = json.loads(done.stdout.strip().splitlines()[-1])
            ledger.note("table", row) if "blocks" in row else ledger.found.update({case: row})
            if not row.get("good", True) or not linear(ledger.found.get("table", [])):
                ledger.note("faults", f"{case}: {row}")
        ledger.finish_case()
    return ledger.report()


if __name__ == "__main__":
    sys.exit(main())
