"""What the paper's recipes share: data sets, optimizers, rows to train, and how the paper calls them."""

from collections.abc import Mapping
from dataclasses import replace

from ...operators._base.options import Options
from ...operators.reduced_bottleneck import ReducedBottleneck
from ..training.paper import printed as printed
from ..training.recipe import Augment, Optimizer, Recipe, Schedule, Variant

Labels = Mapping[str, str | tuple[str, ...]]

BACKBONES = {"resnet32": "ResNet-32", "resnet110": "ResNet-110", "vit_tiny_8": "ViT-Tiny/8"}  # the paper's names
SMALL_SETS = ("cifar10", "svhn", "stl10")
SMALL_AUGMENT = {
    "cifar10": Augment(pad=4, pad_mode="reflect", flip=True),
    "svhn": Augment(pad=2, pad_mode="zeros"),
    "stl10": Augment(pad=4, pad_mode="zeros", flip=True),
}
IMAGENET_AUGMENT = {"imagenet": Augment(resize=224, flip=True)}

COSINE = Schedule(name="cosine", warmup_epochs=5)
SMALL_SGD = Optimizer(name="sgd", lr=0.8, momentum=0.9, nesterov=True, weight_decay=1e-4)
SMALL_ADAMW = Optimizer(name="adamw", lr=1e-3, weight_decay=0.05)
IMAGENET_SGD = Optimizer(name="sgd", lr=0.2, momentum=0.9, nesterov=True, weight_decay=1e-4)
IMAGENET_ADAMW = Optimizer(name="adamw", lr=7.5e-4, weight_decay=0.05)

E2E = Variant(label="E2E", method="e2e")
SKIP_ATTENTION = Variant(label="Skip-Attention", method="skip_attention")


def removal(label: str = "removal", *, interval: int = 4, first: int | None = None) -> Variant:
    return Variant(label=label, method="removal", interval=interval, first=first)


def repl(
    label: str = "RepL", *, interval: int = 4, first: int | None = None, operator: Options | None = None
) -> Variant:
    return Variant(label=label, method="repl", interval=interval, first=first, operator=operator)


# The printed equation places the first target at K; under first=2 the paper's savings come out.
BOTH_PLACEMENTS = (removal(), repl(), removal("removal first=2", first=2), repl("RepL first=2", first=2))


# The paper does not say which placement it measured, so its numbers stand beside both.
def either(label: str) -> tuple[str, str]:
    return label, f"{label} first=2"


def same(*labels: str) -> dict[str, str]:
    return {label: label for label in labels}


E2E_REPL = same("E2E", "RepL")
EITHER: Labels = {"E2E": "E2E", "RepL": either("RepL")}
WITH_SKIP: Labels = {**EITHER, "Skip-Attention": "Skip-Attention"}
EITHER_REMOVAL: Labels = {"- 25% layers": either("removal")}
SOURCES = {"E2E": "E2E", "succeeding layer": "RepL next", "preceding layer": "RepL previous"}
SOURCES |= {"both layers": "RepL both"}
COMBINED = same("E2E", "RepL", "Stochastic Depth", "RepL+Stochastic Depth", "Checkpointing", "RepL+Checkpointing")

# Detection and segmentation: first=2 gives the paper's savings.
REDUCED = ReducedBottleneck()
SCENES = (E2E, removal(first=2), repl(first=2), repl("RepL reduced", first=2, operator=REDUCED))
# Labelled as the rows of t2 that their classifiers are trained by: `{method}` in `pretrained` is the label's slug.
SCENES_FROM_T2 = (E2E, *(replace(row, label=f"{row.label} first=2") for row in SCENES[1:]))


def on_cifar10(base: Recipe, name: str, table: str, variants: tuple[Variant, ...], labels: Labels) -> Recipe:
    """Other rows, trained as a recipe of table t1 on CIFAR-10; a table without E2E gets the row of t1."""
    backbone = BACKBONES[base.model]
    e2e = () if "E2E" in labels else printed("t1", backbone, {"E2E": "E2E"}, data="cifar10")
    paper = (*e2e, *printed(table, backbone, labels))
    return replace(base, name=name, table=table, data=("cifar10",), variants=variants, paper=paper)
