"""The operators once more, written from the paper's equations, to check the package against.

Plain loops over plain float64 tensors; nothing of `replearn` is imported, and every tensor is an
argument. The functions are named after the operators, take `(x, given)` and return g(x); autograd on
these expressions gives the gradients. Slow on purpose: every index of an equation is a loop here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

EPS = 1e-12  # the epsilon of eq:conv_norm and eq:linear_norm

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Block:
    """What the removed block is, apart from its weights."""

    kind: str
    groups: int = 1
    dilation: int = 1
    heads: int = 1
    activation: str = "relu"
    norm: str = "layer"  # or "rms"
    norm_eps: float = 1e-5
    post_norm: bool = False
    causal: bool = False


@dataclass
class Statistics:
    """A BatchNorm's running mean and variance; a training step replaces them."""

    mean: Tensor
    var: Tensor


@dataclass
class Given:
    """Everything an operator depends on.

    `previous` and `next` are the neighbours' weights by role, without those whose shape does not fit.
    `learned` holds `a`, `b`, `norm.weight`, `norm.bias`, `scale`, `shift`, and the corrections:
    `<role>.delta`, or `<role>.left` and `<role>.right`.
    """

    block: Block
    shapes: Mapping[str, tuple[int, ...]]  # of the removed block's weights, by role and by name
    previous: Tensors
    next: Tensors
    learned: Tensors
    running: dict[str, Statistics] = field(default_factory=dict)
    sources: str = "both"
    stop_gradient: bool = True
    coefficients: str = "separate"
    attention: str = "projection"
    training: bool = False
    # fixed factors, which a fit to a trained block may set: of the head-wise bias, of the MLP's last layer
    bias_gain: Tensor | float = 1.0
    mlp_gain: Tensor | float = 1.0
    names: tuple[str, ...] = ()  # whole block: every parameter of the removed block, in order
    roles: Callable[[Tensors], Tensors] = dict  # whole block: parameters by role

    def read(self, previous: str, next: str) -> dict[str, Tensor]:
        """The sources of one weight by side, behind sg(.) where it is on (eq:stop_gradient)."""
        found = {}
        if self.sources in ("both", "previous") and previous in self.previous:
            found["previous"] = self.previous[previous]
        if self.sources in ("both", "next") and next in self.next:
            found["next"] = self.next[next]
        return {side: tensor.detach() if self.stop_gradient else tensor for side, tensor in found.items()}

    def read_one(self, role: str, prefer: str) -> Tensor | None:
        """A weight that is used as it is: from the preferred side, or from the other if it is not there."""
        found = self.read(role, role)
        return found.get(prefer, next(iter(found.values()), None))

    def coefficient(self, side: str) -> Tensor:
        shared = self.coefficients == "shared" and self.sources == "both"
        return self.learned["a" if side == "previous" or shared else "b"]

    def corrected(self, role: str, terms: list[Tensor], like: str | None = None) -> Tensor | None:
        """The terms' sum, and D, which has the shape of the removed block's weight."""
        if f"{role}.delta" in self.learned:
            terms = [*terms, self.learned[f"{role}.delta"]]
        if f"{role}.left" in self.learned:
            delta = product(self.learned[f"{role}.left"], self.learned[f"{role}.right"])
            terms = [*terms, delta.reshape(self.shapes[like or role])]
        return sum(terms[1:], terms[0]) if terms else None


# --- layers -------------------------------------------------------------------------------------------


def product(left: Tensor, right: Tensor) -> Tensor:
    """sum_k left_ck right_kj, for a low-rank D."""
    ranks = range(left.shape[1])
    return torch.stack([sum(left[c, k] * right[k] for k in ranks) for c in range(left.shape[0])])


def unit_rows(weight: Tensor) -> Tensor:
    """eq:conv_norm, eq:linear_norm: each output row by its own length."""
    return torch.stack([row / torch.sqrt((row * row).sum() + EPS) for row in weight])


def convolve(x: Tensor, kernel: Tensor, dilation: int = 1, groups: int = 1) -> Tensor:
    """y_c(i, j) = sum_{a, u, v} W_cauv x_a(i + u, j + v), with zeros around, at the same size."""
    outputs, inputs, q, _ = kernel.shape
    num, channels, height, width = x.shape
    edge = dilation * (q // 2)
    padded = torch.zeros(num, channels, height + 2 * edge, width + 2 * edge, dtype=x.dtype)
    padded[:, :, edge : edge + height, edge : edge + width] = x
    offsets = [(u * dilation, v * dilation) for u in range(q) for v in range(q)]
    shifted = [padded[:, :, u : u + height, v : v + width] for u, v in offsets]
    seen = torch.stack(shifted, dim=2)  # (image, input channel, u and v, i, j)
    maps = []
    for c in range(outputs):
        first = c // (outputs // groups) * inputs  # the first input channel of this output's group
        weights = kernel[c].reshape(1, inputs, q * q, 1, 1)
        maps.append((weights * seen[:, first : first + inputs]).sum((1, 2)))
    return torch.stack(maps, dim=1)


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor, running: Statistics, training: bool) -> Tensor:
    maps = []
    means, variances = [], []
    count = x[:, 0].numel()
    for c in range(x.shape[1]):
        mean, var = running.mean[c], running.var[c]
        if training:
            mean = x[:, c].sum() / count
            var = ((x[:, c] - mean) ** 2).sum() / count
            means.append(0.9 * running.mean[c] + 0.1 * mean.detach())
            variances.append(0.9 * running.var[c] + 0.1 * var.detach() * count / (count - 1))
        maps.append((x[:, c] - mean) / torch.sqrt(var + 1e-5) * weight[c] + bias[c])
    if training:
        running.mean, running.var = torch.stack(means), torch.stack(variances)
    return torch.stack(maps, dim=1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """X W^T + b, one output at a time."""
    columns = torch.stack([(x * row).sum(-1) for row in weight], dim=-1)
    return columns if bias is None else columns + bias


def normalise(x: Tensor, weight: Tensor, bias: Tensor | None, block: Block) -> Tensor:
    """LayerNorm, or RMSNorm, over the last index."""
    width = x.shape[-1]
    if block.norm == "layer":
        x = x - x.sum(-1, keepdim=True) / width
    x = x / torch.sqrt((x * x).sum(-1, keepdim=True) / width + block.norm_eps)
    return x * weight if bias is None else x * weight + bias


def relu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.zeros_like(x))


def activate(x: Tensor, name: str) -> Tensor:
    if name == "relu":
        return relu(x)
    if name == "gelu":
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2
    if name == "gelu_tanh":
        return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))) / 2
    if name == "silu":
        return x / (1 + torch.exp(-x))
    raise ValueError(name)


# --- CNNs ---------------------------------------------------------------------------------------------


def mixed_rows(given: Given, role: str, previous: str, next: str) -> Tensor:
    """W_c = a_c norm(prev)_c + b_c norm(next)_c + D_c (eq:basic_kernel_synthesis)."""
    terms = []
    for side, weight in given.read(previous, next).items():
        unit, coefficient = unit_rows(weight), given.coefficient(side)
        terms.append(torch.stack([coefficient[c] * unit[c] for c in range(weight.shape[0])]))
    return given.corrected(role, terms, like=previous)


def borrowed(given: Given, role: str, part: str, prefer: str) -> Tensor:
    found = given.read_one(part, prefer)
    return given.corrected(role, [] if found is None else [found], like=part)


def close(x: Tensor, y: Tensor, given: Given) -> Tensor:
    """relu(x + BN(y)), the end of every CNN operator."""
    norm = given.learned["norm.weight"], given.learned["norm.bias"], given.running["norm"]
    return relu(x + batch_norm(y, *norm, given.training))


def basic(x: Tensor, given: Given) -> Tensor:
    """eq:basic_forward."""
    kernel = mixed_rows(given, "kernel", "conv2", "conv1")
    return close(x, convolve(x, kernel, given.block.dilation, given.block.groups), given)


def bottleneck(x: Tensor, given: Given) -> Tensor:
    """eq:bottleneck_forward."""
    middle = mixed_rows(given, "middle", "conv2", "conv2")
    z1 = relu(convolve(x, borrowed(given, "reduce", "conv1", prefer="previous")))
    z2 = relu(convolve(z1, middle, given.block.dilation, given.block.groups))
    return close(x, convolve(z2, borrowed(given, "expand", "conv3", prefer="next")), given)


def reduced_bottleneck(x: Tensor, given: Given) -> Tensor:
    """relu(x + BN(W_exp * relu(W_red * x)))."""
    z = relu(convolve(x, borrowed(given, "reduce", "conv1", prefer="previous")))
    return close(x, convolve(z, borrowed(given, "expand", "conv3", prefer="next")), given)


# --- transformers -------------------------------------------------------------------------------------


def mean_bias(given: Given, role: str, gain: Tensor | float = 1.0) -> Tensor | None:
    """eq:vit_bias_average, eq:vit_mlp_bias_synthesis; the fixed gain is 1 in the paper."""
    found = list(given.read(f"{role}_bias", f"{role}_bias").values())
    return given.corrected(f"{role}_bias", [gain * sum(found) / len(found)] if found else [])


def borrowed_norm(x: Tensor, given: Given, role: str) -> Tensor:
    """LN_{r-1}; with the next source alone, LN_{r+1}."""
    weight = given.read_one(role, prefer="previous")
    return normalise(x, weight, given.read_one(f"{role}_bias", prefer="previous"), given.block)


def projection(x: Tensor, given: Given) -> Tensor:
    """eq:vit_projection_synthesis, eq:vit_basic_forward."""
    weights = [given.coefficient(side)[0] * w for side, w in given.read("proj", "proj").items()]
    biases = [given.coefficient(side)[0] * b for side, b in given.read("proj_bias", "proj_bias").items()]
    return x + linear(x, given.corrected("proj", weights), given.corrected("proj_bias", biases))


def head_wise_weight(given: Given) -> Tensor:
    """eq:vit_headwise_synthesis: rows are normalised whole, then the columns of head h are scaled."""
    terms = []
    for side, weight in given.read("proj", "proj").items():
        unit, size = unit_rows(weight), weight.shape[1] // given.block.heads
        columns = [given.coefficient(side)[j // size] * unit[:, j] for j in range(weight.shape[1])]
        terms.append(torch.stack(columns, dim=1))
    return given.corrected("proj", terms)


def head_wise(x: Tensor, given: Given) -> Tensor:
    """eq:vit_head_forward: d^-1/2 is on the product, not on the bias."""
    delta = linear(borrowed_norm(x, given, "norm1"), head_wise_weight(given), None) / math.sqrt(x.shape[-1])
    bias = mean_bias(given, "proj", given.bias_gain)
    return x + delta if bias is None else x + delta + bias


def mlp(x: Tensor, given: Given) -> Tensor:
    """eq:vit_mlp_forward; with a gate, down(act(gate) * up)."""

    def fused(tokens: Tensor, role: str) -> Tensor:
        found = [unit_rows(weight) for weight in given.read(role, role).values()]
        gain = given.mlp_gain if role == "down" else 1.0
        weight = given.corrected(role, [gain * sum(found) / len(found)])
        return linear(tokens, weight, mean_bias(given, role, gain))

    normed = borrowed_norm(x, given, "norm2")
    if "gate" in given.shapes:
        hidden = activate(fused(normed, "gate"), given.block.activation) * fused(normed, "up")
    else:
        hidden = activate(fused(normed, "up"), given.block.activation)
    return x + fused(hidden, "down")


def attention_mlp(x: Tensor, given: Given) -> Tensor:
    """The attention form, then the MLP form, as eq:vit_block orders them."""
    return mlp({"projection": projection, "head_wise": head_wise}[given.attention](x, given), given)


# --- any block ----------------------------------------------------------------------------------------


def no_weights(x: Tensor, given: Given) -> Tensor:
    """x + s_c x + t_c; channels come second in images and last in tokens."""
    axis = 1 if given.block.kind in ("basic", "bottleneck") else x.dim() - 1
    scale, shift = given.learned["scale"].flatten(), given.learned["shift"].flatten()
    parts = [part + scale[c] * part + shift[c] for c, part in enumerate(x.unbind(axis))]
    return torch.stack(parts, dim=axis)


def removal(x: Tensor, given: Given) -> Tensor:
    return x * 1


def whole_block(x: Tensor, given: Given) -> Tensor:
    """The block's own equations with theta_p = a_p prev_p + b_p next_p + D_p."""
    theta = {}
    for p, name in enumerate(given.names):
        terms = [given.coefficient(side)[p] * tensor for side, tensor in given.read(name, name).items()]
        theta[name] = given.corrected(name, terms)
    return BLOCKS[given.block.kind](x, given.roles(theta), given)


def basic_block(x: Tensor, parts: Tensors, given: Given) -> Tensor:
    """eq:basicblock."""
    z = relu(own_norm(convolve(x, parts["conv1"]), "bn1", parts, given))
    return relu(x + own_norm(convolve(z, parts["conv2"]), "bn2", parts, given))


def bottleneck_block(x: Tensor, parts: Tensors, given: Given) -> Tensor:
    """eq:bottleneck."""
    z = relu(own_norm(convolve(x, parts["conv1"]), "bn1", parts, given))
    z = convolve(z, parts["conv2"], given.block.dilation, given.block.groups)
    z = relu(own_norm(z, "bn2", parts, given))
    return relu(x + own_norm(convolve(z, parts["conv3"]), "bn3", parts, given))


def own_norm(x: Tensor, name: str, parts: Tensors, given: Given) -> Tensor:
    return batch_norm(x, parts[name], parts[f"{name}_bias"], given.running[name], given.training)


def transformer_block(x: Tensor, parts: Tensors, given: Given) -> Tensor:
    """eq:vit_block; BERT and the default nn.TransformerEncoderLayer normalise after each sum instead."""
    block = given.block

    def norm(tokens: Tensor, role: str) -> Tensor:
        return normalise(tokens, parts[role], parts.get(f"{role}_bias"), block)

    def own(tokens: Tensor, role: str) -> Tensor:
        return linear(tokens, parts[role], parts.get(f"{role}_bias"))

    def attend(tokens: Tensor) -> Tensor:
        q, k, v = (own(tokens, role) for role in ("q", "k", "v"))
        size = q.shape[-1] // block.heads
        heads = []
        for h in range(block.heads):
            part = slice(h * size, (h + 1) * size)
            rows = []
            for t in range(tokens.shape[1]):
                last = t + 1 if block.causal else tokens.shape[1]
                scores = (q[:, t : t + 1, part] * k[:, :last, part]).sum(-1, keepdim=True) / math.sqrt(size)
                shares = torch.exp(scores) / torch.exp(scores).sum(1, keepdim=True)
                rows.append((shares * v[:, :last, part]).sum(1))
            heads.append(torch.stack(rows, dim=1))
        return own(torch.cat(heads, dim=-1), "proj")

    def feed(tokens: Tensor) -> Tensor:
        if "gate" in parts:
            return own(activate(own(tokens, "gate"), block.activation) * own(tokens, "up"), "down")
        return own(activate(own(tokens, "up"), block.activation), "down")

    if block.post_norm:
        u = norm(x + attend(x), "norm1")
        return norm(u + feed(u), "norm2")
    u = x + attend(norm(x, "norm1"))
    return u + feed(norm(u, "norm2"))


def odd_block(x: Tensor, parts: Tensors, given: Given) -> Tensor:
    """A block that no family knows: x + s tanh(X W^T + b)."""
    return x + parts["size"] * torch.tanh(linear(x, parts["inner.weight"], parts["inner.bias"]))


BLOCKS = {"basic": basic_block, "bottleneck": bottleneck_block, "transformer": transformer_block, "any": odd_block}

# --- starting values ----------------------------------------------------------------------------------


def row_lengths(weight: Tensor) -> Tensor:
    """The coefficients that reproduce a source from its normalised rows."""
    return torch.stack([torch.sqrt((row * row).sum() + EPS) for row in weight])


def head_scales(weight: Tensor, heads: int) -> Tensor:
    """Per head, the s that minimises |s norm(W)_{:,C_h} - W_{:,C_h}|^2."""
    unit, size = unit_rows(weight), weight.shape[1] // heads
    heads_of = [(unit[:, h * size :][:, :size], weight[:, h * size :][:, :size]) for h in range(heads)]
    return torch.stack([(u * w).sum() / (u * u).sum() for u, w in heads_of])


def starting(scales: Tensors, start: str | float, coefficients: str) -> dict[str, Tensor]:
    """a and b at the start; `scales` are the coefficients that reproduce each source alone."""
    values = {}
    for side, scale in scales.items():
        if start == "mean":
            values[side] = scale / len(scales)
        elif start in ("previous", "next"):
            values[side] = scale if side == start else 0 * scale
        else:
            values[side] = 0 * scale + (0.0 if start == "zero" else start)
    if coefficients == "shared" and len(values) == 2:
        return {"a": (values["previous"] + values["next"]) / 2}
    return {{"previous": "a", "next": "b"}[side]: value for side, value in values.items()}
