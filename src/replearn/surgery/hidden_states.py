"""Hidden-state hooks: Hugging Face models record the outputs of blocks by class, so replacements are told to them.

`output_hidden_states=True` hangs hooks on every module of a class, once and for good. A replacement (an operator,
or its deployed form) is of another class, and the tuple would be an entry short: `hidden_states[5]` would be the
state after block 6. Nothing is done where the library was never imported.
"""

import dataclasses
import sys
from typing import Any

from torch import fx, nn

from ..blocks.stacks import class_path
from ..planning.targets import RECORDER, records_hidden_states

INSTALLED = "_output_capturing_hooks_installed"  # the library's mark on a model that has its hooks
BLOCK = "replaced_block"  # on a replacement: the class of its block


class ReplacementOf(type):
    """A class of which every replacement of blocks of one class is an instance."""

    block_type: str

    def __instancecheck__(cls, module: Any) -> bool:
        return getattr(module, BLOCK, None) == cls.block_type


def record_replacement(model: nn.Module, block: nn.Module, replacement: nn.Module) -> None:
    """Have the Hugging Face parts of the model record the replacement as they did the block."""
    library = sys.modules.get(RECORDER)
    if library is None:
        return
    forget_recording(model)
    block_type = getattr(block, BLOCK, None) or class_path(block)
    if class_path(replacement) == block_type:
        return  # a deployed whole block is one of theirs again
    body = replacement.body if isinstance(replacement, fx.GraphModule) and hasattr(replacement, "body") else None
    setattr(body or replacement, BLOCK, block_type)  # what hooks will hang on
    for part in model.modules():
        recorders = getattr(type(part), "_can_record_outputs", None)  # the class's: one for all its models
        if isinstance(recorders, dict) and "hidden_states" in recorders:
            found = recorders["hidden_states"]
            specs = found if isinstance(found, list) else [found]
            made = [widened(spec, block, block_type, library) for spec in specs]
            recorders["hidden_states"] = made if isinstance(found, list) else made[0]


def widened(spec: Any, block: nn.Module, block_type: str, library: Any) -> Any:
    """A recorder of the block's class that also takes its replacements; any other as it is."""
    recorder = spec if isinstance(spec, library.OutputRecorder) else None
    named = recorder.target_class if recorder else spec
    # none where it goes by a module's name, which a replacement has too
    classes = tuple(kind for kind in (named if isinstance(named, tuple) else (named,)) if isinstance(kind, type))
    if not any(isinstance(block, kind) for kind in classes if not isinstance(kind, ReplacementOf)):
        return spec
    if any(isinstance(kind, ReplacementOf) and kind.block_type == block_type for kind in classes):
        return spec
    wider = (*classes, ReplacementOf("Replacement", (), {"block_type": block_type}))
    recorder = recorder or library.OutputRecorder(target_class=spec)
    return dataclasses.replace(recorder, target_class=wider)


def forget_recording(model: nn.Module) -> None:
    """Take these hooks off again: the model hangs them anew, on what stands there now, when it is next asked."""
    for module in model.modules():
        for key, hook in list(module._forward_hooks.items()):
            if records_hidden_states(hook):
                del module._forward_hooks[key]
        vars(module).pop(INSTALLED, None)
