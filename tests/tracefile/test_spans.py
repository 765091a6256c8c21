"""Begins and ends, and the rows in which spans nest."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from oracle_trace import write_process

from minidl.tracefile import events as ev
from minidl.tracefile.attachments import SLICE
from minidl.tracefile.reader import Trace, read_trace
from minidl.tracefile.spans import MOST_LANES, ROUNDING_NS, SPAN, nest, pairs, stack


def test_spans(tmp_path: Path) -> None:
    write_process(tmp_path, [
        {"code": ev.RESULT_GET[0], "time": 1, "task": 3, "worker": 1, "x": 500},
        {"code": ev.INDEX_GET[0], "time": 2, "tid": 9},
        {"code": ev.INDEX_GET[1], "time": 4, "tid": 9, "task": 7, "worker": 2, "x": 1, "y": 8},
        {"code": ev.RESULT_GET[1], "time": 6, "task": 5, "worker": 0, "x": 2, "y": 1},
        {"code": ev.FETCH[0], "time": 8, "task": 7, "x": 4},
    ], pid=4)  # fmt: skip
    spans = read_trace(tmp_path).spans()
    assert spans.dtype == SPAN
    columns = ["code", "begin", "end", "tid", "task", "worker", "end_task", "end_worker", "bx", "ex", "ey"]
    assert [tuple(row) for row in spans[columns].tolist()] == [
        (ev.RESULT_GET[0], 1, 6, 4, 3, 1, 5, 0, 500, 2, 1),
        (ev.INDEX_GET[0], 2, 4, 9, 7, 2, 7, 2, 0, 1, 8),
        (ev.FETCH[0], 8, -1, 4, 7, -1, -1, -1, 4, 0, 0),
    ]


def test_cpu_times_stand_in_the_ends(tmp_path: Path) -> None:
    """In another thread's end it is none; no CPU time is longer than its span; a write tells that of the pickling,
    and the end of a get how long the rebuilding had no CPU."""
    write_process(tmp_path, [
        {"code": ev.FETCH[0], "time": 10}, {"code": ev.SAMPLE[0], "time": 20},
        {"code": ev.SAMPLE[1], "time": 50, "z": 31}, {"code": ev.FETCH[1], "time": 110, "x": 2, "y": 60, "z": 70},
        {"code": ev.CONSUMER[0], "time": 111}, {"code": ev.CONSUMER[1], "time": 120, "tid": 2, "x": 5},
        {"code": ev.RESULT_PICKLE[0], "time": 200, "tid": 9, "task": 1},
        {"code": ev.RESULT_PICKLE[1], "time": 240, "tid": 9, "task": 1, "x": 7, "y": 1, "z": 33},
        {"code": ev.RESULT_PICKLE[0], "time": 251, "tid": 9, "task": 2},
        {"code": ev.RESULT_WRITE[0], "time": 250, "tid": 9, "task": 1, "x": 7, "y": 21},
        {"code": ev.RESULT_PICKLE[1], "time": 260, "tid": 9, "task": 2},  # it could not be pickled
        {"code": ev.RESULT_WRITE[0], "time": 270, "tid": 9, "task": -1, "x": 7, "y": 5},
        {"code": ev.RESULT_GET[0], "time": 300}, {"code": ev.RESULT_REBUILD[0], "time": 310, "task": 3},
        {"code": ev.RESULT_REBUILD[1], "time": 390, "task": 3, "z": 2},
        {"code": ev.RESULT_GET[1], "time": 391, "task": 3, "x": 2, "z": 77},
    ])  # fmt: skip
    spans = read_trace(tmp_path).spans()
    assert [(int(row["code"]), int(row["cpu"]), int(row["cpu_wait"])) for row in spans] == [
        (ev.FETCH[0], 60, 40), (ev.SAMPLE[0], 30, 0), (ev.CONSUMER[0], 0, 0), (ev.RESULT_PICKLE[0], 21, 0),
        (ev.RESULT_WRITE[0], 0, 0), (ev.RESULT_PICKLE[0], 0, 0), (ev.RESULT_WRITE[0], 0, 0),
        (ev.RESULT_GET[0], 0, 0), (ev.RESULT_REBUILD[0], 2, 77),
    ]  # fmt: skip


def test_an_epoch_may_be_ended_by_another_thread(tmp_path: Path) -> None:
    write_process(tmp_path, [
        {"code": ev.EPOCH[0], "tid": 1}, {"code": ev.FETCH[0], "tid": 1},
        {"code": ev.FETCH[1], "tid": 2}, {"code": ev.EPOCH[1], "tid": 2},
    ])  # fmt: skip
    epoch, fetch = read_trace(tmp_path).spans()
    assert (epoch["begin"], epoch["end"]) == (1, 4)
    assert (fetch["begin"], fetch["end"]) == (2, -1)  # work stays in its thread: this one did not end


def paired_by_hand(trace: Trace) -> list[tuple[int, int]]:
    """(begin's seq, end's seq or 0) by walking through the events with a stack for each thread, loader and name."""
    stacks: dict[tuple[int, ...], list[int]] = {}
    ends: dict[int, int] = {}
    for row in trace.events:
        event = ev.EVENTS[int(row["code"])]
        key = (int(row["process"]), int(row["tid"]), int(row["loader"]), ev.BY_NAME[event.name, ev.Phase.BEGIN].code)
        number = int(row["seq"])
        if event.phase is ev.Phase.BEGIN:
            stacks.setdefault(key, []).append(number)
            ends[number] = 0
        elif stacks.get(key):
            ends[stacks[key].pop()] = number
    return sorted(ends.items())


@given(st.lists(st.tuples(st.sampled_from([*ev.FETCH, *ev.SAMPLE, *ev.COLLATE]), st.integers(1, 2), st.integers(1, 2))))
def test_spans_are_paired_as_a_stack_would(steps: list[tuple[int, int, int]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        events = [
            {"code": code, "tid": tid, "loader": loader, "y": n} for n, (code, tid, loader) in enumerate(steps, 1)
        ]
        write_process(Path(directory), events)
        trace = read_trace(directory)
    spans = pairs(trace.events)
    assert spans["by"].tolist() == sorted(spans["by"].tolist())
    assert list(zip(spans["by"].tolist(), spans["ey"].tolist(), strict=True)) == paired_by_hand(trace)
    assert ((spans["end"] == -1) == (spans["ey"] == 0)).all()


# --- Nesting ----------------------------------------------------------------------------------------------------------
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(-1, 60)), max_size=14))
def test_nested_spans_end_inside_the_span_around_them(raw: list[tuple[int, int, int]]) -> None:
    spans = np.zeros(len(raw), SPAN)
    spans["begin"] = [begin for _, begin, _ in raw]
    spans["end"] = [-1 if length < 0 else begin + length for _, begin, length in raw]
    track = np.array([track for track, _, _ in raw], np.int64)
    until, around = nest(spans, track)
    for at, outer in enumerate(around.tolist()):
        assert until[at] == spans["end"][at] or (outer >= 0 and until[at] == until[outer])
        if outer >= 0:
            assert track[outer] == track[at]
            assert spans["begin"][outer] <= spans["begin"][at]
            assert until[outer] == -1 or spans["begin"][at] < until[outer]


def slices(*values: tuple[int, int, int, int]) -> Any:
    return np.array(list(values), SLICE)


def laid_out(*values: tuple[int, int]) -> list[tuple[int, int]]:
    """Lane and drawn end of slices on one track."""
    lane, end = stack(slices(*((b, e, 0, 0) for b, e in values)))
    return list(zip(lane.tolist(), end.tolist(), strict=True))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 400), st.integers(0, 400)), max_size=14))
def test_in_one_row_slices_nest_or_stand_apart(raw: list[tuple[int, int, int]]) -> None:
    rows = slices(*((begin, begin + length, track, 0) for track, begin, length in raw))
    lane, end = stack(rows)
    drawn = [(t, n, b, e) for t, n, b, e in zip(rows["track"], lane, rows["begin"], end, strict=True)]
    for ta, na, ba, ea in drawn:
        assert not [1 for tb, nb, bb, eb in drawn if (ta, na) == (tb, nb) and ba < bb < ea < eb]
    assert (lane >= 0).all()
    assert (end >= rows["begin"]).all()
    assert ((rows["end"] - end >= 0) & (rows["end"] - end <= 2 * ROUNDING_NS)).all()


def test_what_really_overlaps_goes_a_row_down() -> None:
    assert laid_out((0, 1000), (500, 1500), (600, 700), (1200, 1300)) == [(0, 1000), (1, 1500), (0, 700), (0, 1300)]


def test_what_overlaps_by_rounding_is_cut() -> None:
    assert laid_out((0, 1000), (999, 2000)) == [(0, 999), (0, 2000)], "neighbours"
    assert laid_out((0, 1000), (400, 1001)) == [(0, 1000), (0, 1000)], "one in the other"
    assert laid_out((0, 1000), (990, 1000)) == [(0, 1000), (0, 1000)], "a short call at the end of its caller"


def test_a_pile_of_overlaps_is_bounded() -> None:
    many = [(1000 * n, 1_000_000 + 1000 * n) for n in range(MOST_LANES + 3)]
    assert [lane for lane, _ in laid_out(*many)] == [*range(MOST_LANES), -1, -1, -1]
