"""Load a replaced Hugging Face model that save_pretrained wrote, with the plan in its config.json."""

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
    """Load a replaced model that `model.save_pretrained` wrote, from a folder or the hub.

    `model_class` is the model's class or an Auto class; settings (dtype, device_map, revision, ...) are those
    of its own `from_pretrained`, which does the loading. Raises ReplearnError without a plan, for a plan that does
    not fit the class, and for missing or unexpected weights.
    """
    if not hasattr(model_class, "from_pretrained"):
        raise ReplearnError(
            f"from_pretrained takes a Hugging Face model class, as AutoModelForCausalLM, got {model_class!r}."
        )
    hub = {name: settings[name] for name in HUB if name in settings}
    library: Any = sys.modules["transformers"]  # imported, since the class is from it
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
    set_placeholders_(model, present=False)
    model.__class__ = concrete  # so that it is pickled and saved as an ordinary model
    return model


def concrete_class(model_class: Any, config: Any) -> Any:
    """The class itself, or the class that an Auto class picks for this config."""
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
    """A subclass whose __init__ carries out the plan, before the weights are loaded."""

    class Replaced(concrete):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            check_fit(self, plan)
            exchange_(self, plan, start=False)
            set_placeholders_(self, present=True)

    # transformers renames old weights only for classes of its own modules
    Replaced.__module__ = concrete.__module__
    Replaced.__name__, Replaced.__qualname__ = concrete.__name__, concrete.__qualname__
    return Replaced


def set_placeholders_(model: Any, *, present: bool) -> None:
    """Set or remove placeholders of the parameters that operators do not own, which are None.

    transformers initializes every parameter before it loads the files, and the code of some models fails for None.
    Parameters that are marked as initialized are skipped.
    """
    for _, operator in operators_of(model):
        for module in operator.modules():
            for name in (name for name, parameter in module._parameters.items() if parameter is None):
                if present:
                    placeholder: Any = torch.empty(0, device="meta")
                    placeholder._is_hf_initialized = True
                    vars(module)[name] = placeholder
                else:
                    vars(module).pop(name, None)
