"""Steps without an end: of a program that was killed, or that ended by itself and left its iterators as they were."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path

import pytest
import workloads as wl
from made_trace import NEVER, made
from programs import python, write
from sizes import slow

import minidl
from minidl.check import examine
from minidl.loader.protocol import WorkerState
from minidl.playback.stepper import Replay
from minidl.speed.critical_path import critical_path
from minidl.tracefile import watched
from minidl.tracefile.events import EVENTS, Phase
from minidl.tracefile.format import TraceError
from minidl.tracefile.open_spans import alive_until, how_ended, left_alive
from minidl.tracefile.reader import Trace, read_trace
from minidl.tracefile.watched import Ended, Sample, Vitals
from minidl.views.summary import summary
from minidl.views.text import render
from minidl.views.top import follow

KEEPS = """
    import sys
    from torch.utils.data import DataLoader

    def keep(*of):
        kept = sys.kept = [DataLoader(range(8), batch_size=2, num_workers=1, persistent_workers=True)]
        assert len(list(kept[0])) == 4
        kept.append(iter(DataLoader(range(8), batch_size=2, num_workers=1)))
        next(kept[1])
        assert len(list(DataLoader(range(8), num_workers=1))) == 8  # is shut down

    if __name__ == "__main__":
        if sys.argv[1:]:
            import multiprocessing
            ranks = [multiprocessing.get_context("fork").Process(target=keep) for _ in range(2)]
            [rank.start() for rank in ranks]
            [rank.join() for rank in ranks]
        else:
            keep()
"""
"""Persistent workers and an epoch that nothing ends: of the program itself, or of two processes that it forks."""

BY_ENVIRONMENT = """
    import minidl, runpy, torch.utils.data
    torch.utils.data.DataLoader = minidl.DataLoader
    runpy.run_path("keeps.py", run_name="__main__")
"""

RUN = ("-m", "minidl", "run", "--trace", "trace")
COMMANDS = {
    "run": (*RUN, "keeps.py"),
    "observed": (*RUN, "--observe", "keeps.py"),
    "ranks": (*RUN, "keeps.py", "ranks"),
    "MINIDL_TRACE": ("by_environment.py",),
}


def kept_by(place: Path, how: str, code: int, last: str = "") -> Trace:
    """The trace of a program that keeps its iterators, does `last`, and ends with this exit code."""
    write(place / "keeps.py", f"{KEEPS}\n        {last}\n")
    write(place / "by_environment.py", BY_ENVIRONMENT)
    environment = {"MINIDL_TRACE": "trace"} if how == "MINIDL_TRACE" else {}
    done = python(*COMMANDS[how], cwd=place, **environment)
    assert done.returncode == code, done.stderr
    return read_trace(place / "trace")


@pytest.mark.live
@pytest.mark.parametrize("how", ["run", "ranks", *slow("observed", "MINIDL_TRACE")])
def test_what_a_program_leaves_is_alive_at_its_end(tmp_path: Path, how: str) -> None:
    trace = kept_by(tmp_path, how, code=0)
    report, told, alive = examine(trace), summary(trace), left_alive(trace)
    assert (report.violations, report.open, told.open) == ([], [], [])
    left = {"ranks": 4, "observed": 0}.get(how, 2)  # minidl run shuts torch's own iterators down
    assert len(report.alive) == len(alive) == left
    assert [text for text in report.alive if not re.match("iterator .*waiting for a task", text)] == []
    assert len(trace.loaders) == (6 if how == "ranks" else 3)
    assert told.alive == report.alive
    assert ("alive at the program's end\n" in told.text()) == bool(left)
    assert "did not end:" not in render(trace)
    assert ("alive at the program's end: " in render(trace)) == bool(left)
    assert {Replay(trace, number).ending for number in alive} <= {"alive at the program's end"}


HANGS = """
import sys
import minidl, torch, workloads as wl

if __name__ == "__main__":
    library, step, place = sys.argv[1:]
    ours = library == "ours"
    dataset, init = (wl.Numbers(8), wl.hang_in_init) if step == "worker_init" else (wl.HangsAtOnce(), wl.draw_once)
    with minidl.trace(place):
        context = None if ours else minidl.observe()
        loader = (minidl if ours else torch.utils.data).DataLoader(
            dataset, num_workers=1, worker_init_fn=init, multiprocessing_context=context
        )
        next(iter(loader))
"""


STEPS = {"worker_init": "in worker_init_fn", "make_fetcher": "making its fetcher (an iterable dataset's __iter__)"}


def hangs(place: Path, step: str) -> bool:
    """Whether the worker has begun the step, and the loader waits for it."""
    try:
        trace = read_trace(place)
    except TraceError:  # not begun yet
        return False
    return len(trace.select(step, Phase.BEGIN)) > len(trace.select(step, Phase.END)) and len(trace.select("result_get"))


@pytest.mark.live
@pytest.mark.parametrize(
    ("library", "step"),
    [("ours", "worker_init"), ("torch", "make_fetcher"), *slow(("ours", "make_fetcher"), ("torch", "worker_init"))],
)
def test_a_worker_that_hangs_before_it_is_ready_is_seen_in_its_step(tmp_path: Path, library: str, step: str) -> None:
    """While the program runs, by `top`; of its trace, once it was killed, by every command."""
    words, place = STEPS[step], tmp_path / "trace"
    with wl.started(HANGS, library, step, place) as program:
        while not hangs(place, step):
            assert program.poll() is None, "the program has ended"
            time.sleep(0.02)
        shot = follow(place, once=True, out=io.StringIO())
        wl.kill_group(program)
    assert shot.loaders[0].workers[0].doing.words == words
    trace = read_trace(place)
    in_worker = trace.events[[trace.processes[at].role == "worker" for at in trace.events["process"].tolist()]]
    assert EVENTS[int(in_worker["code"][-1])].name == step
    report = examine(trace)
    assert report.violations == []
    (open_,) = [line for line in report.open if line.startswith("worker 0 ")]
    assert f" has been {words} for " in open_
    assert open_ in summary(trace).text()
    assert open_ in critical_path(trace, 0)
    replay = Replay(trace)
    assert [state.violation for state in replay.walk() if state.violation] == []
    worker = replay.state.worker(0)
    assert (worker.state, worker.doing) == (WorkerState.STARTING, words)


@pytest.mark.live
def test_a_program_that_is_killed_has_no_end(tmp_path: Path) -> None:
    trace = kept_by(tmp_path, "run", code=-9, last="import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    report = examine(trace)
    assert report.alive == []
    assert any("in the consumer's code" in text for text in report.open)


def test_a_watchdog_saw_until_when_each_process_was_there(tmp_path: Path) -> None:
    """A worker that emits nothing lives on; one that ends later than its last event has lived until then."""
    trace = made(tmp_path / "trace", batches=6, cost=lambda task: NEVER if task == 3 else 900_000)
    last, (main, zero, one) = trace.last, trace.processes
    assert alive_until(trace) == [last] * 3
    vitals = Vitals("S", 1, 1, 1, 1, 1)
    samples = [
        Sample(last + 50, {main.pid: vitals, one.pid: vitals}),
        Sample(last + 90, {main.pid: vitals, one.pid: vitals._replace(state="Z")}),
    ]
    lines = [watched.description("0", main.pid, 5), *map(watched.sample, samples)]
    lines.append(watched.ended(Ended(zero.pid, last + 20, -9)))
    (tmp_path / "trace" / "watch-1-1.attachment.jsonl").write_bytes(b"".join(lines))
    trace = read_trace(tmp_path / "trace")
    assert [at - last for at in alive_until(trace)] == [90, 20, 50]
    assert how_ended(trace) == [f"worker 0 (pid {zero.pid}) was seen to end by SIGKILL"]


@pytest.mark.live
@pytest.mark.parametrize("how", [*slow("run", "observed"), "MINIDL_TRACE"])
def test_the_exception_that_ends_a_program_is_in_its_trace(tmp_path: Path, how: str) -> None:
    trace = kept_by(tmp_path, how, code=1, last="raise KeyError('no\\nsuch')")
    (line,) = trace.described("uncaught")
    assert line["error"] == "KeyError: 'no\\nsuch'"
    assert "keeps.py:" in line["at"][0]
    (text,) = [text for text in how_ended(trace) if "KeyError" in text]
    assert text in summary(trace).text()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("in the block")])
def test_the_exception_that_ends_a_traced_block_is_in_its_trace(tmp_path: Path, error: BaseException) -> None:
    def fails() -> None:
        with minidl.trace(tmp_path / "trace"):
            next(iter(minidl.DataLoader(range(4))))
            raise error

    with pytest.raises(type(error)):
        fails()
    (line,) = read_trace(tmp_path / "trace").described("uncaught")
    assert line["error"].startswith(type(error).__name__)
    assert line["at"][0].endswith(" fails")
