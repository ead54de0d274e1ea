"""Small data sets: read from official layouts, checked, and every kind of damage told in one line."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from official_layouts import LAYOUTS, cifar10_binary, cifar10_python, pictures, svhn_mat

from replearn.errors import ReplearnError
from replearn.experiments.training import data
from replearn.experiments.training.data import ImageSet, inspect_source
from replearn.experiments.training.data.images import channel_statistics, load_images
from replearn.experiments.training.data.pickles import images_and_labels
from replearn.experiments.training.data.sets import cifar10, cifar100, digits, stl10, svhn
from replearn.experiments.training.data.source import md5_of

SMALL = ("cifar10", "cifar100", "svhn", "stl10")
TABLE = Path(find_spec("sklearn").origin).parent / "datasets" / "data" / "digits.csv.gz"
MODULES = {"cifar10": cifar10, "cifar100": cifar100, "svhn": svhn, "stl10": stl10}


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict]]:
    made = {}
    for case, write in LAYOUTS.items():
        root = tmp_path_factory.mktemp("data")
        made[case] = (root, write(root))
    return made


@pytest.fixture(params=LAYOUTS)
def written(request, originals, tmp_path):
    """The name, a root of its own with the tiny data set, and what was written there."""
    original, expected = originals[request.param]
    shutil.copytree(original, tmp_path / "root")
    return request.param.split("/")[0], tmp_path / "root", expected


def files_of(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


# ---- reading ---------------------------------------------------------------------------------


def test_every_layout_gives_back_what_was_written(written):
    name, root, expected = written
    loaded = data.load(name, root, strict_counts=False)
    assert isinstance(loaded, ImageSet)
    for images, labels, split in (
        (loaded.train_images, loaded.train_labels, "train"),
        (loaded.test_images, loaded.test_labels, "test"),
    ):
        assert torch.equal(images, expected[split][0])
        assert torch.equal(labels, expected[split][1])
        assert images.is_contiguous()
        assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
    source = MODULES[name].SOURCE
    assert (loaded.name, loaded.num_classes) == (name, source.num_classes)
    assert (loaded.channels, loaded.size, loaded.size) == source.shape


def test_the_official_counts_are_asked_for(written):
    name, root, _ = written
    with pytest.raises(ReplearnError, match=r"holds \d+ images, and [\d,]+ are expected") as error:
        data.load(name, root)
    assert str(root) in str(error.value)
    assert f"replearn data download {name}" in str(error.value)


def test_a_file_that_is_cut_off_is_named(written):
    name, root, _ = written
    for path in files_of(root):
        whole = path.read_bytes()
        for left in (0, len(whole) // 2 + 1, len(whole) - 1):
            path.write_bytes(whole[:left])
            with pytest.raises(ReplearnError) as error:
                data.load(name, root, strict_counts=False)
            # STL-10 keeps labels apart: fewer of them are found out when the images are counted
            beside = path.with_name(path.name.replace("_y", "_X"))
            assert str(path) in str(error.value) or str(beside) in str(error.value)
            assert "replearn data download" in str(error.value)
        path.write_bytes(whole)


def test_a_missing_file_is_named(written):
    name, root, _ = written
    for path in files_of(root):
        path.rename(path.with_name("aside"))
        with pytest.raises(ReplearnError, match="is missing") as error:
            data.load(name, root, strict_counts=False)
        assert str(path) in str(error.value)
        path.with_name("aside").rename(path)


@pytest.mark.parametrize(
    ("case", "file", "spoil", "told"),
    [
        ("cifar10/binary", "data_batch_3.bin", lambda raw: bytes([10]) + raw[1:], "image 0 the label 10"),
        ("cifar100/binary", "test.bin", lambda raw: raw[:1] + bytes([100]) + raw[2:], "image 0 the label 100"),
        ("stl10/binary", "train_y.bin", lambda raw: bytes([0]) + raw[1:], "the label 0"),
        ("stl10/binary", "test_y.bin", lambda raw: raw[:-1] + bytes([11]), "the label 11"),
        ("stl10/binary", "train_y.bin", lambda raw: raw + raw, "6 images and 12 labels"),
    ],
)
def test_labels_out_of_range_are_told_with_the_file(originals, tmp_path, case, file, spoil, told):
    shutil.copytree(originals[case][0], tmp_path, dirs_exist_ok=True)
    (path,) = tmp_path.rglob(file)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ReplearnError, match=told) as error:
        data.load(case.split("/")[0], tmp_path, strict_counts=False)
    assert str(path.parent) in str(error.value)


def test_svhn_files_with_other_contents_are_refused(tmp_path):
    from scipy.io import savemat

    svhn_mat(tmp_path)
    path = tmp_path / "svhn" / "train_32x32.mat"
    x = np.zeros((32, 32, 3, 2), np.uint8)
    for table, told in (
        ({"X": x}, "does not hold"),
        ({"X": x.astype(float), "y": [[1], [2]]}, "does not hold"),
        ({"X": x, "y": [[1], [0]]}, "the label 0"),
        ({"X": x, "y": [[1]]}, "2 images and 1 labels"),
        ({"X": x[:16], "y": [[1], [2]]}, "3x16x32"),
    ):
        savemat(path, table)
        with pytest.raises(ReplearnError, match=told) as error:
            data.load("svhn", tmp_path, strict_counts=False)
        assert str(path) in str(error.value)


def test_a_whole_layout_is_preferred_to_a_broken_one(tmp_path):
    cifar10_binary(tmp_path)
    expected = cifar10_python(tmp_path)
    (tmp_path / "cifar-10-batches-bin" / "data_batch_2.bin").unlink()
    assert torch.equal(data.load("cifar10", tmp_path, strict_counts=False).test_images, expected["test"][0])


# ---- pickles ---------------------------------------------------------------------------------


class Harmful:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("protocol", [2, 5])
def test_a_pickle_that_runs_code_is_refused_and_not_run(tmp_path, protocol):
    path, mark = tmp_path / "data_batch_1", tmp_path / "mark"
    path.write_bytes(pickle.dumps([Harmful(mark)], protocol))
    with pytest.raises(ReplearnError, match=r"mkdir, which no CIFAR file needs") as error:
        images_and_labels(path, b"labels")
    assert str(path) in str(error.value)
    assert not mark.exists()
    pickle.loads(path.read_bytes())
    assert mark.exists()  # the file is a harmful one indeed


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ([1, 2], "no file of CIFAR"),
        ({b"data": 1, b"labels": []}, "no file of CIFAR"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": [1]}, "no file of CIFAR"),
        ({b"data": np.zeros((1, 3072), np.float32), b"labels": [1]}, "not one of uint8 rows"),
        ({b"data": np.zeros((1, 3071), np.uint8), b"labels": [1]}, r"shape \(1, 3071\)"),
        ({b"data": np.zeros((1, 3072), np.uint8), b"labels": ["cat"]}, "not small whole numbers"),
        ({b"data": np.zeros((1, 3072), np.uint8), b"labels": [10**30]}, "not small whole numbers"),
    ],
)
def test_a_pickle_with_other_contents_is_refused(tmp_path, table, told):
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps(table, protocol=3))
    with pytest.raises(ReplearnError, match=told) as error:
        images_and_labels(path, b"labels")
    assert str(path) in str(error.value)


# ---- where it is looked for ------------------------------------------------------------------


def test_the_root_is_the_argument_else_the_variable_else_data(tmp_path, monkeypatch):
    roots = {name: tmp_path / name for name in ("given", "named", "here/data")}
    for root in roots.values():
        cifar10_binary(root)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("REPLEARN_DATA", str(roots["named"]))
    assert data.status("cifar10", roots["given"]).found == roots["given"] / "cifar-10-batches-bin"
    assert data.status("cifar10").found == roots["named"] / "cifar-10-batches-bin"
    monkeypatch.delenv("REPLEARN_DATA")
    assert data.status("cifar10").found == roots["here/data"] / "cifar-10-batches-bin"


@pytest.mark.parametrize("name", [*SMALL, "imagenet"])
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
    assert status.how in told
    assert status.problem == told
    assert (status.found, status.num_train, status.checksums, status.ok) == (None, None, (), False)


# ---- status and checksums --------------------------------------------------------------------


def test_status_tells_counts_and_a_verdict_for_each_file(tmp_path):
    cifar10_binary(tmp_path)
    loose = inspect_source(cifar10.SOURCE, lambda root: cifar10.load(root, strict_counts=False), tmp_path)
    assert (loose.num_classes, loose.num_train, loose.num_test, loose.layout) == (10, 20, 4, "binary")
    assert [check.verdict for check in loose.checksums] == ["differs"] * 6
    assert loose.problem is None
    assert not loose.ok
    (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").unlink()
    broken = data.status("cifar10", tmp_path)
    assert [check.verdict for check in broken.checksums] == ["differs"] * 5 + ["missing"]
    assert broken.problem is not None
    assert "test_batch.bin is missing" in broken.problem
    assert data.status("cifar10", tmp_path, checksums=False).checksums == ()


def test_status_is_ok_where_every_sum_is_the_official_one(tmp_path):
    cifar10_python(tmp_path)
    layout = cifar10.SOURCE.layouts[1]
    folder = tmp_path / layout.folders[0]
    files = tuple(replace(file, md5=md5_of(folder / file.name), num_images=4) for file in layout.files)
    source = replace(cifar10.SOURCE, layouts=(replace(layout, files=files),))
    status = inspect_source(source, lambda root: load_images(source, root), tmp_path)
    assert status.ok
    assert [check.verdict for check in status.checksums] == ["ok"] * 6


def test_the_sums_are_those_of_torchvision():
    # read, not imported: importing torchvision takes seconds
    theirs = Path(find_spec("torchvision").origin).parent / "datasets"
    for source, file in ((cifar10, "cifar"), (cifar100, "cifar"), (stl10, "stl10"), (svhn, "svhn")):
        text = (theirs / f"{file}.py").read_text()
        assert all(f'"{file.md5}"' in text for file in source.SOURCE.layouts[-1].files)


@pytest.mark.parametrize("name", data.available())
def test_every_file_of_the_folder_is_a_data_set(name):
    from importlib import import_module

    module = import_module(f"replearn.experiments.training.data.sets.{name}")
    assert module.SOURCE.name == name
    assert module.SOURCE.how.endswith(".")
    for layout in module.SOURCE.layouts:
        for split, count in (("train", module.SOURCE.num_train), ("test", module.SOURCE.num_test)):
            held = [file.num_images for file in layout.files if file.split == split]
            assert not layout.files or sum(held) == count
        for item in layout.downloads:
            assert item.url.startswith("http")
            assert len(item.md5) == 32
            assert int(item.md5, 16) >= 0


# ---- digits, subsets, statistics -------------------------------------------------------------


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
    assert data.status("digits").ok


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


def test_svhn_without_scipy_names_the_extra(tmp_path, monkeypatch):
    svhn_mat(tmp_path)
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(ReplearnError, match=r"pip install 'replearn\[train\]'"):
        data.load("svhn", tmp_path, strict_counts=False)


def test_statistics_are_those_of_the_pixels():
    images, _ = pictures(50, 32, 10, 0)
    images[:, 2] = 7
    mean, std = channel_statistics(images)
    scaled = images.double() / 255
    assert mean == pytest.approx(scaled.mean((0, 2, 3)).tolist(), abs=1e-12)
    assert std[:2] == pytest.approx(scaled.std((0, 2, 3), correction=0).tolist()[:2], abs=1e-12)
    assert std[2] == 1.0  # a constant channel is not divided by zero
