"""The terminal: progress on one line, only where it is seen, and text that no encoding makes fail."""

from __future__ import annotations

import io
import os
import sys
import threading

import pytest

from minidl import terminal


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_replaces_its_line_and_is_erased_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    written = terminal.counting("events written")
    written(1000, 2000)
    written(2000, 2000)
    assert shown.getvalue() == "\r\x1b[Kevents written: 1,000 of 2,000\r\x1b[K"


def test_progress_is_for_terminals_alone(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.progress("half")
    assert capsys.readouterr() == ("", "")


def test_work_that_lasts_says_so_and_takes_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    said = threading.Event()

    class Watched(Terminal):
        def write(self, text: str) -> int:
            if "checking: 0 s" in text:
                said.set()
            return super().write(text)

    monkeypatch.setattr(sys, "stderr", shown := Watched())
    monkeypatch.setattr(terminal, "BUSY_AFTER", 0.0)
    with terminal.busy("checking"):
        assert said.wait(30)
    assert shown.getvalue().endswith(terminal.ERASE_LINE)
    assert "minidl-busy" not in {thread.name for thread in threading.enumerate()}


def test_short_work_and_work_without_a_terminal_say_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "BUSY_AFTER", 3600.0)
    with terminal.busy("checking"):
        assert "minidl-busy" not in {thread.name for thread in threading.enumerate()}
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    with terminal.busy("checking"):
        pass
    assert shown.getvalue().replace(terminal.ERASE_LINE, "") == ""


def test_a_message_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.say("done")
    assert capsys.readouterr() == ("", "done\n")


def test_the_width_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("LINES", raising=False)
    monkeypatch.setattr("shutil.os.get_terminal_size", lambda fd: os.terminal_size((0, 0)))
    assert terminal.columns(77) == 77
    assert terminal.size(77, 7) == (77, 7)
    monkeypatch.setenv("COLUMNS", "44")
    assert terminal.columns() == 44


def test_text_that_the_encoding_lacks_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    terminal.escape_unencodable()
    print("lane ▒ \udcff", flush=True)
    assert sys.stdout.buffer.getvalue() == b"lane \\u2592 \\udcff\n"  # type: ignore[attr-defined]
