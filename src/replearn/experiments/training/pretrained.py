"""Start from trained weights: a file of ours, any other file of tensors, or timm's hub."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...errors import ReplearnError, first_line, library
from ...planning.data import Plan
from ...planning.serialization import parse, read_text
from ...surgery.weights import fill_, load_backbone_, metadata_of, plan_below, read_weights, shape_of
from .architectures import num_heads


def load_pretrained_(
    model: nn.Module,
    source: str,
    words: int | None = None,
    outputs: list[Any] | None = None,
    name: str | None = None,
) -> None:
    """Load trained weights into a fresh model; the output layer keeps its initial values for other classes.

    `source` is a file (safetensors, or a torch file of tensors alone) or `timm:NAME` for timm's hub. `outputs` are
    the data set and classes of this run: if a file of ours was trained on others, even as many, its output layer
    is not loaded. `words` is the size of a language model's vocabulary, whose output layer must fit. `name` is the
    model's name in the recipe, which has the number of heads. A plan in the file is carried out first.

    Raises ReplearnError, with the model unchanged, for weights of another configuration.
    """
    carried, found = weights_of(source)
    moved = None if carried is None else plan_below(model, carried, "", source)
    about = recorded_settings(Path(source))

    def fitting(own: dict[str, Tensor]) -> dict[str, Tensor]:
        head = set() if words is not None else head_names(model)
        check_names(model, found.keys() - head, own.keys() - head, source)
        for key, tensor in own.items():
            if key not in head and found[key].shape != tensor.shape:
                message = shape_message(key, found[key], tensor, words)
                raise ReplearnError(f"{source} is of another configuration: {message}")
        there = about.get("model")  # no shape shows the number of heads
        before, now = (num_heads(each) if isinstance(each, str) else None for each in (there, name))
        if None not in (before, now) and before != now:
            raise ReplearnError(
                f"{source} is of another configuration: it was trained as {there}, with {before} heads, and "
                f"{name} has {now}. Write the model that it is of."
            )
        other = outputs is not None and about.get("outputs", outputs) != outputs
        fits = all(key in found and key in own and found[key].shape == own[key].shape for key in head)
        return {key: found[key] for key in own.keys() - (head if other or not fits else set())}

    fill_(model, moved, source, fitting)


def check_names(model: nn.Module, there: set[str], here: set[str], source: str) -> None:
    """Raise for missing or unknown tensors."""
    missing, unknown = sorted(here - there), sorted(there - here)
    if not missing and not unknown:
        return
    parts = [f"lacks {missing[0]}"] if missing else []
    parts += [f"holds {unknown[0]}, which the model has not"] if unknown else []
    hint = ""
    if any(".a" in name[-2:] or "corrections." in name for name in unknown):
        hint = " It is of a model with replaced blocks: start from one that was trained end to end (E2E)."
    raise ReplearnError(
        f"{source} does not fit this {type(model).__name__}: it {' and '.join(parts)} ({len(missing)} tensors "
        f"are missing, {len(unknown)} unknown).{hint} Use weights of the same architecture, or write the "
        "model that they are of."
    )


def weights_of(source: str) -> tuple[Plan | None, dict[str, Tensor]]:
    """The weights, and the plan of a file of ours whose blocks are replaced."""
    if not source.startswith("timm:"):
        return read_weights(source)
    timm = library("timm", "vision")
    try:
        return None, dict(timm.create_model(source.removeprefix("timm:"), pretrained=True).state_dict())
    except Exception as error:  # the hub's libraries raise errors of many kinds
        raise ReplearnError(
            f"{source} could not be had from the hub: {first_line(error)} Get its file by hand and write "
            "pretrained=FILE."
        ) from error


def shape_message(name: str, found: Tensor, own: Tensor, words: int | None) -> str:
    """Why a tensor has another shape in the file than in the model, and what to write instead."""
    shapes = f"{name} is {shape_of(found)} there and {shape_of(own)} here."
    if words is not None and found.dim() == 2 and own.shape[0] == words and found.shape[1:] == own.shape[1:]:
        return (
            f"{shapes} Its vocabulary has {found.shape[0]:,} words, and this text gives {words:,}: use the text "
            "and the text.min_count that it was trained with."
        )
    if "pos" in name:
        return (
            f"{shapes} It was trained for sequences or images of another size: set augment.DATA.resize (images) "
            "or text.sequence_length (texts) to that size."
        )
    return f"{shapes} Write the model that it is of."


def recorded_settings(path: Path) -> dict[str, Any]:
    """The model's name, data set and classes in a file of ours or in the result beside it; empty for others."""
    try:
        if (about := metadata_of(path).get("about")) is not None:
            return dict(parse(about, "it"))
        result = parse(read_text(path.parent / "result.json"), "result.json")
        recipe = result["recipe"]
        return {"model": recipe.get("model"), "outputs": [result["data"], list(recipe.get("classes", ()))]}
    except (ReplearnError, OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def head_names(model: nn.Module) -> set[str]:
    """The tensors of the output layer, which is the last linear one."""
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return {f"{linear[-1]}.weight", f"{linear[-1]}.bias"} if linear else set()


def start_backbone_(model: nn.Module, source: str) -> str:
    """Load the backbone from a file or timm:NAME; returns what was and wasn't loaded, in words.

    Raises ReplearnError, with the model unchanged, for weights of another backbone.
    """
    if not source.startswith("timm:"):
        return str(load_backbone_(model, source))
    return str(load_backbone_(model, weights_of(source)[1])).replace("the state dict", source, 1)
