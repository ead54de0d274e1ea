"""Penultimate features, E2E beside RepL: a t-SNE picture, and two numbers that a picture can't give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ReplearnError
from ..training.trained import Trained
from .matplotlib_figure import new_figure

NEIGHBOURS = 20
PER_CLASS, FEW = (
    10,
    10,
)  # images of a class; up to FEW classes may have fewer
MOST_BYTES = 2**30  # of images at once, so that a streamed set is read in part


@dataclass(frozen=True, kw_only=True)
class FeatureScores:
    """How well the classes lie apart in the features of the layer before the classifier."""

    label: str
    seed: int
    test_images: int
    train_images: int
    silhouette: float  # the mean over test images, from -1 to 1
    knn_accuracy: float  # of the vote of the nearest training images, in percent
    points: tuple[tuple[float, float], ...]
    classes: tuple[int, ...]


def feature_scores(run: Trained, test_images: int = 1000, train_images: int = 5000) -> FeatureScores:
    """The numbers and the t-SNE points of one run. Deterministic: the same images and start every time."""
    try:
        from sklearn.manifold import TSNE
        from sklearn.metrics import silhouette_score
        from sklearn.neighbors import KNeighborsClassifier
    except ImportError as error:
        raise ReplearnError("These figures need scikit-learn: pip install 'replearn[report]'.") from error
    shown = bounded(run, test_images)
    classes = max(shown // PER_CLASS, min(FEW, shown // 2))
    x, y = run.test(shown, classes)
    if len(y) < 10 or len(set(y.tolist())) < 2:
        raise ReplearnError(f"{len(y)} images are too few for a t-SNE; write at least 10, of two classes.")
    known_x, known_y = run.train(bounded(run, train_images), classes)
    features, known = (penultimate(run.model, images).cpu().numpy() for images in (x, known_x))
    labels, known_labels = y.cpu().numpy(), known_y.cpu().numpy()
    vote = KNeighborsClassifier(n_neighbors=min(NEIGHBOURS, len(known_labels))).fit(known, known_labels)
    perplexity = min(30.0, (len(labels) - 1) / 3)
    points = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(features)
    return FeatureScores(
        label=run.label,
        seed=run.result.seed,
        test_images=len(labels),
        train_images=len(known_labels),
        silhouette=float(silhouette_score(features, labels)),
        knn_accuracy=100 * float(vote.score(features, labels)),
        points=tuple((float(a), float(b)) for a, b in points),
        classes=tuple(int(label) for label in labels),
    )


def bounded(run: Trained, count: int) -> int:
    """At most so many images, and no more than fit in MOST_BYTES."""
    return min(count, max(10, MOST_BYTES // (4 * run.example[0].numel())))


@torch.no_grad()
def penultimate(model: nn.Module, images: Tensor, batch: int = 256) -> Tensor:
    """What the classifier is given: the input of the model's last linear layer, a row an image."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    name, caught = type(model).__name__, list[Tensor]()
    if not linears:
        raise ReplearnError(f"{name} has no linear layer, so it has no features before one.")
    handle = linears[-1].register_forward_pre_hook(lambda _, args: caught.append(args[0].flatten(1).float()))
    try:
        for part in images.split(batch):
            model(part)
    finally:
        handle.remove()
    if not caught:
        raise ReplearnError(f"{name} does not run its last linear layer; its features are not known.")
    found = torch.cat(caught)
    if not torch.isfinite(found).all():
        raise ReplearnError(f"The features of {name} are not finite: this run has diverged.")
    return found


def features_figure(scores: Sequence[FeatureScores]) -> Any:
    """The runs side by side, a dot a test image; a colour for each of the first ten classes."""
    figure = new_figure(3.8 * len(scores), 4.4)
    shown = sorted({label for score in scores for label in score.classes})
    colours = {label: f"C{number}" for number, label in enumerate(shown[:10])}
    for axes, score in zip(figure.subplots(1, len(scores), squeeze=False)[0], scores, strict=True):
        numbers = f"silhouette {score.silhouette:.3f}, {NEIGHBOURS}-NN accuracy {score.knn_accuracy:.2f} %"
        axes.set_title(f"{score.label}, seed {score.seed}\n{numbers}", fontsize=9)
        xs, ys = zip(*score.points, strict=True)
        axes.scatter(xs, ys, s=6, c=[colours.get(label, "lightgray") for label in score.classes], alpha=0.75)
        axes.set(xticks=[], yticks=[], aspect="equal")
    others = {f"{len(shown) - 10} other classes": "lightgray"} if len(shown) > 10 else {}
    entries = {f"class {label}": colour for label, colour in colours.items()} | others
    for label, colour in entries.items():
        axes.scatter([], [], s=20, c=colour, label=label)
    figure.legend(loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    return figure
