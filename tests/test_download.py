"""Downloading, against a real server on the loopback that cuts, stalls, errs and lies."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
import time
from collections import deque
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from official_layouts import cifar10_binary, svhn_mat

from replearn.errors import ReplearnError
from replearn.experiments.training import data
from replearn.experiments.training.data.fetching import download_source, fetch
from replearn.experiments.training.data.images import load_images
from replearn.experiments.training.data.sets import cifar10, svhn
from replearn.experiments.training.data.source import Source

BODY = bytes(range(256)) * 1000
SUM = hashlib.md5(BODY).hexdigest()


class Server:
    """Serves `files`; each request takes the next entry of `script`, and a plain answer when it is empty."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {"/file.bin": BODY}
        self.script: deque[dict] = deque()
        self.asked: list[str] = []  # the path of each request
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                act = outer.script.popleft() if outer.script else {}
                outer.asked.append(self.path)
                body = outer.files.get(self.path)
                status = act.get("status", 404 if body is None else 200)
                if status >= 400:
                    self.send_error(status)
                    return
                self.send_response(status)
                if not act.get("no_length"):
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: act.get("cut", len(body))])
                self.wfile.flush()
                time.sleep(act.get("stall", 0))

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for name, value in (("ATTEMPTS", 4), ("TIMEOUT", 0.5), ("PAUSE", 0.01)):
        monkeypatch.setattr(f"replearn.experiments.training.data.fetching.{name}", value)
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- one file --------------------------------------------------------------------------------


def test_a_file_is_fetched_checked_and_not_fetched_twice(server, tmp_path):
    target = tmp_path / "deep" / "file.bin"
    assert fetch(f"{server.address}/file.bin", target, SUM)
    assert target.read_bytes() == BODY
    assert leftovers(target.parent) == ["file.bin"]
    assert not fetch(f"{server.address}/file.bin", target, SUM)
    assert len(server.asked) == 1


def test_a_cut_connection_is_tried_again_from_the_start(server, tmp_path):
    server.script.extend([{"cut": 100_000}, {"cut": 50_000}])
    fetch(f"{server.address}/file.bin", tmp_path / "file.bin", SUM)
    assert (tmp_path / "file.bin").read_bytes() == BODY
    assert len(server.asked) == 3
    server.script.extend([{"cut": 10_000}] * 4)
    with pytest.raises(ReplearnError, match="in 4 attempts: the connection was cut after 10,000 of 256,000"):
        fetch(f"{server.address}/file.bin", tmp_path / "other.bin", SUM)
    assert leftovers(tmp_path) == ["file.bin"]


def test_a_wrong_file_names_both_sums_and_touches_nothing(server, tmp_path):
    old = tmp_path / "file.bin"
    old.write_bytes(b"what was there")
    server.files["/file.bin"] = b"a page that says the file has moved"
    found = hashlib.md5(server.files["/file.bin"]).hexdigest()
    with pytest.raises(ReplearnError, match=f"md5 {found}, and {SUM} is expected"):
        fetch(f"{server.address}/file.bin", old, SUM)
    assert old.read_bytes() == b"what was there"
    assert leftovers(tmp_path) == ["file.bin"]
    assert len(server.asked) == 1  # the same address would give the same file again


def test_not_found_is_told_at_once(server, tmp_path):
    with pytest.raises(ReplearnError, match=r"/gone\.bin answered 404 \(Not Found\)") as error:
        fetch(f"{server.address}/gone.bin", tmp_path / "gone.bin", SUM)
    assert str(tmp_path / "gone.bin") in str(error.value)
    assert len(server.asked) == 1
    assert leftovers(tmp_path) == []


def test_a_server_that_falls_silent_is_left_and_asked_again(server, tmp_path):
    server.script.append({"cut": 1000, "stall": 2})
    fetch(f"{server.address}/file.bin", tmp_path / "file.bin", SUM)
    assert len(server.asked) == 2


def test_no_network_is_told_with_what_to_do(server, tmp_path):
    with pytest.raises(ReplearnError, match="in 4 attempts") as error:
        # a port of the loopback on which nothing listens
        fetch("http://127.0.0.1:9/file.bin", tmp_path / "file.bin", SUM)
    assert "bring the file by hand" in str(error.value)
    assert leftovers(tmp_path) == []


def test_only_web_addresses_are_fetched(tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(BODY)
    with pytest.raises(ReplearnError, match="starts with http"):
        fetch(secret.as_uri(), tmp_path / "file.bin", SUM)


def test_a_place_that_can_t_be_written_is_told(server, tmp_path):
    (tmp_path / "taken").write_bytes(b"a file, not a folder")
    with pytest.raises(ReplearnError, match="Choose another root"):
        fetch(f"{server.address}/file.bin", tmp_path / "taken" / "file.bin", SUM)


# ---- a whole data set ------------------------------------------------------------------------


def tar_of(members: dict[str, bytes | tarfile.TarInfo]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, held in members.items():
            info = held if isinstance(held, tarfile.TarInfo) else tarfile.TarInfo(name)
            raw = held if isinstance(held, bytes) else b""
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
    return stream.getvalue()


@pytest.fixture
def offered(server, tmp_path):
    """Tiny CIFAR-10 on the server: the source with its address and sums, and the archive's members."""
    cifar10_binary(tmp_path / "offered")
    members = {
        str(path.relative_to(tmp_path / "offered")): path.read_bytes()
        for path in sorted((tmp_path / "offered").rglob("*.bin"))
    }
    return offer(server, members), members


def offer(server: Server, members: dict) -> Source:
    raw = tar_of(members)
    server.files["/cifar-10-binary.tar.gz"] = raw
    layout = cifar10.SOURCE.layouts[0]
    sums = {
        Path(name).name: hashlib.md5(held).hexdigest() for name, held in members.items() if type(held) is bytes
    }
    files = tuple(replace(file, md5=sums.get(file.name), num_images=4) for file in layout.files)
    item = replace(
        layout.downloads[0], url=f"{server.address}/cifar-10-binary.tar.gz", md5=hashlib.md5(raw).hexdigest()
    )
    return replace(cifar10.SOURCE, layouts=(replace(layout, files=files, downloads=(item,)),))


def test_a_data_set_is_fetched_unpacked_and_readable(server, offered, tmp_path):
    source, _ = offered
    server.script.append({"cut": 30_000})
    root = tmp_path / "root"
    folder = download_source(source, root)
    assert folder == root / "cifar-10-batches-bin"
    assert load_images(source, root).num_train == 20
    assert leftovers(root) == ["cifar-10-batches-bin"]  # the archive is not kept, nor anything unfinished
    download_source(source, root)
    assert len(server.asked) == 2  # whole and right: not fetched again


def test_a_damaged_copy_is_mended_and_what_was_there_is_kept(offered, tmp_path):
    source, members = offered
    root = tmp_path / "root"
    folder = download_source(source, root)
    (folder / "data_batch_2.bin").write_bytes(b"damaged")
    (folder / "test_batch.bin").unlink()
    (folder / "mine.txt").write_text("a note")
    download_source(source, root)
    assert (folder / "data_batch_2.bin").read_bytes() == members["cifar-10-batches-bin/data_batch_2.bin"]
    assert (folder / "data_batch_2.bin.old").read_bytes() == b"damaged"
    assert (folder / "mine.txt").read_text() == "a note"
    assert not (folder / "data_batch_1.bin.old").exists()
    assert load_images(source, root).num_test == 4


def link(name: str, to: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, to
    return info


@pytest.mark.parametrize(
    "evil",
    [
        {"../outside": b"x"},
        {"cifar-10-batches-bin/../../outside": b"x"},
        {"link": link("cifar-10-batches-bin/link", "../../..")},
        {"link": link("cifar-10-batches-bin/link", "/etc/passwd")},
        {"link": link("cifar-10-batches-bin/link", "../../../etc/passwd", tarfile.LNKTYPE)},
        {"pipe": link("cifar-10-batches-bin/pipe", "", tarfile.FIFOTYPE)},
    ],
)
def test_an_archive_that_reaches_outside_is_refused(server, offered, tmp_path, evil):
    _, members = offered
    source = offer(server, {**members, **evil})
    root = tmp_path / "deep" / "root"
    with pytest.raises(ReplearnError, match=r"Can't unpack .*cifar-10-binary\.tar\.gz"):
        download_source(source, root)
    assert not (root / "cifar-10-batches-bin").exists()
    assert leftovers(tmp_path / "deep") == ["root"]
    assert not list(tmp_path.rglob("outside"))


def test_a_link_in_place_of_a_file_is_not_taken_for_it(server, offered, tmp_path):
    _, members = offered
    fake = link("cifar-10-batches-bin/test_batch.bin", "data_batch_1.bin")
    source = offer(server, {**members, "cifar-10-batches-bin/test_batch.bin": fake})
    with pytest.raises(ReplearnError, match=r"lacks cifar-10-batches-bin/test_batch\.bin"):
        download_source(source, tmp_path / "root")
    assert not (tmp_path / "root" / "cifar-10-batches-bin").exists()


@pytest.mark.parametrize("raw", [b"no archive", tar_of({"cifar-10-batches-bin/data_batch_1.bin": BODY})[:500]])
def test_a_file_that_is_no_whole_archive_is_told(server, offered, tmp_path, raw):
    source, _ = offered
    server.files["/cifar-10-binary.tar.gz"] = raw
    item = replace(source.layouts[0].downloads[0], md5=hashlib.md5(raw).hexdigest())
    source = replace(source, layouts=(replace(source.layouts[0], downloads=(item,)),))
    with pytest.raises(ReplearnError, match=r"cifar-10-binary\.tar\.gz"):
        download_source(source, tmp_path / "root")
    assert not (tmp_path / "root" / "cifar-10-batches-bin").exists()


def test_files_that_are_no_archive_go_to_their_folder(server, tmp_path):
    expected = svhn_mat(tmp_path / "offered")
    layout = svhn.SOURCE.layouts[0]
    files, items = [], []
    for file, item in zip(layout.files, layout.downloads, strict=True):
        raw = (tmp_path / "offered" / "svhn" / file.name).read_bytes()
        server.files[f"/{file.name}"] = raw
        md5 = hashlib.md5(raw).hexdigest()
        files.append(replace(file, md5=md5, num_images=10 if file.split == "train" else 5))
        items.append(replace(item, url=f"{server.address}/{file.name}", md5=md5))
    source = replace(svhn.SOURCE, layouts=(replace(layout, files=tuple(files), downloads=tuple(items)),))
    assert download_source(source, tmp_path / "root") == tmp_path / "root" / "svhn"
    assert torch.equal(load_images(source, tmp_path / "root").train_images, expected["train"][0])


def test_the_public_door_takes_a_mirror_and_holds_it_to_the_official_sum(server, tmp_path):
    server.files["/mirror/cifar-10-binary.tar.gz"] = b"not it"
    with pytest.raises(ReplearnError, match="c32a1d4ab5d03f1284b67883e8d87530 is expected"):
        data.download("cifar10", tmp_path / "root", mirror=f"{server.address}/mirror/")
    assert leftovers(tmp_path / "root") == []


def test_what_can_t_be_downloaded_says_how_to_get_it(tmp_path):
    with pytest.raises(ReplearnError, match=r"image-net\.org after registration"):
        data.download("imagenet", tmp_path)
    with pytest.raises(ReplearnError, match="comes with scikit-learn"):
        data.download("digits", tmp_path)
