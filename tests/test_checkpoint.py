"""Save and load: every dtype and layout, atomic writes, and damaged or foreign files refused without a trace."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from zoo import everything

import replearn
from replearn import ReplearnError, operators
from replearn.surgery import tensor_file
from replearn.surgery.checkpoint import FORMAT
from replearn.surgery.plan_metadata import PLAN
from replearn.surgery.tensor_file import read_file, write_file

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def trained(seed: int = 0, depth: int = 20, **options: Any) -> nn.Module:
    """A replaced residual network with every value random, running statistics too."""
    torch.manual_seed(seed)
    model = tiny.replaced(tiny.resnet(depth), interval=2, first=2, **options)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.dtype.is_floating_point:
                tensor.uniform_(0.1, 1.0)
            else:
                tensor.fill_(7)
    return model.eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "run.safetensors"
    replearn.save(trained(), path)
    return path


def refused(model: nn.Module, path: Any) -> str:
    """Loading fails with a ReplearnError that names the file; the model is bit for bit what it was."""
    before = everything(model)
    with pytest.raises(ReplearnError) as caught:
        replearn.load(model, path)
    assert everything(model) == before, str(caught.value)
    assert str(path) in str(caught.value)
    assert str(caught.value).endswith("The model is unchanged.")
    return str(caught.value)


# ---- there and back -----------------------------------------------------------------------------


@pytest.mark.parametrize("onto", FLOATS, ids=str)
@pytest.mark.parametrize("written", FLOATS, ids=str)
def test_a_file_of_any_dtype_loads_onto_a_model_of_any_other(written: Any, onto: Any, tmp_path: Path) -> None:
    model = trained().to(written)
    replearn.save(model, tmp_path / "run.safetensors")
    loaded = replearn.load(tiny.resnet().to(onto), tmp_path / "run.safetensors")
    own = model.state_dict()
    for name, tensor in loaded.state_dict().items():
        if not tensor.dtype.is_floating_point:
            assert torch.equal(tensor, own[name])
            continue
        coefficient = name.endswith((".a", ".b"))
        assert tensor.dtype is (torch.promote_types(onto, torch.float32) if coefficient else onto)
        assert torch.equal(tensor, own[name].to(tensor.dtype))


def test_loading_keeps_mode_frozen_parameters_layout_and_the_random_state(tmp_path: Path) -> None:
    saved = trained(operator=operators.Basic(correction="low-rank", rank=2))  # whose start would draw numbers
    replearn.save(saved, tmp_path / "run.safetensors")
    model = tiny.resnet().to(memory_format=torch.channels_last).eval()
    model.fc.requires_grad_(False)
    kept = {name: parameter for name, parameter in model.named_parameters() if not name.startswith("layer")}
    random = torch.get_rng_state()
    replearn.load(model, tmp_path / "run.safetensors")
    assert not any(module.training for module in model.modules())
    now = dict(model.named_parameters())
    assert all(now[name] is parameter for name, parameter in kept.items())
    assert [p.requires_grad for p in model.fc.parameters()] == [False, False]
    assert model.layer3[2].conv1.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(torch.get_rng_state(), random)
    images = torch.randn(2, 3, 8, 8)
    assert torch.allclose(model(images), saved(images), rtol=1e-4, atol=1e-4)


class Odd(nn.Module):
    """Tensors that file formats stumble over."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(tiny.Own(4) for _ in range(5)))
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)
        if tied:
            self.two.weight = self.one.weight
        base = torch.arange(24.0).view(4, 6)
        for name, tensor in {
            "base": base,
            "part": base[1:3],
            "column": base[:, 2],
            "transposed": base.t(),
            "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(3.5),
            "count": torch.tensor(2**62 + 1),
            "mask": torch.tensor([True, False, True]),
            "bytes": torch.arange(7, dtype=torch.uint8),
            "words": torch.tensor([0, 40000], dtype=torch.uint16),
            "turn": torch.tensor([1 + 2j, -3j]),
            "conjugate": torch.tensor([1 + 2j, -3j]).conj(),
            "tiny8": torch.tensor([0.5, -1.0]).to(torch.float8_e4m3fn),
        }.items():
            self.register_buffer(name, tensor)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.two(self.one(self.blocks(x)))
        return out


def test_odd_tensors_survive_and_ties_stay_ties(tmp_path: Path) -> None:
    model = tiny.replaced(Odd())
    replearn.save(model, tmp_path / "run.safetensors")
    fresh = Odd()
    with torch.no_grad():
        for buffer in fresh.buffers():
            buffer.zero_()
    loaded = replearn.load(fresh, tmp_path / "run.safetensors")
    for name, tensor in model.state_dict().items():
        found = loaded.state_dict()[name]
        assert (found.dtype, found.shape, found.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        one, other = (t.view(torch.uint8) if name == "tiny8" else t for t in (found, tensor))
        assert torch.equal(one, other)
    assert loaded.two.weight is loaded.one.weight
    assert loaded.part.data_ptr() == loaded.base[1].data_ptr()
    with safe_open(tmp_path / "run.safetensors", "pt") as file:
        assert {"one.weight", "two.weight"} & set(file.keys()) == {"one.weight"}


def test_tied_files_fit_untied_models_and_untied_ones_fit_where_they_say_the_same(tmp_path: Path) -> None:
    path, model, untied = tmp_path / "run.safetensors", tiny.replaced(Odd()), tiny.replaced(Odd(tied=False))
    replearn.save(model, path)
    loaded = replearn.load(Odd(tied=False), path)
    assert loaded.two.weight is not loaded.one.weight
    assert torch.equal(loaded.two.weight, model.one.weight)
    replearn.save(untied, path)
    assert "one.weight and two.weight are one tensor in the model, and differ" in refused(Odd(), path)
    with torch.no_grad():
        untied.two.weight.copy_(untied.one.weight)
    replearn.save(untied, path)
    assert torch.equal(replearn.load(Odd(), path).one.weight, untied.one.weight)


def test_the_file_is_one_that_safetensors_itself_reads_and_would_have_written(tmp_path: Path) -> None:
    model = trained()
    replearn.save(model, tmp_path / "ours.safetensors")
    found = load_file(tmp_path / "ours.safetensors")
    state = model.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in found)
    with safe_open(tmp_path / "ours.safetensors", "pt") as file:
        metadata = file.metadata()
    dense = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(dense, tmp_path / "theirs.safetensors", metadata)  # by their writer, checksum and all
    loaded = replearn.load(tiny.resnet(), tmp_path / "theirs.safetensors")
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())


def test_a_compiled_model_saves_under_its_own_names(tmp_path: Path) -> None:
    model = trained()
    names = model.state_dict().keys()
    replearn.save(torch.compile(model, backend="eager"), tmp_path / "run.safetensors")
    assert load_file(tmp_path / "run.safetensors").keys() == names
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for number, block in enumerate(model.layer1):  # one by one, which compiles faster
        model.layer1[number] = torch.compile(block, backend="eager")  # type: ignore[assignment]
    for gathered in (None, state):
        replearn.save(model, tmp_path / "run.safetensors", state=gathered)
        assert load_file(tmp_path / "run.safetensors").keys() == names
    replearn.load(tiny.resnet(), tmp_path / "run.safetensors")


def test_a_gathered_state_can_be_given_and_must_be_the_model_s(tmp_path: Path) -> None:
    model, other = trained(0), trained(1)
    replearn.save(model, tmp_path / "run.safetensors", state=other.state_dict())
    loaded = replearn.load(tiny.resnet(), tmp_path / "run.safetensors")
    assert torch.equal(loaded.fc.weight, other.fc.weight)
    less = {name: tensor for name, tensor in other.state_dict().items() if name != "fc.bias"}
    with pytest.raises(ReplearnError, match=r"keys of the state that you gave.*1 missing \(fc\.bias\)"):
        replearn.save(model, tmp_path / "run.safetensors", state=less)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.cuda
def test_a_file_from_a_gpu_loads_onto_a_cpu_and_back(tmp_path: Path) -> None:
    model = trained().cuda()
    replearn.save(model, tmp_path / "run.safetensors")
    for device in ("cpu", "cuda"):
        loaded = replearn.load(tiny.resnet().to(device), tmp_path / "run.safetensors")
        assert all(torch.equal(t.cuda(), model.state_dict()[n]) for n, t in loaded.state_dict().items())


# ---- writing ------------------------------------------------------------------------------------


@pytest.fixture
def old(tmp_path: Path) -> Iterator[Path]:
    """A saved file that whatever goes wrong must leave as it is, with nothing beside it."""
    path = tmp_path / "run.safetensors"
    replearn.save(trained(0), path)
    before = path.read_bytes()
    yield path
    assert path.read_bytes() == before


@pytest.mark.parametrize("size", [0, 100, 60_000])
def test_a_disk_that_fills_up_leaves_the_old_file_and_nothing_else(size: int, old: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert old.stat().st_size > size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))  # the system's own write fails halfway
    try:
        with pytest.raises(ReplearnError, match="what was there before is untouched") as caught:
            replearn.save(trained(1), old)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(old) in str(caught.value)
    assert "File too large" in str(caught.value)
    assert os.listdir(old.parent) == [old.name]


def test_weights_that_change_while_they_are_saved_leave_a_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = iter(range(10_000))
    monkeypatch.setattr(tensor_file, "on_cpu", lambda tensor: torch.full_like(tensor, next(seen)))
    replearn.save(trained(), tmp_path / "run.safetensors")
    monkeypatch.undo()
    read_file(tmp_path / "run.safetensors", FORMAT)  # what was written is what was counted


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_an_interrupted_save_leaves_the_old_file(moment: str, old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, moment, interrupt)  # Ctrl-C, at the worst moments
    with pytest.raises(KeyboardInterrupt):
        replearn.save(trained(1), old)
    assert os.listdir(old.parent) == [old.name]


def test_a_save_that_is_killed_leaves_the_old_file(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: os.kill(os.getpid(), signal.SIGKILL))
    child = os.fork()
    if not child:  # dies with all of the new file written, and none of it in place
        replearn.save(trained(1), old)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_a_new_file_has_the_usual_permissions_and_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    real, link = tmp_path / "there" / "real.safetensors", tmp_path / "latest.safetensors"
    link.symlink_to(real)
    replearn.save(trained(), link)
    assert link.is_symlink()
    (tmp_path / "plain").touch()
    assert real.stat().st_mode == (tmp_path / "plain").stat().st_mode


# ---- files that are not ours, or not whole ------------------------------------------------------


def header_end(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def test_a_file_cut_off_anywhere_is_refused(saved: Path, tmp_path: Path) -> None:
    data, path = saved.read_bytes(), tmp_path / "damaged.safetensors"
    start = header_end(data)
    for length in (0, 1, 7, 8, 9, 100, start - 1, start, start + 1, (start + len(data)) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        assert "cut off or damaged: use another copy" in refused(tiny.resnet(), path), length


@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), in_header=st.booleans())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_a_file_with_one_bit_flipped_is_refused(saved: Path, where: float, bit: int, in_header: bool) -> None:
    data = bytearray(saved.read_bytes())
    start = header_end(data)
    offset = int(where * start) if in_header else start + int(where * (len(data) - start))
    data[offset] ^= 1 << bit
    path = saved.with_name("flipped.safetensors")
    path.write_bytes(data)
    # reading is all that the file has a part in; the model is looked at in the other tests
    with pytest.raises(ReplearnError):
        read_file(path, FORMAT)


class Exploding:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("exploded",))


@pytest.mark.parametrize("protocol", [0, 2, 5, "torch.save"])
def test_a_pickle_is_refused_and_never_run(protocol: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.safetensors"
    if protocol == "torch.save":
        torch.save({"a": Exploding()}, path)
    else:
        path.write_bytes(pickle.dumps(Exploding(), protocol=protocol))
    text = refused(tiny.resnet(), path)
    assert "is a pickle and can run code" in text or protocol == 0
    assert not (tmp_path / "exploded").exists()


def test_a_header_whose_length_looks_like_a_pickle_s_first_byte_is_read(saved: Path) -> None:
    for padding in range(0, 260, 8):
        path = rewritten(saved, lambda tensors, about, padding=padding: about.update(padding="x" * padding))
        if path.read_bytes()[0] == 0x80:
            break
    assert path.read_bytes()[0] == 0x80
    replearn.load(tiny.resnet(), path)


# ---- files that are whole and don't fit ---------------------------------------------------------


def rewritten(saved: Path, change: Callable[[dict[str, Tensor], dict[str, str]], None]) -> Path:
    """The same file with something changed on purpose, checksum and all: what a stranger could send."""
    about, tensors = read_file(saved, FORMAT)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    del about["checksum"]
    change(tensors, about)
    path = saved.with_name("rewritten.safetensors")
    write_file(path, tensors, about)
    return path


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: tiny.resnet(14), "it has no block 'layer1.2'"),
        (lambda: tiny.resnet(26), "this CifarResNet has 12 blocks, and the plan was made for 9"),
        (lambda: tiny.resnet(20, width=8), "parameters_after of layer1.1 is different in this model: 32, and the"),
        (tiny.Tokens, "it has no block 'layer1.1'"),
        (lambda: replearn.models.CifarResNet(20, 11, width=4), "(10, 16) in the file and (11, 16) in the model"),
        (lambda: tiny.resnet().to("meta"), "is on the meta device. Give the model memory first: model.to_empty"),
        (lambda: copying(tiny.resnet()), "fc.weight can't be written to"),
    ],
)
def test_a_model_that_the_plan_does_not_fit_is_refused_and_unchanged(
    build: Callable[[], nn.Module], message: str, saved: Path
) -> None:
    model = build()
    if next(model.parameters()).is_meta:
        with pytest.raises(ReplearnError, match=message):
            replearn.load(model, saved)
        assert not hasattr(model, PLAN)
        return
    assert message in refused(model, saved)


def copying(model: Any) -> nn.Module:
    def hook(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
        state["fc.weight"] = state["fc.weight"].clone()

    model._register_state_dict_hook(hook)
    return model


# ---- in little memory ---------------------------------------------------------------------------

FRUGAL = """
import sys
import torch, replearn
from torch import nn

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) // 1024 for line in status if line.startswith("VmHWM"))

def build():
    blocks = (nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True) for _ in range(40))
    return nn.Sequential(*blocks)

model = build()
replearn.replace_(model, replearn.plan(model))
size = sum(p.numel() * 4 for p in model.parameters()) // 2**20
before = peak()
replearn.save(model, "run.safetensors")
saving = peak() - before
del model
fresh = build()
before = peak()
replearn.load(fresh, "run.safetensors")
print(size, saving, peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory from /proc")
def test_saving_holds_one_tensor_and_loading_holds_the_file_once(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FRUGAL]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr
    size, saving, loading = map(int, made.stdout.split())
    assert size > 80
    assert saving < size / 4, (size, saving)
    assert loading < size * 1.25, (size, loading)  # the mapped file itself, and little else


def test_names_like_those_of_torch_compile_stay(tmp_path: Path) -> None:
    def model() -> nn.Module:
        made = tiny.resnet()
        made.my_orig_mod = nn.Linear(2, 2)
        return made

    replaced = tiny.replaced(model())
    replearn.save(replaced, tmp_path / "run.safetensors")
    again = replearn.load(model(), tmp_path / "run.safetensors")
    assert torch.equal(again.my_orig_mod.weight, replaced.my_orig_mod.weight)
