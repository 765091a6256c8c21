"""`minidl doctor` on traces: what the events say without evidence, and the doctor's sentence where there is some."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.utils.data
from made_evidence import LOCKED, LOOP, MAIN, SLEEPS, Syscall, library, look, loop, process, thread, user, worker

import minidl
from minidl import cli, doctor
from minidl.doctor import of_trace
from minidl.hang.consult import opinion
from minidl.hang.evidence.model import RunEvidence, SeenProcess
from minidl.hang.finding import Finding, HangCause, RecordedWait, RunOutcome, Sure
from minidl.hang.headline import headline
from minidl.process_stat import descendants_of
from minidl.tracefile.format import TraceError
from minidl.tracefile.reader import Trace, read_trace

SECOND = 1_000_000_000
TRACES = Path(__file__).parent.parent / "traces"
TOLD = RecordedWait(hung=True, seconds=60.0, pid=LOOP, task=9, worker=1, worker_pid=102, numbers={101: 0, 102: 1})


def seen_in(trace: Trace) -> Finding:
    """What the doctor says of a trace, at once."""
    return of_trace(trace, py_spy=False, seconds=0)


def committed(kind: str) -> list[Path]:
    return sorted(path for path in TRACES.glob("*.minidl") if kind in path.name)


@pytest.mark.parametrize(
    "path", committed("killed") + committed("stopped") + committed("torn"), ids=lambda path: path.stem
)
def test_a_committed_trace_without_evidence_says_what_was_not_seen_and_claims_no_cause(path: Path) -> None:
    said = seen_in(read_trace(path))
    if said.outcome is RunOutcome.HUNG:
        assert (said.cause, said.sure) == (HangCause.UNKNOWN, Sure.UNKNOWN)
        assert "has no evidence of it" in said.not_seen[0]
    assert said.sentence
    assert said.who


def test_a_directory_of_ranks_is_one_job_and_names_the_rank_that_is_wrong(tmp_path: Path) -> None:
    (killed,) = committed("killed")[:1]
    for name, path in (("rank-0", TRACES / "demo-cpu-4-workers.minidl"), ("rank-1", killed)):
        shutil.copy(path, tmp_path / f"{name}.minidl")
    said = doctor.examine(str(tmp_path), py_spy=False, seconds=0)
    assert said.title == seen_in(read_trace(killed)).title
    (other,) = [line.text for line in said.evidence if line.text.startswith("rank 0: ")]
    assert "supply-bound" in other
    for name in ("rank-0", "rank-1"):
        (tmp_path / f"{name}.minidl").rename(tmp_path / f"{name.replace('rank', 'run')}.minidl")
    with pytest.raises(TraceError, match="holds 2"):
        doctor.examine(str(tmp_path), py_spy=False, seconds=0)


def test_of_a_program_that_ends_while_it_is_looked_at_the_trace_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = committed("killed")[:1]
    ended = Finding(RunOutcome.DIED, "process 9 has ended: exit code 1")
    monkeypatch.setattr(doctor, "_running", lambda trace: [os.getpid()])
    monkeypatch.setattr(doctor, "look_at", lambda *args, **options: ended)
    trace = read_trace(path)
    trace.once("headline", lambda: Finding(RunOutcome.RUNNING, "it ran when it was read first"))
    said = seen_in(trace)
    assert said.title == headline(read_trace(path)).title != ended.title


def test_looks_that_say_no_more_than_the_events_leave_the_headline_alone() -> None:
    assert opinion([], TOLD) is None
    unseen = thread(102, None, None, wchan="do_msgrcv")
    assert opinion([look(loop(1), worker(0, step="idle"), replace(worker(1), threads=(unseen,)))], TOLD) is None
    known = opinion([look(loop(1), worker(0, step="idle"), worker(1, user("time.sleep(990)"), call=SLEEPS))], TOLD)
    assert known.title.startswith("hung for 60.0 s: the loop waits for batch 9 of worker 1, in sample 37")
    placed = opinion([look(loop(1), worker(0, step="idle"), worker(1, user("x")))], TOLD)
    assert (placed.cause, placed.where["line"]) == (HangCause.UNKNOWN, 12)


def test_the_command_prints_json_and_its_exit_code_says_whether_something_is_wrong(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = TRACES / "head-of-line-in-order.minidl"
    assert cli.main(["doctor", "--json", str(path)]) == cli.OK
    assert json.loads(capsys.readouterr().out)["state"] in ("slow", "fine")


_AT_ITS_END = """
import sys, threading
import minidl
if __name__ == "__main__":
    with minidl.trace(sys.argv[1]):
        list(minidl.DataLoader(range(4)))
    print("ready", flush=True)
    threading.Event().wait()
"""


def looked_at(
    monkeypatch: pytest.MonkeyPatch, seen: list[RunEvidence], wait: Callable[[], RecordedWait | None], seconds: float
) -> Finding:
    """What the doctor says after looks that give this evidence; what it does not need is left."""
    monkeypatch.setattr(doctor, "collect", lambda *args, **options: seen.pop(0))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    return doctor.look_at(os.getpid(), wait, py_spy=False, seconds=seconds)


@pytest.mark.parametrize(("idle", "looks"), [(41.0, 1), (2.0, 2)])
def test_threads_that_have_slept_since_before_the_first_look_are_looked_at_once(
    monkeypatch: pytest.MonkeyPatch, idle: float, looks: int
) -> None:
    reads = worker(1, user("recv()"), call=Syscall("recvfrom", timeout=-1.0), idle=idle)
    seen = [look(loop(1), worker(0, step="idle"), reads, moment=4 * i * SECOND) for i in range(3)]
    said = looked_at(monkeypatch, seen, lambda: None, 3.5)
    assert (said.still, len(seen)) == (idle, 3 - looks)


@pytest.mark.live
def test_a_program_that_hangs_after_its_trace_has_ended_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_AT_ITS_END)
    command = [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "t")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout.readline() == "ready\n"
            trace = read_trace(tmp_path / "t")
            (end,) = (line for line in trace.lines if line["kind"] == "trace_end")
            end["monotonic_ns"] -= 6 * SECOND  # less is no hang
            said = seen_in(trace)
        finally:
            program.kill()
    assert said.outcome is RunOutcome.MAYBE_HUNG, "after its loaders, without a stack: it need not go on"
    assert said.who["pid"] == program.pid
    assert seen_in(trace).sentence.startswith("fine")  # it is gone


@pytest.mark.live
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_worker_is_asked_for_at_the_process_that_reads_its_batches(method: str) -> None:
    for make in (torch.utils.data.DataLoader, minidl.DataLoader):
        batches = iter(make(range(4), num_workers=1, multiprocessing_context=method))
        next(batches)
        assert doctor.home_of(batches._workers[0].pid) == doctor.home_of(os.getpid()) == os.getpid()
        list(batches)


def in_all_reduce(pid: int, rank: int) -> SeenProcess:
    inside = library("all_reduce", "/site-packages/torch/distributed/distributed_c10d.py")
    return replace(process(pid, 1, thread(pid, (inside, user("", "train", 13), MAIN), LOCKED)), rank=rank, ranks=3)


def rank_that_ended(rank: int, *seen: SeenProcess, pid: int, boot: str = "here", runs: bool = False) -> Any:
    """A rank's trace, as far as it is asked: with the looks of its own watchdog, at its own processes alone."""
    own = RecordedWait(hung=True, seconds=50.0, pid=pid, own_code=len(seen) == 1, ranks={pid: rank})
    looks = [look(*seen, moment=moment * SECOND) for moment in (36, 40)]
    return SimpleNamespace(manifest={"boot_id": boot}, wait=own, looks=looks, runs=runs)


@pytest.mark.parametrize(
    ("boots", "runs", "title"),
    [
        (("here",) * 3, False, "hung for 50.0 s: rank 1 waits for its worker 1, in sample 37 (Data.__getitem__ at "
         "data.py:12): it is asleep (990 s more); ranks 0 and 2 wait in all_reduce"),
        (("here", "here", "there"), False, ""),
        (("here",) * 3, True, ""),
    ],
    ids=["on one machine", "on two", "one of them runs"],
)  # fmt: skip
def test_the_last_looks_at_all_ranks_of_a_job_that_has_ended_are_one(
    monkeypatch: pytest.MonkeyPatch, boots: tuple[str, ...], runs: bool, title: str
) -> None:
    """Each watchdog has seen its own rank alone; together they show for which rank the others wait."""
    stuck = replace(loop(1), rank=1, ranks=3), worker(0, step="idle"), worker(1, user("sleep()"), call=SLEEPS)
    traces = [
        rank_that_ended(0, in_all_reduce(300, 0), pid=300, boot=boots[0], runs=runs),
        rank_that_ended(1, *stuck, pid=LOOP, boot=boots[1]),
        rank_that_ended(2, in_all_reduce(400, 2), pid=400, boot=boots[2]),
    ]
    monkeypatch.setattr(doctor, "headline", lambda trace: trace)
    monkeypatch.setattr(doctor, "recorded_looks", lambda trace, wait: trace.looks)
    monkeypatch.setattr(doctor, "_running", lambda trace: [1] * trace.runs)
    found = doctor._together(traces)
    assert (found.title if found is not None else "") == title
    assert doctor._together(traces[:1]) is None


@pytest.mark.live
def test_a_shell_stands_for_the_program_that_it_runs() -> None:
    """With several children, or none, it is asked itself."""
    for script, runs in (("exec timeout 60 sh -c 'sleep 61; :'", "sleep"), ("sleep 60 & sleep 61; wait", "sh")):
        with subprocess.Popen(["sh", "-c", script], start_new_session=True) as shell:
            until = time.monotonic() + 60
            while len(descendants_of(shell.pid)) < 2 and time.monotonic() < until:
                time.sleep(0.01)
            home = doctor.home_of(shell.pid)
            name = Path(f"/proc/{home}/comm").read_text().strip()
            os.killpg(shell.pid, signal.SIGKILL)
        assert name == runs


def test_what_is_neither_a_trace_nor_a_process_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "/nowhere/at/all"]) == cli.USAGE
    assert "/nowhere/at/all" in capsys.readouterr().err
    assert cli.main(["doctor", "4194999"]) == cli.USAGE
    assert "there is no process 4194999" in capsys.readouterr().err


def test_a_wait_that_has_ended_between_two_looks_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker has sent its batch when it is looked at again: the loop waits for another one, which is no hang."""
    first = RecordedWait(since=1, past=0.1, pid=LOOP, task=3, worker=1)
    other = RecordedWait(since=40 * SECOND, past=30.0, pid=LOOP, task=5)
    idle = [worker(0, step="idle"), worker(1, step="idle")]
    seen = [look(loop(1), *idle, moment=moment * SECOND) for moment in (36, 40, 44)]
    said = looked_at(monkeypatch, seen, lambda: first if len(seen) == 2 else other, 0.001)
    assert said.outcome is not RunOutcome.HUNG


def test_workers_that_take_turns_are_looked_at_twice_though_the_loop_has_waited_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = RecordedWait(since=1, past=0.1, pid=LOOP, task=3, worker=1, worker_pid=102, numbers={101: 0, 102: 1})
    turns = [worker(1, user("with drive:"), call=LOCKED, index=index, idle=2.0) for index in (37, 38, 39)]
    seen = [look(loop(1), worker(0, step="idle"), turn, moment=(36 + 4 * i) * SECOND) for i, turn in enumerate(turns)]
    assert looked_at(monkeypatch, seen, lambda: told, 0.001).outcome is not RunOutcome.HUNG


@pytest.mark.parametrize("cause", [HangCause.COMPUTING, HangCause.DEVICE])
def test_what_may_go_on_after_a_trace_has_ended_is_no_finding_of_it(cause: HangCause) -> None:
    assert doctor._is_blocked(Finding(RunOutcome.MAYBE_HUNG, "it is in a sample", HangCause.LOCK))
    assert not doctor._is_blocked(Finding(RunOutcome.MAYBE_HUNG, "it is in its own code", cause))
