"""The file for the Perfetto UI: where each track stands, what is folded under it, its flows, that its slices nest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import made_trace
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_trace import Run, made
from oracle_trace import rows_of, trace_of, write_process
from perfetto_file import PerfettoFile, fields

from minidl.hang.headline import headline
from minidl.tracefile import events as ev
from minidl.tracefile.attachments import SLICE, Name, SliceTrack, chunk, closing, description
from minidl.tracefile.reader import Trace, read_trace
from minidl.views.chrome import to_chrome
from minidl.views.export import COUNTERS
from minidl.views.perfetto import number_field, varint, write_perfetto


def ns(us: float) -> int:
    return round(us * 1000)


def ranked(path: Path, ranks: int = 11, then: Sequence[tuple[int, int]] = ()) -> Trace:
    """A trace of several ranks. then: codes of more events of the loaders, each ns after the first."""
    for rank in range(ranks):
        for worker in (-1, 1, 0):
            pid, role = 100 * (rank + 1) + worker + 1, "loader" if worker < 0 else "worker"
            steps = [(ev.NEXT[0], 0), *then] if worker < 0 else [(ev.FETCH[0], 0)]
            events = rows_of("code time", *((code, pid + after) for code, after in steps), task=0)
            write_process(path, events, pid=pid, start_ns=pid, role=role, worker=worker, loader=rank + 1, rank=rank)
    return read_trace(path)


def test_lanes_stand_in_the_order_of_their_roles_with_threads_and_queues_folded_under_them(tmp_path: Path) -> None:
    file = PerfettoFile(made(tmp_path / "t", batches=6, pin=True, simulated=True), tmp_path)
    assert file.titles() == ["headline"]
    lanes = ["consumer", "loader, pid 1000", "worker 1, pid 1101", "worker 0, pid 1100", "pin thread"]
    assert file.titles("headline") == [*lanes, "epoch", "batch in flight", "counters"]
    order = {one.title: one.order for one in file.tracks.values()}
    assert order["epoch"] < order["batch in flight"] < order["counters"]
    assert file.titles("loader, pid 1000") == ["feeder to worker 0", "feeder to worker 1"]
    assert file.titles("worker 0, pid 1100") == ["feeder", "index queue tasks", "result queue batches"]
    assert file.titles("counters") == [name for name in COUNTERS if "queue" not in name]
    assert not [one.title for one in file.tracks.values() if one.title.startswith("/")]


def test_the_worker_that_the_headline_points_at_comes_first_and_then_those_of_its_iterator(tmp_path: Path) -> None:
    long_poll = made_trace.HUNG | {"poll": 5_000_000_000}
    trace = made(tmp_path / "t", Run(batches=3), Run(**long_poll, loader=2, first_pid=3000))
    workers = [title for title in PerfettoFile(trace, tmp_path).titles("headline") if title.startswith("worker")]
    assert [title.split(",")[0] for title in workers] == [
        f"worker {worker} of iterator {number}" for worker, number in ((1, 2), (0, 2), (0, 1), (1, 1))
    ]


def test_each_rank_is_a_group_and_ranks_stand_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    file = PerfettoFile(ranked(tmp_path), tmp_path)
    assert file.titles("headline") == [f"rank {rank}" for rank in range(11)]
    assert file.titles("rank 10") == ["loader, pid 1100", "worker 0, pid 1101", "worker 1, pid 1102"]


def test_the_headline_lasts_as_long_as_the_trace_and_says_why_and_what_next(tmp_path: Path) -> None:
    hung = made(tmp_path / "t", **made_trace.HUNG)
    hung.problems.append("something is missing")
    found, file = headline(hung), PerfettoFile(hung, tmp_path)
    (one,) = (one for one in file.slices if file.title(one.track) == "headline")
    assert (one.name, one.begin, one.end) == (found.title, 0, hung.last - hung.start)
    assert one.args["evidence 1"] == found.notes()[0]
    assert one.args["next step"] == found.next_step
    assert one.args["problems"] == ["something is missing"]


def test_a_counter_says_what_it_counts(hung: Trace, tmp_path: Path) -> None:
    counters = [one for one in PerfettoFile(hung, tmp_path).tracks.values() if one.title in COUNTERS]
    assert {one.title: one.about for one in counters} == COUNTERS
    assert all(one.title.endswith(one.unit) for one in counters)


def test_batches_in_flight_share_as_many_rows_as_there_are_at_once(hung: Trace, tmp_path: Path) -> None:
    file = PerfettoFile(hung, tmp_path)
    rows = [number for number, one in file.tracks.items() if one.title == "batch in flight"]
    flights = [one for one in file.slices if one.track in rows]
    changes = sorted([(one.begin, 1) for one in flights] + [(one.end, -1) for one in flights])
    assert len(rows) == max(np.cumsum([change for _, change in changes]))
    assert {one.depth for one in flights} == {0}


def test_a_wait_is_joined_to_its_fetch_and_its_slowest_sample_even_if_they_began_later(tmp_path: Path) -> None:
    """A flow goes from what it comes from: the fetch, and the loop's next is where it ends."""
    steps = rows_of(
        "time code task tid",
        (1, ev.INDEX_PUT, 0, 100), (3, ev.NEXT[0], -1, 100), (3, ev.RESULT_GET[0], 0, 100), (4, ev.FETCH[0], 0, 109),
        (5, ev.SAMPLE[0], 0, 109), (6, ev.SAMPLE[1], 0, 109), (6, ev.SAMPLE[0], 0, 109), (31, ev.SAMPLE[1], 0, 109),
        (32, ev.FETCH[1], 0, 109), (40, ev.RESULT_GET[1], 0, 100), (41, ev.YIELD, 0, 100), (42, ev.NEXT[1], 0, 100),
        worker=0,
    )  # fmt: skip
    flows = PerfettoFile(trace_of(tmp_path, steps), tmp_path).flows.values()
    ways = [[(one.name, one.begin) for one in flow] for flow in flows]
    assert [way for way in ways if way[-1][0].startswith("next")] == [
        [("fetch 0", 3), ("next 0", 2)], [("sample 0", 5), ("next 0", 2)],
    ]  # fmt: skip


@pytest.mark.heavy
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=2, max_size=8))
def test_slices_nest_whatever_begins_and_ends_at_one_time(
    tmp_path_factory: pytest.TempPathFactory, spans: list[tuple[int, int]]
) -> None:
    """Empty ones too. The reader of the tests ends the innermost slice of the track, as Perfetto does."""
    place = tmp_path_factory.mktemp("t")
    times = [(n, 1 + begin, 1 + begin + length) for n, (begin, length) in enumerate(spans)]
    steps = [(time, code, n) for n, *both in times for time, code in zip(both, ev.H2D, strict=True)]
    rows = rows_of("time code task", *sorted(steps, key=lambda step: step[0]), tid=100, worker=0)
    trace = trace_of(place, rows)
    drawn = sorted((ns(e["ts"]), ns(e["dur"])) for e in to_chrome(trace)["traceEvents"] if e["ph"] == "X")
    slices = [one for one in PerfettoFile(trace, place).slices if one.name.startswith("h2d")]
    assert sorted((one.begin, one.end - one.begin) for one in slices) == drawn


@pytest.mark.parametrize("text", ['a "b" \\ c', "line\nline", "100 % %d", "данные 数据", "</script>\x00", r"\udcff"])
def test_texts_survive_whatever_is_in_them(tmp_path: Path, text: str) -> None:
    lines = [{"kind": "string", "id": 1, "text": text}]
    trace = trace_of(tmp_path, [{"code": ev.TASK_ERROR, "task": 0, "worker": 0, "z": 1}], lines=lines, role="worker")
    (error,) = (one for one in PerfettoFile(trace, tmp_path).instants if one.name == "task_error")
    assert error.args["text"] == text


def test_what_other_recorders_saw_is_folded_under_the_process_that_they_saw(tmp_path: Path) -> None:
    made_trace.write(tmp_path, Run(**made_trace.HEALTHY))
    tracks = [SliceTrack(1100, 1100, "MainThread"), SliceTrack(0, 7, "stream 7", "GPU 0")]
    rows = np.array([(made_trace.START, made_trace.START + 9, track, 0) for track in (0, 1)], SLICE)
    data = description("profiler", "p", "1", 1100, "", 0) + chunk(tracks, [Name("f", "a")], rows, {0: {"x.y [B]": 1.5}})
    (tmp_path / "profiler-1.attachment.jsonl").write_bytes(data + closing())
    file = PerfettoFile(read_trace(tmp_path), tmp_path)
    assert "operators: MainThread" in file.titles("worker 0, pid 1100")
    assert file.titles("headline")[-2:] == ["GPU 0 (profiler)", "counters"]
    assert file.titles("GPU 0 (profiler)") == ["stream 7"]
    (first,) = (one for one in file.slices if file.title(one.track) == "operators: MainThread")
    assert first.args == {"category": "a", "x y, B": 1.5}, "the UI takes a dot or brackets for a path"


def test_a_trace_without_events_has_one_track(tmp_path: Path) -> None:
    file = PerfettoFile(trace_of(tmp_path, []), tmp_path)
    assert (list(file.tree()), file.slices) == (["headline"], [])


def test_progress_reaches_the_end(hung: Trace, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    write_perfetto(hung, tmp_path / "t", lambda done, of: seen.append((done, of)))
    assert seen == sorted(seen)
    assert seen[-1] == (len(hung), len(hung))


@given(st.integers(-(2**63), 2**64 - 1))
def test_a_varint_has_seven_bits_in_a_byte(number: int) -> None:
    assert fields(number_field(5, number)) == {5: [number % 2**64]}
    assert len(varint(number)) == max(1, -(-(number % 2**64).bit_length() // 7))


def test_of_several_ranks_the_lanes_after_the_workers_are_folded(tmp_path: Path) -> None:
    file = PerfettoFile(ranked(tmp_path, 2, then=[(ev.INDEX_PUT, 7), (ev.TASK_ASSIGNED, 8)]), tmp_path)
    assert file.titles("rank 1")[-1] == "pin thread, device, batches"
    assert file.titles("pin thread, device, batches") == ["batch in flight", "counters"]


def test_a_death_is_a_note_on_the_lane_that_died(tmp_path: Path) -> None:
    write_process(tmp_path, [{"code": ev.FETCH[0], "time": 5, "task": 0}], pid=101, role="worker", worker=0)
    gone = {"time": 90, "code": ev.WORKER_GONE, "worker": 0, "x": 101, "y": -9}
    file = PerfettoFile(trace_of(tmp_path, [{"code": ev.NEXT[0], "time": 1}, gone], pid=100), tmp_path)
    (death,) = (one for one in file.instants if "last sign of life" in one.name)
    assert (death.name, file.title(death.track)) == ("killed by SIGKILL; last sign of life", "worker 0, pid 101")
    assert death.begin == 4
