"""The tour: it shows a real hang and its cause, waits for the person, and leaves nothing behind."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import workloads as wl

from minidl import tour
from minidl.tour import STOPS, Stop
from minidl.views.frame import Page


@pytest.mark.live
@pytest.mark.timeout(300)
def test_without_a_person_it_runs_through_and_leaves_nothing_behind() -> None:
    place = Path(tempfile.mkdtemp())  # a short path: sockets have no room for pytest's
    command, environment = wl.command_and_environment("from minidl import cli; cli.main(['demo', '--tour'])")
    environment["TMPDIR"] = str(place)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stderr
    headings = re.findall(r"^--- \d of 7: (.*) ---$", done.stdout, re.M)
    assert headings == [stop.title for stop in STOPS]
    assert "[Enter" not in done.stdout
    hung = re.findall(r"^hung for .* batch 3 of worker 1, .* opening photos/13\.raw, a FIFO", done.stdout, re.M)
    assert len(hung) == 2, "the process is asked, and the trace after kill -9"
    assert {path.name.partition("_")[0] for path in place.iterdir()} <= {"torchinductor"}, "torch's own cache"
    shutil.rmtree(place)


def stop(title: str, page: Page | None = None) -> Stop:
    played = (lambda tour: print("(steps)")) if page is not None else None
    return Stop(title, "Words.", "minidl x {folder}", lambda tour: f"<{title}>", page and (lambda tour: page), played)


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tour, "STOPS", (stop("one"), stop("two", Page("a page & more")), stop("three")))


@pytest.mark.parametrize(
    ("answers", "shown"), [(["", "s", "S", ""], ["one", "two", "three"]), (["", "q"], ["one", "two"]), (["q"], ["one"])]
)
def test_a_person_goes_on_steps_or_ends(
    answers: list[str],
    shown: list[str],
    three: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[str] = []

    def answer(words: str) -> str:
        asked.append(words)
        return answers[len(asked) - 1]

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with tour.Tour() as given:
        tour.in_terminal(given)
    said = capsys.readouterr().out
    assert re.findall(r"^<(.*)>$", said, re.M) == shown
    assert said.count("(steps)") == len([each for each in answers if each in ("s", "S")])
    assert [("s: step" in words) for words in asked] == [number > 0 for number in range(len(asked))]
    assert not given.folder.exists()


def test_the_page_holds_each_stop_with_what_its_command_says(three: None, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[str] = []
    monkeypatch.setattr(tour, "serve", lambda page, what: served.append(page))
    with tour.Tour() as given:
        tour.in_browser(given)
    (page,) = served
    assert [*re.findall(r'<a href="#stop-\d">\d (\w+)</a>', page)] == ["one", "two", "three"]
    assert "&lt;one&gt;" in page
    assert "&lt;two&gt;" not in page, "its frame says it"
    assert page.count("<iframe") == 1
    assert "a page &amp; more" in page
