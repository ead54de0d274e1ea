"""One model of each kind that people bring from Hugging Face: replaced, trained, saved, loaded and deployed.

    python examples/hf_families.py                # all six
    python examples/hf_families.py qwen2 vit      # some

Llama, Qwen2, Mistral and GPT-2 learn to count and go on counting, BERT fills in masked numbers, a ViT tells where
a picture is bright. All are built from small configurations; nothing is downloaded. What is done with each is
`example_of`, and it is the same for all.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

import replearn

hub: Any = transformers  # whose classes take their settings as keywords that no type tells
WORDS, LENGTH, MASK = 32, 12, 1
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "hidden_size": 32,
    "intermediate_size": 64,
}
TEXT: dict[str, Any] = {**SHAPE, "vocab_size": WORDS, "max_position_embeddings": 32, "pad_token_id": 0}
Batch = dict[str, Tensor]


def counting(count: int) -> Batch:
    """Rows that count upwards from a random number."""
    rows = torch.randint(2, WORDS - LENGTH, (count, 1)) + torch.arange(LENGTH)
    return {"input_ids": rows, "labels": rows}


def masked(count: int) -> Batch:
    """The same with some numbers masked, and only those to be said."""
    rows = counting(count)["input_ids"]
    hidden = torch.rand(rows.shape) < 0.2
    return {"input_ids": rows.masked_fill(hidden, MASK), "labels": rows.masked_fill(~hidden, -100)}


def pictures(count: int) -> Batch:
    """Noise with one bright quarter, whose number is the label."""
    labels = torch.randint(4, (count,))
    images = torch.randn(count, 3, 16, 16)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[:, 8 * (label // 2) :, 8 * (label % 2) :][:, :8, :8] += 2
    return {"pixel_values": images, "labels": labels}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A small configuration, the library's class to load it with, and what it learns from."""

    config: Any
    auto: Any
    batch: Callable[[int], Batch] = counting
    talks: bool = True


CAUSAL = hub.AutoModelForCausalLM
FAMILIES: dict[str, Callable[[], Family]] = {
    "llama": lambda: Family(config=hub.LlamaConfig(**TEXT, num_key_value_heads=2), auto=CAUSAL),
    "qwen2": lambda: Family(
        config=hub.Qwen2Config(**TEXT, num_key_value_heads=2, tie_word_embeddings=True), auto=CAUSAL
    ),
    "mistral": lambda: Family(
        config=hub.MistralConfig(**TEXT, num_key_value_heads=2, sliding_window=8), auto=CAUSAL
    ),
    "gpt2": lambda: Family(
        config=hub.GPT2Config(
            vocab_size=WORDS, n_positions=32, n_embd=32, n_layer=6, n_head=4, bos_token_id=0, eos_token_id=0
        ),
        auto=CAUSAL,
    ),
    "bert": lambda: Family(
        config=hub.BertConfig(**TEXT), auto=hub.AutoModelForMaskedLM, batch=masked, talks=False
    ),
    "vit": lambda: Family(
        config=hub.ViTConfig(**SHAPE, image_size=16, patch_size=4, num_labels=4),
        auto=hub.AutoModelForImageClassification,
        batch=pictures,
        talks=False,
    ),
}


def example_of(name: str, steps: int = 25) -> str:
    family = FAMILIES[name]()
    torch.manual_seed(0)
    model = family.auto.from_config(family.config)
    replearn.replace_(model, plan := replearn.plan(model, interval=2, first=2))  # the one line that is ours
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(replearn.param_groups(model, weight_decay=0.01), lr=3e-3)
    losses = []
    for _ in range(steps):
        loss = model.train()(**family.batch(32)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    assert last < first

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = replearn.from_pretrained(family.auto, folder).eval()
    plain: Any = replearn.deploy(again)
    batch = family.batch(4)
    with torch.no_grad():
        torch.testing.assert_close(plain(**batch).logits, model.eval()(**batch).logits, rtol=1e-4, atol=1e-5)
    said = ""
    if family.talks:
        prompt = torch.arange(5, 9)[None]
        words = [one.generate(prompt, max_new_tokens=6, do_sample=False) for one in (model, again, plain)]
        assert torch.equal(words[0], words[1])
        assert torch.equal(words[0], words[2])
        said = f", says {words[0][0].tolist()}"
    return f"{len(plan.targets)} of {plan.num_blocks} blocks replaced; loss {first:.2f} -> {last:.2f}{said}"


def main() -> None:
    names = sys.argv[1:] or list(FAMILIES)
    if unknown := set(names) - set(FAMILIES):
        sys.exit(f"no family {', '.join(sorted(unknown))}; there are {', '.join(FAMILIES)}")
    for name in names:
        print(f"{name}: {example_of(name)}", flush=True)


if __name__ == "__main__":
    main()
