"""The page over HTTP, for a browser on another machine: it listens on 127.0.0.1 only, and holds no trace of the user's.

Interface: `serve(page, port)` blocks until Ctrl-C. `server_of(page, port)` is the server alone, for tests.
"""

from __future__ import annotations

import webbrowser
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from minidl.views.viewer import GUARDS, HOST, has_display, tunnel


class _PageServer(ThreadingHTTPServer):
    """Serves one page at "/"."""

    daemon_threads = True

    def __init__(self, page: str, port: int) -> None:
        self.page = page.encode()
        super().__init__((HOST, port), _PageHandler)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"


class _PageHandler(BaseHTTPRequestHandler):
    server: _PageServer
    timeout = 30

    def do_GET(self) -> None:
        own = {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}
        if self.headers.get("Host", "") not in own:  # a page elsewhere reaches this server by a name of its own
            self._send(HTTPStatus.FORBIDDEN, b"this server answers only to 127.0.0.1\n", "text/plain")
        elif self.path.partition("?")[0] == "/":
            self._send(HTTPStatus.OK, self.server.page, "text/html; charset=utf-8")
        else:
            self._send(HTTPStatus.NOT_FOUND, b"only / is here\n", "text/plain")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in GUARDS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the terminal waits for Ctrl-C."""


def server_of(page: str, port: int = 0) -> _PageServer:
    """Return a server that listens. Raises ValueError if the port is taken."""
    try:
        return _PageServer(page, port)
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"cannot listen on {HOST}:{port} ({error}): use another port, or 0, which is any free one"
        ) from error


def serve(page: str, port: int = 0, what: str = "companion") -> None:
    """Serve the page until Ctrl-C, and open it in a browser if there is one. what: the page's name."""
    with server_of(page, port) as server:
        print(f"The {what} is at {server.url}")
        if has_display():
            webbrowser.open(server.url)
        else:
            print(f"From another machine, first: {tunnel(server.url)}")
        print("Press Ctrl-C to end.", flush=True)
        try:
            server.serve_forever(0.2)
        except KeyboardInterrupt:
            print()
