"""A process writes its own stacks when it is asked by a signal, and leaves the signal as it was."""

from __future__ import annotations

import contextlib
import os
import signal
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import python

from minidl.record import stack_dumps
from minidl.watch.dumps import Asked, crash_in, parsed


@contextlib.contextmanager
def answering(folder: Path) -> Iterator[dict[str, Any]]:
    described: dict[str, Any] = {}
    stack_dumps.answer(str(folder), lambda kind, **facts: described.update(facts, kind=kind))
    try:
        yield described
    finally:
        stack_dumps.no_longer()


def test_all_threads_are_written_with_the_signal_that_was_described(tmp_path: Path) -> None:
    go_on, waits = threading.Event(), threading.Event()

    def a_function_that_waits() -> None:
        waits.set()
        go_on.wait(30)

    other = threading.Thread(target=a_function_that_waits)
    other.start()
    assert waits.wait(30)
    try:
        with answering(tmp_path) as how:
            os.kill(os.getpid(), how["signal"])
            dump = parsed((tmp_path / how["file"]).read_text())
    finally:
        go_on.set()
        other.join()
    (current,) = [one for one in dump if one.current]
    (waiting,) = [one for one in dump if one.ident == other.ident]
    assert current.ident == threading.main_thread().ident
    assert "test_all_threads_are_written_with_the_signal_that_was_described" in [f.function for f in current.frames]
    assert "a_function_that_waits" in [frame.function for frame in waiting.frames]
    assert [frame.file for frame in waiting.frames if frame.function == "a_function_that_waits"] == [__file__]


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with answering(tmp_path) as how:
        assert signal.getsignal(how["signal"]) is signal.SIG_IGN, "what faulthandler gives back when Python ends"
    assert signal.getsignal(how["signal"]) is signal.SIG_DFL
    assert (list(tmp_path.iterdir()), len(os.listdir("/proc/self/fd"))) == ([], before)


def test_a_signal_of_the_program_is_not_taken(tmp_path: Path) -> None:
    first = stack_dumps.free_signal()
    assert first is not None
    signal.signal(first, lambda *_: None)
    try:
        with answering(tmp_path) as how:
            assert how["signal"] != first
    finally:
        signal.signal(first, signal.SIG_DFL)


def test_without_a_descriptor_the_run_goes_on(tmp_path: Path) -> None:
    with answering(tmp_path / "deleted") as how:
        assert how == {}


def test_a_process_that_cannot_answer_is_sent_nothing(tmp_path: Path) -> None:
    """Its file is another one now, or it does not handle the signal: it would die of it."""
    with answering(tmp_path) as how:
        side = tmp_path / f"{os.getpid()}-1.meta.jsonl"
        for changed in ({"fd": 0}, {"signal": int(signal.SIGRTMAX)}, {"file": "gone"}):
            side.write_text(f"{how | changed}".replace("'", '"') + "\n")
            assert Asked(tmp_path).stacks([os.getpid()]) == {}
        assert (tmp_path / how["file"]).read_text() == ""


@pytest.mark.live
@pytest.mark.parametrize(
    ("before", "after", "written"),
    [("", "", True), ("faulthandler.enable()", "", False), ("", "stack_dumps.no_longer()", False)],
    ids=["a crash", "the program's own handler", "after the trace"],
)
def test_a_crash_is_written_unless_the_program_has_it_written(
    tmp_path: Path, before: str, after: str, written: bool
) -> None:
    program = f"""
        import faulthandler, os, resource, signal
        from minidl.record import stack_dumps

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        {before}
        stack_dumps.answer({str(tmp_path)!r}, lambda kind, **facts: None)
        stack_dumps.at_a_crash()
        if os.fork() == 0:
            stack_dumps.answer({str(tmp_path)!r}, lambda kind, **facts: None)
            os.kill(os.getpid(), signal.SIGSEGV)  # before it is ready: in no file
        os.wait()
        {after}
        os.kill(os.getpid(), signal.SIGABRT)
    """
    done = python("-c", textwrap.dedent(program), cwd=tmp_path)
    assert done.returncode == -signal.SIGABRT
    assert ("Fatal Python error: Aborted" in done.stderr) is bool(before)
    crashes = [crash for file in tmp_path.iterdir() if (crash := crash_in(file)) is not None]
    assert [(crash.signum, crash.stack[-1].function) for crash in crashes] == [(signal.SIGABRT, "<module>")] * written


@pytest.mark.live
def test_a_handler_that_another_library_has_set_since_stays(tmp_path: Path) -> None:
    program = f"""
        import os, signal
        from minidl.record import stack_dumps

        def fault(signum, frame):
            os.write(1, b"it handles it")

        stack_dumps.answer({str(tmp_path)!r}, lambda kind, **facts: None)
        stack_dumps.at_a_crash()
        signal.signal(signal.SIGSEGV, fault)
        stack_dumps.no_longer()
        os.kill(os.getpid(), signal.SIGSEGV)
    """
    done = python("-c", textwrap.dedent(program), cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "it handles it", "")


@pytest.mark.live
def test_a_forked_child_answers_by_itself(tmp_path: Path) -> None:
    """It blocks in a read; its stack comes from its own file, with the kernel's number of its thread."""
    (r, w), (ready, told) = os.pipe(), os.pipe()
    with answering(tmp_path) as parents:
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):

                def describe(kind: str, **facts: Any) -> None:
                    text = f"{facts | {'kind': kind}}".replace("'", '"')
                    (tmp_path / f"{os.getpid()}-1.meta.jsonl").write_text(text + "\n")

                stack_dumps.answer(str(tmp_path), describe)
                os.write(told, b"!")
                os.read(r, 1)
            os._exit(0)
        try:
            os.read(ready, 1)
            until, found = time.monotonic() + 60, {}
            while not found and time.monotonic() < until:  # it is asked once it has been in its read for a while
                found = Asked(tmp_path).stacks([child])
            assert list(found[child]) == [child]
            names = [frame.function for frame in found[child][child].frames]
            assert names[0] == "test_a_forked_child_answers_by_itself"
            assert (tmp_path / parents["file"]).read_text() == "", "the parent was not asked"
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            for fd in (r, w, ready, told):
                os.close(fd)
            for file in tmp_path.glob(f"{child}-*.stacks"):
                file.unlink()
