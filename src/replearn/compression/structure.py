"""The structure of a block, read from its trace: linear layers, residual sums and what follows the sums."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from ..operators._base.layers import foldable
from .activations import Arguments, OpKey, input_name
from .trace import VIEWS, Node, Sum, Trace, ancestors, find_chain, mixes_tokens, residual_sums, trace_block

Kind = Literal["basic", "bottleneck", "convolutions", "transformer", "any"]
LINEAR_OPERATIONS = {"convolution": 0, "linear": 0, "addmm": 1, "mm": 0}  # and the index of the input argument
ORDERS = {"permute", "transpose"}


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer of a block; argument `arg` of operation `key` is its input.

    If only BatchNorm, a scale and views are between the layer and a residual sum, `sum` is that operation and
    `other_arg` the argument that holds the other summand.
    """

    path: str
    key: OpKey
    arg: int
    norm: str = ""
    norm_key: OpKey | None = None
    scale: str = ""
    order: tuple[int, ...] = ()  # of a permutation after the layer
    sum: OpKey | None = None
    other_arg: int = 0
    adds_input: bool = False  # the other summand is the block's input
    feeds_attention: bool = False


@dataclass(frozen=True, slots=True)
class Structure:
    """What a block computes."""

    kind: Kind
    layers: tuple[Layer, ...]
    sums: tuple[Sum, ...]
    after: tuple[str, ...] | None  # modules after the last sum, or "=relu"; None if unclear
    keeps_shape: bool
    channel: int  # the dimension of the channels
    image: bool  # (batch, channels, height, width)
    argument: str  # the name of its input, '' for an only argument
    trace: Trace = field(repr=False, compare=False)

    @property
    def call(self) -> dict[str, Any]:
        """How the block is called and what it returns, for its replacement."""
        return {"argument": self.argument, "length": self.trace.length}


def read_structure(block: nn.Module, arguments: Arguments) -> Structure:
    """Trace a block and read its structure; the kind is `any` if no other fits."""
    trace = trace_block(block, arguments)
    modules = dict(block.named_modules())
    linear = {node.index: path for node in trace.nodes if (path := linear_path(node, modules))}
    used = list(linear.values())
    linear = {index: path for index, path in linear.items() if used.count(path) == 1}
    sums = residual_sums(trace, trace.output) or ()
    after = find_chain(trace, sums[-1].index, trace.output) if sums else None
    layers = tuple(describe_layer(trace, index, linear, modules) for index in sorted(linear))
    channel = channel_of(arguments.x, layers, modules)
    return Structure(
        kind=kind_of(layers, sums, modules),
        layers=layers,
        sums=sums,
        after=after,
        keeps_shape=trace.shape == tuple(arguments.x.shape),
        channel=channel,
        image=channel == 1 and arguments.x.dim() == 4,
        argument=input_name(block, arguments),
        trace=trace,
    )


def linear_path(node: Node, modules: dict[str, nn.Module]) -> str:
    """The path of the convolution or linear layer whose weight an operation reads, or ''."""
    if node.name not in LINEAR_OPERATIONS:
        return ""
    for name in node.tensors:
        path, _, leaf = name.rpartition(".")
        if leaf == "weight" and is_linear(modules[path]):
            return path
    return ""


def is_linear(module: nn.Module) -> bool:
    if isinstance(module, (nn.Conv1d, nn.Conv2d)):
        return module.padding_mode == "zeros"
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Hugging Face's Conv1D: a linear layer with its weight as (in, out)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def describe_layer(trace: Trace, index: int, linear: dict[int, str], modules: dict[str, nn.Module]) -> Layer:
    node = trace.nodes[index]
    arg = LINEAR_OPERATIONS[node.name]
    norm, scale = "", ""
    norm_key: OpKey | None = None
    order: tuple[int, ...] = ()
    at = index
    while at != trace.output:
        users = trace.users(at)
        if len(users) != 1:
            break
        user = users[0]
        owner = user.tensors[0].rpartition(".")[0] if user.tensors else ""
        if not norm and at == index and owner in modules and foldable(modules[owner]):
            norm, norm_key = owner, user.key
        elif user.name in ORDERS and not order:
            order = tuple(dim % len(user.dims) for dim in user.dims)
        elif is_scale(user, modules, linear[index]) and not scale:
            scale = user.tensors[0]
        elif user.name == "add" and len(user.inputs) == 2:
            own = user.inputs.index(at)
            other = user.inputs[1 - own]
            if any(i in linear and i > index for i in ancestors(trace, other)):
                break
            summand = (user.key, user.args[1 - own], other == 0)
            return Layer(linear[index], node.key, arg, norm, norm_key, scale, order, *summand)
        elif user.name not in VIEWS or not _keeps_rows(node, trace.nodes[at], user, order):
            break
        at = user.index
    feeds = _feeds_attention(trace, index, linear)
    return Layer(linear[index], node.key, arg, norm, norm_key, feeds_attention=feeds)


def is_scale(node: Node, modules: dict[str, nn.Module], path: str) -> bool:
    """True for a product of a layer's output with one number, or one for each channel."""
    if node.name != "mul" or len(node.inputs) != 1 or len(node.tensors) != 1:
        return False
    owner, _, name = node.tensors[0].rpartition(".")
    features = modules[path].get_parameter("weight").shape[1 if is_transposed(modules[path]) else 0]
    return getattr(modules[owner], name).numel() in (1, features)


def _keeps_rows(layer: Node, before: Node, view: Node, order: tuple[int, ...]) -> bool:
    """True if a view keeps the layer's output as rows in the same order, with channels last (or second)."""
    if layer.name == "convolution" or order:
        return view.shape == before.shape
    return view.shape[-1:] == layer.shape[-1:]


def _feeds_attention(trace: Trace, index: int, linear: Iterable[int]) -> bool:
    todo, seen = [index], {index}
    while todo:
        for user in trace.users(todo.pop()):
            if mixes_tokens(user):
                return True
            if user.index not in seen and user.index not in linear:
                seen.add(user.index)
                todo.append(user.index)
    return False


def kind_of(layers: tuple[Layer, ...], sums: tuple[Sum, ...], modules: dict[str, nn.Module]) -> Kind:
    convs = [m for layer in layers if isinstance(m := modules[layer.path], nn.Conv2d)]
    if len(sums) == 2 and sums[0].attention != sums[1].attention:
        return "transformer"
    if len(sums) == 1 and convs and len(convs) == len(layers):
        sizes = [conv.kernel_size[0] for conv in convs]
        if len(sizes) == 2 and min(sizes) > 1:
            return "basic"
        if len(sizes) == 3 and sizes[0] == sizes[2] == 1 < sizes[1]:
            return "bottleneck"
        return "convolutions"
    return "any"


def channel_of(x: Tensor, layers: tuple[Layer, ...], modules: dict[str, nn.Module]) -> int:
    """The dimension of the channels: 1 where convolutions read them, else the last."""
    widths = {m.in_channels for layer in layers if isinstance(m := modules[layer.path], (nn.Conv1d, nn.Conv2d))}
    return 1 if x.dim() >= 3 and x.shape[1] in widths else x.dim() - 1
