"""Hugging Face models with fewer blocks: the same class, with a config that says how many."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any, cast

from torch import nn

from .build import Build
from .lists import BlockList, Shortened

COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")  # the first is n_layer too in GPT-2 and others
SIDE_COUNTS = ("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers")
STAGES = ("depths", "layers")  # a number for every stage
Edit = tuple[str, str, Any]  # the name of an inner config, as "text_config", or ""; its attribute; the new value


def supports(model: nn.Module) -> bool:
    return hasattr(model, "save_pretrained") and hasattr(getattr(model, "config", None), "to_json_string")


def builds(short: Shortened, arguments: dict[str, Any]) -> Iterator[Build]:
    """Every config in which attributes that held the old lengths hold the new ones."""
    model: Any = short.model
    choices = []
    seen: set[str] = set()
    for found in short.changed:
        if found.name not in seen:
            stages = list(of_stages(model.config, short.siblings(found)))
            if stages:
                seen |= {sibling.name for sibling in short.siblings(found)}
            choices.append([*stages, *of_count(model.config, found)])
    for edits in product(*choices):
        config = copy.deepcopy(model.config)
        for part, name, value in (edit for group in edits for edit in group):
            setattr(getattr(config, part) if part else config, name, value)
        for name, value in arguments.items():
            setattr(config, name, value)
        yield Build("transformers", partial(with_config, model, config), type(model).__name__, {})


def with_config(model: Any, config: Any) -> nn.Module:
    """A model of the same class with another config, and with the old one's generation settings."""
    built: Any = type(model)(config)
    settings = getattr(model, "generation_config", None)
    if settings is not None:
        built.generation_config = copy.deepcopy(settings)
    return cast(nn.Module, built)


def parts(config: Any) -> Iterator[tuple[str, Any]]:
    """The config and its inner configs, as text_config and vision_config."""
    yield "", config
    for name, value in vars(config).items():
        if hasattr(value, "to_json_string"):
            yield name, value


def of_count(config: Any, found: BlockList) -> Iterator[list[Edit]]:
    """Edits of a number of layers that equals the list's length, and of lists with an entry for every layer."""
    for part, owner in parts(config):
        for name in (*COUNTS, *SIDE_COUNTS):
            if getattr(owner, name, None) == found.length:
                yield [(part, name, len(found.kept)), *per_layer(part, owner, found)]


def per_layer(part: str, owner: Any, found: BlockList) -> Iterator[Edit]:
    """Lists such as layer_types, cut to the layers that are kept."""
    for name, value in vars(owner).items():
        if "layer" in name and isinstance(value, (list, tuple)) and len(value) == found.length:
            yield part, name, type(value)(value[index] for index in found.kept)
    stages = list(getattr(owner, "stage_names", None) or ())
    last = len(found.kept)
    if len(stages) == found.length + 1 and list(owner.out_features or ()) == stages[-1:]:  # those of a backbone
        yield part, "stage_names", stages[: last + 1]
        yield part, "_out_features", [stages[last]]
        yield part, "_out_indices", [last]


def of_stages(config: Any, lists: tuple[BlockList, ...]) -> Iterator[list[Edit]]:
    """Edits of a list of the stages' lengths."""
    for part, owner in parts(config):
        for name in STAGES:
            if list(getattr(owner, name, None) or ()) == [found.length for found in lists]:
                yield [(part, name, [len(found.kept) for found in lists])]
