"""Hidden-state hooks: Hugging Face models record the outputs of blocks by class, so replacements are registered.

`output_hidden_states=True` registers hooks on every module of a class, once. A replacement (an operator, or its
deployed form) is of another class, and without it `hidden_states[5]` would be the state after block 6. Nothing is
done if transformers was never imported.
"""

import dataclasses
import sys
from typing import Any

from torch import fx, nn

from ..blocks.stacks import class_path
from ..planning.targets import RECORDER, records_hidden_states

INSTALLED = "_output_capturing_hooks_installed"  # transformers sets it on a model with its hooks
BLOCK = "replaced_block"  # attribute of a replacement: the class of its block


class ReplacementOf(type):
    """A class for isinstance: its instances are the replacements of blocks of one class."""

    block_type: str

    def __instancecheck__(cls, module: Any) -> bool:
        return getattr(module, BLOCK, None) == cls.block_type


def record_replacement(model: nn.Module, block: nn.Module, replacement: nn.Module) -> None:
    """Make the Hugging Face parts of the model record the replacement as they did the block."""
    library = sys.modules.get(RECORDER)
    if library is None:
        return
    remove_recording_hooks(model)
    block_type = getattr(block, BLOCK, None) or class_path(block)
    if class_path(replacement) == block_type:
        return  # the deployed whole-block operator is of the block's own class
    body = replacement.body if isinstance(replacement, fx.GraphModule) and hasattr(replacement, "body") else None
    setattr(body or replacement, BLOCK, block_type)  # on the module that gets the hooks
    for part in model.modules():
        recorders = getattr(type(part), "_can_record_outputs", None)  # of the class, for all its models
        if isinstance(recorders, dict) and "hidden_states" in recorders:
            found = recorders["hidden_states"]
            specs = found if isinstance(found, list) else [found]
            specs = [with_replacements(spec, block, block_type, library) for spec in specs]
            recorders["hidden_states"] = specs if isinstance(found, list) else specs[0]


def with_replacements(spec: Any, block: nn.Module, block_type: str, library: Any) -> Any:
    """A recorder of the block's class, extended to its replacements; any other recorder unchanged."""
    recorder = spec if isinstance(spec, library.OutputRecorder) else None
    named = recorder.target_class if recorder else spec
    # empty for a recorder by module name, which a replacement has too
    classes = tuple(kind for kind in (named if isinstance(named, tuple) else (named,)) if isinstance(kind, type))
    if not any(isinstance(block, kind) for kind in classes if not isinstance(kind, ReplacementOf)):
        return spec
    if any(isinstance(kind, ReplacementOf) and kind.block_type == block_type for kind in classes):
        return spec
    wider = (*classes, ReplacementOf("Replacement", (), {"block_type": block_type}))
    recorder = recorder or library.OutputRecorder(target_class=spec)
    return dataclasses.replace(recorder, target_class=wider)


def remove_recording_hooks(model: nn.Module) -> None:
    """Remove these hooks; the model registers them again at the next `output_hidden_states=True`."""
    for module in model.modules():
        for key, hook in list(module._forward_hooks.items()):
            if records_hidden_states(hook):
                del module._forward_hooks[key]
        vars(module).pop(INSTALLED, None)
