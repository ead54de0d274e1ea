"""1,000 random networks and plans: each goes all the way, or is refused with a message that names the block.

    python -m torture.generated

Planned, replaced, trained a step, saved, loaded, deployed with equal outputs; or a ReplearnError. A third outcome
is a fault, written down with its seed: `python -m torture.generated --seed 17` shows it.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
import warnings
from dataclasses import fields
from random import Random
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

import replearn
from replearn import ReplearnError, operators
from replearn.operators._base.options import Options

from .ledger import open_ledger
from .models import Shape, draw_shape

EQUAL = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}
KINDS = {
    **dict.fromkeys(("encoder", "attending", "llama", "gpt2", "bert", "vit"), "transformer"),
    "basic": "basic",
    "bottleneck": "bottleneck",
    "resnet": "basic",
}


class Fault(Exception):
    """A third outcome."""


def draw_options(random: Random, block: str) -> Options | None:
    """The default operator, another that suits the block, or now and then one that does not."""
    everything = list(operators.available().values())
    suited = [kind for kind in everything if KINDS.get(block, "any") in kind.kinds]
    kind = random.choice([None, None, *suited, *suited, random.choice(everything)])
    if kind is None:
        return None
    hints, chosen = get_type_hints(kind, localns={"Kind": str}), {}
    for entry in fields(kind):
        hint = hints[entry.name]
        if get_origin(hint) is Literal:
            chosen[entry.name] = random.choice(get_args(hint))
        elif hint is bool:
            chosen[entry.name] = random.random() < 0.5
        elif entry.name == "rank":
            chosen[entry.name] = random.choice((1, 2, 5))
        elif entry.name == "start":
            chosen[entry.name] = random.choice(("mean", "previous", "next", "zero", 0.3))
    if random.random() < 0.9:  # mend what is refused at once, so that most come further
        if chosen.get("sources") == "none" and chosen["correction"] == "none":
            chosen["correction"] = "full"
        one_sided = chosen.get("start") in ("previous", "next")
        shared = chosen.get("coefficients") == "shared"
        if one_sided and (shared or chosen["sources"] not in ("both", chosen["start"])):
            chosen["start"] = "mean"
    return kind(**chosen)


def draw_placement(random: Random, shape: Shape) -> dict[str, Any]:
    which = random.randrange(8)
    if which == 0:
        return {"fraction": random.choice((0.1, 0.2, 0.34, 0.9))}
    if which == 1:
        return {"targets": [f"stacks.0.{random.randrange(shape.depth)}"]}
    return {"interval": random.choice((2, 3, 4)), "first": random.choice((None, 2, 2))}


def walk(seed: int, libraries: bool = True) -> tuple[str, str]:
    """How it went (`whole` or `refused`) and where: by which operator, or in which room."""
    random = Random(seed)
    shape = draw_shape(random, libraries)
    placement = draw_placement(random, shape)
    model, x = shape.build(), shape.example()
    with torch.no_grad():
        model.eval()(x)  # the network itself must work
    names = [name for stack in replearn.find_stacks(model) for name in stack.blocks]
    before = [tensor.clone() for tensor in model.state_dict().values()]
    room = "options"
    try:
        options = draw_options(random, shape.block)
        room = "plan"
        plan = replearn.plan(model, operator=options, **placement)
        expect(plan == replearn.Plan.from_json(plan.to_json()), "the plan changed in JSON")
        expect(same(before, model), "planning changed the model")
        room = "replace_"
        replearn.replace_(model, plan)
        promised = sum(p.numel() for p in model.parameters() if p.requires_grad)
        expect(promised == plan.parameters_after, f"{promised} parameters, not {plan.parameters_after}")
        take_step(model, x)
        model.eval()
        with torch.no_grad():
            expected = model(x)
        room = "save"
        with tempfile.TemporaryDirectory() as folder:
            replearn.save(model, f"{folder}/run.safetensors")
            room = "load"
            loaded = replearn.load(shape.build(), f"{folder}/run.safetensors").eval()
        with torch.no_grad():
            expect(torch.equal(loaded(x), expected), "the loaded model gives another output")
        room = "deploy"
        plain = replearn.deploy(loaded, example=x, merge=seed % 2 == 1)
        ours = [n for n, m in plain.named_modules() if type(m).__module__.startswith("replearn.")]
        expect(not ours, f"{ours} are ours still")
        with torch.no_grad():
            found = plain(x)
            error = float((found - expected).double().abs().max()) / (float(expected.double().abs().max()) or 1)
            expect(error <= EQUAL[expected.dtype], f"the deployed model is {error:.1e} off")
            expect(torch.equal(loaded(x), expected), "deploying changed the model")
    except ReplearnError as error:
        check_refusal(str(error), room, names, placement)
        if room in ("options", "plan"):
            expect(same(before, model), "a refused plan changed the model")
        return "refused", room
    return "whole", plan.targets[0].operator.name


def take_step(model: nn.Module, x: Tensor) -> None:
    model.train()
    out = model(x).float().square().mean()
    if not out.requires_grad:  # all is frozen, and the operator has nothing to learn
        return
    optimizer = torch.optim.SGD(replearn.param_groups(model, 1e-4), lr=0.01)
    out.backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        expect(bool(parameter.isfinite().all()), f"{name} is not finite after a step")


def same(before: list[Tensor], model: nn.Module) -> bool:
    after = model.state_dict().values()
    return len(before) == len(after) and all(map(torch.equal, before, after))


def check_refusal(text: str, room: str, names: list[str], placement: dict[str, Any]) -> None:
    """A refusal names the block, or says why there is none: options that contradict, no stack, too few blocks."""
    named = any(name in text for name in names)
    without = "has no stack" in text or "a target needs a block on each side" in text or room == "options"
    unknown = any(repr(name) in text for name in placement.get("targets", ()))
    expect(named or without or unknown, f"refused in {room} without a block's name: {text}")


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Fault(otherwise)


def main() -> int:
    warnings.simplefilter("ignore")
    if "--seed" in sys.argv:
        seed = int(sys.argv[sys.argv.index("--seed") + 1])
        random = Random(seed)
        shape = draw_shape(random, libraries=True)
        print(shape, draw_placement(random, shape), draw_options(random, shape.block))
        print(walk(seed))
        return 0
    ledger = open_ledger("generated", total=1000, seconds=600, first_seed=0)
    while ledger.open:
        seed = ledger.done
        try:
            outcome, where = walk(seed)
            ledger.count("outcomes", outcome)
            ledger.count(outcome, where)
        except Exception as error:
            ledger.count("outcomes", "fault")
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{last.filename.rpartition('/')[2]}:{last.lineno}"
            told = f"{type(error).__name__}: {error}"[:300]
            ledger.note("faults", {"seed": seed, "error": told, "at": place})
        ledger.finish_case()
    return ledger.report()


if __name__ == "__main__":
    sys.exit(main())
