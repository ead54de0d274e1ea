"""The live view: one page, for this machine alone, that changes with the files and leads nowhere else."""

from __future__ import annotations

import http.client
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from runs_made_up import run

from replearn.errors import ReplearnError
from replearn.experiments.report import serving
from replearn.experiments.report.serving import Server, make_server, watch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "runs"
    place = inside / "cifar10" / "e2e" / "seed-0"
    place.mkdir(parents=True)
    (place / "result.json").write_text(run("E2E", 0, 91.25).to_json())
    (tmp_path / "secret.json").write_text('{"secret": "outside"}')
    return inside


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(serving, "FRESH", 0.0)
    with make_server(folder) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join(5)


def ask(server: Server, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    try:
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def test_it_serves_the_report_of_the_folder(server: Server) -> None:
    status, headers, text = ask(server)
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert "91.25" in text
    assert 'data-live="5"' in text
    assert "default-src 'none'" in headers["Content-Security-Policy"]


def test_it_listens_on_this_machine_alone(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"


def test_a_head_has_no_body_and_the_same_length(server: Server) -> None:
    status, headers, text = ask(server, method="HEAD")
    assert (status, text) == (200, "")
    assert int(headers["Content-Length"]) == len(ask(server)[2].encode())


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_every_other_method_is_refused(server: Server, folder: Path, method: str) -> None:
    assert ask(server, method=method)[0] == 501
    assert (folder / "cifar10" / "e2e" / "seed-0" / "result.json").exists()


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.json",
        "/..%2fsecret.json",
        "/%2e%2e/secret.json",
        "//secret.json",
        "/cifar10/e2e/seed-0/result.json",
        "/etc/passwd",
        "http://127.0.0.1/../secret.json",
        "/\\..\\secret.json",
        "/\x00",
    ],
)
def test_no_path_leads_to_a_file(server: Server, path: str) -> None:
    with socket.create_connection(server.server_address[:2], timeout=20) as raw:
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
    assert answer.split()[1] in (b"404", b"400")
    assert b"outside" not in answer
    assert b"91.25" not in answer


def test_another_sites_name_for_this_machine_is_refused(server: Server) -> None:
    assert ask(server, Host="evil.example:80")[0] == 403
    assert ask(server, Host=f"localhost:{server.server_address[1]}")[0] == 200


def test_it_says_when_nothing_changed_and_shows_what_did(server: Server, folder: Path) -> None:
    mark = ask(server)[1]["ETag"]
    assert ask(server, If_None_Match=mark)[0] == 304
    place = folder / "cifar10" / "repl" / "seed-0"
    place.mkdir(parents=True)
    (place / "result.json").write_text(run("RepL", 0, 88.75).to_json())
    status, headers, text = ask(server, If_None_Match=mark)
    assert status == 200
    assert headers["ETag"] != mark
    assert "88.75" in text


def test_half_written_files_and_a_vanished_folder_do_not_end_it(server: Server, folder: Path) -> None:
    file = folder / "cifar10" / "e2e" / "seed-0" / "result.json"
    file.write_text(file.read_text()[:300])
    assert "may be writing it just now" in ask(server)[2]
    file.unlink()
    for place in (file.parent, file.parent.parent, file.parent.parent.parent, folder):
        place.rmdir()
    status, _, text = ask(server)
    assert status == 200
    assert "nothing here yet" in text


def test_a_slow_client_is_dropped_and_keeps_nobody_waiting(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving.Handler, "timeout", 0.3)
    with socket.create_connection(server.server_address[:2], timeout=20) as slow:
        slow.sendall(b"GET / HT")
        assert ask(server)[0] == 200
        assert slow.recv(10) == b""  # closed by the server


def test_a_client_that_drips_is_dropped_too(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "LONGEST", 0.5)
    with socket.create_connection(server.server_address[:2], timeout=20) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\n")
        with suppress(OSError):  # a byte now and then keeps it from being idle, until the server hangs up
            while True:
                slow.sendall(b"x")
                time.sleep(0.05)
    assert ask(server)[0] == 200


def test_a_pipe_and_a_link_out_of_the_folder_are_named_and_not_read(server: Server, folder: Path) -> None:
    os.mkfifo(folder / "pipe.json")
    (folder / "link.json").symlink_to(folder.parent / "secret.json")
    status, _, text = ask(server)
    assert status == 200
    assert "outside" not in text
    assert "a link that leads out of the folder" in text
    assert "not an ordinary file" in text


def test_a_missing_folder_and_a_taken_port_are_told(server: Server, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ReplearnError, match=r"There is no folder .*nowhere"):
        make_server(tmp_path / "nowhere")
    with pytest.raises(ReplearnError, match=r"Can't listen on port \d+ .*Choose another with --port"):
        make_server(folder, server.server_address[1])


def test_an_empty_folder_is_waited_for(tmp_path: Path) -> None:
    with make_server(tmp_path) as made:
        assert b"There is nothing here yet" in made.current()[0]


def test_watch_tells_its_address_and_ends_with_ctrl_c(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Server) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "serve_forever", interrupted)
    told: list[str] = []
    watch(folder, 0, told.append)
    assert told[0].startswith("http://127.0.0.1:")
