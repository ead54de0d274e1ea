"""Read a trained run from its folder: its result, its model and its data."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ...errors import ReplearnError
from ...planning.planner import plan
from ...planning.serialization import decode
from ...surgery.checkpoint import load
from ...surgery.weights import metadata_of, read_weights
from . import data as datasets
from .architectures import is_language_model
from .data.images import stratified_order
from .image_batches import ImageBatches
from .methods import method_for
from .methods.base import Method, Setting
from .processes import Processes
from .recipe import Augment, Recipe, Variant, recipe_from_dict
from .results import Result, read_result
from .run import RunSpec
from .state import read_state
from .tasks import Task, task_named
from .text_batches import TextBatches

Labelled = tuple[Tensor, Tensor]
MODEL = "model.safetensors"
ANY_WORDS = 64  # of a vocabulary, where nothing depends on its size
PLANNED = "replearn-checkpoint-"  # how the format of a file with a plan begins, of any version


@dataclass(frozen=True, eq=False)
class Trained:
    """A finished run: its result, its model in eval mode, and an example of the model's input.

    The run's data is opened when it is first asked for. A sample is an image with its label, or a window of words
    with the word after each.
    """

    result: Result
    recipe: Recipe
    model: nn.Module
    example: Tensor
    data_root: Path | None = None

    @property
    def label(self) -> str:
        return str(self.result.variant["label"])

    @property
    def name(self) -> str:
        """Recipe, data set, seed and epoch, to print."""
        result = self.result
        return f"{self.recipe.name}, {result.data}, seed {result.seed}, epoch {len(result.epochs)}"

    @property
    def metric(self) -> str:
        """What `score` gives: accuracy, perplexity."""
        return self.result.metric.name

    @cached_property
    def task(self) -> Task:
        """The run's task with its data, not augmented, on the model's device."""
        data = self.result.data
        plain = Augment(resize=self.recipe.augment.get(data, Augment()).resize)
        recipe = replace(self.recipe, augment={data: plain}, pretrained=None, channels_last=False)
        variant = replace(decode(Variant, self.result.variant, "variant"), calibrate=0)
        spec = RunSpec(
            recipe=recipe, variant=variant, data=data, seed=self.result.seed, out=Path(), data_root=self.data_root
        )
        return task_named(recipe.task)(spec, self.example.device, Processes(), {})

    @property
    def _batches(self) -> ImageBatches:
        if not isinstance(self.task.batches, ImageBatches):
            raise ReplearnError(f"{self.result.data} is no set of images with labels, which this command takes.")
        return self.task.batches

    def train_batches(self, count: int, size: int, seed: int = 0) -> list[Labelled]:
        """So many training samples, drawn once and not augmented, in batches with their labels."""
        batches = self.task.batches
        if isinstance(batches, TextBatches):
            starts = batches.starts(seed, -1)[:count].to(self.task.device)
            return [batches.batch(part) for part in starts.split(size)]
        labels = self._batches.labels_of(train=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))[:count]
        return [self._batches.picked(True, part) for part in order.split(size)]

    def test(self, count: int, classes: int | None = None) -> Labelled:
        """Test images as the model takes them, and labels: the same ones for every run, classes evenly.

        Of more classes than asked for, so many are taken, evenly from the first to the last.
        """
        labels = self._batches.labels_of(train=False).cpu()
        known = labels.unique()
        if classes is not None and classes < len(known):
            known = known[torch.arange(classes) * len(known) // classes]
        rows = torch.isin(labels, known).nonzero()[:, 0]
        return self._batches.picked(False, rows[stratified_order(labels[rows], 0)[:count]])

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        """The task's metric on the test set, as the model stands, in float32."""
        return self.task.evaluate(model, nullcontext())[self.task.metric.key]

    def forward(self, model: nn.Module, batch: Labelled) -> Tensor:
        return model(batch[0])

    def loss(self, output: Tensor, batch: Labelled) -> Tensor:
        return cross_entropy(output.flatten(0, -2), batch[1].flatten())


def read_trained(folder: str | Path, device: torch.device | None = None, root: Path | None = None) -> Trained:
    """The finished run in a folder that `replearn train` wrote; a file in that folder stands for it.

    ReplearnError where there is none, where it is not finished or does not fit its recipe's model.
    """
    folder = Path(folder)
    folder = folder.parent if folder.is_file() else folder
    if not (folder / "result.json").exists():
        raise ReplearnError(
            f"There is no run at {folder}: it has no result.json. Name the folder of a finished run, as "
            "runs/t1_resnet32/cifar10/e2e/seed-0; `replearn train RECIPE --method e2e` writes one."
        )
    result = read_result(folder / "result.json")
    recipe, variant = recipe_from_dict(result.recipe), decode(Variant, result.variant, "variant")
    if not (folder / MODEL).is_file():
        raise ReplearnError(
            f"{folder} has no {MODEL}: the run has not finished. Finish it with `replearn train --resume`."
        )
    model, example = fresh_model(recipe, result.data, folder / MODEL)
    model = filled(model, folder / MODEL, method_for(Setting(variant, result.seed)))
    device = device or torch.device("cpu")
    return Trained(result, recipe, model.to(device), example.to(device), root)


def read_full_model(folder: str | Path, device: torch.device, root: Path | None = None) -> Trained:
    """A finished run of a whole classifier or language model; ReplearnError for any other."""
    trained = read_trained(folder, device, root)
    if (method := trained.result.variant["method"]) != "e2e":
        raise ReplearnError(
            f"{folder} was trained with {trained.label} ({method}), so it is not the full model with all of its "
            "blocks. Name a run of method e2e."
        )
    if not isinstance(trained.task.batches, (ImageBatches, TextBatches)):
        raise ReplearnError(f"{trained.name}: this command takes classifiers and language models.")
    return trained


def fresh_model(recipe: Recipe, data: str, file: Path | None = None) -> tuple[nn.Module, Tensor]:
    """The recipe's model as it was before training, and an example of its input; no data is read for it.

    A language model has the vocabulary of the weights in `file`, and without one just any.
    """
    task, (classes, channels, size) = task_named(recipe.task), datasets.shape_of(data)
    size = recipe.augment.get(data, Augment()).resize or size
    classes, example = len(recipe.classes) or classes, task.inputs(recipe, channels, size)
    if is_language_model(recipe.model):
        held = {} if file is None else read_weights(file)[1]
        classes = len(held.get("words.weight", range(ANY_WORDS)))
        # from the first word to the last, since an export is tried on random words between the example's
        example = torch.linspace(0, classes - 1, example.numel()).long().reshape(example.shape)
    return task.fresh(recipe, classes, channels, size), example


def filled(model: nn.Module, file: Path, method: Method | None = None) -> nn.Module:
    """A fresh model with a file's weights, in eval mode: replaced where the file has a plan, else as the method
    that it was trained with leaves it."""
    if not file.is_file():
        raise ReplearnError(f"There is no file or folder {file}. Name the folder of a run, or a checkpoint.")
    kind = metadata_of(file).get("format", "")
    if kind.startswith(PLANNED):
        return load(model, file).eval()
    tensors = read_state(file)[0] if kind.startswith("replearn-") else read_weights(file)[1]
    if method is not None:
        model = method.finish(method.prepare(model))
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise ReplearnError(
            f"{file} does not fit {type(model).__name__}: {str(error).splitlines()[-1].strip()}"
        ) from error
    return model.eval()


def refuse_impossible_rows(specs: Sequence[RunSpec]) -> None:
    """Plan each row that replaces blocks, on a fresh model, which that leaves as it is.

    Raises ReplearnError with the row's label where its operator does not fit, which would else come out when the
    rows before it are trained. Rows that start from weights of their own may bring a plan along, and are left.
    """
    fresh: dict[tuple[str, str], nn.Module] = {}
    for label, spec in {spec.variant.label: spec for spec in specs}.items():
        own = spec.recipe.pretrained is not None and spec.pretrained != spec.recipe.pretrained
        if own or "repl" not in spec.variant.method.split("+"):
            continue
        key = spec.recipe.model, spec.data
        if key not in fresh:
            fresh[key], _ = fresh_model(spec.recipe, spec.data)
        try:
            plan(fresh[key], spec.variant.interval, spec.variant.begin, operator=spec.variant.operator)
        except ReplearnError as error:
            raise ReplearnError(f"The row {label} can't be trained. {error}") from error
