"""Predicted costs, held against the paper's formulas, torch's own counter and real tensors."""

from dataclasses import asdict

import pytest
import tiny
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode
from zoo import everything

import replearn
from replearn import operators
from replearn.costs import machines
from replearn.costs.recorder import allocated

B, C, Q, S = 4, 8, 3, 16  # batch, channels, kernel, image side


def resnet(*lengths):
    return tiny.Stages(*lengths, width=C)


def images(width=C, batch=B):
    return torch.empty(batch, width, S, S, device="meta")


def encoder(depth=4, d=32, heads=4):
    how = {"dropout": 0.0, "activation": "gelu", "norm_first": True, "batch_first": True}
    layer = nn.TransformerEncoderLayer(d, heads, 4 * d, **how)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


def tokens(batch=2, length=24, d=32):
    return torch.empty(batch, length, d, device="meta")


def alone(model, given, name, operator=None):
    """The costs of a block and of the operator in its place: what each is above removal."""
    floor, made = (
        replearn.costs.estimate(model, given, replearn.plan(model, targets=[name], operator=options))
        for options in ("removal", operator)
    )

    def beyond_removal(cost):
        least = asdict(floor.after.total)
        return replearn.costs.Cost(**{key: number - least[key] for key, number in asdict(cost.total).items()})

    return beyond_removal(floor.before), beyond_removal(made.after)


# ---- the paper's closed formulas ----------------------------------------------------------------


def test_a_basic_block_costs_what_the_paper_says():
    model = resnet(5)
    block, operator = alone(model, images(), "stages.0.2")
    assert block.trainable == 2 * C**2 * Q**2 + 4 * C
    assert operator.trainable == 4 * C
    assert block.forward_flops == 2 * (2 * B * S * S * C**2 * Q**2)
    assert operator.forward_flops / block.forward_flops == 1 / 2  # eta


def test_a_bottleneck_costs_what_the_paper_says():
    torchvision = pytest.importorskip("torchvision")
    wide, middle = 256, 64
    with torch.device("meta"):
        model = torchvision.models.ResNet(torchvision.models.resnet.Bottleneck, [4, 1, 1, 1], num_classes=10)
    block, operator = alone(model, torch.empty(2, 3, 32, 32, device="meta"), "layer1.2", operators.Bottleneck())
    assert block.trainable == 2 * wide * middle + middle**2 * Q**2 + 4 * middle + 2 * wide
    assert operator.trainable == 2 * middle + 2 * wide
    assert block.forward_flops == 2 * (2 * 8 * 8) * (2 * wide * middle + middle**2 * Q**2)
    assert operator.forward_flops == block.forward_flops  # the printed form saves no FLOPs


@pytest.mark.parametrize(("operator", "learned"), [(operators.Projection(), 2), (operators.HeadWise(), 2 * 4)])
def test_a_vit_block_costs_what_the_paper_says(operator, learned):
    model, (batch, length, d) = encoder(), (2, 24, 32)
    block, made = alone(model, tokens(), "layers.2", operator)
    assert block.trainable == 12 * d**2 + 13 * d  # 4 + 8 matrices, 9 biases, two LayerNorms
    assert made.trainable == learned
    assert block.forward_flops == pytest.approx(batch * (24 * length * d**2 + 4 * length**2 * d), rel=0.01)
    assert made.forward_flops / block.forward_flops == pytest.approx(1 / (12 + 2 * length / d), rel=0.01)  # eta


@pytest.mark.parametrize("interval", [2, 3])
def test_the_cost_of_an_interval_is_the_papers_c_of_k(interval):
    """C(K) = C0 (1 - (1 - eta) R / N), with the R that the placement really has."""
    model = encoder(depth=5)
    plan = replearn.plan(model, interval=interval)
    promise = replearn.costs.estimate(model, tokens(), plan)
    full, after = promise.before.total.forward_flops, promise.after.total.forward_flops
    eta = 1 / (12 + 2 * 24 / 32)
    assert after == pytest.approx(full * (1 - (1 - eta) * len(plan.targets) / 5), rel=0.01)
    # a source is read under stop-gradient: nothing flows back into it
    assert promise.after.total.backward_flops <= 2 * after


# ---- against torch itself -----------------------------------------------------------------------


class Plain(nn.Module):
    """Layers whose saved tensors are the same on every device."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(24, 40), nn.Linear(40, 24)
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 7)

    def forward(self, x):
        x = x + self.second(nn.functional.gelu(self.first(self.norm(x))))
        return self.head(nn.functional.silu(x))


def real_saved_bytes(model, given):
    """What autograd keeps, on real tensors: each storage once, rounded as the CUDA allocator does."""
    kept, owned = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}
    owned.add(given.untyped_storage().data_ptr())

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(given)
        loss = cross_entropy(output, torch.zeros(len(output), dtype=torch.long))
    for result in (output, loss):
        kept[result.untyped_storage().data_ptr()] = (result.untyped_storage().nbytes(), result)
    made = loss.grad_fn._saved_target.untyped_storage().data_ptr()
    del kept[made]  # the labels are part of the batch
    return sum(allocated(size) for key, (size, _) in kept.items() if key not in owned)


def test_activations_are_what_autograd_really_keeps():
    model, given = Plain(), torch.randn(64, 24)
    cost = replearn.costs.predict(model, given).total
    labels = allocated(64 * 8)  # the default loss makes its own
    assert cost.activation_bytes - labels == real_saved_bytes(model, given)


def test_flops_are_those_of_torchs_counter_in_a_real_step():
    model, given = replearn.models.CifarResNet(20, width=4), torch.randn(2, 3, 16, 16)
    replearn.replace_(model, replearn.plan(model, interval=2, operator=operators.Basic(stop_gradient=False)))
    counter = FlopCounterMode(display=False)
    with counter:
        cross_entropy(model(given), torch.tensor([1, 2])).backward()
    cost = replearn.costs.predict(model, given).total
    assert cost.forward_flops + cost.backward_flops == counter.get_total_flops()


def test_gradients_of_a_depthwise_convolution_cost_what_its_forward_costs():
    """torch's own formula takes every channel with every other for the weight's gradient."""
    for layer in (nn.Conv2d(C, C, Q, groups=C), nn.ConvTranspose2d(C, 2 * C, Q, stride=2, groups=C)):
        given = torch.empty(B, C, S, S, device="meta")
        cost = replearn.costs.predict(nn.Sequential(nn.Conv2d(C, C, 1), layer), given, loss=lambda y: y.sum())
        point = 2 * B * C * C * S * S  # its input takes no gradient
        depthwise = cost.total.forward_flops - point
        assert cost.total.backward_flops == point + 2 * depthwise
        assert depthwise == layer.weight[0].numel() * 2 * B * C * (
            S * S if isinstance(layer, nn.ConvTranspose2d) else (S - 2) ** 2
        )


def test_autocast_keeps_16_bit_copies_of_weights_and_inputs():
    model, rows = nn.Sequential(nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False)), 32
    given = torch.empty(rows, 256)
    cost = replearn.costs.predict(model, given, precision="bfloat16", loss=lambda y: y.sum()).total
    inputs = 2 * rows * 256 + 2 * rows * 512  # of both layers
    second = 2 * 512 * 256  # the first layer's weight is not needed: its input takes no gradient
    outputs = 2 * rows * 256 + allocated(4)  # the output, and its sum in float32
    assert cost.activation_bytes == inputs + second + outputs


@pytest.mark.parametrize(("precision", "itemsize"), [("float32", 4), ("bfloat16", 2)])
def test_attention_keeps_no_matrix_of_pairs(precision, itemsize):
    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(self.scale * x, x, x)

    batch, heads, length, width = 2, 2, 512, 32
    given = torch.empty(batch, heads, length, width, device="meta")
    cost = replearn.costs.predict(Attend(), given, precision=precision, loss=lambda y: y.float().sum()).total
    one = batch * heads * length * width * itemsize
    pairs = batch * heads * length * length * itemsize
    assert cost.activation_bytes < 6 * one + batch * heads * length * 4 + 8 * one // itemsize
    assert cost.activation_bytes < pairs
    assert cost.forward_flops == 4 * batch * heads * length**2 * width


def test_a_step_ends_with_nothing_but_the_gradients():
    cost = replearn.costs.predict(Plain(), torch.randn(64, 24), optimizer="sgd")
    total = cost.total
    assert total.parameter_bytes + total.activation_bytes < cost.peak_bytes
    assert cost.peak_bytes < total.memory_bytes + 2 * allocated(64 * 40 * 4)


# ---- what it must not do ------------------------------------------------------------------------


def test_the_model_is_not_touched():
    model, calls = replearn.models.CifarResNet(20, width=4).eval(), []
    model.layer1[0].register_forward_hook(lambda *given: calls.append(given))
    before = everything(model)
    replearn.costs.predict(model, torch.empty(2, 3, 16, 16), precision="float16")
    assert everything(model) == before
    assert calls == []
    assert torch.is_autocast_enabled("cuda") is False


def test_shared_frozen_and_loose_tensors_are_counted_as_they_are():
    class Loose(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(50, 16)
            self.head = nn.Linear(16, 50, bias=False)
            self.head.weight = self.embed.weight
            self.frozen = nn.Linear(16, 16).requires_grad_(False)
            self.table = [torch.ones(16)]  # no buffer

        def forward(self, ids):
            return {"logits": self.head(self.frozen(self.embed(ids)) * self.table[0])}

    cost = replearn.costs.predict(Loose(), torch.zeros(2, 5, dtype=torch.long)).total
    assert (cost.trainable, cost.parameters) == (50 * 16, 50 * 16 + 16 * 16 + 16)
    assert (cost.gradient_bytes, cost.optimizer_bytes) == (4 * 50 * 16, 8 * 50 * 16)


# ---- the promise --------------------------------------------------------------------------------


def test_a_promise_keeps_the_plans_own_count_and_prints():
    model = replearn.models.CifarResNet(20, width=4)
    plan = replearn.plan(model, interval=2, first=2)
    machine = replearn.costs.named_machine("rtx 4090")
    terms = {"machine": machine, "optimizer": "sgd_momentum"}
    promise = replearn.costs.estimate(model, torch.empty(8, 3, 32, 32), plan, **terms)
    assert promise.before.total.trainable == plan.parameters_before
    assert promise.after.total.trainable == plan.parameters_after
    assert 0 < promise.ratio("activation_bytes") < 1
    assert 0 < promise.ratio("peak_bytes") < 1
    assert promise.before.total.seconds > machine.launch
    text = str(promise)
    for word in ("deployed", "8x3x32x32 float32", "activations", "optimizer state", "RTX 4090"):
        assert word in text


def test_removal_is_the_floor():
    model, machine = resnet(4), replearn.costs.named_machine("H200")
    (target,) = replearn.plan(model, first=2).targets
    plans = {kind: replearn.plan(model, targets=[target.name], operator=kind) for kind in ("removal", None)}
    removal, repl, small = (
        replearn.costs.estimate(model, images(batch=size), plans[kind], machine=machine)
        for size, kind in ((2**15, "removal"), (2**15, None), (2, None))
    )
    for quantity in ("training_flops", "activation_bytes", "memory_bytes", "seconds", "trainable"):
        assert removal.ratio(quantity) < repl.ratio(quantity) < 1
    assert small.ratio("seconds") > repl.ratio("seconds")  # a small step is bound by launches, not by its work


def test_hugging_face_models_are_priced_with_their_own_loss():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=4, n_embd=32, n_head=2, vocab_size=64, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.zeros(2, 16, dtype=torch.long)
    plan = replearn.plan(model, interval=2)
    promise = replearn.costs.estimate(model, {"input_ids": ids, "labels": ids}, plan, precision="bfloat16")
    assert promise.after.total.trainable == plan.parameters_after
    assert 0 < promise.ratio("activation_bytes") < 1


# ---- bad input ----------------------------------------------------------------------------------


class Asking(nn.Module):
    def forward(self, x):
        return x if x.sum().item() > 0 else -x


predict, estimate, given = replearn.costs.predict, replearn.costs.estimate, torch.empty(2, 24)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: predict(nn.Sequential(nn.Identity(), Asking()), given), ("1 (Asking)", "without values")),
        (lambda: predict(Plain(), torch.empty(2, 5)), ("norm (LayerNorm)", "the example does not fit")),
        (lambda: predict(Plain(), {"y": torch.empty(2)}), ("Plain failed", "dict of keywords")),
        (lambda: predict("resnet", given), ("Expected a torch.nn.Module", "got str")),
        (lambda: predict(Plain(), given, precision="half"), ("'half'", "bfloat16")),
        (lambda: predict(Plain(), given, optimizer="shampoo"), ("'shampoo'", "adamw")),
        (lambda: replearn.costs.named_machine("abacus"), ("'abacus'", "H200", "probe")),
        (lambda: predict(Plain().requires_grad_(False), given), ("no trainable parameter", "Unfreeze")),
        (lambda: estimate(resnet(5), images(), "a plan"), ("got str", "replearn.plan(model)")),
        (lambda: replearn.costs.probe("meta"), ("cpu and cuda", "'meta'")),
    ],
)
def test_what_cannot_work_is_said(call, words):
    with pytest.raises(replearn.ReplearnError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


# ---- the probe ----------------------------------------------------------------------------------


def test_a_probe_measures_this_machine(monkeypatch):
    monkeypatch.setattr(machines, "SECONDS", 0.02)
    monkeypatch.setitem(machines.SIZES, "cpu", (64, 1, 2**16))
    found = replearn.costs.probe("cpu")
    assert min(found.half_flops, found.tf32_flops, found.float32_flops, found.bandwidth, found.launch) > 0
    assert "threads" in found.name
