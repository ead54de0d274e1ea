"""Results made up for tests of what happens to results."""

from replearn.experiments.training.recipe import Optimizer, PaperRow, Recipe, Variant
from replearn.experiments.training.results import Epoch, Result
from replearn.planning.serialization import encode

RECIPE = Recipe(
    name="made_up",
    table="",
    model="resnet32",
    data=("cifar10", "svhn"),
    variants=(
        Variant(label="E2E", method="e2e"),
        Variant(label="removal", method="removal"),
        Variant(label="RepL", method="repl"),
        Variant(label="removal first=2", method="removal", first=2),
        Variant(label="RepL first=2", method="repl", first=2),
    ),
    epochs=2,
    batch_size=8,
    optimizer=Optimizer(lr=0.1),
    paper=(
        PaperRow(data="cifar10", label="E2E", score=93.17, std=0.14, memory_gb=4.0, seconds_per_epoch=10.0),
        PaperRow(data="cifar10", label="RepL", score=93.43, std=0.19, memory_gb=3.0, seconds_per_epoch=8.0),
    ),
)


def run(label, seed, accuracy, *, recipe=RECIPE, best=None, seconds=1.0, memory=1000, gpu="a GPU", **changes):
    """A finished run whose last epoch has this accuracy, and whose first one was better by 1."""
    first = accuracy + 1 if best is None else best
    epochs = tuple(
        Epoch(
            epoch=number,
            measures={
                "train_loss": 0.5,
                "train_accuracy": 99.0,
                "test_loss": 0.4,
                "test_accuracy": reached,
                "test_top5": 99.0,
            },
            lr=0.1,
            seconds=seconds,
            images_per_second=100.0,
            peak_memory=memory,
        )
        for number, reached in ((1, first), (2, accuracy))
    )
    fields = {
        "recipe": recipe.to_dict(),
        "variant": encode(recipe.variant(label)),
        "data": "cifar10",
        "seed": seed,
        "plan": None,
        "parameters": 400 if label == "E2E" else 300,
        "flops": 2_000_000,
        "step_ms": 1.0,
        "epochs": epochs,
        "hardware": {"device": "cuda", "gpu": gpu, "processes": 1},
        "versions": {},
        "started": "",
        "finished": True,
    }
    return Result(**{**fields, **changes})
