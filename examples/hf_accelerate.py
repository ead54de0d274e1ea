"""Replacement Learning in an accelerate loop: two lines before `prepare`.

    python examples/hf_accelerate.py            # or: accelerate launch examples/hf_accelerate.py

A small GPT-2 learns to repeat a pattern; nothing is downloaded.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel

import replearn


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    config = GPT2Config(
        vocab_size=32, n_positions=32, n_embd=32, n_layer=6, n_head=4, bos_token_id=0, eos_token_id=1
    )
    build: Any = GPT2LMHeadModel
    model = build(config)

    plan = replearn.plan(model, first=2)  # line one
    replearn.replace_(model, plan)  # line two; before the optimizer and before `prepare` wraps the model

    groups = replearn.param_groups(model, weight_decay=0.01)  # coefficients without weight decay
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(groups, lr=1e-2))
    starts = torch.randint(2, 16, (40, 32, 1))
    losses = []
    for rows in starts + torch.arange(16):
        loss = model(input_ids=rows, labels=rows).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]

    bare = accelerator.unwrap_model(model).eval()
    with tempfile.TemporaryDirectory() as folder:
        bare.save_pretrained(folder, save_function=accelerator.save)
        again = replearn.from_pretrained(GPT2LMHeadModel, folder).eval()
    rows = torch.arange(3, 12)[None]
    assert torch.equal(again(rows).logits, bare(rows).logits)
    print(f"{len(plan.targets)} of {plan.num_blocks} blocks replaced; loss {losses[0]:.2f} -> {losses[-1]:.2f}")


if __name__ == "__main__":
    main()
