"""The headline names the cause: of made runs that hang, die, fail or go on, and of the recordings."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_evidence import (
    DATALOADER,
    LOCKED,
    LOOP,
    MAIN,
    SLEEPS,
    Frame,
    library,
    look,
    loop,
    thread,
    user,
    worker,
)
from made_evidence import process as one_process
from made_trace import HEALTHY, HUNG, LOADER_PID, START, WAITS_FOR_TASK_0, Run, made, write
from oracle_trace import stop_recording, write_process
from recorded import recorded

from minidl.explore.guards import GUARDS, OURS
from minidl.explore.model import Model
from minidl.explore.search import shortest
from minidl.explore.trace import write as explored
from minidl.hang.consult import diagnose_recorded
from minidl.hang.evidence.model import RunEvidence, Syscall
from minidl.hang.finding import LONGEST, Finding, FocusScope, HangCause, RecordedWait, RunOutcome, titled
from minidl.hang.headline import hangs, headline, held_up
from minidl.hang.places import LoaderStep
from minidl.tracefile import events as ev
from minidl.tracefile import watched
from minidl.tracefile.events import Call
from minidl.tracefile.open_spans import open_spans
from minidl.tracefile.process import ProcessLife
from minidl.tracefile.reader import Trace, read_trace
from minidl.tracefile.stack_samples import CodeLine, StackSamples
from minidl.tracefile.watched import Stall, StallLook

SECOND = 1_000_000_000
LONG = HUNG | {"poll": 5 * SECOND}
"""A hang in which the loader looks round six times: 30 s."""

FIELDS = ("time", "code", "loader", "tid", "task", "worker", "x", "y", "z")

TRACES = Path(__file__).parents[2] / "traces"
WAIT_IN_THE_WORKER = "since 0.01 s: waiting for worker 1 (pid 1101), in sample 38"


# --- Events and looks -------------------------------------------------------------------------------------------------
def at(time: int, code: int, **values: int) -> dict[str, int]:
    """An event."""
    return {"time": time, "code": code} | values


def span(codes: tuple[int, int], begin: int, end: int, **values: int) -> list[dict[str, int]]:
    """The two events of a span."""
    return [at(begin, codes[0], **values), at(end, codes[1], **values)]


def of_loader(path: Path, events: Iterable[dict[str, int]], *lines: dict[str, object]) -> Trace:
    """Write a process with a loader, and read the trace."""
    write_process(path, events, pid=LOOP, role="loader", loader=1, lines=lines)
    return read_trace(path)


def add_worker(path: Path, number: int, events: Iterable[dict[str, int]], *lines: dict[str, object]) -> None:
    write_process(path, events, pid=200 + number, role="worker", worker=number, loader=1, ppid=LOOP, lines=lines)


def longer(path: Path, run: dict[str, Any], events: dict[int, list[dict[str, int]]]) -> Trace:
    """The trace of a run with more events of some processes, whose times count from its last event."""
    trace = read_trace(path) if path.exists() else made(path, **run)
    end = trace.last
    for pid, more in events.items():
        index, process = next((i, one) for i, one in enumerate(trace.processes) if one.pid == pid)
        rows = trace.events[trace.events["process"] == index]
        old = [{name: int(row[name]) for name in FIELDS} for row in rows]
        write_process(
            path, old + [event | {"time": end + event["time"]} for event in more], pid=pid, role=process.role,
            worker=process.worker, loader=process.loader, start_ns=process.start_ns,
        )  # fmt: skip
    return read_trace(path)


def found_dead(number: int, code: int, pid: int = 0) -> dict[str, int]:
    """The loader finds a worker dead, just after the run's last event."""
    return at(1, ev.FOUND_DEAD, worker=number, x=ev.Actor.WORKER, y=pid or LOADER_PID + 100 + number, z=code)


def raising(trace: Trace, error: str, *places: str, pid: int = 0) -> Trace:
    """The trace, whose program has ended with an exception."""
    home = next((index for index, one in enumerate(trace.processes) if one.pid == pid), 0)
    trace.lines.append({"kind": "uncaught", "process": home, "error": error, "at": list(places), "monotonic_ns": 5})
    return trace


def looked_at(trace: Trace, call: Call = Call.NEXT, after: int = 0) -> Trace:
    """The trace, at whose end, or so many ns later, a watchdog has looked at the loader's process."""
    stall = Stall(1, call, trace.last, LOADER_PID)
    trace.watched.looks = [StallLook(stall, 1, trace.last + after, {})]
    return trace


def doctor_says(monkeypatch: pytest.MonkeyPatch, *said: Any, **more: Any) -> None:
    """Let each look lead to the finding of these arguments; to none without arguments."""
    found = Finding(*said, **more) if said else None
    for module in (hangs, held_up):
        monkeypatch.setattr(module, "diagnose_recorded", lambda trace, told: found)


def hung(directory: Path, **changes: object) -> Finding:
    found = headline(made(directory / "t", **LONG | changes))
    assert found.outcome is RunOutcome.HUNG
    return found


def focus_of(found: Finding, trace: Trace) -> tuple[str, str]:
    """The process and the step that the headline points at; its span is one of the trace."""
    focus = found.focus
    spans = trace.spans()
    place = (spans["process"] == focus.process) & (spans["tid"] == focus.tid) & (spans["begin"] == focus.span)
    assert focus.code in spans["code"][place]
    assert focus.begin <= focus.end <= int(trace.events["time"][-1])
    return trace.processes[focus.process].name, ev.EVENTS[focus.code].name


# --- Hung -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("stuck", "what", "helps"),
    [
        (ev.SAMPLE, "waiting for worker 1 (pid 1101), in sample 38 (task 9)", "run dataset[38] alone"),
        (ev.COLLATE, "waiting for worker 1 (pid 1101), collating task 9", "call collate_fn"),
        (ev.RESULT_PICKLE, "worker 1 has put task 9 into the result queue; its feeder is pickling task 9",
         "pickle that batch alone"),
    ],
)  # fmt: skip
def test_a_hang_names_who_is_waited_for_and_in_which_step(
    tmp_path: Path, stuck: tuple[int, int], what: str, helps: str
) -> None:
    found = hung(tmp_path, stuck=stuck[0])
    assert found.title == f"hung for 30.0 s, since 0.01 s: {what}; later batches that wait behind it: 2"
    assert found.next_step.startswith(helps)
    assert "py-spy dump --pid 1101" in found.next_step
    assert focus_of(found, read_trace(tmp_path / "t")) == ("worker 1 (pid 1101)", ev.EVENTS[stuck[0]].name)
    assert (found.focus.task, found.focus.worker, found.focus.epoch) == (9, 1, 0)
    assert found.focus.end - found.focus.begin == pytest.approx(30 * SECOND, rel=1e-3)
    text = "\n".join(found.notes())
    assert "finished behind it: 2 tasks (10, 12)" in text
    assert "last events: worker 1 0.01 s, loader 30.01 s, worker 0 0.0" in text


def test_a_wait_that_is_cut_short_and_that_nobody_has_looked_at_is_no_hang(tmp_path: Path) -> None:
    """However short the waits before it were: one sample may take two seconds."""
    found = headline(made(tmp_path / "t", **HUNG | {"poll": SECOND // 2}))
    assert (found.outcome, found.title[:5]) == (RunOutcome.CUT, "cut: ")
    assert WAIT_IN_THE_WORKER.partition(": ")[2] in found.title


def test_a_worker_that_no_longer_reads_its_queue_may_be_stopped(tmp_path: Path) -> None:
    found = hung(tmp_path, stuck=ev.INDEX_GET[0])
    assert found.title == "hung for 30.0 s, since 0.01 s: worker 1 (pid 1101) has not taken task 9 (stopped?)"
    assert found.next_step.endswith("ps -o stat,wchan -p 1101")
    words = "stopped? no sign of life since 0.00 s; the loader waits for its task 9"
    assert (found.focus.frame, found.focus.words) == (FocusScope.PROCESS, words)


@pytest.mark.parametrize(
    ("cause", "frame"), [(HangCause.STOPPED, FocusScope.PROCESS), (HangCause.GIL, FocusScope.STEP)]
)
def test_what_the_evidence_shows_as_stopped_is_to_blame_and_not_its_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: HangCause, frame: FocusScope
) -> None:
    doctor_says(monkeypatch, RunOutcome.HUNG, "the loop waits for worker 1: it is ...", cause, who={"pid": 1101})
    found = hung(tmp_path)
    assert found.title == "hung for 30.0 s, since 0.01 s: the loop waits for worker 1: it is ..."
    assert (found.focus.frame, "stopped" in found.focus.words) == (frame, frame is FocusScope.PROCESS)
    if frame is FocusScope.PROCESS:
        events = read_trace(tmp_path / "t").events
        assert found.focus.since == int(events["time"][events["pid"] == 1101].max())


def test_a_worker_that_a_running_system_shows_as_stopped(tmp_path: Path) -> None:
    trace = made(tmp_path / "t", **LONG)
    trace.processes[2].life = ProcessLife.STOPPED
    focus = headline(trace).focus
    assert (trace.processes[focus.process].name, focus.frame) == ("worker 1 (pid 1101)", FocusScope.PROCESS)


@pytest.mark.parametrize(
    ("sentence", "cause"),
    [
        ("hung for 11.0 s, since 0.35 s: the loop waits for batch 0 of worker 0, importing the main module in a "
         "spawned worker (<module> at train.py:27): it is waiting in flock on /tmp/job-2d87/train.lock: a circle "
         "of waiting (the loop -> worker 0 -> the loop)",
         "it is waiting in flock on .../train.lock: a circle of waiting (the loop -> worker 0 -> the loop)"),
        ("hung for 12.0 s, since 0.35 s: waiting for worker 1 (pid 123456), making its fetcher (an iterable "
         "dataset's __iter__); task 123 is still in its index queue; later batches that wait behind it: 12",
         "making its fetcher (an iterable dataset's __iter__); task 123 is still in its index queue"),
        ("hung for 12.4 s, since 0.18 s: the loop waits for batch 5 of worker 1, in sample 21 (D.__getitem__ at "
         "own.py:6): it waits for a lock in D.__getitem__ (own.py:6) that no thread of its process can release",
         "batch 5 of worker 1, in sample 21: it waits for a lock in D.__getitem__ that no thread of its process can "
         "release"),
        ("hung for 34.8 s: rank 1 waits for batch 3 of its worker 1, in sample 53 (Tiles.read_tile at j.py:20): it "
         "is waiting for data in pipe 1995133, whose writing end only its own process has; ranks 0, 2 and 3 wait in "
         "all_reduce",
         "rank 1 waits for its worker 1, in sample 53: it waits for data in a pipe, whose writing end only its own "
         "process has; ranks 0, 2 and 3 wait in all_reduce"),
        ("hung for 12.0 s: " + "the loop waits and waits " * 20 + "for a lock of worker 1", "for a lock of worker 1"),
    ],
    ids=["a long path", "what comes after", "a place twice", "a number", "no place to cut"],
)  # fmt: skip
def test_a_title_that_is_too_long_keeps_its_cause(sentence: str, cause: str) -> None:
    short = titled(sentence)
    assert len(short) <= LONGEST < len(sentence)
    assert short.endswith(cause)
    assert short.startswith(("hung: ", sentence[:15]))
    assert titled(short) == short


def test_of_a_title_that_was_shortened_the_evidence_has_the_whole(tmp_path: Path) -> None:
    text = "no such file: " + "a long path " * 20 + "and its end"
    trace = made(tmp_path / "t", **HEALTHY)
    trace.manifest["explored"] = {"wrong": text}
    trace.events = trace.events[: len(trace.events) // 2]
    found = headline(trace)
    assert found.title.endswith(text[-20:])
    assert text in found.notes()[0]


def test_of_steps_alike_none_is_blamed_alone(tmp_path: Path) -> None:
    alike = headline(made(tmp_path / "t", batches=200, step=10_000))
    assert alike.focus.frame is FocusScope.ALIKE
    one_is_late = made(tmp_path / "u", batches=40, step=10_000, cost=lambda t: 60_000_000 if t == 9 else 900_000)
    late = headline(one_is_late).focus
    assert (late.frame, late.task) == (FocusScope.STEP, 9)


def test_the_order_is_not_asked_for_a_hang_without_workers_in_turn(tmp_path: Path) -> None:
    """With in_order=False the loop takes what comes: the worker that is at work holds it up."""
    path = write(tmp_path / "t", Run(**LONG | {"workers": 1}))
    side = next(path.glob(f"{LOADER_PID}-*.jsonl"))
    side.write_text(side.read_text() + '{"kind": "loader", "loader": 1, "in_order": false}\n')
    trace = read_trace(path)
    found = headline(trace)
    assert "waiting for a result; worker 0 (pid 1100), in sample 38 (task 9)" in found.title
    assert focus_of(found, trace) == ("worker 0 (pid 1100)", "sample")


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (ev.WORKER_INIT, "in worker_init_fn"),
        (ev.MAKE_FETCHER, "making its fetcher (an iterable dataset's __iter__)"),
    ],
)
def test_a_worker_that_hangs_before_its_first_task(tmp_path: Path, step: tuple[int, int], words: str) -> None:
    starts = [at(1, ev.WORKER_START[0], worker=0), at(2, ev.WORKER_START[1], worker=0, x=200)]
    looks_again = [at(5 * SECOND, ev.RESULT_GET[1]), at(7 * SECOND, ev.RESULT_GET[0], task=0, worker=0)]
    add_worker(tmp_path, 0, [at(3, step[0], worker=0)])
    trace = of_loader(tmp_path, [*starts, *WAITS_FOR_TASK_0, *looks_again])
    found = headline(trace)
    assert found.title.startswith(f"hung for 7.00 s, since 0.00 s: waiting for worker 0 (pid 200), {words}; ")
    assert "; task 0 is still in its index queue" in found.title
    assert "forkserver" in found.next_step
    assert focus_of(found, trace) == ("worker 0 (pid 200)", ev.EVENTS[step[0]].name)


def test_a_stopped_worker_is_named_for_the_memory_that_it_does_not_hand_over(tmp_path: Path) -> None:
    about = {"task": 0, "worker": 0}
    stopped = [
        *span(ev.INDEX_GET, 3, 6, **about),
        *span(ev.FETCH, 8, 10, **about),
        at(11, ev.RESULT_PUT, **about),
        *span(ev.RESULT_WRITE, 12, 13, **about),
        at(14, ev.FETCH[0], task=2, worker=0),
        at(15, ev.SAMPLE[0], task=2, worker=0, x=0, y=7),
    ]
    add_worker(tmp_path, 0, stopped)
    add_worker(tmp_path, 1, [at(time, ev.INDEX_GET[0], worker=1) for time in (3, 9 * SECOND)])
    trace = of_loader(tmp_path, [*WAITS_FOR_TASK_0, at(20, ev.RESULT_REBUILD[0], **about)])
    found = headline(trace)
    assert found.title == (
        "hung for 9.00 s, since 0.00 s: worker 0 (pid 200) does not react (stopped?); it has to hand over the "
        "memory of task 0"
    )
    assert found.next_step.endswith("ps -o stat,wchan -p 200")
    assert focus_of(found, trace) == ("worker 0 (pid 200)", "sample")
    assert (found.focus.frame, found.focus.since) == (FocusScope.PROCESS, 15), "its sample is not to blame"


EXITS = library("_exit_function", "/lib/python3.11/multiprocessing/util.py", "p.join()")
SHUTS_DOWN = library("It._shutdown_workers", DATALOADER, "w.join()")
NOT_TOLD_TO_END = "waits for worker 0, which is idle; it was not told to end"


def looks_by_a_watchdog(path: Path, stall: Stall, sees: RunEvidence, end: int, hang_after: float, *more: bytes) -> None:
    """The file of a watchdog with two looks, at `end` and a second before."""
    seen = json.loads(sees.to_json())
    looks = [watched.look(stall, n, end - (3 - n) * SECOND, seen) for n in (1, 2)]
    data = [watched.description("0", LOOP, hang_after), *looks, *more]
    (path / f"watch-{LOOP}-1.attachment.jsonl").write_bytes(b"".join(data))


def after_its_end(
    path: Path, call: Call, sees: RunEvidence, seconds: float, hang_after: float = 2.0, killed_by: int | None = None
) -> Finding:
    """Of a run whose program has ended, and that a watchdog then saw in what the evidence shows, for so long."""
    events = [at(time, code) for time, code in ((1, ev.EPOCH[0]), (2, ev.NEXT[0]), (3, ev.NEXT[1]))]
    events += span(ev.GC, 5, 6) if call is Call.OWN else []
    events += [at(7, ev.INDEX_WRITE[0], tid=LOOP + 50)]
    events += [at(6, ev.SHUTDOWN[0])] * (call is Call.SHUTDOWN)
    of_loader(path, events, {"kind": "program_end", "monotonic_ns": 5}, {"kind": "loader", "loader": 1})
    end = round(seconds * SECOND)
    seen = watched.sample(watched.Sample(end, {LOOP: watched.Vitals("S", 1, 1, 1, 1, 1)}, 0, 0))
    ended = [] if killed_by is None else [watched.ended(watched.Ended(LOOP, end + SECOND // 2, -killed_by))]
    looks_by_a_watchdog(path, Stall(1, call, 4, LOOP), sees, end, hang_after, seen, *ended, watched.over(1))
    return headline(read_trace(path))


def joins(*outside: Frame) -> RunEvidence:
    """A worker, which waits for a task, is waited for."""
    stack = (Frame("Popen.poll", "/lib/python3.11/multiprocessing/popen_fork.py", 27), *outside)
    call = Syscall("wait4", "for a child", target=LOOP + 1, timeout=-1.0)
    return look(loop(0, stack=stack, call=call), worker(0, step="idle"))


@pytest.mark.parametrize("apart", [4, 40])
def test_a_finding_by_an_old_look_says_so(apart: int, tmp_path: Path) -> None:
    """The last look is 3 s, or 39 s, before the recording's end."""
    of_loader(tmp_path, [at(time, code) for time, code in ((1, ev.EPOCH[0]), (2, ev.NEXT[0]), (3, ev.NEXT[1]))])
    end, stall = apart * SECOND, Stall(1, Call.NEXT, 2, LOOP)
    looks_by_a_watchdog(tmp_path, stall, joins(EXITS), 2 * SECOND, 2.0)
    told = RecordedWait(hung=True, since=2, seconds=end / SECOND, pid=LOOP)
    found = diagnose_recorded(read_trace(tmp_path), told)
    assert found is not None
    assert any("last look was 39.0 s before" in line.text for line in found.evidence) is (apart == 40)


def test_a_program_that_has_ended_and_whose_process_has_not_hangs(tmp_path: Path) -> None:
    found = after_its_end(tmp_path / "a", Call.OWN, joins(EXITS), 4.0)
    assert (found.outcome, found.cause) == (RunOutcome.HUNG, HangCause.NOBODY)
    assert found.title == (
        f"hung for 4.00 s, since 0.00 s, after the program's end: the loop, at Python's exit, {NOT_TOLD_TO_END}"
    )
    allowed = after_its_end(tmp_path / "b", Call.OWN, joins(EXITS), 4.0, hang_after=5.0)
    assert allowed.outcome is RunOutcome.FINE, "the watchdog was told to allow 5 s"


@pytest.mark.parametrize(
    ("seconds", "signum", "hung"),
    [(6.0, signal.SIGKILL, True), (6.0, 0, False), (4.0, signal.SIGKILL, False)],
    ids=["by kill -9", "by itself", "an exit may last so long"],
)
def test_a_process_that_is_killed_at_its_exit_may_have_hung(
    tmp_path: Path, seconds: float, signum: int, hung: bool
) -> None:
    """A person ends with kill -9 what the watchdog still allowed."""
    found = after_its_end(tmp_path, Call.OWN, joins(EXITS), seconds, 120.0, killed_by=signum)
    if hung:
        assert found.title == f"cut: may hang: the loop, at Python's exit, {NOT_TOLD_TO_END}"
    else:
        assert found.outcome is RunOutcome.FINE


def test_a_loader_that_hangs_in_its_shutdown_after_the_program(tmp_path: Path) -> None:
    found = after_its_end(tmp_path / "a", Call.SHUTDOWN, joins(SHUTS_DOWN), 4.0)
    assert found.outcome is RunOutcome.HUNG
    assert found.title.endswith(f": the loop shuts down, and {NOT_TOLD_TO_END}")
    elsewhere = after_its_end(tmp_path / "b", Call.SHUTDOWN, joins(EXITS), 4.0)
    assert elsewhere.outcome is RunOutcome.FINE, "the evidence is not of a shutdown"


def test_a_program_that_hangs_in_its_own_code_after_its_last_loader(tmp_path: Path) -> None:
    """The thread that iterated has died, and the main thread waits for its batches."""
    stack = (library("Condition.wait"), library("Queue.get", "/lib/python3.11/queue.py"), user("batches.get()"))
    found = after_its_end(tmp_path, Call.OWN, look(loop(0, stack=stack, call=LOCKED)), 40.0)
    assert found.outcome is RunOutcome.HUNG
    assert "waits in Queue.get (queue.py), which no thread of its process can end" in found.title
    assert "the thread that should answer has ended" in " ".join(found.also)


WAITS_FOR_CHILD = thread(
    LOOP, (user("run(fetch)"), MAIN), Syscall("wait4", "for a child", target=LOOP + 1, timeout=-1.0)
)
SLEEPING_CHILD = one_process(LOOP + 1, LOOP, thread(LOOP + 1, (user("time.sleep(1000)"), MAIN), SLEEPS), name="fetch")
COMPUTES = thread(LOOP, (user("work()"), MAIN), None, state="R", idle=0.0, cpu=1.0)


@pytest.mark.parametrize(
    ("sees", "cause", "head"),
    [
        (look(one_process(LOOP, 1, WAITS_FOR_CHILD), SLEEPING_CHILD), HangCause.CHILD,
         "hung for 39.0 s, before any DataLoader"),
        (look(one_process(LOOP, 1, COMPUTES)), HangCause.COMPUTING,
         "cut: may hang for 39.0 s, before any DataLoader"),
    ],
    ids=["it waits for a child", "it computes"],
)  # fmt: skip
def test_a_program_that_hangs_before_its_first_loader(
    tmp_path: Path, sees: RunEvidence, cause: HangCause, head: str
) -> None:
    write_process(tmp_path, [], pid=LOOP, role="process")
    looks_by_a_watchdog(tmp_path, Stall(0, Call.OWN, 4, LOOP), sees, 40 * SECOND, 120.0)
    found = headline(read_trace(tmp_path))
    assert (found.cause, found.head) == (cause, head)
    assert found.title.startswith(f"{head}: the program, in its own code, ")


def test_a_pin_thread_that_hangs(tmp_path: Path) -> None:
    waits = [event | {"code": ev.READY_GET[0] if event["code"] == ev.RESULT_GET[0] else event["code"]}
             for event in WAITS_FOR_TASK_0]  # fmt: skip
    main = [
        *waits,
        at(5, ev.PIN_START, tid=150),
        *span(ev.RESULT_GET, 8, 20, tid=150, task=0, worker=0, x=ev.Message.RESULT),
        at(21, ev.PIN[0], task=0, worker=0, x=9, tid=150),
        at(5 * SECOND, ev.READY_GET[1]),
        at(7 * SECOND, ev.READY_GET[0], task=0, worker=0),
    ]
    got = [at(2, ev.WORKER_READY, worker=0, x=200), at(10, ev.INDEX_GET[1], task=0, worker=0, x=ev.Message.TASK)]
    add_worker(tmp_path, 0, [*got, at(11, ev.RESULT_PUT, task=0, worker=0), at(12, ev.INDEX_GET[0], worker=0)])
    trace = of_loader(tmp_path, main)
    found = headline(trace)
    assert found.title == "hung for 7.00 s, since 0.00 s: task 0 has left worker 0: the pin thread has it"
    assert focus_of(found, trace) == ("loader (pid 100)", "pin")
    assert "pin_memory=False" in found.next_step


def consumer_hangs(directory: Path, seconds: int) -> Path:
    """The loop's code does not come back after task 4; the workers look into their queues meanwhile."""
    whole = made(directory, **HEALTHY)
    end = int(whole.select("consumer", ev.Phase.BEGIN)["time"][4])
    for file in (*directory.glob("*.events"), *directory.glob("*.jsonl")):
        file.unlink()
    for index, process in enumerate(whole.processes):
        rows = whole.events[(whole.events["process"] == index) & (whole.events["time"] <= end)]
        events = [{name: int(row[name]) for name in FIELDS} for row in rows]
        if process.worker >= 0:
            events += [
                at(end + after * SECOND + code, code, worker=process.worker)
                for after in range(0, seconds + 1, 5)
                for code in ev.INDEX_GET
            ]
        write_process(
            directory, events, pid=process.pid, role=process.role, worker=process.worker, loader=1, start_ns=START
        )
    return directory


def test_a_loop_that_no_longer_calls_next(tmp_path: Path) -> None:
    trace = read_trace(consumer_hangs(tmp_path / "t", 20))
    found = headline(trace)
    assert found.outcome is RunOutcome.CUT  # an evaluation takes as long: without evidence it is no hang
    said = "cut: the training loop's own code after task 4 has not called next() for 20.0 s, since 0.00 s; 1 batch "
    assert found.title == said + "is ready"
    assert f"py-spy dump --pid {LOADER_PID}" in found.next_step
    assert focus_of(found, trace) == (f"loader (pid {LOADER_PID})", "consumer")


def test_of_two_ranks_the_one_whose_worker_hangs_is_named(tmp_path: Path) -> None:
    """The other one waits in its own code, for the first."""
    path = write(tmp_path / "t", Run(**LONG | {"first_pid": 3000, "loader": 2}))
    consumer_hangs(tmp_path / "other", 30)
    for file in (tmp_path / "other").glob("1*"):
        shutil.copy(file, path)
    for pid, number, rank in ((3000, 2, 0), (LOADER_PID, 1, 1)):
        side = next(path.glob(f"{pid}-*.jsonl"))
        side.write_text(side.read_text() + f'{{"kind": "loader", "loader": {number}, "rank": {rank}}}\n')
    found = headline(read_trace(path))
    assert found.title.startswith(
        "hung for 30.0 s, since 0.01 s in rank 0: waiting for worker 1 (pid 3101), in sample 38"
    )
    assert any(text.startswith("rank 1 loader") and "may wait for the other" in text for text in found.notes())


RAISES = at(2, ev.NEXT[1], x=9, y=ev.Outcome.ERROR)


def test_ctrl_c_in_a_hang_is_a_hang_that_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stuck worker is interrupted as well, a little before the loader writes its end."""
    of_task = {"worker": 1, "task": 9}
    interrupted = [
        at(-900, ev.SAMPLE[1], x=2, y=38, **of_task),
        at(-800, ev.FETCH[1], x=ev.Outcome.ERROR, **of_task),
        at(-700, ev.WORKER_EXIT, worker=1, x=ev.Ending.INTERRUPTED),
    ]
    closes = [at(1, ev.RESULT_GET[1]), RAISES, at(3, ev.EPOCH[1], z=ev.Ending.CLOSED)]
    trace = longer(tmp_path / "t", LONG, {1101: interrupted, LOADER_PID: [*closes, *span(ev.SHUTDOWN, 4, 5 * SECOND)]})
    found = headline(trace)
    assert found.title == (
        "hung for 30.0 s, since 0.01 s, until it was interrupted: waiting for worker 1 (pid 1101), in sample 38 "
        "(task 9); later batches that wait behind it: 2"
    )
    assert focus_of(found, trace) == ("worker 1 (pid 1101)", "sample")
    assert "last events: worker 1 0.0" in found.evidence[-1].text, "while it hung, and not when it was interrupted"
    doctor_says(monkeypatch, RunOutcome.MAYBE_HUNG, "the loop waits: it is asleep", HangCause.SLEEP)
    assert headline(read_trace(tmp_path / "t")).title == (
        "waited for 30.0 s, since 0.01 s, until it was interrupted: the loop waits: it is asleep"
    )


def test_ctrl_c_in_a_short_wait_is_no_hang_and_says_what_was_waited_for(tmp_path: Path) -> None:
    found = headline(longer(tmp_path / "t", HUNG, {LOADER_PID: [RAISES]}))
    assert found.outcome is RunOutcome.CUT
    assert "after waiting 7.70 ms, since 6.2 ms: waiting for worker 1 (pid 1101), in sample 38 (task 9)" in found.title


def test_a_loader_that_gave_up_a_wait_says_what_it_waited_for(tmp_path: Path) -> None:
    error = "RuntimeError: DataLoader timed out after 4 seconds"
    trace = longer(tmp_path / "t", HUNG, {LOADER_PID: [RAISES]})
    found = headline(raising(trace, error, "loader.py:1449 _get_data", pid=LOADER_PID))
    assert found.outcome is RunOutcome.ERROR
    assert found.title.startswith(f"error: {error} in next, at loader.py:1449 _get_data; worker 1 ")
    assert "in sample 38 (task 9)" in found.title
    assert trace.processes[found.focus.process].worker == 1


def failed_next(task: int, *inside: dict[str, int], worker: int = -1) -> list[dict[str, int]]:
    """The events of a loop whose first `next` raises an error; of task -1: of no task."""
    return [
        at(1, ev.EPOCH[0]),
        at(2, ev.NEXT[0]),
        *inside,
        at(20, ev.YIELD, task=task, worker=worker, x=ev.Outcome.ERROR),
        at(21, ev.NEXT[1], y=ev.Outcome.ERROR),
    ]


OF_A_WORKER = """OSError: Caught OSError in DataLoader worker process 1.
Original Traceback (most recent call last):
  File "train.py", line 8, in fault
    file.write(data)
"""


@pytest.mark.parametrize(
    ("raised", "told", "helps"),
    [
        ("MemoryError", "MemoryError", "traceback"),
        (OF_A_WORKER + "OSError: [Errno 27] File too large", "OSError: [Errno 27, EFBIG] File too large", "ulimit -f"),
        (OF_A_WORKER, "OSError: Caught OSError in DataLoader worker process 1.", "traceback"),
    ],
    ids=["in the program", "in a worker", "without its last line"],
)
def test_an_error_of_no_task_is_told_by_the_programs_exception(
    tmp_path: Path, raised: str, told: str, helps: str
) -> None:
    found = headline(raising(of_loader(tmp_path, failed_next(-1)), raised, "train.py:7 main"))
    assert found.title == f"error: {told} in next, at train.py:7 main"
    assert helps in found.next_step


@pytest.mark.parametrize("yields", [True, False], ids=["without workers", "with workers"])
def test_a_samplers_error_is_not_blamed_on_the_sample_before(tmp_path: Path, yields: bool) -> None:
    events = failed_next(3, *span(ev.SAMPLER_NEXT, 3, 4, task=4))
    trace = of_loader(tmp_path, [event for event in events if yields or event["code"] != ev.YIELD])
    said = "error: the sampler raised an exception when it drew the indices of task 4"
    assert headline(trace).title == said


def test_an_error_is_told_in_full_with_its_errno_and_the_one_that_came_first(tmp_path: Path) -> None:
    """Task 1 failed before task 0, whose batch the loop asked for: both are told, and the sample of torch's loader."""
    path = "/data/" + "a-long-name/" * 12 + "7.jpeg"
    texts = f"OSError: [Errno 5] Input/output error: '{path}'", "FileNotFoundError: [Errno 2] no shard"
    lines = [{"kind": "string", "id": number, "text": text} for number, text in enumerate(texts, 1)]
    fetch = span(ev.FETCH, 2, 10, task=0, x=ev.Outcome.ERROR)
    add_worker(tmp_path, 0, [fetch[0], at(9, ev.TASK_ERROR, task=0, x=3, y=3, z=1), fetch[1]], *lines)
    add_worker(tmp_path, 1, [at(5, ev.TASK_ERROR, task=1, x=1, y=5, z=2)], *lines)
    trace = of_loader(tmp_path, failed_next(0, at(2, ev.INDEX_PUT, task=0)))
    frames = 'File "/home/a/data.py", line 24, in __getitem__\nFile "/usr/lib/python3.11/io.py", line 9, in read\n'
    found = headline(raising(trace, f"OSError: Caught\n{frames}{texts[0]}"))
    assert found.sentence.startswith(
        f"error: OSError: [Errno 5, EIO] Input/output error: '{path}' in sample 3 (task 0) at data.py:24, at "
    )
    assert path not in found.title
    assert (found.where["sample"], "nfsstat" in found.next_step) == (3, True)
    assert "first" in found.evidence[1].text
    assert "FileNotFoundError: [Errno 2, ENOENT] no shard in sample 5 (task 1), worker " in found.evidence[1].text


@pytest.mark.parametrize(("side", "doing"), [("loader", "rebuilding task 0 of worker 0"),
                                             ("worker", "pickling task 0, worker 0")])  # fmt: skip
def test_an_error_belongs_to_the_step_in_which_it_was_told(tmp_path: Path, side: str, doing: str) -> None:
    """Not to the last one of the worker: a message can fail where it is pickled, or where it is rebuilt."""
    string = {"kind": "string", "id": 1, "text": "RuntimeError: no"}
    told = {"task": 0, "worker": 0, "x": -1, "y": -1, "z": 1}
    pickled, rebuilt = span(ev.RESULT_PICKLE, 5, 7, task=0), span(ev.RESULT_REBUILD, 8, 10, task=0)
    by_worker = [at(6, ev.TASK_ERROR, **told)] if side == "worker" else []
    by_loader = [at(9, ev.TASK_ERROR, **told)] if side == "loader" else []
    add_worker(tmp_path, 0, [*span(ev.COLLATE, 3, 4, task=0), *pickled, *by_worker], string)
    main = [event | {"tid": 107} for event in failed_next(0, *rebuilt, *by_loader, worker=0)]
    found = headline(of_loader(tmp_path, main, string, {"kind": "thread", "tid": 107, "name": "prefetch"}))
    assert found.sentence.startswith(f"error: RuntimeError: no {doing}, at ")
    assert found.evidence[1].text.startswith("thread prefetch called next()")


def test_without_descriptors_it_is_told_who_has_how_many(tmp_path: Path) -> None:
    trace = raising(of_loader(tmp_path, failed_next(-1)), "OSError: [Errno 24] no more")
    trace.watched.samples = [watched.Sample(2, {LOOP: watched.Vitals("S", 1, 1, 1, 99, 1)})]
    assert "open descriptors at 1.0 ns: loader (pid 100) 99" in headline(trace).notes()


def test_an_error_after_which_the_program_went_on_has_a_headline(tmp_path: Path) -> None:
    exhausted = span(ev.NEXT, 22, 23, y=ev.Outcome.EXHAUSTED)
    trace = of_loader(tmp_path, [*failed_next(-1), *exhausted], {"kind": "program_end", "monotonic_ns": 24})
    assert headline(trace).title.startswith("error: next() raised an exception at ")


def test_a_hang_whose_loader_is_found_dead_ends_with_its_last_sign_of_life(tmp_path: Path) -> None:
    dead = at(5 * SECOND, ev.FOUND_DEAD, worker=0, x=ev.Actor.LOADER, y=LOADER_PID)
    trace = longer(tmp_path / "t", LONG, {1100: [dead]})
    assert headline(trace).title.startswith(f"hung for 30.0 s, {WAIT_IN_THE_WORKER}")
    (line,) = (text for text in open_spans(trace) if text.startswith("loader"))
    assert line.endswith("for 30.0 s")


def test_a_hang_that_kill_9_of_the_whole_run_ended_comes_before_the_deaths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker dies first, and its loader finds it dead before it is killed too."""
    trace = longer(tmp_path / "t", LONG, {LOADER_PID: [found_dead(0, -signal.SIGKILL)]})
    found = headline(trace)
    assert found.title.startswith(f"hung for 30.0 s, {WAIT_IN_THE_WORKER}")
    assert "SIGKILL ended the whole run at 30.01 s: the loader found pid 1100 dead" in found.evidence[-1].text
    assert (found.wait.step, found.wait.step_since) == ("in sample 38 (task 9)", found.focus.span)
    assert found.wait.workers == 2
    doctor_says(monkeypatch, RunOutcome.HUNG, "the loop waits for worker 1: it is ...", HangCause.FIFO)
    assert headline(read_trace(tmp_path / "t")).evidence == found.evidence[-1:]
    starved = read_trace(tmp_path / "t")
    starved.watched.samples = [watched.Sample(starved.start + n, {}, 0, oom_kills=n) for n in (0, 1)]
    assert headline(starved).title.startswith("died: worker 0 (pid 1100)")


@pytest.mark.parametrize(
    ("seen", "killed", "said"),
    [
        (None, False, "died: worker 0 (pid 1100)"),
        (RunOutcome.HUNG, False, "hung for 30.0 s, since 0.01 s: the loop waits: ..."),
        (RunOutcome.MAYBE_HUNG, False, "died: worker 0 (pid 1100)"),
        (RunOutcome.MAYBE_HUNG, True, "cut: may hang: the loop"),
    ],
    ids=["not looked at", "seen to hang", "seen to wait", "seen to wait, then killed"],
)
def test_a_loader_that_lives_on_after_a_death_raises_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: RunOutcome | None, killed: bool, said: str
) -> None:
    """If a watchdog has seen that it hung before, the death is what ended the hang."""
    trace = longer(tmp_path / "t", LONG, {LOADER_PID: [found_dead(0, -signal.SIGKILL), RAISES]})
    if seen is not None:
        doctor_says(monkeypatch, seen, "the loop waits: ...", HangCause.FIFO)
        looked_at(trace)
    if killed:
        trace.watched.ended = [watched.Ended(LOADER_PID, trace.last - 2, -signal.SIGKILL)]
    assert headline(trace).title.startswith(said)


@pytest.mark.parametrize(("seen", "outcome"), [(None, RunOutcome.CUT), (5, RunOutcome.CUT), (0, RunOutcome.HUNG)])
def test_a_worker_that_goes_on_to_its_next_sample_does_not_hang(
    seen: int | None, outcome: RunOutcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came to a sample in the wait, and is not in it for longer than in others. seen: when a watchdog saw a hang."""
    of_task = {"task": 9, "worker": 1}
    goes_on = [at(-2 * SECOND, ev.SAMPLE[1], **of_task), at(-SECOND, ev.SAMPLE[0], x=1, y=39, **of_task)]
    trace = longer(tmp_path / "t", LONG, {1101: goes_on})
    if seen is not None:
        looks = {LOADER_PID: trace.last - seen * SECOND, 999: trace.last}  # the other one is at another rank's wait
        trace.watched.looks = [StallLook(Stall(1, Call.NEXT, 0, pid), 1, when, {}) for pid, when in looks.items()]
        doctor_says(monkeypatch, RunOutcome.HUNG, "the loop waits: ...", HangCause.FIFO)
    assert headline(trace).outcome is outcome


@pytest.mark.parametrize(
    ("code", "said"), [(-signal.SIGKILL, "cut: loader (pid 100) was killed 2.00 s after its last event"), (0, "fine")]
)
def test_a_program_that_is_killed_after_its_loaders_is_cut(tmp_path: Path, code: int, said: str) -> None:
    """Its exit may have hung, and no look has seen it yet: what bound its loaders is not what it was killed for."""
    codes = (ev.EPOCH[0], *ev.NEXT, ev.EPOCH[1], *ev.SHUTDOWN)
    events = [at(time, one) for time, one in enumerate(codes, 1)]
    trace = of_loader(tmp_path, events, {"kind": "loader", "loader": 1})
    ended = watched.ended(watched.Ended(LOOP, 2 * SECOND + 6, code))
    data = [watched.description("0", LOOP, 120.0), ended, watched.over(1)]
    (tmp_path / f"watch-{LOOP}-1.attachment.jsonl").write_bytes(b"".join(data))
    trace = read_trace(tmp_path)
    assert headline(trace).title.startswith(said)


def test_a_sampler_that_gives_no_first_index_is_waited_for(tmp_path: Path) -> None:
    """iter() draws the first indices, before the first call of next."""
    events = [at(1, ev.EPOCH[0]), at(2, ev.SAMPLER_NEXT[0]), at(9 * SECOND, ev.GC[0], tid=LOOP + 1)]
    trace = of_loader(tmp_path, events, {"kind": "loader", "loader": 1})
    assert headline(trace).title.startswith("hung for 9.00 s, since 0.00 s: asking the sampler")


# --- Not hung ---------------------------------------------------------------------------------------------------------
def slow_once(slow: int, seconds: int) -> dict[str, Any]:
    """A run that hangs at task 9; one task took so many seconds."""
    cost = HUNG["cost"]
    return HUNG | {"cost": lambda task: seconds * SECOND if task == slow else cost(task)}  # type: ignore[operator]


@pytest.mark.parametrize(
    "run",
    [HUNG, HUNG | {"polls": 0}, slow_once(3, 4) | {"poll": SECOND, "polls": 4}],
    ids=["a few milliseconds", "nothing", "four seconds, as another batch"],
)
def test_a_wait_within_the_runs_own_past_is_no_hang(tmp_path: Path, run: dict[str, Any]) -> None:
    found = headline(made(tmp_path / "t", **run))
    assert found.outcome is RunOutcome.CUT
    assert found.title.startswith(
        "cut: the recording ends after 9 batches, before the run's end (killed, or still running); loader (pid 1000) "
    )
    assert "waiting for task 9 of worker 1" in found.title


def test_a_run_that_is_cut_while_all_moves(tmp_path: Path) -> None:
    """SIGKILL to the group of a healthy run; and a file that is cut."""
    trace = made(tmp_path / "t", **HEALTHY)
    trace.events = trace.events[: len(trace.events) // 2]
    found = headline(trace)
    assert found.outcome is RunOutcome.CUT
    too_short = "too short" in found.evidence[0].text
    assert too_short or "no sign of a hang" in found.evidence[0].text
    assert ("may have been a hang" if too_short else "it was still making progress") in found.next_step
    stop_recording(tmp_path / "t", LOADER_PID, 300, 28, int(trace.events["time"][-1]))
    assert headline(read_trace(tmp_path / "t")).outcome is not RunOutcome.HUNG


def test_a_healthy_run(tmp_path: Path) -> None:
    found = headline(made(tmp_path / "t", batches=40, step=5_000_000))
    assert found.outcome is RunOutcome.FINE
    assert found.title.startswith("fine: not input-bound")
    assert found.focus is None


def test_too_few_workers_are_the_verdicts_and_a_title_has_one_share(tmp_path: Path) -> None:
    trace = made(tmp_path / "t", batches=40, cost=lambda task: 9_000_000)
    found = headline(trace)
    assert found.outcome is RunOutcome.SLOW
    assert found.title.startswith("slow: supply-bound: the loop waited ")
    assert (found.title.count("%"), "for workers that fetch samples" in found.title) == (1, True)
    assert focus_of(found, trace)[1] in ("sample", "collate")


def test_the_batch_that_blocked_the_line_is_the_focus_even_if_it_is_the_first(tmp_path: Path) -> None:
    trace = made(tmp_path / "t", workers=3, batches=12, epochs=2, cost=lambda task: 40_000_000 if task else 600_000_000)
    found = headline(trace)
    assert "samples take 58% of the time of all" in found.title
    assert (found.focus.task, found.focus.worker) == (0, 0)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        ("", "cut: the recording ends before the program iterated over a DataLoader"),
        ("SystemExit: 0", "cut: "),
        ("ValueError: no RANK", "error: ValueError: no RANK"),
    ],
)
def test_a_program_without_an_iterator(tmp_path: Path, error: str, sentence: str) -> None:
    trace = of_loader(tmp_path, [])
    said = headline(raising(trace, error) if error else trace)
    assert said.sentence.startswith(sentence)


# --- Died, and errors -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("code", "how", "helps"),
    [
        (-signal.SIGKILL, "was killed by SIGKILL", "out-of-memory"),
        (-signal.SIGBUS, "was killed by SIGBUS", "/dev/shm"),
        (-signal.SIGSEGV, "was killed by SIGSEGV", "faulthandler"),
        (3, "ended with exit code 3", "run dataset[38] alone"),
    ],
)
def test_a_worker_that_died_is_named_with_its_sample(tmp_path: Path, code: int, how: str, helps: str) -> None:
    trace = longer(tmp_path / "t", HUNG, {LOADER_PID: [found_dead(1, code)]})
    found = headline(trace)
    assert found.title == f"died: worker 1 (pid 1101), last seen at 5.0 ms, {how} while it was in sample 38 (task 9)"
    assert helps in found.next_step
    assert focus_of(found, trace) == ("worker 1 (pid 1101)", "sample")
    late = read_trace(tmp_path / "t")
    late.watched.ended = [watched.Ended(1101, late.last + 9_000_000, code)]  # later than the loader
    assert headline(late).evidence[0].text == "found dead 0 ns after its last sign of life"


LOAD = CodeLine("/home/a/tiles.py", 31, "load", "return decode(blob)")


def test_a_worker_that_died_is_told_with_the_stack_that_it_wrote_at_the_fault(tmp_path: Path) -> None:
    trace = longer(tmp_path / "t", HUNG, {LOADER_PID: [found_dead(1, -signal.SIGSEGV)]})
    inside = CodeLine("/lib/python3.11/site-packages/png.py", 7, "decode")
    trace.watched.ended = [watched.Ended(1101, trace.last, -signal.SIGSEGV, (LOAD, inside))]
    found = headline(trace)
    assert found.title.endswith("while it was in sample 38 (task 9), at tiles.py:31")
    assert (found.where["function"], found.where["file"], found.where["line"]) == ("load", "/home/a/tiles.py", 31)
    assert found.next_step.startswith("call tiles.py:31 alone")
    assert [one.text for one in found.evidence][-2:] == [
        "load, /home/a/tiles.py:31: return decode(blob): its stack, which it wrote when the signal came",
        "innermost frame: decode (png.py:7)",
    ]


@pytest.mark.parametrize(("since", "told"), [(1000, ", at tiles.py:31"), (-1000, "")], ids=["in its step", "before"])
def test_a_worker_that_died_is_told_with_the_last_look_at_its_stack_in_that_step(
    tmp_path: Path, since: int, told: str
) -> None:
    trace = longer(tmp_path / "t", HUNG, {LOADER_PID: [found_dead(1, -signal.SIGSEGV)]})
    process = next(i for i, one in enumerate(trace.processes) if one.pid == 1101)
    rows = trace.spans()
    begun = int(rows["begin"][(rows["code"] == ev.SAMPLE[0]) & (rows["process"] == process)].max())
    looks = (np.array([value]) for value in (begun + since, process, 1101, 1, 0, 0))
    trace.__dict__["stack_samples"] = StackSamples(*looks, stacks=((), (LOAD,)))
    assert headline(trace).title.endswith("while it was in sample 38 (task 9)" + told)


def test_a_worker_that_died_before_it_recorded_anything_died_while_it_started(tmp_path: Path) -> None:
    path = write(tmp_path / "t", Run(**HUNG))
    for file in path.glob("1101-*"):
        file.unlink()
    found = headline(longer(path, HUNG, {LOADER_PID: [found_dead(1, 1, pid=4711)]}))
    assert found.title.endswith("ended with exit code 1 while it started")
    assert "__main__" in found.next_step


TERMINATED = at(1, ev.TERMINATE, worker=1, x=1101, y=signal.SIGTERM)


def test_what_the_loader_ends_itself_has_not_died(tmp_path: Path) -> None:
    """Its shutdown sends SIGTERM to a worker that does not end."""
    gone = at(2, ev.WORKER_GONE, worker=1, x=1101, y=-signal.SIGTERM)
    found = headline(longer(tmp_path / "t", HEALTHY, {LOADER_PID: [TERMINATED, gone]}))
    assert found.outcome in (RunOutcome.SLOW, RunOutcome.FINE)


def outlived(path: Path, ended: bool) -> Finding:
    """Of a run whose loader sent SIGTERM to worker 1, and has waited 5 s for its end, or so long in vain."""
    joins = span(ev.JOIN, 2, 1 + 5 * SECOND, worker=1, x=ev.Actor.WORKER, y=5 * SECOND)
    joins[1]["y"] = int(ended)
    trace = longer(path, HEALTHY, {LOADER_PID: [TERMINATED, *joins]})
    is_gone = (trace.events["code"] == ev.WORKER_GONE) & (trace.events["x"] == 1101)
    trace.events = trace.events[~is_gone]
    return headline(trace)


def test_a_worker_that_outlived_its_shutdown_hangs_though_the_recording_is_whole(tmp_path: Path) -> None:
    """If the wait for it has seen the worker's end, all is well."""
    found = outlived(tmp_path / "a", ended=False)
    assert found.outcome is RunOutcome.HUNG
    assert found.title.startswith("hung for 5.00 s, since ")
    assert "worker 1 (pid 1101) did not end by SIGTERM" in found.title
    assert found.focus.worker == 1
    assert outlived(tmp_path / "b", ended=True).outcome in (RunOutcome.SLOW, RunOutcome.FINE)


@pytest.mark.parametrize(
    ("pid", "words", "cause"),
    [
        (1100, "worker 1 (pid 1101) did not end by SIGTERM", HangCause.UNKNOWN),
        (1101, "the loop waits: it is asleep", HangCause.SLEEP),
    ],
    ids=["at another one", "at it"],
)
def test_a_look_at_a_worker_that_outlived_its_shutdown_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pid: int, words: str, cause: HangCause
) -> None:
    doctor_says(monkeypatch, RunOutcome.MAYBE_HUNG, "the loop waits: it is asleep", HangCause.SLEEP, who={"pid": pid})
    found = outlived(tmp_path / "t", ended=False)
    assert found.title.startswith("hung for 5.00 s, since ")
    assert words in found.title
    assert (found.outcome, found.cause) == (RunOutcome.HUNG, cause)


def slow_before(slow: int) -> dict[str, Any]:
    """A run that is killed after a wait of 6 s for task 9; one task took 10 s."""
    return slow_once(slow, 10) | {"poll": SECOND, "polls": 6}


def test_how_long_workers_took_to_start_is_no_measure_for_a_later_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first batch took 10 s, as its workers started; no other one took a hundredth of 6 s."""
    found = headline(made(tmp_path / "slow start", **slow_before(0)))
    assert found.outcome is RunOutcome.HUNG
    assert "waiting for worker 1 (pid 1101), in sample 38 (task 9)" in found.title
    doctor_says(monkeypatch, RunOutcome.MOVES, "it goes on", HangCause.NONE, next_step="ask again")
    found = headline(read_trace(tmp_path / "slow start"))
    assert (found.title, found.next_step[:13]) == ("cut: moves: it goes on", "run it longer")


@pytest.mark.parametrize(
    ("state", "looked", "kind", "begin"),
    [
        (RunOutcome.HUNG, True, RunOutcome.HUNG, "hung for 6.0 s, since 10.0 s: the loop waits for worker 1"),
        (RunOutcome.MAYBE_HUNG, True, RunOutcome.MAYBE_HUNG, "cut: may hang: the loop waits for worker 1"),
        (RunOutcome.MOVES, True, RunOutcome.CUT, "cut: the recording ends after 9 batches"),
        (None, False, RunOutcome.CUT, "cut: the recording ends after 9 batches"),
    ],
)
def test_a_wait_within_the_runs_past_hangs_if_the_evidence_shows_it(
    state: RunOutcome, looked: bool, kind: RunOutcome, begin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fourth batch took 10 s; a later wait lasts for 6 s."""
    trace = made(tmp_path / "t", **slow_before(3))
    if looked:
        doctor_says(monkeypatch, state, "the loop waits for worker 1", HangCause.SLEEP, next_step="ask again")
        looked_at(trace)
    found = headline(trace)
    assert found.outcome is kind
    assert kind is RunOutcome.HUNG or "again" not in found.next_step, "the recording has ended"
    assert re.sub(r"6\.\d+ s, since 10\.\d+", "6.0 s, since 10.0", found.title).startswith(begin)


def test_a_hang_at_exit_is_told_in_a_unit_of_its_own_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loaders lived for some milliseconds, and Python's exit has lasted for 20 s."""
    doctor_says(monkeypatch, RunOutcome.HUNG, "the loop waits", HangCause.LOCK, loop_step=LoaderStep.EXIT)
    trace = looked_at(made(tmp_path / "t", batches=4, step=10_000), Call.OWN, 20 * SECOND)
    assert headline(trace).title == "hung for 20.0 s, since 0.00 s: the loop waits"


@pytest.mark.live
@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("killed worker", RunOutcome.DIED, "was killed by SIGKILL while it was in sample 5 (task 2)"),
        ("killed program", RunOutcome.DIED, "ended without a shutdown"),
        ("timeout", RunOutcome.HUNG, "until its timeout passed: waiting for worker 0"),
        ("worker_init error", RunOutcome.ERROR, "error: "),
        ("sampler error", RunOutcome.FINE, ""),  # the loop went on
        ("dataset error", RunOutcome.FINE, ""),  # the loop went on
        ("fork", RunOutcome.FINE, ""),
        ("left early", RunOutcome.FINE, ""),
    ],
)
def test_real_runs(name: str, kind: RunOutcome, words: str) -> None:
    found = headline(recorded(name))
    assert words in found.title
    assert found.outcome is kind or (kind, found.outcome) == (RunOutcome.FINE, RunOutcome.SLOW)


# --- The recordings ---------------------------------------------------------------------------------------------------
RECORDINGS: dict[str, tuple[RunOutcome, str]] = {
    "worker-sigkilled": (RunOutcome.DIED, r"^died: worker 1 .*, was killed by SIGKILL while it was in sample 620"),
    "torn-message-pin-thread": (RunOutcome.DIED, r"^died: worker 1 .*, was killed by SIGKILL .* in sample 578"),
    "worker-sigstopped": (
        RunOutcome.HUNG,
        r"^hung for .*, until its timeout passed: waiting for worker 1 \(pid \d+\), in sample 844 ",
    ),
    "shutdown-error": (
        RunOutcome.ERROR,
        r"^error: ValueError: image 386 is damaged in sample 386 \(task 6\), worker 2, at 203\.8 ms$",
    ),
    "head-of-line-in-order": (
        RunOutcome.SLOW,
        r"^slow: head-of-line blocking: .* \(longest: task 9 of worker 1, sample 579\)$",
    ),
    "head-of-line-out-of-order": (RunOutcome.FINE, "^fine: not input-bound"),
    "respawn": (RunOutcome.SLOW, "^slow: supply-bound"),  # summed over its three iterators
    "workers-8": (RunOutcome.FINE, "^fine: not input-bound"),
    "workers-0": (RunOutcome.SLOW, "^slow: supply-bound"),
}


@pytest.mark.heavy
@pytest.mark.parametrize("path", sorted(TRACES.glob("*.minidl")), ids=lambda path: path.stem)
def test_each_recording_has_a_headline(path: Path) -> None:
    trace = read_trace(path)
    found = headline(trace)
    kind, words = RECORDINGS.get(path.stem, (None, ""))
    assert re.search(words, found.title), found.title
    assert found.outcome is kind or (kind is None and found.outcome in (RunOutcome.SLOW, RunOutcome.FINE))
    assert len(found.title) <= LONGEST
    assert "record more" not in found.next_step
    if found.outcome is not RunOutcome.FINE:
        assert found.next_step
        _, step = focus_of(found, trace)
        of_start = ("worker_init", "make_fetcher", "worker_start", "join")
        assert not re.search("start-up|shutdown", found.title) or step in of_start


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_trace_has_a_headline_that_points_into_it(tmp_path: Path, seed: int) -> None:
    """Events are missing, and some are others."""
    draw = random.Random(seed)
    whole = made(tmp_path / "whole", **draw.choice([LONG, HUNG, HEALTHY, LONG | {"pin": True}]))
    for index, process in enumerate(whole.processes):
        rows = [row for row in whole.events[whole.events["process"] == index] if draw.random() > 0.1]
        events = [{name: int(row[name]) for name in FIELDS} for row in rows[: draw.randint(0, len(rows))]]
        for event in draw.sample(events, len(events) // 20):
            event["code"] = draw.choice(list(ev.EVENTS))
            event["x"], event["worker"] = draw.randint(-11, 9), draw.choice([-1, 0, 9])
        write_process(
            tmp_path / "t", events, pid=process.pid, role=process.role, worker=process.worker, loader=process.loader
        )
    trace = read_trace(tmp_path / "t")
    found = headline(trace)
    assert found.title
    if found.focus is not None and found.focus.code:
        focus_of(found, trace)


def test_a_run_of_the_explorer_was_not_killed(tmp_path: Path) -> None:
    guard = GUARDS["sentinel"]
    model = Model(guard.where[0], OURS.without(guard.field), reduced=True)
    run = shortest(model)
    assert run.bad is not None
    found = headline(read_trace(explored(tmp_path / "explored", model, run)))
    assert found.outcome is RunOutcome.CUT
    assert found.title.startswith("cut: a run of minidl explore ends here: no actor has")
    assert not found.next_step
