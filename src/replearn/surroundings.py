"""Who else would notice that a block does the work of the operator after it?

Nobody may: its result goes to the operator and nowhere else, nothing else has or reads the weights that change,
and no hook sees the values that do.
"""

from __future__ import annotations

import operator
from collections import Counter

from torch import fx, nn

from .anatomy import Anatomy
from .ending import Ending
from .folding import reaches, words_of
from .tracing import owners_of, trace


class Surroundings:
    """A model's modules, and how often each of them and each parameter is held."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.links = Counter(id(child) for part in self.modules.values() for child in part._modules.values())
        self.uses = Counter(id(p) for part in self.modules.values() for p in part._parameters.values())

    def objection(self, name: str, previous: str, anatomy: Anatomy, ending: Ending) -> str | None:
        """Why the block `previous` can't do the work of the operator `name` after it, as far as others go."""
        return self._sees(previous, ending) or self._elsewhere(name, previous, anatomy)

    def _sees(self, previous: str, ending: Ending) -> str | None:
        """Who else has the Linear, or would see other values."""
        path = f"{previous}.{ending.linear}"
        steps = path.split(".")
        for name in (".".join(steps[: n + 1]) for n in range(len(steps))):
            if name not in self.modules or self.links[id(self.modules[name])] > 1:
                return f"{name} is shared with another part of the model"
        if any(self.uses[id(p)] > 1 for p in self.modules[path]._parameters.values() if p is not None):
            return f"the weights of {path} are shared with another part of the model"
        inside = [f"{previous}.{part}" for part in (ending.linear, *ending.passed)]
        above = {part.rpartition(".")[0] for part in inside}
        for name in (previous, *inside, *above):
            if name in self.modules and _has_hooks(self.modules[name]):
                return f"{name} has hooks, which would see other values"
        return None

    def _elsewhere(self, name: str, previous: str, anatomy: Anatomy) -> str | None:
        """Where the block's result goes, if it is not to the operator alone."""
        owner, *above = owners_of(self.modules, name)
        if owners_of(self.modules, previous)[0] != owner:
            return f"{name} is run by other code"
        label, prefix = owner or "the model", f"{owner}." if owner else ""
        one, other = previous.removeprefix(prefix), name.removeprefix(prefix)
        for left_out in (None, lambda value: value):  # with optional arguments, and without
            graph = trace(self.modules[owner], left_out)
            if isinstance(graph, str):
                return f"the code of {label} can't be traced ({graph.partition('. ')[0]})"
            if not _feeds(graph, one, other, anatomy) or reaches(graph, one, called=True):
                return f"{label} does more with its result than to give it to {name}"
        for place in above:
            graph, prefix = trace(self.modules[place]), f"{place}." if place else ""
            if isinstance(graph, str):
                words = words_of(self.modules[place])
                if any(part in words for part in previous.removeprefix(f"{owner}.").split(".")):
                    return f"{place or 'the model'} can't be traced and may use it as well"
            elif any(str(node.target).startswith(previous.removeprefix(prefix)) for node in graph.nodes):
                return f"{place or 'the model'} uses it as well"
        return None


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _feeds(graph: fx.Graph, one: str, other: str, anatomy: Anatomy) -> bool:
    """Is each of the two called once, and the first for the second alone?"""
    calls = {name: [n for n in graph.nodes if (n.op, n.target) == ("call_module", name)] for name in (one, other)}
    if any(len(found) != 1 for found in calls.values()):
        return False
    value, taker = calls[one][0], calls[other][0]
    if anatomy.returns == "tuple":
        if len(value.users) != 1:
            return False
        (value,) = value.users
        if value.target is not operator.getitem or value.args[1] != 0:
            return False
    taken = taker.args[0] if taker.args else taker.kwargs.get(anatomy.input)
    return list(value.users) == [taker] and taken is value and taker.all_input_nodes.count(value) == 1
