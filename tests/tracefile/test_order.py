"""What happened before what: links against a clock that can be trusted, and answers that no clock can change."""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_trace
import numpy as np
import pytest
import workloads as wl
from oracle_trace import trace_of, write_process
from recorded import record

import minidl
from minidl.speed.critical_path import critical_path, in_order
from minidl.tracefile import events as ev
from minidl.tracefile.events import Message, Phase
from minidl.tracefile.format import HEADER_BYTES, RECORD
from minidl.tracefile.reader import Trace, read_trace

SECOND = 1_000_000_000


# --- Runs -------------------------------------------------------------------------------------------------------------
def loader_of(samples: int, **options: Any) -> minidl.DataLoader[Any]:
    return minidl.DataLoader(wl.Tensors(samples), **{"batch_size": 2, "num_workers": 2} | options)


def persistent(directory: Path) -> None:
    """Three epochs, of which the second is broken off while its tasks are under way."""
    with loader_of(12, persistent_workers=True) as loader:
        list(loader)
        next(iter(loader))
        list(loader)


def pinned(directory: Path) -> None:
    with loader_of(12, persistent_workers=True, pin_memory=True) as loader:
        for _ in range(2):
            list(loader)


def stream(directory: Path) -> None:
    list(minidl.DataLoader(wl.Stream(9), batch_size=2, num_workers=2))


def alone(directory: Path) -> None:
    list(loader_of(8, num_workers=0))


def overwritten(directory: Path) -> None:
    """Four epochs, of which the rings of 1,024 events hold the last."""
    with loader_of(160, persistent_workers=True) as loader:
        for _ in range(4):
            list(loader)


def killed(directory: Path) -> None:
    iterator = wl.killed_in_a_sample(directory)
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(iterator)


RUNS: dict[str, Callable[[Path], None]] = {
    run.__name__: run for run in (persistent, pinned, stream, alone, overwritten, killed)
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every run's trace, recorded once."""
    return {
        name: record(run, tmp_path_factory.mktemp(name), 65_536 if name == "overwritten" else None)
        for name, run in RUNS.items()
    }


@pytest.fixture(scope="module")
def traces(directories: dict[str, Path]) -> dict[str, Trace]:
    return {name: read_trace(path) for name, path in directories.items()}


def named(trace: Trace, at: int) -> str:
    event = ev.EVENTS[int(trace.events["code"][at])]
    return event.name if event.phase is Phase.INSTANT else f"{event.name} {event.phase.value}"


def links(trace: Trace) -> list[tuple[str, str]]:
    return [(named(trace, a), named(trace, b)) for a, b in trace.order.links.tolist()]


def ids(trace: Trace, events: np.ndarray) -> list[tuple[int, int]]:
    """Events as something that a change of their times leaves alone."""
    rows = trace.events[events]
    return list(zip(rows["process"].tolist(), rows["seq"].tolist(), strict=True))


def only(trace: Trace, name: str, phase: Phase = Phase.INSTANT, **fields: int) -> int:
    """The position of the one event that is described so."""
    mask = trace.events["code"] == ev.BY_NAME[name, phase].code
    for field, value in fields.items():
        mask &= trace.events[field] == value
    (at,) = np.flatnonzero(mask).tolist()
    return int(at)


# --- Links ------------------------------------------------------------------------------------------------------------
@pytest.mark.live
@pytest.mark.parametrize("name", RUNS)
def test_no_link_goes_against_the_clock_of_one_machine(name: str, traces: dict[str, Trace]) -> None:
    """The recorder's clock is one for all processes here, so that a link between the wrong two events shows."""
    trace = traces[name]
    times = trace.events["time"]
    source, target = trace.order.links["source"], trace.order.links["target"]
    assert (times[source] <= times[target]).all()
    assert len(source) or name == "alone"


@pytest.mark.live
@pytest.mark.parametrize("name", ["persistent", "pinned", "stream", "killed"])
def test_every_message_that_came_is_linked_to_where_it_was_put(name: str, traces: dict[str, Trace]) -> None:
    trace = traces[name]
    found = Counter(links(trace))
    came = Counter(trace.select("index_get", Phase.END)["x"].tolist())
    rebuilt = len(trace.select("result_rebuild", Phase.BEGIN))
    for pair, count in (
        (("index_put", "index_get E"), came[Message.TASK]),
        (("resume_put", "index_get E"), came[Message.RESUME]),
        (("sentinel_put", "index_get E"), came[Message.SENTINEL]),
        (("result_put", "result_read"), rebuilt),
        (("result_write B", "result_read"), rebuilt),
        (("resume_ack", "result_read"), len(trace.select("resume_ack"))),
        (("worker_start B", "make_fetcher B"), 2),
        (("ready_put", "ready_get E"), len(trace.select("ready_put"))),
    ):
        assert found[pair] == count, pair
    assert not len(trace.select("worker_gone")) or "worker_gone" in {target for _, target in found}


@pytest.mark.live
def test_what_a_ring_still_holds_is_linked_though_its_epochs_begin_is_gone(traces: dict[str, Trace]) -> None:
    trace = traces["overwritten"]
    workers = [p for p in trace.processes if p.role == "worker"]
    assert all(p.lost for p in workers), "the rings must have gone round"
    assert links(trace).count(("index_put", "index_get E")) > 30
    assert links(trace).count(("result_put", "result_read")) > 30


@pytest.mark.parametrize("puts", [1, 2])
def test_two_candidates_are_none(tmp_path: Path, puts: int) -> None:
    """Two puts of one task in one epoch are what no loader does: nothing says which of them came."""
    put = {"code": ev.INDEX_PUT, "task": 3, "worker": 0}
    got = {"code": ev.INDEX_GET[1], "task": 3, "worker": 0, "x": Message.TASK}
    write_process(tmp_path, [put] * puts, pid=10, role="loader", loader=1)
    trace = trace_of(tmp_path, [got], pid=11, role="worker", worker=0, loader=1)
    assert len(trace.order.links) == (1 if puts == 1 else 0)


# --- Before -----------------------------------------------------------------------------------------------------------
def reachable(trace: Trace, at: int) -> set[int]:
    """The past of an event by walking every edge backwards: in its process by sequence, and along links."""
    order = trace.order
    sources: dict[int, list[int]] = {}
    for source, target in order.links.tolist():
        sources.setdefault(target, []).append(source)
    by_rank = {(int(p), int(r)): i for i, (p, r) in enumerate(zip(order.process, order.rank, strict=True))}
    todo, seen = [at], {at}
    while todo:
        here = todo.pop()
        before = by_rank.get((int(order.process[here]), int(order.rank[here]) - 1))
        for cause in sources.get(here, []) + ([] if before is None else [before]):
            if cause not in seen:
                seen.add(cause)
                todo.append(cause)
    return seen - {at}


@pytest.mark.live
@pytest.mark.parametrize("name", ["persistent", "pinned", "killed"])
def test_before_is_what_walking_back_reaches(name: str, traces: dict[str, Trace]) -> None:
    trace = traces[name]
    for at in range(0, len(trace), 17):
        assert set(np.flatnonzero(trace.before(at)).tolist()) == reachable(trace, at)


@pytest.mark.live
@pytest.mark.parametrize("name", ["persistent", "killed"])
def test_of_two_events_at_most_one_came_before_the_other(name: str, traces: dict[str, Trace]) -> None:
    trace = traces[name]
    some = range(3, len(trace), 41)
    answers = {(a, b): trace.happened_before(a, b) for a in some for b in some}
    for (a, b), answer in answers.items():
        assert answer is (bool(trace.before(b)[a]) or (None if a != b and not trace.before(a)[b] else False))
        assert answers[b, a] is (None if answer is None else not answer if a != b else False)
    assert {True, False} <= set(answers.values())


def test_workers_know_nothing_of_each_other(healthy: Trace) -> None:
    one, other = (only(healthy, "result_put", task=task) for task in (0, 1))
    assert healthy.happened_before(one, other) is None
    assert healthy.happened_before(only(healthy, "index_put", task=0), one) is True
    assert healthy.happened_before(only(healthy, "yield", task=0), one) is False
    assert healthy.happened_before(healthy.events[one], healthy.events[one]) is False
    mask = healthy.before(healthy.select("yield")[1], task=1)
    assert {int(task) for task in healthy.events["task"][mask]} == {1}
    named_before = {named(healthy, at) for at in np.flatnonzero(mask)}
    assert {"index_put", "fetch B", "fetch E", "result_write B"} <= named_before


@pytest.mark.live
def test_the_epochs_of_persistent_workers_are_kept_apart(traces: dict[str, Trace]) -> None:
    """Task numbers begin again; the second epoch's first batch is yielded after the first epoch's, not before."""
    trace = traces["persistent"]
    puts = trace.select("index_put")
    firsts = puts[puts["task"] == 0]
    assert len(firsts) == 3
    yields = trace.select("yield")
    for number, row in enumerate(yields[yields["task"] == 0]):
        assert [trace.happened_before(put, row) for put in firsts] == [n <= number for n in range(3)]


@pytest.mark.live
def test_a_dead_workers_last_event_came_before_it_was_found_dead(traces: dict[str, Trace]) -> None:
    trace = traces["killed"]
    (found,) = trace.select("found_dead")
    (process,) = [n for n, p in enumerate(trace.processes) if p.pid == found["y"]]
    assert trace.before(found)[trace.events["process"] == process].all()
    samples = trace.select("sample", Phase.BEGIN)
    (last,) = samples[samples["y"] == 5]
    assert trace.happened_before(last, found) is True


@pytest.mark.live
@pytest.mark.parametrize("event", [10**9, -(10**9)])
def test_an_event_that_is_not_there_is_an_error(event: int, traces: dict[str, Trace]) -> None:
    with pytest.raises(KeyError, match="the trace has"):
        traces["alone"].before(event)
    with pytest.raises(KeyError, match="no event"):
        traces["alone"].before(traces["persistent"].events[-1])


# --- Clocks that are wrong --------------------------------------------------------------------------------------------
def shifted(path: Path, target: Path, process: int, by: int) -> Trace:
    """The trace with another clock in one of its processes."""
    shutil.copytree(path, target)
    stem = read_trace(path).processes[process].file
    file = target / f"{stem}.events"
    data = bytearray(file.read_bytes())
    rows = np.frombuffer(data, RECORD, (len(data) - HEADER_BYTES) // RECORD.itemsize, HEADER_BYTES)
    rows["time"][rows["seq"] > 0] += by
    file.write_bytes(data)
    return read_trace(target)


@pytest.mark.live
@pytest.mark.parametrize("name", ["persistent", "pinned"])
def test_a_story_puts_a_cause_first_at_equal_times(name: str, traces: dict[str, Trace]) -> None:
    trace = traces[name].cut(np.ones(len(traces[name]), bool))
    trace.events["time"] = 0
    way = np.flatnonzero(trace.events["task"] == 3)
    told = in_order(trace, way)
    for place, at in enumerate(told.tolist()):
        assert not [other for other in told[:place].tolist() if trace.happened_before(at, other)]
    assert len(told) == len(way) > 20
    for other in (way[::-1], np.roll(way, 5)):
        assert in_order(trace, other).tolist() == told.tolist()


@pytest.mark.live
@pytest.mark.parametrize("by", [-SECOND, 3_600 * SECOND])
@pytest.mark.parametrize("name", ["persistent", "pinned", "killed"])
def test_no_clock_changes_an_answer(
    name: str, by: int, directories: dict[str, Path], traces: dict[str, Trace], tmp_path: Path
) -> None:
    trace = traces[name]
    for process in range(len(trace.processes)):
        other = shifted(directories[name], tmp_path / str(process), process, by)
        assert not np.array_equal(other.events["time"], trace.events["time"])
        moved = {key: at for at, key in enumerate(ids(other, np.arange(len(other))))}
        for row in [*trace.select("yield")[::3], trace.events[-1]]:
            at = moved[int(row["process"]), int(row["seq"])]
            assert set(ids(other, other.before(at))) == set(ids(trace, trace.before(row)))


# --- The causes that came last ----------------------------------------------------------------------------------------
def test_a_batch_that_waited_behind_a_slow_one_is_blamed_on_that(tmp_path: Path) -> None:
    trace = made_trace.made(tmp_path, batches=12, workers=4, cost=lambda task: 9_000_000 if task == 2 else 900_000)
    chain = trace.chain(only(trace, "yield", task=3)).tolist()
    assert [named(trace, at) for at in (chain[0], chain[-1])] == ["epoch B", "yield"]
    fetched = {int(trace.events["task"][at]) for at in chain if named(trace, at) == "fetch E"}
    assert fetched == {2}, "task 3 lay in the reorder buffer until task 2 had come"
    pairs = set(trace.order.links.tolist())
    for before, at in itertools.pairwise(chain):
        assert before == trace.order.previous[at] or (before, at) in pairs


def test_an_empty_trace_has_no_order(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [])
    assert len(trace.order.links) == 0
    with pytest.raises(ValueError, match="no batch 0: it has no batches"):
        critical_path(trace, 0)
