"""ImageNet from scratch (table t2), against removal (table t4), and the classifiers that the scenes start from.

Command: replearn compare NAME --seeds 0,1,2
Seeds: three, 0 to 2
Hardware: four GPUs (torchrun), or one with patience

Not given by the paper: Nesterov momentum 0.9, weight decay, cosine decay after a warm-up of 5 epochs, 90 epochs
for ViTs, all of ViT-Base. Under first=2 its savings come out. The printed Bottleneck operator costs about what
the block costs; `RepL reduced` halves it. `RepL head-wise` is the paper's form with coefficients a head.

## t2_resnet34: ResNet-34; 1 of 16 blocks is replaced by the printed equation, 4 with first=2
## t2_resnet50: ResNet-50, not in the paper's table; the scenes' recipes start from its rows with first=2
## t2_resnet101: ResNet-101; 5 of 33 blocks are replaced by the printed equation, 9 with first=2
## t2_resnet152: ResNet-152; 9 of 50 blocks are replaced by the printed equation, 13 with first=2
## t2_vit_tiny16: ViT-Tiny/16; 2 of 12 blocks are replaced by the printed equation, 3 with first=2
## t2_vit_small16: ViT-Small/16; 2 of 12 blocks are replaced by the printed equation, 3 with first=2
## t2_vit_base16: ViT-Base/16; 2 of 12 blocks are replaced by the printed equation, 3 with first=2"""

from dataclasses import replace

from ...operators.head_wise import HeadWise
from ...operators.reduced_bottleneck import ReducedBottleneck
from ..training.recipe import Recipe
from . import _paper as shared
from ._paper import printed

HEAD_WISE = shared.repl("RepL head-wise first=2", first=2, operator=HeadWise())
REDUCED = shared.repl("RepL reduced first=2", first=2, operator=ReducedBottleneck())

RESNET34 = Recipe(
    name="t2_resnet34",
    table="t2",
    model="resnet34",
    data=("imagenet",),
    variants=(shared.E2E, *shared.BOTH_PLACEMENTS),
    epochs=90,
    batch_size=512,
    optimizer=shared.IMAGENET_SGD,
    schedule=shared.COSINE,
    augment=shared.IMAGENET_AUGMENT,
    precision="tf32",
    channels_last=True,
    paper=printed("t2", "ResNet-34", shared.EITHER) + printed("t4", "ResNet-34", shared.EITHER_REMOVAL),
)
RESNET101 = replace(
    RESNET34,
    name="t2_resnet101",
    model="resnet101",
    variants=(*RESNET34.variants, REDUCED),
    paper=printed("t2", "ResNet-101", shared.EITHER),
)
RESNET50 = replace(RESNET101, name="t2_resnet50", table="", model="resnet50", paper=())
RESNET152 = replace(
    RESNET101, name="t2_resnet152", model="resnet152", paper=printed("t2", "ResNet-152", shared.EITHER)
)

VIT_SMALL16 = replace(
    RESNET34,
    name="t2_vit_small16",
    model="vit_small_16",
    variants=(shared.E2E, shared.SKIP_ATTENTION, *shared.BOTH_PLACEMENTS, HEAD_WISE),
    batch_size=1024,
    optimizer=shared.IMAGENET_ADAMW,
    channels_last=False,
    paper=printed("t2", "ViT-S/16", shared.WITH_SKIP),
)
VIT_BASE16 = replace(
    VIT_SMALL16, name="t2_vit_base16", model="vit_base_16", paper=printed("t2", "ViT-B/16", shared.WITH_SKIP)
)
VIT_TINY16 = replace(
    VIT_SMALL16,
    name="t2_vit_tiny16",
    model="vit_tiny_16",
    paper=printed("t2", "ViT-T/16", shared.WITH_SKIP) + printed("t4", "ViT-Tiny/16", shared.EITHER_REMOVAL),
)
