"""`graph=True`: one recording for each kind of input, outputs that stay, and nothing replayed that is out of date.

Without a GPU a stand-in records: it runs the model again and writes into the same outputs, as a graph does.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, fx, nn

import replearn
from replearn import ReplearnError
from replearn.deployment.exporting import export
from replearn.fast.graphs import replay as replaying
from replearn.fast.graphs.capture import Synchronizing, capture, refuse_synchronizing
from replearn.fast.graphs.replay import Replayed, signature
from replearn.fast.inference import Autocast
from replearn.fast.verify import tensors_in


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record on the CPU, and note the names of what was."""
    names: list[str] = []

    def stand_in(name: str, body: Callable[[], Any], device: torch.device, pool: Any) -> Any:
        names.append(name)
        output = body()

        def launch() -> None:
            for old, new in zip(tensors_in(output), tensors_in(body()), strict=True):
                old.copy_(new)

        return launch, output

    monkeypatch.setattr(replaying, "capture", stand_in)
    return names


def test_one_recording_for_each_kind_of_input(recorded: list[str]) -> None:
    model = nn.Linear(3, 2).eval()
    fast = Replayed(model)
    for batch in (4, 4, 1, 4, 1):
        x = torch.randn(batch, 3)
        assert torch.equal(fast(x), model(x))
    assert recorded == ["Linear", "Linear"]
    assert fast.num_graphs == 2
    fast(torch.randn(3, 4).t())  # other strides: the layout may be what decides which kernel runs
    assert fast.num_graphs == 3
    fast.double()(torch.randn(4, 3, dtype=torch.float64))
    assert fast.num_graphs == 1
    fast(input=torch.randn(4, 3, dtype=torch.float64))  # by keyword is another call
    assert fast.num_graphs == 2


def test_the_kind_not_used_for_longest_is_forgotten(recorded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying, "MAX_GRAPHS", 2)
    fast = Replayed(nn.Linear(3, 2).eval())
    for batch in (1, 2, 1, 3):  # 2 goes
        fast(torch.randn(batch, 3))
    assert len(recorded) == 3
    assert fast.num_graphs == 2
    fast(torch.randn(1, 3))
    assert len(recorded) == 3
    fast(torch.randn(2, 3))
    assert len(recorded) == 4


def test_outputs_stay_and_inputs_are_read_anew(recorded: list[str]) -> None:
    fast = Replayed(nn.Linear(3, 2).eval())
    x = torch.randn(4, 3)
    first = fast(x)
    kept = first.clone()
    second = fast(x.mul_(2))
    assert torch.equal(first, kept)
    assert not torch.equal(first, second)
    first.zero_()  # the caller's own
    assert torch.equal(fast(x), second)
    assert recorded == ["Linear"]


def test_signatures_tell_numbers_apart_that_compare_equal() -> None:
    def of(value: Any) -> Any:
        return signature(value, [], "takes")

    assert len({of(1), of(1.0), of(True), of("1"), of(None)}) == 5
    assert of(0.0) != of(-0.0)
    assert of(float("nan")) == of(float("nan"))
    assert of((1, 2)) != of([1, 2])
    assert of({"a": 1}) != of({"b": 1})
    assert of(torch.zeros(2)) != of(torch.zeros(2, device="meta"))
    found: list[Tensor] = []
    one, two = torch.zeros(2), torch.zeros(3, dtype=torch.int64)
    key = signature({"a": [one], "b": {"c": two}}, found, "takes")
    assert [id(tensor) for tensor in found] == [id(one), id(two)]
    assert key == signature({"a": [torch.ones(2)], "b": {"c": torch.ones(3, dtype=torch.int64)}}, [], "takes")


def test_hugging_face_outputs_keep_their_class(recorded: list[str]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).eval()
    fast, words = Replayed(model), torch.tensor([[3, 1, 4, 1, 5]])
    for given in (words, words.flip(1)):
        made = fast(input_ids=given, use_cache=False)
        assert type(made) is type(model(input_ids=given, use_cache=False))
        torch.testing.assert_close(made.logits, model(input_ids=given, use_cache=False).logits)
        assert made.logits is made["logits"]
    assert len(recorded) == 1
    with pytest.raises(ReplearnError, match=r"returns tensors, .* not DynamicCache: .* use_cache=False"):
        fast(input_ids=words)
    assert fast.num_graphs == 1


@pytest.mark.parametrize(
    "change", ["to", "half", "assign", "data", "turned", "inner", "submodule", "buffer", "model"]
)
def test_weights_elsewhere_are_recorded_anew(change: str, recorded: list[str]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
    fast, x = Replayed(model), torch.randn(4, 3)
    fast(x)
    fast(x[:2])
    state = {name: torch.rand_like(value) for name, value in model.state_dict().items() if "num" not in name}
    weight: Any = model[0].weight
    changes: dict[str, Callable[[], Any]] = {
        "to": lambda: fast.to(torch.float64),
        "half": lambda: model.double(),  # behind its back
        "assign": lambda: model.load_state_dict(state, strict=False, assign=True),
        "data": lambda: setattr(weight, "data", torch.randn(3, 3)),
        "turned": lambda: setattr(weight, "data", weight.data.t()),  # the same memory
        "inner": lambda: setattr(model[0], "weight", nn.Parameter(torch.randn(3, 3))),
        "submodule": lambda: model.__setitem__(0, nn.Linear(3, 3).eval()),
        "buffer": lambda: setattr(model[1], "running_mean", torch.randn(3)),
        "model": lambda: setattr(fast, "model", copy.deepcopy(model)),
    }
    changes[change]()
    model = fast.model
    if change == "to":
        assert fast.num_graphs == 0  # at once
    x = x.to(model[0].weight.dtype)
    assert torch.equal(fast(x), model(x))
    assert len(recorded) == 3
    assert fast.num_graphs == 1  # the other one went as well
    model.load_state_dict({k: v.clone() + 1 for k, v in model.state_dict().items()})  # in place
    assert torch.equal(fast(x), model(x))
    assert len(recorded) == 3


def test_train_mode_is_refused_and_forget_records_anew(recorded: list[str]) -> None:
    fast, x = Replayed(nn.Sequential(nn.Linear(3, 3), nn.Dropout())), torch.randn(4, 3)
    fast(x)
    fast.model[1].train()
    with pytest.raises(ReplearnError, match=r"Sequential can't be captured in train mode \(1\). Call .eval\(\)"):
        fast(x)
    fast.eval()(x)
    assert len(recorded) == 2
    fast.forget()
    assert fast.num_graphs == 0
    fast(x)
    assert len(recorded) == 3


class Seen(nn.Module):
    """Notes the autocast that it is called in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.seen: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()))
        return self.layer(x)


def test_a_recording_keeps_no_casts_and_autocast_around_is_another_kind(recorded: list[str]) -> None:
    model, x = Seen().eval(), torch.randn(4, 3)
    low = Replayed(Autocast(model, torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):  # whose cache lives longer than the recording
        assert low(x).dtype is torch.bfloat16
    assert recorded == ["Seen"]  # the user's name, not that of the wrapper
    assert model.seen[0] == (True, False)
    fast = Replayed(model)
    fast(x)
    before = torch.get_autocast_dtype("cuda")
    try:
        torch.set_autocast_enabled("cuda", True)
        for dtype in (torch.bfloat16, torch.float16):
            torch.set_autocast_dtype("cuda", dtype)
            fast(x)
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)
    assert fast.num_graphs == 3
    with torch.autocast("cpu", torch.bfloat16):
        assert Replayed(model)(x).dtype is torch.bfloat16


@pytest.mark.parametrize("how", [copy.deepcopy, lambda fast: pickle.loads(pickle.dumps(fast))])
def test_copies_have_the_model_and_no_graphs(how: Callable[[Replayed], Replayed], recorded: list[str]) -> None:
    fast, x = Replayed(nn.Linear(3, 2).eval()), torch.randn(4, 3)
    expected = fast(x)
    other = how(fast)
    assert (other.num_graphs, fast.num_graphs) == (0, 1)
    assert torch.equal(other(x), expected)
    with torch.no_grad():
        other.model.weight.zero_()
        other.model.bias.zero_()
    assert torch.equal(other(x), torch.zeros(4, 2))
    assert torch.equal(fast(x), expected)
    assert set(fast.state_dict()) == {"model.weight", "model.bias"}


def test_tensors_that_a_model_caches_stay_where_the_graph_reads_them(recorded: list[str]) -> None:
    class Caching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if getattr(self, "table", None) is None or len(self.table[0]) != len(x):
                self.table = [torch.arange(len(x)).float()]
            return x + self.table[0]

    model = Caching().eval()
    fast = Replayed(model)
    fast(torch.zeros(3))
    address = model.table[0].data_ptr()
    fast(torch.zeros(4))
    (first, _) = fast._graphs.values()
    assert address in [tensor.data_ptr() for tensor in first.read]
    assert torch.equal(fast(torch.zeros(3)), torch.arange(3).float())
    assert len(recorded) == 2


BY_VALUES, COUNTS = r"depends on values \(aten.{}\)", torch.ones(2, dtype=torch.int64)
WAYS: dict[str, tuple[Callable[[Tensor], Any], str]] = {  # and why they can't be captured
    "if": (lambda x: x if x.sum() > 0 else -x, r"from the GPU \(aten._local_scalar_dense.default\), as an if"),
    "item": (lambda x: x * x.max().item(), "reads a value from the GPU"),
    "nonzero": (lambda x: x.nonzero(), "the size of a tensor .*" + BY_VALUES.format("nonzero.default")),
    "mask": (lambda x: x[x > 0], BY_VALUES.format("index.Tensor")),
    "bytes": (lambda x: x[(x > 0).byte()], BY_VALUES.format("index.Tensor")),
    "select": (lambda x: torch.masked_select(x, x > 0), BY_VALUES.format("masked_select.default")),
    "repeat": (lambda x: torch.repeat_interleave(COUNTS), BY_VALUES.format("repeat_interleave.Tensor")),
    "move": (lambda x: x.to("meta"), r"copies a tensor between cpu and meta \(aten._to_copy.default\)"),
    "copy": (lambda x: torch.empty(4, 3, device="meta").copy_(x), r"between cpu and meta \(aten.copy_.default\)"),
    "sized": (lambda x: torch.repeat_interleave(COUNTS, output_size=2), ""),
    "index": (lambda x: x[torch.tensor([0, 1])], ""),
    "plain": (lambda x: torch.relu(x).to(torch.float64).repeat_interleave(2, 0), ""),
}


class Odd(nn.Module):
    """Waits for values in one of the ways there are, or does not."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Any:
        return WAYS[self.how][0](x)


@pytest.mark.parametrize("how", WAYS)
def test_code_that_waits_is_found_before_it_is_recorded(how: str) -> None:
    x, model = torch.randn(4, 3), Odd(how)
    with Synchronizing(torch.device("cuda")) as waiting:  # values on the CPU are there already
        Odd("item")(x)
    assert waiting.found is None
    if not WAYS[how][1]:
        refuse_synchronizing("Odd", lambda: model(x), torch.device("cpu"))
        return
    with pytest.raises(ReplearnError, match=WAYS[how][1]) as caught:
        refuse_synchronizing("Odd", lambda: model(x), torch.device("cpu"))
    assert "Odd can't be captured as a CUDA graph" in str(caught.value)
    assert "Deploy it without graph=True" in str(caught.value)


def deploy(**form: Any) -> nn.Module:
    return replearn.deploy(tiny.replaced(tiny.resnet()).eval(), **form)


ON_CPU = r"graph=True needs a model on a CUDA GPU, and this CifarResNet is on cpu.* model.to\('cuda'\)"
OWN_GRAPHS = "compile='reduce-overhead' replays CUDA graphs of its own.* graph=True with compile=True"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: deploy(graph=True), ON_CPU),
        (lambda: deploy(graph=4), "graph=4: write True to replay CUDA graphs"),
        (lambda: deploy(graph=True, compile="reduce-overhead"), OWN_GRAPHS),
        (lambda: Replayed(nn.Linear(3, 3).eval())(torch.zeros(3)), "Linear is on cpu, and only what runs on"),
        (lambda: capture("Net", lambda: None, torch.device("cpu"), None), "Net is on cpu"),
        (lambda: Replayed(nn.Linear(3, 3))(object()), "takes tensors, .* plain values, not object: a graph"),
        (lambda: Replayed(nn.Linear(3, 3))(torch.eye(3).to_sparse()), "takes no tensors with the layout"),
        (lambda: export(Replayed(nn.Linear(3, 3)), "x.onnx", torch.zeros(1, 3)), "what deploy gives without gr"),
    ],
)
def test_what_cannot_be_replayed_is_said(wrong: Callable[[], Any], says: str) -> None:
    with pytest.raises(ReplearnError, match=says):
        wrong()


def test_a_tensor_on_another_device_is_said(recorded: list[str]) -> None:
    with pytest.raises(ReplearnError, match=r"Linear is on cpu and got a tensor on meta.* tensor.to\('cpu'\)"):
        Replayed(nn.Linear(3, 3))(torch.zeros(3, device="meta"))


def test_compiled_code_passes_the_check_and_stays_compiled() -> None:
    runs: list[fx.GraphModule] = []

    def backend(compiled: fx.GraphModule, example: Any) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            runs.append(compiled)
            return compiled(*given)

        return run

    torch._dynamo.reset()
    model, x = Odd("plain"), torch.randn(2, 3)
    model.compile(backend=backend)
    with torch.no_grad():
        model(x)
        refuse_synchronizing("Odd", lambda: model(x), torch.device("cpu"))
        model(x)
    assert len(runs) == 2  # before and after the check, which runs the code as it is written


def test_there_are_no_gradients_and_inference_mode_is_the_callers(recorded: list[str]) -> None:
    fast, x = Replayed(nn.Linear(3, 2).eval()), torch.randn(4, 3, requires_grad=True)
    with torch.inference_mode():
        made = fast(x)  # recorded in inference mode
        assert made.is_inference()
        inside = torch.randn(4, 3)
    for given in (x, inside):
        made = fast(given)
        assert not made.is_inference()
        assert not made.requires_grad
    assert recorded == ["Linear"]
    assert torch.is_grad_enabled()
