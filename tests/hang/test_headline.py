"""The headline names the cause: of made runs that hang, die, fail or go on, and of the recordings."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import shutil
import signal
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
from made_trace import HEALTHY, HUNG, LOADER_PID, START, Run, made, write
from oracle_trace import stop_recording, write_process
from recorded import recorded

from minidl.explore.guards import GUARDS, OURS
from minidl.explore.model import Model
from minidl.explore.search import shortest
from minidl.explore.trace import write as explored
from minidl.hang.evidence.model import RunEvidence, Syscall
from minidl.hang.finding import LONGEST, Finding, FocusScope, HangCause, RunOutcome, titled
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
        (
            ev.RESULT_PICKLE,
            "worker 1 has put task 9 into the result queue; its feeder is pickling task 9",
            "pickle that batch alone",
        ),
    ],
)
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


def test_a_worker_that_no_longer_reads_its_queue_may_be_stopped(tmp_path: Path) -> None:
    found = hung(tmp_path, stuck=ev.INDEX_GET[0])
    assert found.title == ("hung for 30.0 s, since 0.01 s: worker 1 (pid 1101) has not taken task 9 (stopped?)")
    assert found.next_step.endswith("ps -o stat,wchan -p 1101")
    assert (found.focus.frame, found.focus.words) == (
        FocusScope.PROCESS, "stopped? no sign of life since 0.00 s; the loader waits for its task 9"
    )  # fmt: skip


def doctor_says(monkeypatch: pytest.MonkeyPatch, said: Finding | None) -> None:
    for module in (hangs, held_up):
        monkeypatch.setattr(module, "diagnose_recorded", lambda trace, told: said)


@pytest.mark.parametrize(
    ("cause", "frame"), [(HangCause.STOPPED, FocusScope.PROCESS), (HangCause.GIL, FocusScope.STEP)]
)
def test_what_the_evidence_shows_as_stopped_is_to_blame_and_not_its_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: HangCause, frame: FocusScope
) -> None:
    said = Finding(RunOutcome.HUNG, "the loop waits for worker 1: it is ...", cause, who={"pid": 1101})
    doctor_says(monkeypatch, said)
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
        (
            "hung for 11.0 s, since 0.35 s: the loop waits for batch 0 of worker 0, importing the main module in a "
            "spawned worker (<module> at train.py:27): it is waiting in flock on /tmp/job-2d87/train.lock: a circle "
            "of waiting (the loop -> worker 0 -> the loop)",
            "it is waiting in flock on .../train.lock: a circle of waiting (the loop -> worker 0 -> the loop)",
        ),
        (
            "hung for 12.0 s, since 0.35 s: waiting for worker 1 (pid 123456), making its fetcher (an iterable "
            "dataset's __iter__); task 123 is still in its index queue; later batches that wait behind it: 12",
            "making its fetcher (an iterable dataset's __iter__); task 123 is still in its index queue",
        ),
        (
            "hung for 12.4 s, since 0.18 s: the loop waits for batch 5 of worker 1, in sample 21 (D.__getitem__ at "
            "own.py:6): it waits for a lock in D.__getitem__ (own.py:6) that no thread of its process can release",
            "batch 5 of worker 1, in sample 21: it waits for a lock in D.__getitem__ that no thread of its process can "
            "release",
        ),
        (
            "hung for 34.8 s: rank 1 waits for batch 3 of its worker 1, in sample 53 (Tiles.read_tile at j.py:20): it "
            "is waiting for data in pipe 1995133, whose writing end only its own process has; ranks 0, 2 and 3 wait in "
            "all_reduce",
            "rank 1 waits for its worker 1, in sample 53: it waits for data in a pipe, whose writing end only its own "
            "process has; ranks 0, 2 and 3 wait in all_reduce",
        ),
        ("hung for 12.0 s: " + "the loop waits and waits " * 20 + "for a lock of worker 1", "for a lock of worker 1"),
    ],
)
def test_a_title_that_is_too_long_keeps_its_cause(sentence: str, cause: str) -> None:
    short = titled(sentence)
    assert len(short) <= LONGEST < len(sentence)
    assert short.endswith(cause)
    assert short.startswith(("hung: ", sentence[:15]))
    assert titled(short) == short


def test_of_a_title_that_was_shortened_the_evidence_has_the_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "t", Run(**HEALTHY))
    text = "no such file: " + "a long path " * 20 + "and its end"
    trace = read_trace(path)
    trace.manifest["explored"] = {"wrong": text}
    trace.events = trace.events[: len(trace.events) // 2]
    found = headline(trace)
    assert found.title.endswith(text[-20:])
    assert text in found.notes()[0]


def test_of_steps_alike_none_is_blamed_alone(tmp_path: Path) -> None:
    alike = headline(made(tmp_path / "t", batches=200, step=10_000)).focus
    assert alike.frame is FocusScope.ALIKE
    late = headline(
        made(tmp_path / "u", batches=40, step=10_000, cost=lambda t: 60_000_000 if t == 9 else 900_000)
    ).focus
    assert (late.frame, late.task) == (FocusScope.STEP, 9)


def test_the_order_is_not_asked_for_a_hang_without_workers_in_turn(tmp_path: Path) -> None:
    """With in_order=False the loop takes what comes: the worker that is at work holds it up."""
    path = write(tmp_path / "t", Run(**LONG | {"workers": 1}))
    side = next(path.glob(f"{LOADER_PID}-*.jsonl"))
    side.write_text(side.read_text() + '{"kind": "loader", "loader": 1, "in_order": false}\n')
    found = headline(read_trace(path))
    assert "waiting for a result; worker 0 (pid 1100), in sample 38 (task 9)" in found.title
    assert focus_of(found, read_trace(path)) == ("worker 0 (pid 1100)", "sample")


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (ev.WORKER_INIT, "in worker_init_fn"),
        (ev.MAKE_FETCHER, "making its fetcher (an iterable dataset's __iter__)"),
    ],
)
def test_a_worker_that_hangs_before_its_first_task(tmp_path: Path, step: tuple[int, int], words: str) -> None:
    path = tmp_path / "t"
    main: list[dict[str, int]] = [
        {"code": ev.WORKER_START[0], "time": 1, "worker": 0},
        {"code": ev.WORKER_START[1], "time": 2, "worker": 0, "x": 200},
        {"code": ev.EPOCH[0], "time": 3, "y": 1, "z": 2},
        {"code": ev.TASK_ASSIGNED, "time": 4, "task": 0, "worker": 0, "x": 1, "y": 1},
        {"code": ev.INDEX_PUT, "time": 5, "task": 0, "worker": 0},
        {"code": ev.NEXT[0], "time": 6, "task": 0},
        {"code": ev.RESULT_GET[0], "time": 7, "task": 0, "worker": 0},
        {"code": ev.RESULT_GET[1], "time": 5 * SECOND},
        {"code": ev.RESULT_GET[0], "time": 7 * SECOND, "task": 0, "worker": 0},
    ]
    write_process(path, main, pid=100, role="loader", loader=1)
    write_process(path, [{"code": step[0], "time": 3, "worker": 0}], pid=200, role="worker", worker=0, loader=1)
    found = headline(read_trace(path))
    assert found.title.startswith(f"hung for 7.00 s, since 0.00 s: waiting for worker 0 (pid 200), {words}; ")
    assert "; task 0 is still in its index queue" in found.title
    assert "forkserver" in found.next_step
    assert focus_of(found, read_trace(path)) == ("worker 0 (pid 200)", ev.EVENTS[step[0]].name)


def test_a_stopped_worker_is_named_for_the_memory_that_it_does_not_hand_over(tmp_path: Path) -> None:
    path = tmp_path / "t"
    about = {"task": 0, "worker": 0}
    main: list[dict[str, int]] = [
        {"code": ev.EPOCH[0], "time": 3, "y": 2, "z": 2},
        {"code": ev.TASK_ASSIGNED, "time": 4, "x": 1, "y": 1} | about,
        {"code": ev.INDEX_PUT, "time": 5} | about,
        {"code": ev.NEXT[0], "time": 6, "task": 0},
        {"code": ev.RESULT_GET[0], "time": 7} | about,
        {"code": ev.RESULT_REBUILD[0], "time": 20} | about,
    ]
    stopped: list[dict[str, int]] = [
        {"code": ev.INDEX_GET[0], "time": 3, "worker": 0},
        {"code": ev.INDEX_GET[1], "time": 6} | about,
        {"code": ev.FETCH[0], "time": 8} | about,
        {"code": ev.FETCH[1], "time": 10} | about,
        {"code": ev.RESULT_PUT, "time": 11} | about,
        {"code": ev.RESULT_WRITE[0], "time": 12} | about,
        {"code": ev.RESULT_WRITE[1], "time": 13} | about,
        {"code": ev.FETCH[0], "time": 14, "task": 2, "worker": 0},
        {"code": ev.SAMPLE[0], "time": 15, "task": 2, "worker": 0, "x": 0, "y": 7},
    ]
    idle = [{"code": ev.INDEX_GET[0], "time": time, "worker": 1} for time in (3, 9 * SECOND)]
    write_process(path, main, pid=100, role="loader", loader=1)
    write_process(path, stopped, pid=200, role="worker", worker=0, loader=1)
    write_process(path, idle, pid=201, role="worker", worker=1, loader=1)
    trace = read_trace(path)
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


def after_its_end(
    path: Path, call: Call, sees: RunEvidence, seconds: float, hang_after: float = 2.0, *ended: bytes
) -> Finding:
    """Of a run whose program has ended, and that a watchdog then saw in what the evidence shows, for so long."""
    events = [{"code": code, "time": time} for code, time in ((ev.EPOCH[0], 1), (ev.NEXT[0], 2), (ev.NEXT[1], 3))]
    events += [{"code": ev.GC[0], "time": 5}, {"code": ev.GC[1], "time": 6}] * (call is Call.OWN)
    events += [{"code": ev.INDEX_WRITE[0], "time": 7, "tid": LOOP + 50}]
    events += [{"code": ev.SHUTDOWN[0], "time": 6}] * (call is Call.SHUTDOWN)
    lines: list[dict[str, object]] = [{"kind": "program_end", "monotonic_ns": 5}, {"kind": "loader", "loader": 1}]
    write_process(path, events, pid=LOOP, role="loader", loader=1, lines=lines)
    stall, end = watched.Stall(1, call, 4, LOOP), round(seconds * SECOND)
    looks = [watched.look(stall, n, end - (3 - n) * SECOND, json.loads(sees.to_json())) for n in (1, 2)]
    seen = watched.sample(watched.Sample(end, {LOOP: watched.Vitals("S", 1, 1, 1, 1, 1)}, 0, 0))
    data = [watched.description("0", LOOP, hang_after), *looks, seen, *ended, watched.over(1)]
    (path / f"watch-{LOOP}-1.attachment.jsonl").write_bytes(b"".join(data))
    return headline(read_trace(path))


def joins(*outside: Frame) -> RunEvidence:
    """A worker, which waits for a task, is waited for."""
    stack = (Frame("Popen.poll", "/lib/python3.11/multiprocessing/popen_fork.py", 27), *outside)
    call = Syscall("wait4", "for a child", target=LOOP + 1, timeout=-1.0)
    return look(loop(0, stack=stack, call=call), worker(0, step="idle"))


def test_a_program_that_has_ended_and_whose_process_has_not_hangs(tmp_path: Path) -> None:
    found = after_its_end(tmp_path / "a", Call.OWN, joins(EXITS), 4.0)
    assert (found.outcome, found.cause) == (RunOutcome.HUNG, HangCause.NOBODY)
    assert found.title == (
        "hung for 4.00 s, since 0.00 s, after the program's end: the loop, at Python's exit, waits for worker 0, which "
        "is idle; it was not told to end"
    )
    allowed = after_its_end(tmp_path / "b", Call.OWN, joins(EXITS), 4.0, hang_after=5.0)
    assert allowed.outcome is RunOutcome.FINE, "the watchdog was told to allow 5 s"


def test_a_process_that_is_killed_at_its_exit_may_have_hung(tmp_path: Path) -> None:
    """A person ends with kill -9 what the watchdog still allowed."""

    def ended(name: str, seconds: float, code: int) -> Finding:
        end = watched.ended(watched.Ended(LOOP, round((seconds + 0.5) * SECOND), code))
        return after_its_end(tmp_path / name, Call.OWN, joins(EXITS), seconds, 120.0, end)

    assert ended("a", 6.0, -signal.SIGKILL).title == (
        "cut: may hang: the loop, at Python's exit, waits for worker 0, which is idle; it was not told to end"
    )
    assert ended("b", 6.0, 0).outcome is RunOutcome.FINE, "it has ended by itself"
    assert ended("c", 4.0, -signal.SIGKILL).outcome is RunOutcome.FINE, "an exit may last so long"


def test_a_loader_that_hangs_in_its_shutdown_after_the_program(tmp_path: Path) -> None:
    found = after_its_end(tmp_path / "a", Call.SHUTDOWN, joins(SHUTS_DOWN), 4.0)
    assert (found.outcome, found.title.partition(": ")[2]) == (
        RunOutcome.HUNG, "the loop shuts down, and waits for worker 0, which is idle; it was not told to end"
    )  # fmt: skip
    elsewhere = after_its_end(tmp_path / "b", Call.SHUTDOWN, joins(EXITS), 4.0)
    assert elsewhere.outcome is RunOutcome.FINE, "the evidence is not of a shutdown"


def test_a_program_that_hangs_in_its_own_code_after_its_last_loader(tmp_path: Path) -> None:
    """The thread that iterated has died, and the main thread waits for its batches."""
    stack = (library("Condition.wait"), library("Queue.get", "/lib/python3.11/queue.py"), user("batches.get()"))
    found = after_its_end(tmp_path, Call.OWN, look(loop(0, stack=stack, call=LOCKED)), 40.0)
    assert found.outcome is RunOutcome.HUNG
    assert "waits in Queue.get (queue.py), which no thread of its process can end" in found.title
    assert "the thread that should answer has ended" in " ".join(found.also)


def before_any_loader(path: Path, sees: RunEvidence, seconds: float, loader: int = 0) -> Finding:
    """Of a run that has recorded no event, and that a watchdog saw in what the evidence shows, for so long."""
    write_process(path, [], pid=LOOP, role="process")
    end = round(seconds * SECOND)
    stall = watched.Stall(loader, Call.OWN, 4, LOOP)
    looks = [watched.look(stall, n, end - (3 - n) * SECOND, json.loads(sees.to_json())) for n in (1, 2)]
    (path / f"watch-{LOOP}-1.attachment.jsonl").write_bytes(b"".join([watched.description("0", LOOP, 120.0), *looks]))
    return headline(read_trace(path))


def test_a_program_that_hangs_before_its_first_loader(tmp_path: Path) -> None:
    child = one_process(LOOP + 1, LOOP, thread(LOOP + 1, (user("time.sleep(1000)"), MAIN), SLEEPS), name="fetch")
    waits = Syscall("wait4", "for a child", target=LOOP + 1, timeout=-1.0)
    sees = look(one_process(LOOP, 1, thread(LOOP, (user("run(fetch)"), MAIN), waits)), child)
    found = before_any_loader(tmp_path / "a", sees, 40.0)
    assert (found.outcome, found.cause) == (RunOutcome.HUNG, HangCause.CHILD)
    assert found.title.startswith("hung for 39.0 s, before any DataLoader: the program, in its own code, waits for ")
    computes = look(one_process(LOOP, 1, thread(LOOP, (user("work()"), MAIN), None, state="R", idle=0.0, cpu=1.0)))
    found = before_any_loader(tmp_path / "b", computes, 40.0)
    assert (found.outcome, found.head) == (RunOutcome.MAYBE_HUNG, "cut: may hang for 39.0 s, before any DataLoader")


def test_a_pin_thread_that_hangs(tmp_path: Path) -> None:
    path = tmp_path / "t"
    result = {"task": 0, "worker": 0, "x": ev.Message.RESULT}
    main: list[dict[str, int]] = [
        {"code": ev.EPOCH[0], "time": 3, "y": 1, "z": 2},
        {"code": ev.TASK_ASSIGNED, "time": 4, "task": 0, "worker": 0, "x": 1, "y": 1},
        {"code": ev.INDEX_PUT, "time": 5, "task": 0, "worker": 0},
        {"code": ev.PIN_START, "time": 5, "tid": 150},
        {"code": ev.NEXT[0], "time": 6, "task": 0},
        {"code": ev.READY_GET[0], "time": 7, "task": 0, "worker": 0},
        {"code": ev.RESULT_GET[0], "time": 8, "tid": 150},
        {"code": ev.RESULT_GET[1], "time": 20, "tid": 150, **result},
        {"code": ev.PIN[0], "time": 21, "task": 0, "worker": 0, "x": 9, "tid": 150},
        {"code": ev.READY_GET[1], "time": 5 * SECOND},
        {"code": ev.READY_GET[0], "time": 7 * SECOND, "task": 0, "worker": 0},
    ]
    write_process(path, main, pid=100, role="loader", loader=1)
    got = {"code": ev.INDEX_GET[1], "time": 10, "task": 0, "worker": 0, "x": ev.Message.TASK}
    idle = {"code": ev.INDEX_GET[0], "time": 12, "worker": 0}
    ready = {"code": ev.WORKER_READY, "time": 2, "worker": 0, "x": 200}
    put = {"code": ev.RESULT_PUT, "time": 11, "task": 0, "worker": 0}
    write_process(path, [ready, got, put, idle], pid=200, role="worker", worker=0, loader=1)
    found = headline(read_trace(path))
    assert found.title == "hung for 7.00 s, since 0.00 s: task 0 has left worker 0: the pin thread has it"
    assert focus_of(found, read_trace(path)) == ("loader (pid 100)", "pin")
    assert "pin_memory=False" in found.next_step


def consumer_hangs(directory: Path, seconds: int, last: int = 20) -> Path:
    """The loop's code does not come back after task 4; the workers look into their queues meanwhile."""
    write(directory, Run(**HEALTHY))
    whole = read_trace(directory)
    end = int(whole.select("consumer", ev.Phase.BEGIN)["time"][4])
    for file in directory.glob("*.events"):
        file.unlink()
    for file in directory.glob("*.jsonl"):
        file.unlink()
    for index, process in enumerate(whole.processes):
        rows = whole.events[(whole.events["process"] == index) & (whole.events["time"] <= end)]
        events = [{name: int(row[name]) for name in FIELDS} for row in rows]
        if process.worker >= 0:
            poll = {"loader": 1, "tid": process.pid, "worker": process.worker}
            events += [
                poll | {"code": code, "time": end + at * SECOND + code}
                for at in range(0, seconds + 1, 5)
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


def test_ctrl_c_in_a_hang_is_a_hang_that_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stuck worker is interrupted as well, a little before the loader writes its end."""
    path = write(tmp_path / "t", Run(**LONG))
    end = int(read_trace(path).events["time"][-1])
    common = {"loader": 1, "worker": 1, "task": 9, "tid": 1101}
    more = [
        common | {"code": ev.SAMPLE[1], "time": end - 900, "x": 2, "y": 38},
        common | {"code": ev.FETCH[1], "time": end - 800, "x": ev.Outcome.ERROR},
        common | {"code": ev.WORKER_EXIT, "time": end - 700, "task": -1, "x": ev.Ending.INTERRUPTED},
    ]
    add(path, 1101, more)
    closing = {"loader": 1, "tid": LOADER_PID}
    add(path, LOADER_PID, [
        closing | {"code": ev.RESULT_GET[1], "time": end + 1, "x": 0},
        closing | {"code": ev.NEXT[1], "time": end + 2, "x": 9, "y": ev.Outcome.ERROR},
        closing | {"code": ev.EPOCH[1], "time": end + 3, "z": ev.Ending.CLOSED},
        closing | {"code": ev.SHUTDOWN[0], "time": end + 4},
        closing | {"code": ev.SHUTDOWN[1], "time": end + 5 * SECOND},
    ])  # fmt: skip
    trace = read_trace(path)
    found = headline(trace)
    assert found.title == (
        "hung for 30.0 s, since 0.01 s, until it was interrupted: waiting for worker 1 (pid 1101), in sample 38 "
        "(task 9); later batches that wait behind it: 2"
    )
    assert focus_of(found, trace) == ("worker 1 (pid 1101)", "sample")
    assert "last events: worker 1 0.0" in found.evidence[-1].text, "while it hung, and not when it was interrupted"
    doctor_says(monkeypatch, Finding(RunOutcome.MAYBE_HUNG, "the loop waits: it is asleep", HangCause.SLEEP))
    assert headline(read_trace(path)).title == (
        "waited for 30.0 s, since 0.01 s, until it was interrupted: the loop waits: it is asleep"
    )


def add(path: Path, pid: int, events: list[dict[str, int]]) -> None:
    """Write a process's file anew, with more events at its end."""
    trace = read_trace(path)
    index = next(i for i, process in enumerate(trace.processes) if process.pid == pid)
    process = trace.processes[index]
    rows = trace.events[trace.events["process"] == index]
    old = [{name: int(row[name]) for name in FIELDS} for row in rows]
    write_process(
        path, old + events, pid=pid, role=process.role, worker=process.worker, loader=process.loader,
        start_ns=process.start_ns,
    )  # fmt: skip


def test_ctrl_c_in_a_short_wait_is_no_hang_and_says_what_was_waited_for(tmp_path: Path) -> None:
    path = write(tmp_path / "t", Run(**HUNG))
    end = int(read_trace(path).events["time"][-1])
    closing = {"loader": 1, "tid": LOADER_PID, "time": end + 2}
    add(path, LOADER_PID, [closing | {"code": ev.NEXT[1], "x": 9, "y": ev.Outcome.ERROR}])
    found = headline(read_trace(path))
    assert found.outcome is RunOutcome.CUT
    assert "after waiting 7.70 ms, since 6.2 ms: waiting for worker 1 (pid 1101), in sample 38 (task 9)" in found.title


def test_a_loader_that_gave_up_a_wait_says_what_it_waited_for(tmp_path: Path) -> None:
    path = write(tmp_path / "t", Run(**HUNG))
    end = int(read_trace(path).events["time"][-1])
    add(path, LOADER_PID, [{"loader": 1, "tid": LOADER_PID, "time": end + 2, "code": ev.NEXT[1], "x": 9,
                            "y": ev.Outcome.ERROR}])  # fmt: skip
    trace = read_trace(path)
    raised = "RuntimeError: DataLoader timed out after 4 seconds"
    home = next(index for index, one in enumerate(trace.processes) if one.pid == LOADER_PID)
    trace.lines.append({"kind": "uncaught", "process": home, "error": raised, "at": ["loader.py:1449 _get_data"]})
    found = headline(trace)
    assert found.outcome is RunOutcome.ERROR
    assert found.title.startswith(f"error: {raised} in next, at loader.py:1449 _get_data; worker 1 ")
    assert "in sample 38 (task 9)" in found.title
    assert trace.processes[found.focus.process].worker == 1


def failed_next(task: int, *inside: dict[str, int], worker: int = -1) -> list[dict[str, int]]:
    """The events of a loop whose first `next` raises an error; of task -1: of no task."""
    return [
        {"code": ev.EPOCH[0], "time": 1},
        {"code": ev.NEXT[0], "time": 2},
        *inside,
        {"code": ev.YIELD, "time": 20, "task": task, "worker": worker, "x": ev.Outcome.ERROR},
        {"code": ev.NEXT[1], "time": 21, "y": ev.Outcome.ERROR},
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
)
def test_an_error_of_no_task_is_told_by_the_programs_exception(
    tmp_path: Path, raised: str, told: str, helps: str
) -> None:
    write_process(tmp_path, failed_next(-1), pid=100, role="loader", loader=1)
    trace = read_trace(tmp_path)
    trace.lines.append({"kind": "uncaught", "process": 0, "error": raised, "at": ["train.py:7 main"]})
    assert headline(trace).title == f"error: {told} in next, at train.py:7 main"
    assert helps in headline(trace).next_step


def test_a_samplers_error_without_workers_is_not_blamed_on_the_sample_before(tmp_path: Path) -> None:
    drawn = [{"code": code, "time": time, "task": 4} for code, time in zip(ev.SAMPLER_NEXT, (3, 4), strict=True)]
    write_process(tmp_path, failed_next(3, *drawn), pid=100, role="loader", loader=1)
    said = "error: the sampler raised an exception when it drew the indices of task 4"
    assert headline(read_trace(tmp_path)).title == said


def test_an_error_is_told_in_full_with_its_errno_and_the_one_that_came_first(tmp_path: Path) -> None:
    """Task 1 failed before task 0, whose batch the loop asked for: both are told, and the sample of torch's loader."""
    path = "/data/" + "a-long-name/" * 12 + "7.jpeg"
    texts = f"OSError: [Errno 5] Input/output error: '{path}'", "FileNotFoundError: [Errno 2] no shard"
    lines = [{"kind": "string", "id": number, "text": text} for number, text in enumerate(texts, 1)]
    worker = [
        {"code": ev.FETCH[0], "time": 2, "task": 0},
        {"code": ev.TASK_ERROR, "time": 9, "task": 0, "x": 3, "y": 3, "z": 1},
        {"code": ev.FETCH[1], "time": 10, "task": 0, "x": ev.Outcome.ERROR},
    ]
    other = [{"code": ev.TASK_ERROR, "time": 5, "task": 1, "x": 1, "y": 5, "z": 2}]
    main = failed_next(0, {"code": ev.INDEX_PUT, "time": 2, "task": 0})
    write_process(tmp_path, main, pid=100, role="loader", loader=1)
    write_process(tmp_path, worker, pid=101, role="worker", loader=1, worker=0, ppid=100, lines=lines)
    write_process(tmp_path, other, pid=102, role="worker", loader=1, worker=1, ppid=100, lines=lines)
    trace = read_trace(tmp_path)
    frames = 'File "/home/a/data.py", line 24, in __getitem__\nFile "/usr/lib/python3.11/io.py", line 9, in read\n'
    trace.lines.append({"kind": "uncaught", "process": 0, "error": f"OSError: Caught\n{frames}{texts[0]}"})
    found = headline(trace)
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
    lines = [{"kind": "string", "id": 1, "text": "RuntimeError: no"}]
    told = {"code": ev.TASK_ERROR, "task": 0, "worker": 0, "x": -1, "y": -1, "z": 1}
    worker = [
        *({"code": code, "time": time, "task": 0} for code, time in zip(ev.COLLATE, (3, 4), strict=True)),
        *({"code": code, "time": time, "task": 0} for code, time in zip(ev.RESULT_PICKLE, (5, 7), strict=True)),
        *([told | {"time": 6}] if side == "worker" else ()),
    ]
    rebuilt = [{"code": code, "time": time, "task": 0} for code, time in zip(ev.RESULT_REBUILD, (8, 10), strict=True)]
    main = failed_next(0, *rebuilt, *([told | {"time": 9}] if side == "loader" else ()), worker=0)
    thread = {"kind": "thread", "tid": 107, "name": "prefetch"}
    write_process(tmp_path, [event | {"tid": 107} for event in main], pid=100, role="loader", loader=1,
                  lines=[*lines, thread])  # fmt: skip
    write_process(tmp_path, worker, pid=101, role="worker", loader=1, worker=0, ppid=100, lines=lines)
    found = headline(read_trace(tmp_path))
    assert found.sentence.startswith(f"error: RuntimeError: no {doing}, at ")
    assert found.evidence[1].text.startswith("thread prefetch called next()")


def test_without_descriptors_it_is_told_who_has_how_many(tmp_path: Path) -> None:
    write_process(tmp_path, failed_next(-1), pid=100, role="loader", loader=1)
    trace = read_trace(tmp_path)
    trace.lines.append({"kind": "uncaught", "process": 0, "error": "OSError: [Errno 24] no more", "monotonic_ns": 5})
    trace.watched.samples = [watched.Sample(at, {100: watched.Vitals("S", 1, 1, 1, fds, 1)}) for at, fds in ((2, 99),)]
    assert "open descriptors at 1.0 ns: loader (pid 100) 99" in headline(trace).notes()


def test_an_error_after_which_the_program_went_on_has_a_headline(tmp_path: Path) -> None:
    main = [
        {"code": ev.EPOCH[0], "time": 1},
        {"code": ev.NEXT[0], "time": 2},
        {"code": ev.YIELD, "time": 3, "task": -1, "x": ev.Outcome.ERROR},
        {"code": ev.NEXT[1], "time": 4, "y": ev.Outcome.ERROR},
        {"code": ev.NEXT[0], "time": 5},
        {"code": ev.NEXT[1], "time": 6, "y": ev.Outcome.EXHAUSTED},
    ]
    lines: list[dict[str, object]] = [{"kind": "program_end", "monotonic_ns": 7}]
    write_process(tmp_path, main, pid=100, role="loader", loader=1, lines=lines)
    assert headline(read_trace(tmp_path)).title.startswith("error: next() raised an exception at ")


def test_a_sampler_that_raises(tmp_path: Path) -> None:
    main = [
        {"code": ev.EPOCH[0], "time": 1},
        {"code": ev.NEXT[0], "time": 2, "task": 0},
        {"code": ev.SAMPLER_NEXT[0], "time": 3, "task": 4},
        {"code": ev.SAMPLER_NEXT[1], "time": 4, "task": 4},
        {"code": ev.NEXT[1], "time": 5, "y": ev.Outcome.ERROR},
    ]
    write_process(tmp_path, main, pid=100, role="loader", loader=1)
    assert (
        headline(read_trace(tmp_path)).title
        == "error: the sampler raised an exception when it drew the indices of task 4"
    )


def test_a_hang_whose_processes_are_all_killed_is_one(tmp_path: Path) -> None:
    """SIGKILL to the group: nothing says that it was killed, and the last events say what hung."""
    assert hung(tmp_path, polls=2).title.startswith("hung for 10.0 s, since 0.01 s: waiting for worker 1")


def test_a_hang_whose_loader_is_found_dead_ends_with_its_last_sign_of_life(tmp_path: Path) -> None:
    path = write(tmp_path / "t", Run(**LONG))
    end = int(read_trace(path).events["time"][-1])
    found_dead = {"code": ev.FOUND_DEAD, "loader": 1, "worker": 0, "tid": 1100, "x": ev.Actor.LOADER, "y": LOADER_PID}
    add(path, 1100, [found_dead | {"time": end + 5 * SECOND}])
    trace = read_trace(path)
    assert headline(trace).title.startswith(
        "hung for 30.0 s, since 0.01 s: waiting for worker 1 (pid 1101), in sample 38"
    )
    (line,) = (text for text in open_spans(trace) if text.startswith("loader"))
    assert line.endswith("for 30.0 s")


@pytest.mark.parametrize("raises", [False, True])
def test_a_hang_that_kill_9_of_the_whole_run_ended_comes_before_the_deaths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: bool
) -> None:
    """A worker dies first, and its loader finds it dead before it is killed too. One that lives on raises an error."""
    path = write(tmp_path / "t", Run(**LONG))
    end = int(read_trace(path).events["time"][-1])
    own = {"loader": 1, "tid": LOADER_PID}
    dead = {"code": ev.FOUND_DEAD, "worker": 0, "x": ev.Actor.WORKER, "y": 1100, "z": -signal.SIGKILL, "time": end + 1}
    error = {"code": ev.NEXT[1], "time": end + 2, "x": 9, "y": ev.Outcome.ERROR}
    add(path, LOADER_PID, [own | dead, *([own | error] if raises else [])])
    trace = read_trace(path)
    found = headline(trace)
    if raises:
        assert found.title.startswith("died: worker 0 (pid 1100)")
        trace = read_trace(path)
        trace.watched.looks = [StallLook(Stall(1, Call.NEXT, trace.last, LOADER_PID), 1, trace.last, {})]
        doctor_says(monkeypatch, Finding(RunOutcome.HUNG, "the loop waits for worker 1: it is ...", HangCause.FIFO))
        assert headline(trace).title == "hung for 30.0 s, since 0.01 s: the loop waits for worker 1: it is ..."
        doctor_says(monkeypatch, Finding(RunOutcome.MAYBE_HUNG, "the loop waits: ...", HangCause.BARRIER))
        killed = [watched.Ended(LOADER_PID, end, -signal.SIGKILL)]
        for ended, said in ([], "died: worker 0 (pid 1100)"), (killed, "cut: may hang: the loop"):
            trace = read_trace(path)
            trace.watched.looks = [StallLook(Stall(1, Call.NEXT, trace.last, LOADER_PID), 1, trace.last, {})]
            trace.watched.ended = ended
            assert headline(trace).title.startswith(said)
        return
    assert found.title.startswith("hung for 30.0 s, since 0.01 s: waiting for worker 1 (pid 1101), in sample 38")
    assert "SIGKILL ended the whole run at 30.01 s: the loader found pid 1100 dead" in found.evidence[-1].text
    assert (found.wait.step, found.wait.step_since) == ("in sample 38 (task 9)", found.focus.span)
    assert found.wait.workers == 2
    seen = Finding(RunOutcome.HUNG, "the loop waits for worker 1: it is ...", HangCause.FIFO)
    doctor_says(monkeypatch, seen)
    assert headline(read_trace(path)).evidence == found.evidence[-1:]
    starved = read_trace(path)
    starved.watched.samples = [watched.Sample(starved.start + n, {}, 0, oom_kills=n) for n in (0, 1)]
    assert headline(starved).title.startswith("died: worker 0 (pid 1100)")


@pytest.mark.parametrize(("seen", "outcome"), [(None, RunOutcome.CUT), (5, RunOutcome.CUT), (0, RunOutcome.HUNG)])
def test_a_worker_that_goes_on_to_its_next_sample_does_not_hang(
    seen: int | None, outcome: RunOutcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came to a sample in the wait, and is not in it for longer than in others. seen: when a watchdog saw a hang."""
    path = write(tmp_path / "t", Run(**LONG))
    end = int(read_trace(path).events["time"][-1])
    sample = {"loader": 1, "tid": 1101, "task": 9, "worker": 1}
    next_one = sample | {"code": ev.SAMPLE[0], "time": end - SECOND, "x": 1, "y": 39}
    add(path, 1101, [sample | {"code": ev.SAMPLE[1], "time": end - 2 * SECOND}, next_one])
    trace = read_trace(path)
    if seen is not None:
        at = {LOADER_PID: end - seen * SECOND, 999: end}  # the other is a look at another rank's wait
        trace.watched.looks = [StallLook(Stall(1, Call.NEXT, 0, pid), 1, when, {}) for pid, when in at.items()]
        doctor_says(monkeypatch, Finding(RunOutcome.HUNG, "the loop waits: ...", HangCause.FIFO))
    assert headline(trace).outcome is outcome


def test_a_program_that_is_killed_after_its_loaders_is_cut(tmp_path: Path) -> None:
    """Its exit may have hung, and no look has seen it yet: what bound its loaders is not what it was killed for."""
    at = {ev.EPOCH[0]: 1, ev.NEXT[0]: 2, ev.NEXT[1]: 3, ev.EPOCH[1]: 4, ev.SHUTDOWN[0]: 5, ev.SHUTDOWN[1]: 6}
    events = [{"code": code, "time": time} for code, time in at.items()]
    lines: list[dict[str, object]] = [{"kind": "loader", "loader": 1}]
    write_process(tmp_path, events, pid=LOOP, role="loader", loader=1, lines=lines)
    for code, said in ((-signal.SIGKILL, "cut: loader (pid 100) was killed 2.00 s after its last event"), (0, "fine")):
        ended = watched.ended(watched.Ended(LOOP, 2 * SECOND + 6, code))
        data = [watched.description("0", LOOP, 120.0), ended, watched.over(1)]
        (tmp_path / f"watch-{LOOP}-1.attachment.jsonl").write_bytes(b"".join(data))
        assert headline(read_trace(tmp_path)).title.startswith(said)


def test_a_sampler_that_gives_no_first_index_is_waited_for(tmp_path: Path) -> None:
    """iter() draws the first indices, before the first call of next."""
    lines: list[dict[str, object]] = [{"kind": "loader", "loader": 1}]
    at = {ev.EPOCH[0]: 1, ev.SAMPLER_NEXT[0]: 2, ev.GC[0]: 9 * SECOND}
    events = [{"code": code, "time": time, "tid": LOOP + (code == ev.GC[0])} for code, time in at.items()]
    write_process(tmp_path, events, pid=LOOP, role="loader", loader=1, lines=lines)
    assert headline(read_trace(tmp_path)).title.startswith("hung for 9.00 s, since 0.00 s: asking the sampler")


# --- Not hung ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("changes", [{}, {"polls": 0}, {"poll": SECOND, "polls": 4, "cost": "slow"}])
def test_a_wait_within_the_runs_own_past_is_no_hang(tmp_path: Path, changes: dict[str, object]) -> None:
    """A few milliseconds; nothing at all; four seconds in a run whose third batch took as long."""
    run = dict(HUNG) | changes
    if changes.get("cost"):
        run["cost"] = lambda task: HUNG["cost"](task) if task != 3 else 4 * SECOND  # type: ignore[operator]
    trace = made(tmp_path / "t", **run)
    found = headline(trace)
    assert found.outcome is RunOutcome.CUT
    assert found.title.startswith(
        "cut: the recording ends after 9 batches, before the run's end (killed, or still running); loader (pid 1000) "
    )
    assert "waiting for task 9 of worker 1" in found.title


def test_a_run_that_is_cut_while_all_moves(tmp_path: Path) -> None:
    """SIGKILL to the group of a healthy run; and a file that is cut."""
    path = write(tmp_path / "t", Run(**HEALTHY))
    trace = read_trace(path)
    trace.events = trace.events[: len(trace.events) // 2]
    found = headline(trace)
    assert found.outcome is RunOutcome.CUT
    too_short = "too short" in found.evidence[0].text
    assert too_short or "no sign of a hang" in found.evidence[0].text
    assert ("may have been a hang" if too_short else "it was still making progress") in found.next_step
    stop_recording(path, LOADER_PID, 300, 28, int(trace.events["time"][-1]))
    assert headline(read_trace(path)).outcome is not RunOutcome.HUNG


def test_a_healthy_run(tmp_path: Path) -> None:
    found = headline(made(tmp_path / "t", batches=40, step=5_000_000))
    assert found.outcome is RunOutcome.FINE
    assert found.title.startswith("fine: not input-bound")
    assert found.focus is None


def test_too_few_workers_are_the_verdicts(tmp_path: Path) -> None:
    trace = made(tmp_path / "t", batches=200, step=10_000)
    found = headline(trace)
    assert found.outcome is RunOutcome.SLOW
    assert found.title.startswith("slow: supply-bound: the loop waited ")
    assert focus_of(found, trace)[1] in ("sample", "collate")


def test_the_batch_that_blocked_the_line_is_the_focus_even_if_it_is_the_first(tmp_path: Path) -> None:
    trace = made(tmp_path / "t", workers=3, batches=12, epochs=2, cost=lambda task: 40_000_000 if task else 600_000_000)
    found = headline(trace)
    assert "samples take 58% of the time of all" in found.title
    assert (found.focus.task, found.focus.worker) == (0, 0)


def test_a_program_that_raises_before_its_first_iterator_is_not_fine(tmp_path: Path) -> None:
    write_process(tmp_path / "t", [], pid=1, role="loader")
    for error, outcome in (("SystemExit: 0", RunOutcome.CUT), ("ValueError: no RANK", RunOutcome.ERROR)):
        trace = read_trace(tmp_path / "t")
        trace.lines.append({"kind": "uncaught", "process": 0, "error": error})
        said = headline(trace)
        assert said.outcome is outcome
    assert said.sentence == "error: ValueError: no RANK"


def test_nothing_recorded(tmp_path: Path) -> None:
    write_process(tmp_path / "t", [], pid=1, role="loader")
    assert (
        headline(read_trace(tmp_path / "t")).title
        == "cut: the recording ends before the program iterated over a DataLoader"
    )


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
    path = write(tmp_path / "t", Run(**HUNG))
    end = int(read_trace(path).events["time"][-1])
    dead = {"loader": 1, "worker": 1, "tid": LOADER_PID, "code": ev.FOUND_DEAD, "x": ev.Actor.WORKER, "y": 1101}
    add(path, LOADER_PID, [dead | {"z": code, "time": end + 1}])
    trace = read_trace(path)
    found = headline(trace)
    assert found.title == f"died: worker 1 (pid 1101), last seen at 5.0 ms, {how} while it was in sample 38 (task 9)"
    assert helps in found.next_step
    assert focus_of(found, trace) == ("worker 1 (pid 1101)", "sample")
    late = read_trace(path)
    late.watched.ended = [watched.Ended(1101, end + 9_000_000, code)]  # later than the loader
    assert headline(late).evidence[0].text == "found dead 0 ns after its last sign of life"


def test_a_worker_that_died_is_told_with_the_line_that_it_died_in(tmp_path: Path) -> None:
    """By the stack that it wrote at the fault, or else by the last look at its stack in that step."""
    path = write(tmp_path / "t", Run(**HUNG))
    end = int(read_trace(path).events["time"][-1])
    dead = {"loader": 1, "worker": 1, "tid": LOADER_PID, "code": ev.FOUND_DEAD, "x": ev.Actor.WORKER, "y": 1101}
    add(path, LOADER_PID, [dead | {"z": -signal.SIGSEGV, "time": end + 1}])
    trace = read_trace(path)
    process = next(i for i, one in enumerate(trace.processes) if one.pid == 1101)
    rows = trace.spans()
    rows = rows[(rows["code"] == ev.SAMPLE[0]) & (rows["process"] == process)]
    begun = int(rows["begin"].max())
    load = CodeLine("/home/a/tiles.py", 31, "load", "return decode(blob)")
    inside = CodeLine("/lib/python3.11/site-packages/png.py", 7, "decode")
    text = ", at tiles.py:31"
    trace.watched.ended = [watched.Ended(1101, end + 1, -signal.SIGSEGV, (load, inside))]
    found = headline(trace)
    assert found.title.endswith("while it was in sample 38 (task 9)" + text)
    assert (found.where["function"], found.where["file"], found.where["line"]) == ("load", "/home/a/tiles.py", 31)
    assert found.next_step.startswith("call tiles.py:31 alone")
    assert [one.text for one in found.evidence][-2:] == [
        "load, /home/a/tiles.py:31: return decode(blob): its stack, which it wrote when the signal came",
        "innermost frame: decode (png.py:7)",
    ]
    for since, told in ((begun + 1000, text), (begun - 1000, "")):
        trace = read_trace(path)
        looks = np.array([since]), np.array([process]), np.array([1101]), np.array([1]), np.array([0]), np.array([0])
        trace.__dict__["stack_samples"] = StackSamples(*looks, stacks=((), (load,)))
        assert headline(trace).title.endswith("while it was in sample 38 (task 9)" + told)


def test_a_worker_that_died_before_it_recorded_anything_died_while_it_started(tmp_path: Path) -> None:
    path = write(tmp_path / "t", Run(**HUNG))
    dead = {"loader": 1, "worker": 1, "tid": LOADER_PID, "code": ev.FOUND_DEAD, "x": ev.Actor.WORKER, "y": 4711, "z": 1}
    add(path, LOADER_PID, [dead | {"time": int(read_trace(path).events["time"][-1]) + 1}])
    (path / next(one.name for one in path.glob("1101-*.events"))).unlink()
    (path / next(one.name for one in path.glob("1101-*.jsonl"))).unlink()
    found = headline(read_trace(path))
    assert found.title.endswith("ended with exit code 1 while it started")
    assert "__main__" in found.next_step


def test_what_the_loader_ends_itself_has_not_died(tmp_path: Path) -> None:
    """Its shutdown sends SIGTERM to a worker that does not end."""
    path = write(tmp_path / "t", Run(**HEALTHY))
    end = int(read_trace(path).events["time"][-1])
    common = {"loader": 1, "worker": 1, "tid": LOADER_PID, "x": 1101}
    add(path, LOADER_PID, [
        common | {"code": ev.TERMINATE, "y": signal.SIGTERM, "time": end + 1},
        common | {"code": ev.WORKER_GONE, "y": -signal.SIGTERM, "time": end + 2},
    ])  # fmt: skip
    assert headline(read_trace(path)).outcome in (RunOutcome.SLOW, RunOutcome.FINE)


def test_a_worker_that_outlived_its_shutdown_hangs_though_the_recording_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader sent SIGTERM, and waited in vain; if that wait has seen the worker's end, all is well."""
    path = write(tmp_path / "t", Run(**HEALTHY))
    events = read_trace(path).events
    end, common = int(events["time"][-1]), {"loader": 1, "worker": 1, "tid": LOADER_PID}
    home = [{name: int(row[name]) for name in FIELDS} for row in events if row["pid"] == LOADER_PID]
    home = [row for row in home if (row["code"], row["x"]) != (ev.WORKER_GONE, 1101)]

    def waited(ended: bool) -> Finding:
        joins = common | {"x": ev.Actor.WORKER}
        more = [
            common | {"code": ev.TERMINATE, "x": 1101, "y": signal.SIGTERM, "time": end + 1},
            joins | {"code": ev.JOIN[0], "y": 5 * SECOND, "time": end + 2},
            joins | {"code": ev.JOIN[1], "y": int(ended), "time": end + 1 + 5 * SECOND},
        ]
        write_process(path, home + more, pid=LOADER_PID, role="loader", loader=1, start_ns=START)
        return headline(read_trace(path))

    found = waited(False)
    assert found.outcome is RunOutcome.HUNG
    assert found.title.startswith("hung for 5.00 s, since ")
    assert "worker 1 (pid 1101) did not end by SIGTERM" in found.title
    assert found.focus.worker == 1
    assert waited(True).outcome in (RunOutcome.SLOW, RunOutcome.FINE)
    seen = Finding(RunOutcome.MAYBE_HUNG, "the loop waits: it is asleep", HangCause.SLEEP, who={"pid": 1100})
    doctor_says(monkeypatch, seen)
    assert "worker 1 (pid 1101) did not end by SIGTERM" in waited(False).title, "the look was at another one"
    doctor_says(monkeypatch, dataclasses.replace(seen, who={"pid": 1101}))
    found = waited(False)
    assert found.title.startswith("hung for 5.00 s, since ")
    assert found.title.endswith(": the loop waits: it is asleep")
    assert (found.outcome, found.cause) == (RunOutcome.HUNG, HangCause.SLEEP)


def slow_before(slow: int) -> dict[str, Any]:
    """A run that is killed after a wait of 6 s for task 9; one task took 10 s."""
    cost = lambda task: HUNG["cost"](task) if task != slow else 10 * SECOND  # type: ignore[operator]  # noqa: E731
    return dict(HUNG) | {"poll": SECOND, "polls": 6, "cost": cost}


def test_how_long_workers_took_to_start_is_no_measure_for_a_later_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first batch took 10 s, as its workers started; no other one took a hundredth of 6 s."""
    assert headline(made(tmp_path / "usual", **slow_before(3))).outcome is RunOutcome.CUT
    found = headline(made(tmp_path / "slow start", **slow_before(0)))
    assert found.outcome is RunOutcome.HUNG
    assert "waiting for worker 1 (pid 1101), in sample 38 (task 9)" in found.title
    doctor_says(monkeypatch, Finding(RunOutcome.MOVES, "it goes on", HangCause.NONE, next_step="ask again"))
    found = headline(made(tmp_path / "looked at", **slow_before(0)))
    assert (found.title, found.next_step[:13]) == ("cut: moves: it goes on", "run it longer")


@pytest.mark.parametrize(
    ("state", "looks", "kind", "begin"),
    [
        (RunOutcome.HUNG, 1, RunOutcome.HUNG, "hung for 6.0 s, since 10.0 s: the loop waits for worker 1"),
        (RunOutcome.MAYBE_HUNG, 1, RunOutcome.MAYBE_HUNG, "cut: may hang: the loop waits for worker 1"),
        (RunOutcome.MOVES, 1, RunOutcome.CUT, "cut: the recording ends after 9 batches"),
        (RunOutcome.HUNG, 0, RunOutcome.CUT, "cut: the recording ends after 9 batches"),
    ],
)
def test_a_wait_within_the_runs_past_hangs_if_the_evidence_shows_it(
    state: RunOutcome, looks: int, kind: RunOutcome, begin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fourth batch took 10 s; a later wait lasts for 6 s."""
    trace = made(tmp_path / "t", **slow_before(3))
    said = Finding(state, "the loop waits for worker 1", HangCause.SLEEP, next_step="ask again")
    doctor_says(monkeypatch, said if looks else None)
    trace.watched.looks = [StallLook(Stall(1, Call.NEXT, trace.last, LOADER_PID), 1, trace.last, {})] * looks
    found = headline(trace)
    assert found.outcome is kind
    assert kind is RunOutcome.HUNG or "again" not in found.next_step, "the recording has ended"
    assert re.sub(r"6\.\d+ s, since 10\.\d+", "6.0 s, since 10.0", found.title).startswith(begin)


def test_a_hang_at_exit_is_told_in_a_unit_of_its_own_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loaders lived for some milliseconds, and Python's exit has lasted for 20 s."""
    said = Finding(RunOutcome.HUNG, "the loop waits", HangCause.LOCK, loop_step=LoaderStep.EXIT)
    doctor_says(monkeypatch, said)
    trace = made(tmp_path / "t", batches=4, step=10_000)
    trace.watched.looks = [StallLook(Stall(1, Call.OWN, trace.last, LOADER_PID), 1, trace.last + 20 * SECOND, {})]
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
    "worker-sigkilled": (
        RunOutcome.DIED,
        r"^died: worker 1 \(pid \d+\), last seen at [\d.]+ ms, was killed by SIGKILL while it was in sample 620",
    ),
    "torn-message-pin-thread": (
        RunOutcome.DIED,
        r"^died: worker 1 \(pid \d+\), last seen at [\d.]+ s, was killed by SIGKILL while it was in sample 578",
    ),
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
        assert not re.search("start-up|shutdown", found.title) or step in (
            "worker_init",
            "make_fetcher",
            "worker_start",
            "join",
        )


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_trace_has_a_headline_that_points_into_it(tmp_path: Path, seed: int) -> None:
    """Events are missing, and some are others."""
    draw = random.Random(seed)
    whole = made(tmp_path / "whole", **draw.choice([LONG, HUNG, HEALTHY, LONG | {"pin": True}]))
    for index, process in enumerate(whole.processes):
        rows = [row for row in whole.events[whole.events["process"] == index] if draw.random() > 0.1]
        events = [{name: int(row[name]) for name in FIELDS} for row in rows[: draw.randint(0, len(rows))]]
        for event in draw.sample(events, len(events) // 20):
            event |= {
                "code": draw.choice(list(ev.EVENTS)),
                "x": draw.randint(-11, 9),
                "worker": draw.choice([-1, 0, 9]),
            }
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


def test_a_title_has_one_share(tmp_path: Path) -> None:
    slow = made(tmp_path / "t", batches=40, cost=lambda task: 9_000_000)
    sentence = headline(slow).title
    assert sentence.startswith("slow: supply-bound: the loop waited ")
    assert (sentence.count("%"), "for workers that fetch samples" in sentence) == (1, True)
