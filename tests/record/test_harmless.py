"""What only looks at a program's objects never ends the program, and takes nothing from it."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from minidl.record import harmless as module
from minidl.record.harmless import harmless, say_once


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_said", set())


def test_an_error_is_said_once_and_something_else_is_returned(capfd: pytest.CaptureFixture[str]) -> None:
    @harmless(7)
    def looks() -> int:
        raise ValueError("moody")

    assert [looks(), looks()] == [7, 7]
    assert capfd.readouterr().err.count("ValueError: moody. The run goes on.\n") == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_what_a_signal_handler_raises_passes_through(error: Any) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise error("by the program")

    @harmless(7)
    def looks() -> int:
        signal.raise_signal(signal.SIGUSR1)
        return 1

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(error, match="by the program"):
            looks()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_stderr_that_is_closed_hides_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(fd: int, data: bytes) -> int:
        raise OSError("closed")

    monkeypatch.setattr("os.write", write)
    say_once("nobody reads this")
