"""The page of a run that goes on: what it answers as time passes, when the trace goes away, and in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import made_trace
import pytest
from browser import Browser, needs_driver
from pages import Read

from minidl.hang import live
from minidl.tracefile.process import ProcessLife
from minidl.views import live_page, viewer
from minidl.views.live_page import LivePage
from minidl.views.page import html
from minidl.views.viewer import Viewer, ViewerError, serve_live

SECOND = 1_000_000_000


class Run:
    """A run that hangs from `now` on (ns), which the test lets go on."""

    def __init__(self, directory: Path) -> None:
        self.directory = made_trace.write(directory, made_trace.Run(**made_trace.HUNG | {"polls": 0}))
        self.now = made_trace.START + 8_000_000
        self.lives = ProcessLife.ALIVE

    def goes_on(self, seconds: float) -> None:
        self.now += int(seconds * SECOND)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    made = Run(tmp_path / "trace")
    monkeypatch.setattr(live, "is_here", lambda manifest: True)
    monkeypatch.setattr(live, "life", lambda pid, start: made.lives)
    monkeypatch.setattr(live.time, "monotonic_ns", lambda: made.now)
    monkeypatch.setattr(live_page, "EVERY", 0.0)  # each request looks again
    return made


def answer(page: LivePage) -> dict[str, Any]:
    words: dict[str, Any] = json.loads(page.look())["words"]
    return words


def test_the_answers_follow_the_run_into_a_hang(run: Run) -> None:
    page, said = LivePage(run.directory), []
    for seconds in (0.2, 2, 10, 10):
        run.goes_on(seconds)
        words = answer(page)
        assert words["end"] == words["last"], "nothing is drawn beyond now"
        said.append((words["headline"]["kind"], words["headline"]["wrong"], words["end"]))
    assert [(kind, wrong) for kind, wrong, _ in said] == [("running", False)] * 2 + [("hung", True)] * 2
    assert said[3][2] - said[2][2] == 10 * SECOND
    assert words["headline"]["sentence"].startswith("hung for 22.2 s, since 0.01 s: waiting for worker 1 (pid 1101)")
    assert "sample 38 (task 9)" in str(words["live"]["now"][0]["rows"])
    assert (words["live"]["over"], words["perfetto"], words["fates"]["1"]) == (False, "", "not ended yet")


def test_the_page_may_ask_its_own_server_and_a_page_of_a_file_may_ask_nobody(run: Run) -> None:
    page = LivePage(run.directory).html()
    assert "connect-src 'self'" in page
    assert "connect-src" not in html(run.directory)
    assert Read(page).words["live"]["state"] == "running"


def test_a_run_that_ends_is_shown_whole(run: Run) -> None:
    page = LivePage(run.directory, ended="read it again", perfetto="perfetto", most=50)
    assert len(Read(page.html())["bar.begin"]) < 50
    assert page.whole is None
    run.lives = ProcessLife.GONE
    words = answer(page)
    assert page.whole is not None
    assert (words["live"]["over"], words["live"]["ended"], words["perfetto"]) == (True, "read it again", "perfetto")
    assert words["events"] == len(page.whole)
    assert words["headline"]["sentence"].startswith("died: loader (pid 1000), last seen at 7.9 ms, ended without")


@pytest.mark.parametrize("before", [False, True])
def test_a_trace_that_is_deleted_is_said_and_ends_the_requests(run: Run, before: bool) -> None:
    page = LivePage(run.directory)
    kept = answer(page)
    if before:
        (run.directory / "manifest.json").unlink()
    else:
        shutil.rmtree(run.directory)
    words = answer(page)
    assert (words["live"]["over"], words["live"]["lost"]) == (True, True)
    assert words["live"]["state"].startswith("the trace can no longer be read: ")
    assert words["events"] == kept["events"]
    assert answer(page) == words


def test_a_file_that_is_cut_is_said_and_the_view_goes_on(run: Run) -> None:
    page = LivePage(run.directory)
    answer(page)
    for path in run.directory.glob("1000-*.events"):
        with path.open("r+b") as file:
            file.truncate(5000)
    words = answer(page)
    assert "was truncated while it was read" in str(words["problems"])
    assert not words["live"]["over"]


def test_a_run_without_events_has_a_page(run: Run) -> None:
    for path in run.directory.glob("*-*"):
        path.unlink()
    words = answer(LivePage(run.directory))
    assert words["headline"]["sentence"] == "running: no iterator of a DataLoader has recorded anything yet"
    assert words["events"] == 0


def test_only_who_has_the_secret_gets_answers(run: Run) -> None:
    with Viewer(LivePage(run.directory)) as running:
        assert state_at(running.url) == "running"
        root = f"http://{urlsplit(running.url).netloc}"
        for wrong in (f"{root}/live", f"{root}/x/live", f"{root}/live/live", f"{running.url}perfetto"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(wrong)


def test_a_packed_trace_is_not_followed(tmp_path: Path) -> None:
    packed = made_trace.made(tmp_path / "t", **made_trace.HEALTHY).pack(tmp_path / "t.minidl")
    with pytest.raises(ViewerError, match="without --live"):
        serve_live(packed)


STATE = "const d = document; return [d.documentElement.dataset.kind, d.getElementById('headline').textContent]"


@pytest.mark.live
@needs_driver
def test_a_browser_follows_the_run(run: Run, browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "SELDOM", 0.1)
    with Viewer(LivePage(run.directory)) as running:
        browser.post("/url", url=running.url)
        browser.until("return document.documentElement.dataset.looks > 1")
        assert browser.run(STATE)[0] == "running"
        run.goes_on(30)
        browser.until("return document.documentElement.dataset.kind === 'hung'")
        assert browser.run(STATE)[1].startswith("hung for 30.0 s, since 0.01 s: waiting for worker 1 (pid 1101)")
        browser.run("document.getElementById('open').click()")
        assert browser.run("return document.querySelector('#about h2').innerText").startswith("sample 38")
        looks = browser.run("return document.documentElement.dataset.looks")
        run.goes_on(3600)
        browser.until(f"return document.documentElement.dataset.looks > {looks} + 1")
        assert browser.run("return document.querySelector('#about h2').innerText").startswith("sample 38")
        assert "60.5 min" in browser.run("return document.title")
        shutil.rmtree(run.directory)
        browser.until("return document.getElementById('live').classList.contains('alarm')")
        assert browser.run(STATE)[1].startswith("hung for 60.5 min")


PROGRAM = """
import sys, urllib.request
import torch
from torch.utils.data import DataLoader

if __name__ == "__main__":
    print(len(list(DataLoader(torch.arange(8), num_workers=1))))
    print(sys.stdin.readline())
"""


def state_at(url: str) -> str:
    """What the page says of the run."""
    with urllib.request.urlopen(f"{url}live") as got:
        return str(json.load(got)["words"]["live"]["state"])


@pytest.mark.live
def test_run_shows_the_page_while_the_script_runs(tmp_path: Path) -> None:
    """It has an own process, which ends with the run and says nothing on stdout."""
    (tmp_path / "train.py").write_text(PROGRAM)
    without = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    environment = {name: value for name, value in os.environ.items() if name not in without}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-m", "minidl", "run", "--view", "--trace", str(tmp_path / "t"), "train.py"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, **pipes) as process:
        try:
            line = next(line for line in process.stderr if "the run is at" in line)
            url = re.findall(r"http://\S+", line)[0]
            deadline = time.monotonic() + 60  # its address comes before the run's first event
            while (state := state_at(url)) == "nothing has been recorded yet" and time.monotonic() < deadline:
                time.sleep(0.05)
            assert state == "running"
            process.stdin.write("go on\n")
            process.stdin.flush()
            assert process.stdout.read().split() == ["8", "go", "on"]
            assert process.wait(60) == 0
        finally:
            process.kill()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url)
    assert viewer.HOST in url
