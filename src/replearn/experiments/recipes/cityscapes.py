"""Segmentation: DeepLabV3 fine-tuned on Cityscapes (table tab:cityscapes_finetune), and on CamVid from scratch.

Command: replearn compare NAME --seeds 0,1,2 --pretrained FILE
Seeds: three, 0 to 2
Hardware: one GPU

Overall accuracy, mean accuracy and mean IoU on val. The paper starts from RepL models trained on ImageNet-1K:
FILE names one for each row, as runs/t2_resnet50/imagenet/{method}/seed-0/model.safetensors. It trains 30,000
steps, which are 162 epochs; its savings come out under first=2. Not given: poly decay with power 0.9, weight
decay 1e-4, scales from 0.5 to 2, flips, an auxiliary head of weight 0.4, whole pictures in tests.
DeepLabV3Plus needs the extra scenes.

## tab_cityscapes_deeplabv3_r50: DeepLabV3-R50 on Cityscapes
## tab_cityscapes_deeplabv3_r101: DeepLabV3-R101 on Cityscapes
## tab_cityscapes_deeplabv3plus_r50: DeepLabV3Plus-R50 on Cityscapes, without an auxiliary head
## tab_cityscapes_deeplabv3plus_r101: DeepLabV3Plus-R101 on Cityscapes, without an auxiliary head
## camvid_deeplabv3: DeepLabV3-R50 on CamVid, from scratch: segmentation that learns in minutes
Command: replearn compare camvid_deeplabv3 --seeds 0 --epochs 20 --methods e2e,repl,repl-reduced
Expected: E2E 38.97, RepL 38.78, RepL reduced 39.41; all differences are undecided
Seeds: one, 0
Hardware: one H200
Time: 2 minutes for the three runs
Backed by: benchmarks/results/camvid_deeplabv3_20_epochs.jsonl

The time of an epoch over E2E's: removal 0.893, RepL 0.976, RepL reduced 0.940
(benchmarks/results/epochs_camvid_deeplabv3.json). 367 road scenes of 480x360 for training, 233 for the test.
"""

from dataclasses import replace

from ..training.recipe import Augment, Optimizer, Recipe, Schedule, Segmentation
from ._paper import SCENES, SCENES_FROM_T2, printed

ROWS = {"E2E": "E2E", "RepL": "RepL first=2"}
V3_R50 = Recipe(
    name="tab_cityscapes_deeplabv3_r50",
    table="tab:cityscapes_finetune",
    task="segmentation",
    model="deeplabv3_resnet50",
    data=("cityscapes",),
    variants=SCENES_FROM_T2,
    epochs=162,
    batch_size=16,
    segmentation=Segmentation(crop=768, auxiliary=0.4),
    optimizer=Optimizer(name="sgd", lr=0.1, momentum=0.9, nesterov=False, weight_decay=1e-4),
    schedule=Schedule(name="poly", power=0.9),
    augment={"cityscapes": Augment(flip=True)},
    precision="tf32",
    paper=printed("tab:cityscapes_finetune", "DeepLabV3-R50", ROWS),
)


def other(name: str, model: str, backbone: str, auxiliary: float) -> Recipe:
    settings, paper = Segmentation(crop=768, auxiliary=auxiliary), printed(V3_R50.table, backbone, ROWS)
    return replace(V3_R50, name=name, model=model, segmentation=settings, paper=paper)


V3_R101 = other("tab_cityscapes_deeplabv3_r101", "deeplabv3_resnet101", "DeepLabV3-R101", 0.4)
V3PLUS_R50 = other("tab_cityscapes_deeplabv3plus_r50", "deeplabv3plus_resnet50", "DeepLabV3Plus-R50", 0.0)
V3PLUS_R101 = other("tab_cityscapes_deeplabv3plus_r101", "deeplabv3plus_resnet101", "DeepLabV3Plus-R101", 0.0)
CAMVID = replace(
    V3_R50,
    name="camvid_deeplabv3",
    table="",
    data=("camvid",),
    variants=SCENES,
    epochs=40,
    segmentation=Segmentation(crop=320, auxiliary=0.4),
    optimizer=replace(V3_R50.optimizer, lr=0.05),
    schedule=Schedule(name="poly", power=0.9, warmup_epochs=2),
    augment={"camvid": Augment(flip=True)},
    clip_norm=5.0,
    precision="bfloat16",
    channels_last=True,
    paper=(),
)
