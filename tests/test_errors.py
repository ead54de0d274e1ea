"""Errors teach: what was given, why it can't work, and what to write instead. Every one is provoked here.

The test walks the source: a `raise ReplearnError` that no case below provokes is a failure, so a new
error needs a new case.
"""

from __future__ import annotations

import ast
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import save_file
from timm.utils.model import reparameterize_model
from torch import Tensor, nn
from torch.nn.utils import prune

import replearn
from replearn import Plan, ReplearnError, operators
from replearn.deployment.saving import RefusedSaving
from replearn.errors import library
from replearn.fast.kernels.attention_short import attention_short
from replearn.fast.verify import verify
from replearn.operators._base.layers import BorrowedNorm
from replearn.operators._base.options import options_from_dict
from replearn.operators._base.synthesis import Source
from replearn.surgery.replace import set_submodule
from replearn.surgery.tensor_file import write_file
from replearn.surgery.weights import load_backbone_

SOURCE = Path(replearn.__file__).parent

# ---- things to go wrong with --------------------------------------------------------------------

one, two = torch.ones(1), torch.ones(2)
ops, net, anatomy, deep = operators, tiny.resnet, replearn.anatomy, "[" * 850 + "0" + "]" * 850
plan, replace_, save, load, deploy = (
    replearn.plan,
    replearn.replace_,
    replearn.save,
    replearn.load,
    replearn.deploy,
)
streamline = replearn.fast.streamline


def replaced() -> Any:
    return tiny.replaced(net())


def ready() -> Any:
    return replaced().eval()


def having(model: Any, path: str, thing: Any) -> Any:
    """The model with something else at this path."""
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, thing)
    return model


def resnet_plan(**changes: Any) -> Plan:
    return replace(plan(net(), 2, first=2), **changes)


def alike(model: nn.Module, batch: Any) -> Plan:
    return plan(model, budget="blocks=1", score="similarity", data=batch)


@torch.no_grad()
def filled(value: float) -> nn.Module:
    """A network with a source that no operator can be made of."""
    model = net()
    model.layer1[0].conv2.weight.fill_(value)
    return model


def changed_later(part: str, layer: nn.Module) -> None:
    """Run a replaced network in which another layer stands for one that an operator reads."""
    model = ready()
    set_submodule(model, f"layer1.0.{part}".rstrip("."), layer)
    model(torch.randn(2, 3, 8, 8))


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


@torch.no_grad()
def overflowing() -> nn.Module:
    model = ready().half()
    model.layer1[1].a.fill_(1e6)
    return model


def parametrized() -> nn.Module:
    model = stack_of(lambda: tiny.Own(4))
    for block in model:
        torch.nn.utils.parametrizations.weight_norm(block.mix)
    return model


def grown(path: Path, start: int, size: int) -> Path:
    """A file that declares a header of this length and takes no space beyond."""
    path.write_bytes(start.to_bytes(8, "little"))
    os.truncate(path, size)
    return path


def stack_of(block: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(*(block() for _ in range(5)))


class Attention(nn.Module):
    """A transformer block whose declared anatomy can be made to lie."""

    replearn_anatomy = anatomy("mine", "transformer", num_heads=2, proj="proj", norm1="norm", norm2="norm")

    def __init__(self, out: int = 6, inside: int = 6, bare_norm: bool = False) -> None:
        super().__init__()
        self.proj = nn.Linear(inside, out)
        self.norm = nn.Parameter(torch.ones(out)) if bare_norm else nn.LayerNorm(out)

    def forward(self, x: Tensor) -> Tensor:
        return x


def declared(own: Any) -> nn.Module:
    mine = type("Mine", (tiny.Own,), {"replearn_anatomy": own})
    return stack_of(lambda: mine(6))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.rnn(x)[0]


class Pair(tiny.Own):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


@contextmanager
def one_process(folder: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def plan_distributed(folder: Path) -> None:
    with one_process(folder):
        plan(nn.parallel.DistributedDataParallel(net()))


def sharded(folder: Path, model: nn.Module, then: Callable[[Any], Any]) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    with one_process(folder):
        then(fully_shard(model, mesh=init_device_mesh("cpu", (1,))))


def compiled(model: nn.Module) -> nn.Module:
    model.layer1[0].compile()
    return model


def hooked(model: nn.Module) -> nn.Module:
    model.layer1[1].register_forward_hook(lambda module, args, out: None)
    return model


def patched(model: nn.Module) -> nn.Module:
    """As accelerate sets its hooks."""
    model.layer1[1].forward = model.layer1[1].forward
    return model


def with_buffer(buffer: Any) -> nn.Module:
    model = replaced()
    model.register_buffer("odd", buffer)
    return model


class Stateful(nn.Module):
    def get_extra_state(self) -> dict[str, int]:
        return {}

    def set_extra_state(self, state: Any) -> None: ...


def widened(model: Any) -> nn.Module:
    return having(having(model, "layer1.0.conv2", nn.Conv2d(4, 6, 3)), "layer1.2.conv1", nn.Conv2d(4, 6, 3))


def one_sided() -> Any:
    return tiny.replaced(net(), interval=2, operator=ops.Basic(sources="previous")).layer1[1]


def read_edited(change: Callable[[Any], Any], old: str = "", new: str = "") -> Plan:
    data = json.loads(resnet_plan().to_json())
    change(data)
    return Plan.from_json(json.dumps(data).replace(old, new) if old else json.dumps(data))


def checkpoint(folder: Path) -> Path:
    save(replaced(), folder / "good.safetensors")
    return folder / "good.safetensors"


def load_changed(folder: Path, tensors: dict[str, Tensor | None], into: Any = None, **about: str) -> Any:
    """Load a whole file, checksum and all, whose contents are not what they should be."""
    state = {name: tensor for name, tensor in {**replaced().state_dict(), **tensors}.items() if tensor is not None}
    texts = {"format": "replearn-checkpoint-1", "plan": resnet_plan().to_json(), "aliases": "{}", **about}
    write_file(folder / "changed.safetensors", state, texts)
    return load(into or net(), folder / "changed.safetensors")


def tied() -> nn.Module:
    model = net()
    return having(model, "layer1.0.bn1.weight", model.bn1.weight)


def flipped(path: Path) -> Path:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return path


def written(folder: Path, content: bytes) -> Path:
    (folder / "other.safetensors").write_bytes(content)
    return folder / "other.safetensors"


def foreign(folder: Path) -> Path:
    save_file({"a": torch.zeros(2)}, folder / "foreign.safetensors", metadata={"format": "pt"})
    return folder / "foreign.safetensors"


def on_two_devices() -> nn.Module:
    model = ready()
    model.fc.to("meta")
    return model


class Echo(nn.Module):
    """A model that returns whatever it is told."""

    def __init__(self, *outputs: Tensor) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.outputs


class Unreached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = stack_of(lambda: tiny.Own(4))

    def forward(self, x: Tensor) -> Tensor:
        return x


# What to do in an empty folder, and what the message must say, with " ... " between the parts:
# the thing given, the reason, the cure.
Provoke = Callable[[Path], Any]
# fmt: off
CASES: list[tuple[Provoke, str]] = [
    # what is passed as a model
    (lambda f: plan(nn.Sequential(nn.LazyLinear(4))), "its submodule 0 is lazy ... then plan"),
    (lambda f: plan("resnet32"), "torch.nn.Module as the first argument, got str"),
    (lambda f: replearn.find_stacks("resnet32"), "torch.nn.Module as the first argument, got str"),
    (lambda f: library("absent.part", "vision"), "This needs absent: pip install 'replearn[vision]'"),
    (lambda f: plan(nn.DataParallel(net())), "it is wrapped in DataParallel ... first, then wrap"),
    (plan_distributed, "it is wrapped in DistributedDataParallel ... first, then wrap the result"),
    (lambda f: sharded(f, net(), lambda m: plan(nn.Sequential(m))), "its submodule 0 is ... then fully_shard"),
    (lambda f: plan(compiled(net())), "its submodule layer1.0 is compiled ... then compile the result"),
    (lambda f: plan(having(net(), "head", torch.jit.trace(nn.Linear(2, 2), two))),
     "its submodule head is a TorchScript ... Start from the Python model"),
    (lambda f: plan(replaced()), "replaced already (layer1.1 is an operator) ... fresh model"),
    (lambda f: plan(nn.Linear(2, 2)), "Linear has no stack of blocks ... `replearn_anatomy` ... nn.ModuleList"),
    (lambda f: replearn.models.CifarResNet(21), "6n + 2 ... not 21"),
    # how blocks are declared
    (lambda f: plan(declared("basic")), "Mine.replearn_anatomy is a str ... replearn.anatomy(...)"),
    (lambda f: plan(declared(anatomy("mine", "transformer", proj="attn.proj"))),
     "Mine.replearn_anatomy says proj='attn.proj' ... nothing there ... the path of that layer"),
    (lambda f: anatomy("mine", "baisc"), "anatomy of 'mine' says kind='baisc' ... 'basic', 'bottleneck'"),
    (lambda f: anatomy("mine", "any", returns="dict"), "returns='dict' ... 'tensor', 'tuple'"),
    # which blocks
    (lambda f: plan(net(), 1), "interval=1 ... at least 2 ... neighbours must stay"),
    (lambda f: plan(net(), "4"), "interval='4' ... a whole number"),
    (lambda f: plan(net(), True), "interval=True ... a whole number"),
    (lambda f: plan(net(), first=1), "first=1 ... never a target ... write first=2"),
    (lambda f: plan(net(), first=2.0), "first=2.0 ... write first=2"),
    (lambda f: plan(net(), fraction=1), "fraction=1: ... between 0 and 1, as 0.25"),
    (lambda f: plan(net(), fraction=math.nan), "fraction=nan ... between 0 and 1"),
    (lambda f: plan(net(), fraction=0.5), "fraction=0.5 is 4 of 9 blocks ... at most 3 ... fraction=0.333333"),
    (lambda f: plan(net(), fraction=0.2, first=2), "fraction=0.2 places the targets itself ... leave out"),
    (lambda f: plan(net(), targets="layer1.1"), "targets='layer1.1' ... a list of block names"),
    (lambda f: plan(net(), targets=[]), "names no block ... write their names"),
    (lambda f: plan(net(), targets=["layer1.1"], first=2), "already names the blocks ... leave out"),
    (lambda f: plan(net(), targets=["fc"]), "'fc' is not a block ... layer1.0 to layer1.2"),
    (lambda f: plan(net(), targets=["layer2.0"]), "layer2.0 (position 1 of 3) ... first block ... Leave it"),
    (lambda f: plan(net(26), targets=["layer1.1", "layer1.2"]), "layer1.1 and layer1.2 are adjacent ... Drop one"),
    (lambda f: plan(net(), first=4), "has no targets (interval=4, first=4) ... 3, 3, 3 blocks ... first=2"),
    (lambda f: plan(net(), operator=ops.Basic), "not an operator's options ... as Basic()"),
    (lambda f: RefusedSaving("It loads as another model. Export it.")(f), "another model ... Export"),
    (lambda f: plan(net(), operator="base"), "no operator 'base' ... reduced_bottleneck"),
    (lambda f: plan(net(), operator="basic:rank"), "operator='basic:rank' ... NAME:option=value"),
    # the calibration batch
    (lambda f: alike(net(32), torch.ones(2, 5)), "CifarResNet could not be run on ... a tensor, a tuple"),
    (lambda f: alike(Unreached(), one), "never reached blocks.1 ... every block"),
    (lambda f: alike(net(32), torch.full((1, 3, 8, 8), math.nan)), "score of layer1.1 is nan ... finite numbers"),
    (lambda f: alike(net(32).to("meta"), torch.ones(1, 3, 8, 8)), "CifarResNet is on the ... interval or"),
    # synthesis
    # an operator's options
    (lambda f: ops.Basic(sources="left"), "Basic(sources='left') ... 'both', 'previous', 'next', 'none'"),
    (lambda f: ops.MLP(correction="some"), "MLP(correction='some') ... 'none', 'low-rank', 'full'"),
    (lambda f: ops.Basic(coefficients="one"), "coefficients='one' ... 'separate', 'shared'"),
    (lambda f: ops.Basic(start="middle"), "start='middle' ... 'mean', 'previous', 'next', 'zero'"),
    (lambda f: ops.AttentionMLP(attention="full"), "attention='full' ... 'projection', 'head_wise'"),
    (lambda f: ops.Basic(stop_gradient=1), "stop_gradient is True or False, not 1"),
    (lambda f: ops.Basic(rank=0), "rank is a whole number of at least 1, not 0"),
    (lambda f: ops.Basic(rank=2.0), "rank is a whole number of at least 1, not 2.0"),
    (lambda f: ops.Basic(start=math.nan), "a finite number, not nan"),
    (lambda f: ops.Basic(start=10**400), "a finite number, not 1000"),
    (lambda f: ops.Basic(start=None), "start is 'mean' ... not None"),
    (lambda f: ops.Basic(sources="none"), "Basic(sources='none') has no weight left ... correction='full'"),
    (lambda f: ops.Basic(sources="next", start="previous"), "start='previous' needs that side ... 'next'"),
    (lambda f: ops.Basic(coefficients="shared", start="next"), "start='next' needs ... weighs both sides alike"),
    (lambda f: options_from_dict({"name": "magic"}), "no operator 'magic' ... attention_mlp, basic, bottleneck"),
    (lambda f: options_from_dict({"name": []}), "no operator [] ... attention_mlp, basic"),
    (lambda f: options_from_dict({"name": "basic", "x": 1}), "'basic' does not have these options ... 'x'"),
    # an operator on a block that it does not suit
    (lambda f: plan(net(), 2, operator=ops.Projection()), "layer1.1 ... basic block"),
    (lambda f: plan(widened(net(26)), targets=["layer1.1"], operator=ops.Basic()),
     "no source fits its conv2 ... previous conv2 is (6, 4, 3, 3), not (4, 4, 3, 3)"),
    (lambda f: plan(stack_of(Attention), 2, operator=ops.MLP()), "1, 3 can't go ... this mine block has no"),
    (lambda f: plan(declared(anatomy("mine", "transformer", norm1="mix")), 2, operator=ops.NoWeights()),
     "this mine block has no proj, which no_weights needs"),
    (lambda f: plan(stack_of(lambda: Attention(6, 8)), 2, operator=ops.Projection()),
     "1: its attention output projection is 6x8, not square ... operators.WholeBlock()"),
    (lambda f: plan(stack_of(lambda: Attention(5, 5)), 2, operator=ops.HeadWise()),
     "1: 5 columns can't be split among 2 heads ... Use operators.Projection()"),
    (lambda f: plan(stack_of(Attention), 2, operator=ops.HeadWise(sources="none", correction="full")),
     "HeadWise reads a neighbour's LayerNorm ... Projection(sources='none', correction='full')"),
    (lambda f: plan(stack_of(Attention), 2, operator=ops.MLP(sources="none", correction="full")),
     "MLP reads a neighbour's norm ... 'previous' or 'next'"),
    (lambda f: plan(net(), 2, operator=ops.WholeBlock(sources="none", correction="full")),
     "WholeBlock is nothing but its sources ... NoWeights() or Removal()"),
    (lambda f: plan(net(), 2, operator=ops.Basic(correction="low-rank", rank=50)),
     "layer1.1, kernel ... rank 50 does not fit a weight of shape (4, 4, 3, 3) ... rank=4 or less"),
    (lambda f: plan(stack_of(Recurrent), 2), "1 contains an RNNBase layer ... operators.Removal()"),
    (lambda f: plan(stack_of(lambda: Pair(4)), 2, operator=ops.Removal()),
     "Pair.forward returns ... returns='tuple'"),
    (lambda f: plan(stack_of(lambda: Attention(bare_norm=True)), 2, operator=ops.HeadWise()),
     "Expected a normalisation layer at norm"),
    # the inside of an operator
    (lambda f: one_sided().coefficient("next"), "layer1.1 has no coefficient for its next source"),
    (lambda f: BorrowedNorm(Source(tiny.Own(4), replearn.blocks.Part("gain"), True), one.device),
     "Expected a normalisation layer at gain"),
    (lambda f: having(replaced(), "layer1.0.conv2.weight", None).layer1[1](torch.ones(1, 4, 8, 8)),
     "A source has no parameter conv2.weight any more"),
    (lambda f: tiny.replaced(stack_of(lambda: tiny.Own(4)))[1](), "A replaced block was called without a tensor"),
    # replacing
    (lambda f: replace_(net(), {}), "takes a Plan, got dict ... replearn.plan(model)"),
    (lambda f: replace_(net(), resnet_plan().to_json()), "takes a Plan, got str"),
    (lambda f: replace_(replaced(), resnet_plan()), "is replaced already ... fresh"),
    (lambda f: replace_(tiny.Tokens(), resnet_plan()), "fit this Tokens ... no block 'layer1.1' ... 9 blocks"),
    (lambda f: replace_(net(26), resnet_plan()), "has 12 blocks ... made for 9. Plan again"),
    (lambda f: replace_(net(width=8), resnet_plan()), "parameters_after of layer1.1 ... Plan again"),
    (lambda f: replace_(replearn.models.CifarResNet(20, 7, width=4), resnet_plan()),
     "17,483 trainable parameters ... promises 17,534 ... froze parameters or changed the head ... plan again"),
    (lambda f: replace_(net(), resnet_plan(targets=(replace(resnet_plan().targets[0], block_type="x.Y"),))),
     "layer1.1 is a replearn.models.cifar_resnet.BasicBlock ... made for a x.Y"),
    (lambda f: replace_(hooked(net()), resnet_plan()), "layer1.1 has to be kept ... hooks"),
    # a plan
    (lambda f: resnet_plan(targets=()), "at least one target ... replearn.plan(model)"),
    (lambda f: resnet_plan(targets=resnet_plan().targets[:1] * 2), "names 'layer1.1' twice ... replaced once"),
    (lambda f: resnet_plan(targets=(resnet_plan().targets[0], replace(resnet_plan().targets[1], next="layer1.1"))),
     "'layer1.1' is a target and a source of 'layer2.1' ... neighbours must stay"),
    (lambda f: Plan.from_json("plan"), "not JSON ... Pass the text that plan.to_json() gave"),
    (lambda f: Plan.from_json("{}"), "without the key 'replearn_plan' ... Pass the text"),
    (lambda f: read_edited(lambda d: d.update(replearn_plan=9)), "has format 9 ... the version that wrote it"),
    (lambda f: read_edited(lambda d: d.update(num_blocks="9")), "damaged plan: plan.num_blocks ... Make it again"),
    (lambda f: read_edited(lambda d: d.update(surprise=1)), "plan has no field ... its fields are model,"),
    (lambda f: read_edited(lambda d: d.pop("model")), "plan lacks the field 'model'"),
    (lambda f: read_edited(lambda d: d["targets"][0]["operator"].update(rank=0)),
     "plan.targets[0].operator: rank is a whole number of at least 1, not 0. Make it again"),
    (lambda f: read_edited(lambda d: d["targets"][0]["operator"].update(sources="@")).replace('"@"', deep),
     "This is a damaged plan ... Make it again"),
    # deploying
    (lambda f: deploy(net()), "CifarResNet was not replaced ... replearn.replace_(model, plan)"),
    (lambda f: deploy("model"), "a replaced model (a torch.nn.Module), got str"),
    (lambda f: deploy(nn.Sequential(replaced())), "its submodule 0 was: pass that one (model.0)"),
    (lambda f: deploy(replaced().train()), "CifarResNet can't be deployed: it is in ... Call model.eval() first"),
    (lambda f: deploy(on_two_devices()), "it lies on 2 devices (conv1.weight on cpu and ... Move it to one first"),
    (lambda f: deploy(ready(), fold="some"), "fold='some': write 'all' ... or 'operators'"),
    (lambda f: attention_short(torch.zeros(2, 5, 10), 2),
     "attention_short: (2, 5, 10) is not (batch, tokens, 3 x 2 heads x width) ... qkv(x)"),
    (lambda f: deploy(ready(), torch.randn(2, 1, 8, 8)), "CifarResNet can't be run ... Give one as the model"),
    (lambda f: deploy(ready(), torch.randn(2, 1, 8, 8), flatten=True, merge=True),
     "CifarResNet can't be run on the example (RuntimeError:  ... Give one as the model takes it"),
    (lambda f: deploy(reparameterize_model(ready())), "The operators of this ... pass the model from before that"),
    (lambda f: deploy(ready(), channels_last="no"), "channels_last='no': write True or False."),
    (lambda f: streamline(net().eval(), flatten="no"), "flatten='no': write True or False."),
    (lambda f: deploy(ready(), merge="all"), "merge='all': write True to merge ... or False"),
    (lambda f: deploy(ready(), dtype=torch.float64), "dtype=torch.float64 is no ... Write torch.bfloat16 or"),
    (lambda f: deploy(ready(), compile="fast"), "compile='fast': write True, False, or a mode: default,"),
    (lambda f: streamline(net().eval(), fuse="yes"), "fuse='yes': write True to have cuDNN fuse ... or False"),
    (lambda f: deploy(ready(), fuse=True), "fuse=True needs flatten=True"),
    (lambda f: streamline(net().eval(), fuse=True, flatten=True, compile=True),
     "fuse=True and compile=True can't be had together ... Leave one of them out"),
    (lambda f: streamline(net().eval(), fuse=True, flatten=True), "fuse=True needs a model on ... leave fuse out"),
    (lambda f: streamline(ready()), "CifarResNet is replaced (layer1.1 is an ... Use replearn.deploy(model, ...)"),
    (lambda f: streamline("model"), "Expected a torch.nn.Module, got str"),
    (lambda f: replearn.fast.find_folds("model"), "Expected a torch.nn.Module, got str"),
    (lambda f: verify(Echo(one / 0), Echo(one), one), "output 0 of the model itself ... Give an example that the"),
    (lambda f: deploy(ready(), torch.randn(0, 3, 8, 8), flatten=True), "The model's outputs ... Give an example"),
    (lambda f: verify(Echo(), Echo(), one), "The deployed model can't be compared: the ... Leave the example out"),
    (lambda f: deploy(overflowing()), "layer1.1 can't be deployed: its  ... bfloat16 or float32"),
    (lambda f: tiny.replaced(filled(math.nan)), "layer1.0.conv2 holds inf or NaN, ... Mend these weights first"),
    (lambda f: tiny.replaced(filled(1e30)), "The operator of layer1.1 can't start ... Scale the weights down"),
    (lambda f: plan(parametrized(), targets=["1"]), "1.mix computes its weight ... remove_parametrizations does,"),
    (lambda f: Plan.from_json("[" + "1," * 5_000_000 + "1]"), "it is 10,000,003 ... Pass the text that"),
    (lambda f: load(net(), grown(f / "x", 2**40, 64)), "declares a header of ... use another copy"),
    (lambda f: load(net(), grown(f / "x", 2, 2**40)), "has 1,099,511,627,776 bytes, and ... Use the architecture"),
    (lambda f: verify(Echo(one), Echo(one, one), one), "returns 2 tensors, not 1 ... report this with the plan"),
    (lambda f: verify(Echo(one), Echo(two), one), "output 0 has the shape (2,), not (1,) ... report this"),
    (lambda f: verify(Echo(one), Echo(one * 1.1), one), "output 0 by 1.00e-01 ... 1e-05 is rounding ... report"),
    # saving
    (lambda f: save(replaced(), f / "no" / "x"), "/no does not exist ... untouched"),
    (lambda f: save(replaced(), 3), "name of a file, as 'run.safetensors', got int"),
    (lambda f: sharded(f, replaced(), lambda m: save(m, f / "x")), "is sharded ... get_model_state_dict"),
    (lambda f: save(having(replaced(), "extra", Stateful()), f / "x"), "extra._extra_state is a dict ... buffer"),
    (lambda f: save(with_buffer(torch.zeros(1, device="meta")), f / "x"), "odd is on the meta device ... Give it"),
    (lambda f: save(with_buffer(torch.eye(2).to_sparse()), f / "x"), "odd is a torch.sparse_coo ... dense tensor"),
    # loading
    (lambda f: load(net(), f / "nothing"), "There is no file ... nothing ... Check the name"),
    (lambda f: load(net(), f), "is a folder ... the file in it"),
    (lambda f: load(net(), written(f, b"\x80\x04junk")), "is a pickle ... with replearn.save"),
    (lambda f: load(net(), written(f, b"junk")), "not a readable safetensors file ... use another copy"),
    (lambda f: load(net(), written(f, b"\0" * 1000)), "not a readable safetensors file ... cut off or damaged"),
    (lambda f: load(net(), foreign(f)), "not a replearn checkpoint ... format is 'pt' ... with replearn.save"),
    (lambda f: load(net(), flipped(checkpoint(f))), "do not match its checksum ... Use another copy"),
    (lambda f: load_changed(f, {}, aliases="[]"), "list of tied weights is"),
    (lambda f: load_changed(f, {"fc.bias": None, "x": one}), "keys of the file ... Use the architecture"),
    (lambda f: load_changed(f, {"fc.bias": two}), "fc.bias has the shape (2,) in the ... Use the architecture"),
    (lambda f: load_changed(f, {"fc.bias": torch.zeros(10).int()}),
     "fc.bias is torch.int32 in the file and torch.float32 ... Use the architecture"),
    (lambda f: load(net().to("meta"), checkpoint(f)), "on the meta device ... model.to_empty(device='cpu')"),
    (lambda f: load(having(net(), "bn1.running_mean", torch.zeros(1).expand(4)), checkpoint(f)),
     "bn1.running_mean can't be written to ... expand ... an ordinary parameter or buffer"),
    (lambda f: load_changed(f, {"bn1.weight": torch.full((4,), 3.0)}, into=tied()),
     "bn1.weight and layer1.0.bn1.weight are one tensor in the model, and differ ... Untie them"),
    (lambda f: load_backbone_(net(), {**net().state_dict(), "fc.bias": torch.full((10,), math.nan)}),
     "fc.bias holds inf or NaN ... did not diverge ... The model is unchanged"),
    (lambda f: save(replaced(), pipe(f)), "is no regular file ... Write the name of a new file"),
    # a replaced model that is changed later
    (lambda f: deploy(patched(ready())), "layer1.1 has a forward of its own ... Take it off first"),
    (lambda f: deploy(hooked(ready())), "layer1.1 has forward hooks ... set them on the deployed model"),
    (lambda f: replearn.param_groups(net(), None), "weight_decay=None: write a number ... as 1e-4"),
    (lambda f: replearn.param_groups([], 1e-4), "Expected a torch.nn.Module, got list"),
    (lambda f: changed_later("", nn.Conv2d(4, 4, 3, padding=1)), "0 is a Conv2d now, ... plan again on a fresh"),
    (lambda f: changed_later("conv2", prune.identity(nn.Conv2d(4, 4, 3, padding=1), "weight")),
     "0.conv2.weight, which an operator reads, is no parameter any more ... torch.nn.utils.prune.remove"),
]
# fmt: on


# ---- none forgotten -----------------------------------------------------------------------------

# built on the core, with tests of their own
ABOVE = {
    *("costs", "fitting", "fast", "compression", "analysis", "experiments", "cli"),
    *("deployment/exporting", "deployment/quantizing.py", "deployment/saving.py"),
    *("models/transformer_lm.py", "surgery/weights.py", "surgery/plan_metadata.py", "surgery/hugging_face.py"),
}
# fitting in closed form, which calibrate_ does: the operators' side of it
FITTING = ("can't be fitted in closed form", "needs a low-rank fit", "A fit needs")
# fails in one place or the other, as the stack happens to be; and files, which test_hardening.py grows
EITHER = ("it is nested too deeply", "MiB is too large", "it is not an ordinary file")


def raises() -> Iterator[tuple[Path, int, int, str]]:
    """File, first and last line, and text of every `raise ReplearnError` of the core."""
    for file in sorted(SOURCE.rglob("*.py")):
        name = file.relative_to(SOURCE).as_posix()
        if name != "fast/verify.py" and any(f"{name}/".startswith(f"{part}/") for part in ABOVE):
            continue
        text = file.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                name = node.exc.func
                if isinstance(name, ast.Name) and name.id == "ReplearnError":
                    last = node.end_lineno or node.lineno
                    yield file, node.lineno, last, ast.get_source_segment(text, node) or ""


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_every_error_says_what_was_given_why_not_and_what_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[tuple[str, int]] = set()

    def note(self: ReplearnError, *args: object) -> None:
        caller = sys._getframe(1)
        seen.add((caller.f_code.co_filename, caller.f_lineno))
        ValueError.__init__(self, *args)

    monkeypatch.setattr(ReplearnError, "__init__", note)
    for number, (provoke, says) in enumerate(CASES):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(ReplearnError) as caught:
            provoke(folder)
        text = str(caught.value)
        assert [part for part in says.split(" ... ") if part not in text] == [], text
        assert "\n" not in text
        assert ".." not in text.replace("...", "")
    silent = [
        f"{file.relative_to(SOURCE)}:{first} {text}"
        for file, first, last, text in raises()
        if not any((str(file), line) in seen for line in range(first, last + 1))
        and not any(part in text for part in (*FITTING, *EITHER))
    ]
    assert "\n".join(silent) == "", "add a case to CASES for each"
