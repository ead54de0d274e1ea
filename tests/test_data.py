"""Small data sets: read from official layouts and downloaded by torchvision, and damage told in one line."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import tarfile
import threading
from functools import partial
from hashlib import md5
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from official_layouts import LAYOUTS, pictures
from torchvision.datasets import CIFAR10, SVHN

from replearn.errors import ReplearnError
from replearn.experiments.training import data
from replearn.experiments.training.data import ImageSet
from replearn.experiments.training.data.images import channel_statistics
from replearn.experiments.training.data.sets import digits

TABLE = Path(find_spec("sklearn").origin).parent / "datasets" / "data" / "digits.csv.gz"


@pytest.fixture(params=LAYOUTS)
def written(request, tmp_path, monkeypatch):
    """The name, a root with the tiny data set, and what was written there."""
    return request.param, tmp_path, LAYOUTS[request.param](tmp_path, monkeypatch)


def files_of(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


# ---- reading ---------------------------------------------------------------------------------


def test_every_layout_gives_back_what_was_written(written):
    name, root, expected = written
    loaded = data.load(name, root)
    assert isinstance(loaded, ImageSet)
    for images, labels, split in (
        (loaded.train_images, loaded.train_labels, "train"),
        (loaded.test_images, loaded.test_labels, "test"),
    ):
        assert torch.equal(images, expected[split][0])
        assert torch.equal(labels, expected[split][1])
        assert images.is_contiguous()
        assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
    assert (loaded.name, (loaded.num_classes, loaded.channels, loaded.size)) == (name, data.shape_of(name))
    status = data.status(name, root)
    assert (status.problem, status.found) == (None, files_of(root)[0].parent)
    assert (status.data.num_train, status.data.num_test, status.data.unit) == (10, 5, "images")
    assert data.load(name, status.found).num_train == 10  # the root may be the data set's own folder


def test_a_damaged_or_missing_file_is_named(written):
    name, root, _ = written
    for path in files_of(root):
        whole = path.read_bytes()
        for spoil, told in ((lambda p: p.write_bytes(whole[:-1]), "is damaged"), (Path.unlink, "is missing")):  # noqa: B023
            spoil(path)
            with pytest.raises(ReplearnError, match=told) as error:
                data.load(name, root)
            assert str(error.value).startswith(str(path))
            assert f"replearn data download {name}" in str(error.value)
            assert data.status(name, root).problem == str(error.value)
        path.write_bytes(whole)


class Harmful:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_a_pickle_that_runs_code_is_refused_and_not_run(tmp_path, monkeypatch, name):
    LAYOUTS[name](tmp_path, monkeypatch)
    for path in files_of(tmp_path):
        mark, whole = tmp_path / f"mark of {path.name}", path.read_bytes()
        path.write_bytes(pickle.dumps(Harmful(mark)))
        with pytest.raises(ReplearnError, match="its md5 is not the official"):
            data.load(name, tmp_path)
        assert not mark.exists()
        pickle.loads(path.read_bytes())
        assert mark.exists()  # the file is a harmful one indeed
        path.write_bytes(whole)


@pytest.mark.parametrize(("name", "library"), [("cifar10", "torchvision"), ("svhn", "scipy.io")])
def test_a_missing_library_names_the_extra(tmp_path, monkeypatch, name, library):
    LAYOUTS[name](tmp_path, monkeypatch)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ReplearnError, match=rf"needs {library}, .*pip install 'replearn\[train\]'"):
        data.load(name, tmp_path)


# ---- where it is looked for ------------------------------------------------------------------


def test_the_root_is_the_argument_else_the_variable_else_data(tmp_path, monkeypatch):
    roots = {name: tmp_path / name for name in ("given", "named", "here/data")}
    for root in roots.values():
        LAYOUTS["cifar10"](root, monkeypatch)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("REPLEARN_DATA", str(roots["named"]))
    assert data.status("cifar10", roots["given"]).found == roots["given"] / "cifar-10-batches-py"
    assert data.status("cifar10").found == roots["named"] / "cifar-10-batches-py"
    monkeypatch.delenv("REPLEARN_DATA")
    assert data.status("cifar10").found == roots["here/data"] / "cifar-10-batches-py"


@pytest.mark.parametrize("name", [*LAYOUTS, "imagenet"])
def test_data_that_is_not_there_says_where_it_was_looked_for_and_how_to_get_it(tmp_path, monkeypatch, name):
    monkeypatch.setenv("REPLEARN_DATA", str(tmp_path))
    with pytest.raises(ReplearnError) as error:
        data.load(name)
    told = str(error.value)
    status = data.status(name)
    assert status.looked
    for place in status.looked:
        assert str(place) in told
    assert "from the environment variable REPLEARN_DATA" in told
    assert status.source.how in told
    assert (status.problem, status.found, status.data) == (told, None, None)


@pytest.mark.parametrize("name", data.available())
def test_every_data_set_says_what_it_is_and_where(name):
    source = data.source_named(name)
    assert source.name == name
    assert source.how.endswith(".")
    assert source.name == "digits" or (source.folders and source.patterns)


# ---- downloading -----------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The address of a server for the files in `offered`; `server.asked` has the paths it was asked for."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    (tmp_path / "offered").mkdir()

    class Handler(SimpleHTTPRequestHandler):
        def log_request(self, *args: object) -> None:
            http.asked.append(self.path)

    http = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=tmp_path / "offered"))
    http.asked = []
    http.address = f"http://127.0.0.1:{http.server_port}"
    threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
    yield http
    http.shutdown()
    http.server_close()


def test_an_archive_is_fetched_unpacked_and_a_damaged_copy_is_mended(server, tmp_path, monkeypatch):
    expected = LAYOUTS["cifar10"](tmp_path / "original", monkeypatch)
    archive = tmp_path / "offered" / CIFAR10.filename
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "original" / CIFAR10.base_folder, CIFAR10.base_folder)
    monkeypatch.setattr(CIFAR10, "url", f"{server.address}/{CIFAR10.filename}")
    root = tmp_path / "root"
    with pytest.raises(
        ReplearnError, match=r"CIFAR-10 could not be downloaded to .*: File .* corrupted\. Try again"
    ):
        data.download("cifar10", root)  # not the official md5
    assert data.status("cifar10", root).found is None
    monkeypatch.setattr(CIFAR10, "tgz_md5", md5(archive.read_bytes()).hexdigest())
    folder = data.download("cifar10", root)
    assert folder == root / "cifar-10-batches-py"
    assert torch.equal(data.load("cifar10", root).train_images, expected["train"][0])
    asked = len(server.asked)
    for name in ("data_batch_2", "batches.meta"):
        (folder / name).write_bytes(b"damaged")
        data.download("cifar10", root)  # from the archive that is there
        assert torch.equal(data.load("cifar10", root).train_images, expected["train"][0])
    assert len(server.asked) == asked


def test_files_that_are_no_archive_go_to_their_folder(server, tmp_path, monkeypatch):
    expected = LAYOUTS["svhn"](tmp_path / "original", monkeypatch)
    for entry in SVHN.split_list.values():
        shutil.copy(tmp_path / "original" / "svhn" / entry[1], tmp_path / "offered")
        entry[0] = f"{server.address}/{entry[1]}"
    assert data.download("svhn", tmp_path / "root") == tmp_path / "root" / "svhn"
    assert torch.equal(data.load("svhn", tmp_path / "root").train_images, expected["train"][0])


@pytest.mark.parametrize("address", ["{}/gone.tar.gz", "http://127.0.0.1:9/file"])  # the second: nothing listens
def test_what_does_not_arrive_is_told_with_what_to_do(server, tmp_path, monkeypatch, address):
    monkeypatch.setattr(CIFAR10, "url", address.format(server.address))
    with pytest.raises(ReplearnError, match=r"could not be downloaded to .*: .*by hand: unpack http"):
        data.download("cifar10", tmp_path / "root")


def test_what_can_t_be_downloaded_says_how_to_get_it(tmp_path):
    with pytest.raises(ReplearnError, match=r"image-net\.org after registration"):
        data.download("imagenet", tmp_path)
    with pytest.raises(ReplearnError, match="comes with scikit-learn"):
        data.download("digits", tmp_path)


# ---- digits, statistics ----------------------------------------------------------------------


def test_digits_are_scikit_learn_s_in_a_fixed_stratified_split():
    loaded = data.load("digits")
    assert isinstance(loaded, ImageSet)
    assert (loaded.num_train, loaded.num_test, loaded.channels, loaded.size) == (1437, 360, 1, 8)
    assert loaded.test_labels.bincount().tolist() == [36] * 10
    assert int(loaded.train_images.max()) == 255
    # no image is lost and none is in both: together they are the whole bundle
    rows = digits.read_table(TABLE)
    values = rows[:, :-1].mul(255 / 16).round().to(torch.uint8)
    whole = sorted([*row, int(label)] for row, label in zip(values.tolist(), rows[:, -1].tolist(), strict=True))
    ours = torch.cat([loaded.train_images, loaded.test_images]).flatten(1).tolist()
    labels = torch.cat([loaded.train_labels, loaded.test_labels]).tolist()
    assert sorted([*row, label] for row, label in zip(ours, labels, strict=True)) == whole
    # the split is part of every committed result: it must never change
    assert loaded.test_labels[:12].tolist() == [0, 4, 5, 6, 6, 5, 1, 2, 3, 2, 0, 7]
    assert data.status("digits").problem is None


def test_scikit_learn_s_file_and_its_function_give_the_same_digits():
    from sklearn.datasets import load_digits

    rows, bundle = digits.read_table(TABLE), load_digits()
    assert torch.equal(rows[:, :-1], torch.tensor(bundle.data, dtype=torch.float32))
    assert rows[:, -1].tolist() == bundle.target.tolist()
    with pytest.raises(ReplearnError, match="Install scikit-learn anew"):
        digits.read_table(TABLE.with_name("gone"))


def test_digits_without_scikit_learn_name_the_extra(monkeypatch):
    monkeypatch.setattr(digits, "find_spec", lambda name: None)
    with pytest.raises(ReplearnError, match=r"pip install 'replearn\[train\]'"):
        data.load("digits")


def test_statistics_are_those_of_the_pixels():
    images, _ = pictures(50, 32, 10, 0)
    images[:, 2] = 7
    mean, std = channel_statistics(images)
    scaled = images.double() / 255
    assert mean == pytest.approx(scaled.mean((0, 2, 3)).tolist(), abs=1e-12)
    assert std[:2] == pytest.approx(scaled.std((0, 2, 3), correction=0).tolist()[:2], abs=1e-12)
    assert std[2] == 1.0  # a constant channel is not divided by zero
