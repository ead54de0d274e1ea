"""Replacement Learning in Lightning: two lines in the module's `__init__`.

    python examples/hf_lightning.py

A small ViT learns which half of an image is bright; nothing is downloaded. Lightning's own checkpoints need
no plan, since `__init__` carries it out again; `replearn.save` writes one file that loads without Lightning.
"""

from __future__ import annotations

import tempfile
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import ViTConfig, ViTForImageClassification

import replearn


def small_vit() -> Any:
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=8,
        patch_size=4,
    )
    return ViTForImageClassification(config)


class Halves(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = small_vit()
        self.plan = replearn.plan(self.model, first=2)  # line one
        replearn.replace_(self.model, self.plan)  # line two

    def training_step(self, batch: Any, index: int) -> Any:
        images, labels = batch
        return self.model(pixel_values=images, labels=labels).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(replearn.param_groups(self.model, weight_decay=0.01), lr=2e-3)


def main() -> None:
    torch.manual_seed(0)
    labels = torch.randint(2, (512,))
    images = torch.randn(512, 3, 8, 8)
    images[labels == 1, :, :4] += 2.0
    images[labels == 0, :, 4:] += 2.0
    module = Halves()
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=8,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=folder,
        )
        trainer.fit(module, DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True))
        trainer.save_checkpoint(f"{folder}/last.ckpt")
        restored = Halves.load_from_checkpoint(f"{folder}/last.ckpt", map_location="cpu").eval()
        replearn.save(module.model, f"{folder}/model.safetensors")
        alone = replearn.load(small_vit(), f"{folder}/model.safetensors").eval()
    module.eval()
    with torch.no_grad():
        logits = module.model(images).logits
        assert torch.equal(restored.model(images).logits, logits)
        assert torch.equal(alone(images).logits, logits)
    hits = (logits.argmax(1) == labels).float().mean().item()
    assert hits > 0.8
    print(f"{len(module.plan.targets)} of {module.plan.num_blocks} blocks replaced; {100 * hits:.0f} % right")


if __name__ == "__main__":
    main()
