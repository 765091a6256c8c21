"""A run that goes on: the window of its newest events, and the headline as time passes."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import made_trace
import numpy as np
import pytest
from made_trace import HEALTHY, HUNG, LOADER_PID, NEVER, made

from minidl import doctor
from minidl.hang import live
from minidl.hang.finding import RunOutcome
from minidl.hang.headline import headline
from minidl.hang.live import LiveTrace
from minidl.hang.recent import Recent
from minidl.hang.snapshot import Job
from minidl.tracefile import events as ev
from minidl.tracefile.process import ProcessLife
from minidl.tracefile.reader import Trace, read_trace

SECOND = 1_000_000_000


def looks(trace: Trace, count: int) -> list[Trace]:
    """The trace in parts: as `count` readings of it give its events."""
    out = []
    for rows in np.array_split(trace.events, count):
        part = copy.copy(trace)
        part.processes = [copy.copy(process) for process in trace.processes]
        part.events = rows
        out.append(part)
    return out


def test_the_window_is_bounded_and_has_what_has_not_ended(tmp_path: Path) -> None:
    """Worker 1 hangs, and the loader polls 400 times: the begin of what the worker hangs in is kept."""
    whole = made(tmp_path / "t", **HUNG | {"polls": 400})
    recent, most = Recent(most=300), 0
    for part in looks(whole, 20):
        shown = recent.take(part)
        most = max(most, len(shown))
    assert most <= 300 + 20
    assert recent.begin > whole.start
    spans, all_of = shown.spans(), whole.spans()
    hung = all_of[(all_of["end"] < 0) & (all_of["code"] == ev.SAMPLE[0])]
    assert hung["begin"] < recent.begin
    assert hung["begin"] in spans["begin"][(spans["code"] == ev.SAMPLE[0]) & (spans["end"] < 0)]
    inside = all_of[(all_of["begin"] >= recent.begin) & (all_of["end"] >= 0)]
    assert len(inside) > 50
    assert np.isin(inside["begin"], spans["begin"][spans["end"] >= 0]).all()
    assert {process.whole_from for process in shown.processes} == {recent.begin}


def test_a_small_run_is_kept_whole(tmp_path: Path) -> None:
    whole, recent = made(tmp_path / "t", **HEALTHY), Recent()
    for part in looks(whole, 7):
        shown = recent.take(part)
    assert (recent.begin, shown.whole_from(1)) == (0, 0)
    assert np.array_equal(shown.events, whole.events)


def test_after_a_gap_the_window_begins_anew(tmp_path: Path) -> None:
    parts = looks(made(tmp_path / "t", **HEALTHY), 4)
    after = [parts[2].events[parts[2].events["process"] == process] for process in range(3)]
    recent = Recent()
    recent.take(parts[0])
    shown = recent.take(parts[2])
    assert recent.begin == max(rows["time"][0] for rows in after)
    before = shown.events[shown.events["time"] < recent.begin]
    spans = shown.spans()
    assert set(before["time"].tolist()) <= set(spans["begin"][spans["end"] < 0].tolist())


def going_on(trace: Trace, later: int) -> Trace:
    """The trace of a run that was looked at `later` ns after its last event."""
    trace.seen = int(trace.events["time"][-1]) + later
    for process in trace.processes:
        process.life = ProcessLife.ALIVE
    return trace


def test_the_headline_changes_as_time_passes(tmp_path: Path) -> None:
    found = []
    for later in (0.2, 3, 7, 600):
        trace = going_on(made(tmp_path / str(later), **HUNG | {"polls": 0}), int(later * SECOND))
        found.append(headline(trace))
    assert [one.outcome for one in found] == [RunOutcome.RUNNING, RunOutcome.RUNNING, RunOutcome.HUNG, RunOutcome.HUNG]
    assert found[0].title.startswith("running, so far ")
    assert found[1].title.startswith(
        "running, but no batch for 3.00 s, since 0.01 s: waiting for worker 1 (pid 1101), in sample 38"
    )
    assert found[3].title.startswith(
        "hung for 10.0 min, since 0.00 min: waiting for worker 1 (pid 1101), in sample 38 (task 9)"
    )
    assert (found[1].focus.code, found[0].focus) == (ev.SAMPLE[0], None)  # type: ignore[union-attr]


def test_the_loops_own_code_is_no_hang_while_the_run_goes_on(tmp_path: Path) -> None:
    trace = made(tmp_path / "t", **HEALTHY)
    consumer = np.flatnonzero(trace.events["code"] == ev.CONSUMER[0])[-1]
    trace.events = trace.events[: consumer + 1]
    found = headline(going_on(trace, 60 * SECOND))
    assert (found.outcome, found.title[:34]) == (RunOutcome.RUNNING, "running, no call of next for 60.0 ")


def test_a_process_that_is_gone_died_at_its_last_sign_of_life(tmp_path: Path) -> None:
    trace = going_on(made(tmp_path / "t", **HUNG | {"polls": 0}), 60 * SECOND)
    trace.processes[0].life = ProcessLife.GONE
    found = headline(trace)
    assert found.outcome is RunOutcome.DIED
    assert found.focus.end == trace.events["time"][trace.events["process"] == 0][-1]
    assert "ended without a shutdown" in found.title


def test_a_long_wait_that_the_window_has_lost_still_counts(tmp_path: Path) -> None:
    """Sixty-second batches are usual here: seven seconds without one are no hang."""
    first = made(tmp_path / "a", batches=3, cost=lambda task: 60 * SECOND)
    job = Job()
    job.take(first)
    assert job.longest > 59 * SECOND
    trace = going_on(made(tmp_path / "b", **HUNG | {"polls": 0}), 7 * SECOND)
    job.take(trace)
    assert headline(trace, job=job).outcome is RunOutcome.RUNNING


def test_a_first_batch_may_take_as_long_as_an_earlier_epochs_did(tmp_path: Path) -> None:
    job = Job()
    job.take(made(tmp_path / "a", batches=3, cost=lambda task: 60 * SECOND if task == 0 else 1_000_000))
    assert job.first > 59 * SECOND > 59 * job.longest
    trace, alone = (going_on(made(tmp_path / n, batches=3, cost=lambda task: NEVER), 7 * SECOND) for n in "bc")
    job.take(trace)
    assert headline(trace, job=job).outcome is RunOutcome.RUNNING
    assert headline(alone).outcome is RunOutcome.HUNG


@pytest.fixture
def followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LiveTrace:
    """A reader of a run that is there."""
    made_trace.write(tmp_path / "t", made_trace.Run(**HUNG))
    monkeypatch.setattr(live, "is_here", lambda manifest: True)
    monkeypatch.setattr(live, "life", lambda pid, start: ProcessLife.ALIVE)
    monkeypatch.setattr(live.time, "monotonic_ns", lambda: made_trace.START + 3600 * SECOND)
    return LiveTrace(tmp_path / "t", most=50)


def test_time_0_is_the_runs_first_event_also_if_it_was_not_read(followed: LiveTrace) -> None:
    whole = read_trace(followed.directory)
    for _ in range(2):
        trace, _ = followed.read()
        assert trace.start == whole.start < int(whole.events["time"][0]) + 1
        assert trace.seen == made_trace.START + 3600 * SECOND
    assert "overwritten" not in " ".join(followed.read()[0].problems)


def test_a_file_that_shrinks_is_said(followed: LiveTrace) -> None:
    followed.read()
    (path,) = followed.directory.glob(f"{LOADER_PID}-*.events")
    with path.open("r+b") as file:
        file.truncate(8192)
    assert f"{path.name} was truncated while it was read: new events are lost" in followed.read()[0].problems


def test_a_run_that_has_ended_is_not_going_on(followed: LiveTrace) -> None:
    (path,) = followed.directory.glob(f"{LOADER_PID}-*.jsonl")
    with path.open("a") as file:
        file.write(json.dumps({"kind": "trace_end"}) + "\n")
    assert followed.read()[0].seen == 0


def test_of_a_large_trace_that_grows_the_doctor_reads_the_end_and_knows_the_longest_wait_of_all(
    followed: LiveTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = followed.directory
    monkeypatch.setattr(doctor.live, "LiveTrace", lambda directory: followed)
    assert doctor._newest(path) is None  # it is small
    monkeypatch.setattr(doctor, "QUICK", 0)
    trace, before = doctor._newest(path) or pytest.fail("the run goes on")
    assert len(trace) <= 1 + 50 * len(trace.processes) < len(read_trace(path))
    told, known = headline(trace, job=before).wait, headline(read_trace(path)).wait
    assert told is not None
    assert known is not None
    for name in ("task", "worker", "sample", "past", "epoch"):
        assert getattr(told, name) == getattr(known, name)


def test_of_the_epochs_that_began_before_the_newest_events_the_last_one_of_each_loader_is_kept(
    followed: LiveTrace,
) -> None:
    """A ring's file does not begin with its oldest event; loader 9's last epoch has begun among the newest ones."""
    calls = np.zeros(6, read_trace(followed.directory).events.dtype)
    calls["code"], calls["seq"], calls["loader"] = ev.EPOCH[0], (30, 200, 12, 10, 20, 11), (7, 9, 8, 7, 7, 8)
    newest = np.zeros(3, calls.dtype)
    newest["seq"], newest["process"], newest["pid"] = (100, 101, 102), 1, 42
    rows = doctor._with_epoch(newest, calls, 1)
    assert rows["seq"].tolist() == [12, 30, 100, 101, 102]
    assert (set(rows["process"]), set(rows["pid"])) == ({1}, {42})
