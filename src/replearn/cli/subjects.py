"""Models by name for `replearn plan`, built without weights, with a batch for them; and those of own files."""

from __future__ import annotations

import logging
import re
from functools import partial
from pathlib import Path
from runpy import run_path
from typing import Any

import torch
from torch import nn

from ..costs.fake import without_weights
from ..errors import ReplearnError, first_line, library
from ..experiments import recipes
from ..experiments.training.architectures import architecture, is_language_model, language_model
from ..experiments.training.data import shape_of
from ..experiments.training.pretrained import head_names, weights_of
from ..experiments.training.scene_models import is_detector, is_segmenter, on_meta

SMALL = ("resnet20", "resnet32", "resnet56", "resnet110", "vit_tiny_8", "vit_patch4")  # for images of 32x32
SMALL_KINDS = ("cifar_resnet:", "vit:")
WORDS = 28_783  # WikiText-2's, in basic English


def is_small(name: str) -> bool:
    return name in SMALL or name.startswith(SMALL_KINDS)


def is_hub_name(source: str) -> bool:
    """ORG/NAME of the Hugging Face hub, and no folder here.

    >>> is_hub_name("google/vit-base-patch16-224"), is_hub_name("gpt2"), is_hub_name("./google/vit")
    (True, False, False)
    """
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source) is not None and not Path(source).exists()


def not_fetched(name: str, error: Exception) -> ReplearnError:
    """The error for a model of the hub that is neither there nor in the cache, or that no network leads to."""
    told = first_line(error).rstrip(".")
    return ReplearnError(
        f"{name} can't be read from the Hugging Face hub or its cache ({told}). Check name and network, or save "
        "the model to a folder (save_pretrained) and write hf:FOLDER."
    )


def refuse_others(name: str) -> None:
    """An error for what is no model but a recipe or a place: names have no slash, and files need a function."""
    if name.endswith(".py"):
        raise ReplearnError(f"MODEL {name}: add the function that returns the model, as {name}:FUNCTION.")
    if "/" in name and ":" not in name:
        hub = f" A model of the Hugging Face hub is written hf:{name}." if is_hub_name(name) else ""
        raise ReplearnError(f"MODEL {name}: there is no run or model in such a folder.{hub}")
    if ":" not in name and name in recipes.available():
        recipe = recipes.recipe(name)
        grey = f" (for 3 channels; {recipe.data[0]} has 1)" if shape_of(recipe.data[0])[1] == 1 else ""
        raise ReplearnError(f"MODEL {name} is a recipe. Write its model, {recipe.model}{grey}.")


def named_model(name: str, weights: str | Path | None, size: int | None) -> tuple[nn.Module, int]:
    """A fresh model of a name, with as many classes as the weights have, and the side of its images."""
    refuse_others(name)
    small = is_small(name)
    side = size or (32 if small else 224)
    classes = 10 if small else 1000
    model = architecture(name, num_classes=classes, size=side)  # a wrong name is told before a wrong file
    if weights is not None:
        _, state = weights_of(str(weights))
        head = next((key for key in head_names(model) if key.endswith("weight")), "")
        if head in state and len(state[head]) != classes:
            model = architecture(name, num_classes=len(state[head]), size=side)
    return model, side


def subject_named(name: str, batch: int, length: int) -> tuple[nn.Module, Any]:
    """The model of a name and a batch for it, of images or of `length` tokens, both without values.

    Raises ReplearnError for a name that nothing knows.
    """
    if is_language_model(name):
        model = without_weights(lambda: language_model(name, num_words=WORDS, max_length=length))
        return model, (tokens(batch, length), tokens(batch, length))  # with targets, as it is trained
    if name.startswith("hf:"):
        return hugging_face(name, batch, length)
    if ".py:" in name:
        model, example = built_by("MODEL", name)
        shaped = isinstance(example, torch.Tensor)
        return model, example.new_empty((batch, *example.shape[1:]), device="meta") if shaped else example
    refuse_others(name)
    if is_segmenter(name):
        return on_meta(name), torch.empty(batch, 3, 224, 224, device="meta")
    if is_detector(name):
        raise ReplearnError(
            f"The costs of {name} can't be predicted from shapes: a detector decides by what it sees. Plan its "
            f"backbone, which is all that a plan looks at: replearn plan {name.rpartition('_')[2]}."
        )
    size, classes = (32, 10) if is_small(name) else (224, 1000)
    model = without_weights(lambda: architecture(name, num_classes=classes, size=size))
    shape = (3, size, size)
    if name.startswith("timm:"):
        shape = getattr(model, "default_cfg", {}).get("input_size", shape)
    return model, torch.empty(batch, *shape, device="meta")


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.empty(batch, length, dtype=torch.int64, device="meta")


def hugging_face(name: str, batch: int, length: int) -> tuple[nn.Module, Any]:
    """`hf:FOLDER` with a config.json, `hf:ORG/NAME` of the hub, or `hf:TYPE` (gpt2, vit, ...) of the library."""
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # of no use here: advice on torchao's enums
    transformers, known = library("transformers", "hf"), library("transformers.models.auto.modeling_auto", "hf")
    source = name.partition(":")[2]
    try:
        if Path(source).exists() or is_hub_name(source):
            config = transformers.AutoConfig.from_pretrained(source, local_files_only=not is_hub_name(source))
        else:
            config = transformers.AutoConfig.for_model(source)
    except (OSError, ValueError) as error:
        if is_hub_name(source):
            raise not_fetched(name, error) from error
        raise ReplearnError(
            f"{name}: there is no config.json of a Hugging Face model at {source!r}, and it is no type of model "
            f"that transformers knows, as gpt2, llama or vit ({str(error).splitlines()[0][:120]})."
        ) from error

    def built(auto: Any) -> Any:
        return without_weights(partial(auto.from_config, config))

    if type(config) in known.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        size = getattr(config, "image_size", None) or 224
        sides = size if isinstance(size, (list, tuple)) else (size, size)
        images = torch.empty(batch, getattr(config, "num_channels", 3), *sides, device="meta")
        return built(transformers.AutoModelForImageClassification), images
    words = tokens(batch, min(length, getattr(config, "max_position_embeddings", None) or length))
    if type(config) in known.MODEL_FOR_MASKED_LM_MAPPING:
        return built(transformers.AutoModelForMaskedLM), {"input_ids": words, "labels": words}
    if type(config) in known.MODEL_FOR_CAUSAL_LM_MAPPING:
        model = built(transformers.AutoModelForCausalLM)
        if getattr(model, "loss_type", "") is None:
            model.loss_type = "ForCausalLM"  # what transformers takes anyway, with a warning
        return model, {"input_ids": words, "labels": words}
    raise ReplearnError(
        f"{name}: a {type(config).__name__} is no image classifier and no language model; plan it in Python, "
        "with replearn.plan(model) and replearn.costs.estimate(model, batch, plan)."
    )


def called(flag: str, place: str) -> Any:
    """What a function in a file of the user's own returns: FILE.py:FUNCTION; its own errors are its own."""
    file, _, name = place.rpartition(":")
    if not Path(file).is_file():
        raise ReplearnError(f"{flag} {place}: there is no file {file}.")
    found = run_path(file).get(name)
    if not callable(found):
        raise ReplearnError(f"{flag} {place}: there is no function {name!r} in {file}.")
    return found()


def built_by(flag: str, place: str) -> tuple[nn.Module, Any]:
    """The model and the example of its input that such a function returns."""
    made = called(flag, place)
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
        raise ReplearnError(
            f"{flag} {place}: the function has to return the fresh model and an example of its input, as "
            "`return model, torch.randn(2, 3, 224, 224)`."
        )
    return made
