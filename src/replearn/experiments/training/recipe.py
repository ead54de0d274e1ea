"""Recipes: all settings of a run, as frozen typed data."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ...errors import ReplearnError
from ...operators._base.options import Options
from ...planning.serialization import decode, encode

FORMAT = "replearn-recipe-1"


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """SGD with momentum, or AdamW; the learning rate is the peak of the schedule."""

    name: Literal["sgd", "adamw", "adam"] = "sgd"
    lr: float = 0.1
    weight_decay: float = 1e-4
    momentum: float = 0.9
    nesterov: bool = True
    betas: tuple[float, float] = (0.9, 0.999)
    decay_vectors: bool = True  # whether biases and norm weights decay as well; coefficients never do


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate at each step of the run."""

    name: Literal["cosine", "constant", "poly"] = "cosine"
    warmup_epochs: float = 0.0
    power: float = 0.9  # for poly


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Augmentation of training images; for small sets it runs in batch on the device."""

    pad: int = 0
    pad_mode: Literal["reflect", "zeros"] = "reflect"
    flip: bool = False
    resize: int | None = None  # side length the images are brought to
    mixup: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One row of a table: a method with its settings.

    `method` is the name of a file in training/methods, or several joined by `+`
    (`repl+checkpointing`). The placement is the core's: interval and first.
    """

    label: str
    method: str
    interval: int = 4
    first: int | None = None
    operator: Options | None = None
    calibrate: int = 0  # training samples on which operators are fitted before training; 0: no fit
    epochs: int | None = None  # instead of the recipe's, for a row at equal time
    drop_rate: float = 0.1  # stochastic depth: the last block's drop probability

    @property
    def begin(self) -> int:
        """The position of the first target: `first`, or by default the interval, as in the paper."""
        return self.interval if self.first is None else self.first


@dataclass(frozen=True, kw_only=True)
class PaperRow:
    """The paper's numbers for one variant on one data set."""

    data: str
    label: str
    score: float  # by the task's metric: accuracy in percent, perplexity, ...
    std: float | None = None
    top5: float | None = None
    top5_std: float | None = None
    memory_gb: float | None = None
    seconds_per_epoch: float | None = None
    table: str = ""  # that prints it; the recipe's own if not given


@dataclass(frozen=True, kw_only=True)
class Text:
    """How a text becomes training sequences."""

    sequence_length: int = 128
    min_count: int = 2  # words seen less often are <unk>


@dataclass(frozen=True, kw_only=True)
class Detection:
    """Picture sizes of a detector, and limits of its detections."""

    min_size: int = 800  # the shorter side
    max_size: int = 1333  # the longer side at most
    score_threshold: float = 0.05
    max_detections: int = 100  # in a picture; COCO counts no more


@dataclass(frozen=True, kw_only=True)
class Segmentation:
    """Training crops of a segmenter, and its auxiliary loss."""

    crop: int = 768  # the side of a training crop
    scale: tuple[float, float] = (0.5, 2.0)  # a picture is enlarged by a factor from here to there first
    auxiliary: float = 0.4  # the weight of the auxiliary head's loss; 0: no such head


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings for training one model on one of several data sets, with the rows to compare."""

    name: str
    table: str  # the paper's label of the table it belongs to, or ''
    model: str  # a name that training.architectures knows
    data: tuple[str, ...]  # data sets; the first is the default
    variants: tuple[Variant, ...]
    epochs: int
    batch_size: int
    task: str = "classification"  # the name of a file's task in training/tasks
    pretrained: str | None = None  # a file of weights to start from, or timm:NAME for the hub
    classes: tuple[int, ...] = ()  # the classes to train on, numbered anew in this order; all if empty
    text: Text = field(default_factory=Text)
    detection: Detection = field(default_factory=Detection)
    segmentation: Segmentation = field(default_factory=Segmentation)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    augment: Mapping[str, Augment] = field(default_factory=dict)  # by data set; none if missing
    label_smoothing: float = 0.0
    clip_norm: float | None = None
    accumulate: int = 1
    precision: Literal["float32", "tf32", "bfloat16", "float16"] = "float32"  # float16 scales the loss
    channels_last: bool = False
    compile: bool = False
    accelerate: bool = True  # steps run inside replearn.fast.accelerate
    paper: tuple[PaperRow, ...] = ()

    def variant(self, label: str) -> Variant:
        """The variant with this label."""
        for variant in self.variants:
            if variant.label == label:
                return variant
        known = ", ".join(variant.label for variant in self.variants)
        raise ReplearnError(f"The recipe {self.name} has no variant {label!r}; it has {known}.")

    def to_dict(self) -> dict[str, Any]:
        return dict(encode(self))


def slug(label: str) -> str:
    """A label as the name of a folder, which is also its name on the command line.

    >>> slug("RepL first=2")
    'repl-first-2'
    """
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")


def recipe_from_dict(data: Mapping[str, Any]) -> Recipe:
    """A recipe as written by `to_dict`; an unknown or missing field is named in the error."""
    fields = dict(data)
    if (found := fields.pop("format", FORMAT)) != FORMAT:
        raise ReplearnError(
            f"This is not a recipe of this version of replearn: its format is {found!r}, not {FORMAT!r}."
        )
    return decode(Recipe, fields, "recipe")
