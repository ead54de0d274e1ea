"""timm's models with fewer blocks: create_model, or a class, with depth=, depths= or layers=."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from inspect import signature
from typing import Any

from torch import nn

from .build import Build
from .lists import Shortened

HEAD, SIZE = ("num_classes", "in_chans"), ("img_size", "global_pool")


def supports(model: nn.Module) -> bool:
    return type(model).__module__.startswith("timm.")


def builds(short: Shortened, arguments: dict[str, Any]) -> Iterator[Build]:
    """The registered model with a few of its settings, then with all that can be read off the model."""
    model = short.model
    taken = taken_by(type(model))
    for lengths in of_lengths(short, taken):
        known = {name: value for name, value in settings(model).items() if name in taken or name == "in_chans"}
        registered: str = (getattr(model, "pretrained_cfg", None) or {}).get("architecture") or ""
        for names in (HEAD, (*HEAD, *SIZE), tuple(known)) if registered else ():
            chosen = {name: known[name] for name in names if name in known}
            yield created(registered, {**chosen, **lengths, **arguments})
        if "block" in taken and isinstance(getattr(model, "layer1", None), nn.Sequential):
            known["block"] = type(model.get_submodule("layer1.0"))
        yield of_class(model, {**known, **lengths, **arguments})


def taken_by(model: type) -> set[str]:
    """The constructor's arguments; where it passes them on by **kwargs, those of its base classes too."""
    found: set[str] = set()
    for base in model.__mro__:
        if "__init__" in vars(base):
            parameters = signature(vars(base)["__init__"]).parameters.values()
            found |= {parameter.name for parameter in parameters}
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
                break
    return found


def created(name: str, given: dict[str, Any]) -> Build:
    import timm

    return Build(
        "timm", partial(timm.create_model, name, **given), "timm.create_model", {"model_name": name, **given}
    )


def of_class(model: nn.Module, given: dict[str, Any]) -> Build:
    made = type(model)
    return Build(
        made.__module__.partition(".")[0], partial(made, **given), f"{made.__module__}.{made.__name__}", given
    )


def of_lengths(short: Shortened, taken: set[str]) -> Iterator[dict[str, Any]]:
    """The arguments that say how many blocks there are."""
    (first, *rest) = short.changed
    lists = short.siblings(first)
    if any(found not in lists for found in rest):
        return
    for name in ("depths", "layers"):
        if name in taken:
            yield {name: [len(found.kept) for found in lists]}
    if len(lists) == 1:
        for name in ("depth", "num_layers", "num_blocks"):
            if name in taken:
                yield {name: len(first.kept)}


def settings(model: Any) -> dict[str, Any]:
    """Constructor arguments that can be read off a model."""
    found: dict[str, Any] = {}
    for name in ("num_classes", "embed_dim", "global_pool", "drop_rate"):
        value = getattr(model, name, None)
        if isinstance(value, (int, str, float)):
            found[name] = value
    pool: Any = getattr(model, "global_pool", None)
    if isinstance(getattr(pool, "pool_type", None), str):
        found["global_pool"] = pool.pool_type
    convolution = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if convolution is not None:
        found["in_chans"] = convolution.in_channels
    patches = getattr(model, "patch_embed", None)
    for name in ("img_size", "patch_size"):
        size = getattr(patches, name, None)
        if isinstance(size, tuple) and size:
            found[name] = size[0] if len(set(size)) == 1 else list(size)
    heads = next((m.num_heads for m in model.modules() if isinstance(getattr(m, "num_heads", None), int)), None)
    if heads is not None and "embed_dim" in found:
        found["num_heads"] = heads
    hidden = next((module for name, module in model.named_modules() if name.endswith("mlp.fc1")), None)
    if isinstance(hidden, nn.Linear):
        ratio = hidden.out_features / hidden.in_features
        found["mlp_ratio"] = int(ratio) if ratio == int(ratio) else ratio
    return found
