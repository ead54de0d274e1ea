"""Load a replaced Hugging Face model that save_pretrained wrote: the plan is in its config.json."""

import json
import os
import sys
from typing import Any

import torch

from ..errors import ReplearnError, first_line
from ..planning.data import Plan
from .plan_metadata import CONFIG
from .replace import check_fit, exchange_, operators_of

HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token", "trust_remote_code")


def from_pretrained(model_class: Any, source: str | os.PathLike[str], **settings: Any) -> Any:
    """A replaced model as `model.save_pretrained` wrote it, from a folder or the hub.

    `model_class` is the model's class or an Auto class; settings (dtype, device_map, revision, ...) are those
    of its own `from_pretrained`, which does the loading. Raises ReplearnError where there is no plan, where the
    plan does not fit the class, and where weights are missing or left over.
    """
    if not hasattr(model_class, "from_pretrained"):
        raise ReplearnError(
            f"from_pretrained takes a Hugging Face model class, as AutoModelForCausalLM, got {model_class!r}."
        )
    hub = {name: settings[name] for name in HUB if name in settings}
    library: Any = sys.modules["transformers"]  # loaded, since the class is one of its
    try:
        config = library.AutoConfig.from_pretrained(source, **hub)
    except (OSError, ValueError) as error:
        raise ReplearnError(
            f"{source} can't be read: it is neither a folder with the config.json of a Hugging Face model nor one "
            f"of the hub's that is within reach ({first_line(error)}). Name the folder that save_pretrained wrote."
        ) from error
    stored = getattr(config, CONFIG, None)
    if stored is None:
        raise ReplearnError(
            f"{source} holds no replaced model: its config.json has no {CONFIG}. Load it with "
            f"{model_class.__name__}.from_pretrained, then plan and replace_."
        )
    plan = Plan.from_json(json.dumps(stored))
    concrete = concrete_class(model_class, config)
    replaced = with_plan(concrete, plan)
    start_anew = bool(settings.pop("ignore_mismatched_sizes", False))
    try:
        model, found = replaced.from_pretrained(
            source, output_loading_info=True, ignore_mismatched_sizes=True, **settings
        )
    except (RuntimeError, OSError) as error:
        raise ReplearnError(
            f"The weights in {source} can't be read as those of its config.json: {first_line(error).rstrip('.')}. "
            "Use the folder as save_pretrained wrote it."
        ) from error
    for name, there, here in sorted(found.pop("mismatched_keys", ()), key=str):
        if not start_anew:
            raise ReplearnError(
                f"The weights in {source} are of another configuration: {name} has the shape {tuple(there)} there "
                f"and {tuple(here)} here. Use the configuration (vocabulary, classes, width) that they were saved "
                "with; ignore_mismatched_sizes=True starts such tensors anew."
            )
    wrong = {what: sorted(map(str, names)) for what, names in found.items() if names and what.endswith("_keys")}
    for what, names in wrong.items():
        raise ReplearnError(
            f"The weights in {source} are not those of its plan: {len(names)} {what.replace('_', ' ')} "
            f"({names[0]}). Use the folder as save_pretrained wrote it."
        )
    held_places(model, held=False)
    model.__class__ = concrete  # an ordinary model from here on: pickled, saved and called as one
    return model


def concrete_class(model_class: Any, config: Any) -> Any:
    """The class itself; of an Auto class, the one for this config."""
    mapping = getattr(model_class, "_model_mapping", None)
    if mapping is None:
        return model_class
    if type(config) not in mapping:
        raise ReplearnError(
            f"{model_class.__name__} has no model for a {type(config).__name__}; use another class."
        )
    found = mapping[type(config)]
    return found[0] if isinstance(found, tuple) else found


def with_plan(concrete: Any, plan: Plan) -> Any:
    """The class, with the plan carried out as soon as a model is built and before its weights are loaded."""

    class Replaced(concrete):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            check_fit(self, plan)
            exchange_(self, plan, start=False)
            held_places(self, held=True)

    # by its module the library tells its own classes, whose weights it may rename, from foreign ones
    Replaced.__module__ = concrete.__module__
    Replaced.__name__, Replaced.__qualname__ = concrete.__name__, concrete.__qualname__
    return Replaced


def held_places(model: Any, *, held: bool) -> None:
    """Put something in the place of the parameters that operators read elsewhere, while the library loads.

    It starts every module's parameters before it fills them from the files, and some models' code for that takes
    no None. What is marked as started is passed over.
    """
    for _, operator in operators_of(model):
        for module in operator.modules():
            for name in (name for name, parameter in module._parameters.items() if parameter is None):
                if held:
                    place: Any = torch.empty(0, device="meta")
                    place._is_hf_initialized = True
                    vars(module)[name] = place
                else:
                    vars(module).pop(name, None)
