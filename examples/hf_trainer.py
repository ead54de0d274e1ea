"""Replacement Learning inside Hugging Face's Trainer: two lines, and a checkpoint that loads again.

    python examples/hf_trainer.py

A small Llama learns to repeat a pattern; nothing is downloaded. In your own script the model comes from
`from_pretrained`, and the two lines stand between it and the Trainer.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import replearn


def small_llama() -> Any:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )
    build: Any = LlamaForCausalLM
    return build(config)


def counting(num: int, length: int = 16) -> list[dict[str, torch.Tensor]]:
    """Sequences that count upwards from a random number."""
    starts = torch.randint(2, 32 - length, (num,), generator=torch.Generator().manual_seed(0))
    rows = [start + torch.arange(length) for start in starts]
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    torch.manual_seed(0)
    model = small_llama()

    plan = replearn.plan(model, first=2)  # line one: which blocks, and what stands in their place
    replearn.replace_(model, plan)  # line two; before the Trainer makes its optimizer

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=3,
            per_device_train_batch_size=32,
            learning_rate=1e-2,
            gradient_checkpointing=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            use_cpu=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=counting(256))
        loss = trainer.train().training_loss
        trainer.save_model(folder)  # save_pretrained: the plan goes into config.json
        again = replearn.from_pretrained(AutoModelForCausalLM, folder)

    prompt = torch.arange(5, 9)[None]
    said = again.generate(prompt, max_new_tokens=6, do_sample=False)
    assert torch.equal(said, model.generate(prompt, max_new_tokens=6, do_sample=False))
    plain: Any = replearn.deploy(again)  # ordinary modules, the same words
    assert torch.equal(plain.generate(prompt, max_new_tokens=6, do_sample=False), said)
    print(
        f"{len(plan.targets)} of {plan.num_blocks} blocks replaced; training loss {loss:.2f}; {said[0].tolist()}"
    )


if __name__ == "__main__":
    main()
