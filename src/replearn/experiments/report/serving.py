"""The live view: the report of a folder, made anew when its files change, for this machine's browsers alone.

It answers GET and HEAD with one page and never writes. A path is never opened: there is the page at `/` and
nothing else, so no path can lead out of the folder.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import SHUT_RDWR
from threading import Lock, Timer
from typing import Any
from urllib.parse import unquote, urlsplit

from ...errors import ReplearnError
from .collecting import Collection, read_folder
from .page import page
from .sections import sections_of

HOST = "127.0.0.1"
SLOW_CLIENT = 10.0  # seconds that a client may take to send its request or to read its answer
LONGEST = 60.0  # seconds that a connection may last in all: one byte at a time is slow, too
FRESH = 1.0  # seconds for which the folder is not looked at again
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class Handler(BaseHTTPRequestHandler):
    """GET and HEAD of `/`; everything else is refused."""

    server_version, sys_version = "replearn", ""
    protocol_version = "HTTP/1.1"
    timeout = SLOW_CLIENT
    server: Server

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").rpartition(":")[0] or self.headers.get("Host")
        if host not in (HOST, "localhost"):  # a foreign name that resolves to us: another site's script asks
            return self.send_error(HTTPStatus.FORBIDDEN, "This page is for 127.0.0.1 alone")
        if unquote(urlsplit(self.path).path) not in ("/", "/index.html"):
            return self.send_error(HTTPStatus.NOT_FOUND, "There is one page, at /")
        text, mark = self.server.current()
        same = self.headers.get("If-None-Match") == mark
        self.send_response(HTTPStatus.NOT_MODIFIED if same else HTTPStatus.OK)
        whole = {} if same else {"Content-Type": "text/html; charset=utf-8", "Content-Length": str(len(text))}
        for name, value in {"ETag": mark, **HEADERS, **whole}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET" and not same:
            self.wfile.write(text)
        return None

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Stay quiet: the terminal belongs to whoever started the server."""


class Server(ThreadingHTTPServer):
    """A thread for each connection; the page is made again only if a file changed."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, root: Path, port: int, every: int) -> None:
        self.root, self.every = root, every
        self._lock, self._looked = Lock(), float("-inf")
        self._seen: Collection | None = None
        self._held = b"", ""
        super().__init__((HOST, port), Handler)

    def current(self) -> tuple[bytes, str]:
        """The page and its fingerprint."""
        with self._lock:
            if time.monotonic() - self._looked > FRESH:
                try:
                    found = read_folder(self.root)
                except ReplearnError:  # the folder was taken away: the page says that there is nothing
                    found = Collection(root=self.root)
                if found != self._seen:
                    text = page(found, sections_of(found), live=self.every).encode()
                    self._held, self._seen = (text, f'"{hashlib.sha256(text).hexdigest()[:32]}"'), found
                self._looked = time.monotonic()
            return self._held

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        def hang_up() -> None:  # whoever reads from the connection sees its end
            with suppress(OSError):
                request.shutdown(SHUT_RDWR)

        limit = Timer(LONGEST, hang_up)
        limit.daemon = True
        limit.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            limit.cancel()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is nothing to tell."""


def make_server(folder: str | Path, port: int = 0, every: int = 5) -> Server:
    """A server for the folder's report, not yet serving; port 0 takes a free one.

    ReplearnError if there is no such folder or the port is taken.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ReplearnError(f"There is no folder {root}; write the one that the runs are trained into.")
    try:
        return Server(root, port, every)
    except (OSError, OverflowError) as error:
        raise ReplearnError(
            f"Can't listen on port {port} of {HOST}: {error}. Choose another with --port."
        ) from error


def watch(folder: str | Path, port: int, ready: Callable[[str], None]) -> None:
    """Serve until Ctrl-C; `ready` gets the address."""
    with make_server(folder, port) as server:
        ready(f"http://{HOST}:{server.server_address[1]}/")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
