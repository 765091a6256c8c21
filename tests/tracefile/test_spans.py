"""Begins and ends, and the rows in which spans nest."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from oracle_trace import rows_of, trace_of

from minidl.tracefile import events as ev
from minidl.tracefile.attachments import SLICE
from minidl.tracefile.reader import Trace
from minidl.tracefile.spans import MOST_LANES, ROUNDING_NS, SPAN, nest, pairs, stack


def test_spans(tmp_path: Path) -> None:
    rows = rows_of(
        "code time tid task worker x y", (ev.RESULT_GET[0], 1, 4, 3, 1, 500, 0), (ev.INDEX_GET[0], 2, 9, -1, -1, 0, 0),
        (ev.INDEX_GET[1], 4, 9, 7, 2, 1, 8), (ev.RESULT_GET[1], 6, 4, 5, 0, 2, 1), (ev.FETCH[0], 8, 4, 7, -1, 4, 0),
    )  # fmt: skip
    spans = trace_of(tmp_path, rows).spans()
    assert spans.dtype == SPAN
    columns = ["code", "begin", "end", "tid", "task", "worker", "end_task", "end_worker", "bx", "ex", "ey"]
    assert spans[columns].tolist() == [
        (ev.RESULT_GET[0], 1, 6, 4, 3, 1, 5, 0, 500, 2, 1),
        (ev.INDEX_GET[0], 2, 4, 9, 7, 2, 7, 2, 0, 1, 8),
        (ev.FETCH[0], 8, -1, 4, 7, -1, -1, -1, 4, 0, 0),
    ]


def test_cpu_times_stand_in_the_ends(tmp_path: Path) -> None:
    """In another thread's end it is none; no CPU time is longer than its span; a write tells that of the pickling,
    and the end of a get how long the rebuilding had no CPU."""
    rows = rows_of(
        "code time tid task x y z",
        (ev.FETCH[0], 10, 1, 0, 0, 0, 0), (ev.SAMPLE[0], 20, 1, 0, 0, 0, 0), (ev.SAMPLE[1], 50, 1, 0, 0, 0, 31),
        (ev.FETCH[1], 110, 1, 0, 2, 60, 70), (ev.CONSUMER[0], 111, 1, 0, 0, 0, 0), (ev.CONSUMER[1], 120, 2, 0, 5, 0, 0),
        (ev.RESULT_PICKLE[0], 200, 9, 1, 0, 0, 0), (ev.RESULT_PICKLE[1], 240, 9, 1, 7, 1, 33),
        (ev.RESULT_PICKLE[0], 251, 9, 2, 0, 0, 0), (ev.RESULT_WRITE[0], 250, 9, 1, 7, 21, 0),
        (ev.RESULT_PICKLE[1], 260, 9, 2, 0, 0, 0),  # it could not be pickled
        (ev.RESULT_WRITE[0], 270, 9, -1, 7, 5, 0), (ev.RESULT_GET[0], 300, 1, -1, 0, 0, 0),
        (ev.RESULT_REBUILD[0], 310, 1, 3, 0, 0, 0), (ev.RESULT_REBUILD[1], 390, 1, 3, 0, 0, 2),
        (ev.RESULT_GET[1], 391, 1, 3, 2, 0, 77),
    )  # fmt: skip
    spans = trace_of(tmp_path, rows).spans()
    assert spans[["code", "cpu", "cpu_wait"]].tolist() == [
        (ev.FETCH[0], 60, 40), (ev.SAMPLE[0], 30, 0), (ev.CONSUMER[0], 0, 0), (ev.RESULT_PICKLE[0], 21, 0),
        (ev.RESULT_WRITE[0], 0, 0), (ev.RESULT_PICKLE[0], 0, 0), (ev.RESULT_WRITE[0], 0, 0),
        (ev.RESULT_GET[0], 0, 0), (ev.RESULT_REBUILD[0], 2, 77),
    ]  # fmt: skip


def test_an_epoch_may_be_ended_by_another_thread(tmp_path: Path) -> None:
    steps = (ev.EPOCH[0], 1), (ev.FETCH[0], 1), (ev.FETCH[1], 2), (ev.EPOCH[1], 2)
    epoch, fetch = trace_of(tmp_path, rows_of("code tid", *steps)).spans()
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
        rows = [(*step, n) for n, step in enumerate(steps, 1)]
        trace = trace_of(Path(directory), rows_of("code tid loader y", *rows), role="other")
    spans = pairs(trace.events)
    assert spans[["by", "ey"]].tolist() == paired_by_hand(trace)
    assert ((spans["end"] == -1) == (spans["ey"] == 0)).all()


# --- Nesting ----------------------------------------------------------------------------------------------------------
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(-1, 60)), max_size=14))
@example([(0, 0, 5), (0, 0, -1), (0, 0, 9)])  # of spans that begin together, the longer is around the other
def test_nested_spans_end_inside_the_span_around_them(raw: list[tuple[int, int, int]]) -> None:
    spans = np.zeros(len(raw), SPAN)
    spans["begin"] = [begin for _, begin, _ in raw]
    spans["end"] = [-1 if length < 0 else begin + length for _, begin, length in raw]
    track = np.array([track for track, _, _ in raw], np.int64)
    until, around = nest(spans, track)
    assert ((until >= spans["begin"]) | (until == -1)).all()
    drawn = list(zip(track.tolist(), spans["begin"].tolist(), [e if e >= 0 else 10**9 for e in until], strict=True))
    for (a, begin, end), (b, inner, inner_end) in itertools.permutations(drawn, 2):
        assert a != b or not begin < inner < end < inner_end, "they overlap in part"
    for at, outer in enumerate(around.tolist()):
        assert until[at] == spans["end"][at] or (outer >= 0 and until[at] == until[outer])
        if outer >= 0:
            assert drawn[outer][0] == drawn[at][0]
            assert drawn[outer][1] <= drawn[at][1] < drawn[outer][2] >= drawn[at][2]


def laid_out(*values: tuple[int, int]) -> list[tuple[int, int]]:
    """Lane and drawn end of slices on one track."""
    lane, end = stack(np.array([(*value, 0, 0) for value in values], SLICE))
    return list(zip(lane.tolist(), end.tolist(), strict=True))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 400), st.integers(0, 400)), max_size=14))
def test_in_one_row_slices_nest_or_stand_apart(raw: list[tuple[int, int, int]]) -> None:
    rows = np.array([(begin, begin + length, track, 0) for track, begin, length in raw], SLICE)
    lane, end = stack(rows)
    drawn = list(zip(rows["track"], lane, rows["begin"], end, strict=True))
    for (*row, begin, until), (*other, inner, inner_end) in itertools.permutations(drawn, 2):
        assert row != other or not begin < inner < until < inner_end
    assert (lane >= 0).all()
    assert (end >= rows["begin"]).all()
    assert ((rows["end"] - end >= 0) & (rows["end"] - end <= 2 * ROUNDING_NS)).all()


@pytest.mark.parametrize(
    ("values", "laid"),
    [
        ([(0, 1000), (500, 1500), (600, 700), (1200, 1300)], [(0, 1000), (1, 1500), (0, 700), (0, 1300)]),
        ([(0, 1000), (999, 2000)], [(0, 999), (0, 2000)]),
        ([(0, 1000), (400, 1001)], [(0, 1000), (0, 1000)]),
        ([(0, 1000), (990, 1000)], [(0, 1000), (0, 1000)]),
    ],
    ids=["a row down", "neighbours", "one in the other", "a short call at the end of its caller"],
)
def test_what_really_overlaps_goes_a_row_down_and_what_does_by_rounding_is_cut(
    values: list[tuple[int, int]], laid: list[tuple[int, int]]
) -> None:
    assert laid_out(*values) == laid


def test_a_pile_of_overlaps_is_bounded() -> None:
    many = [(1000 * n, 1_000_000 + 1000 * n) for n in range(MOST_LANES + 3)]
    assert [lane for lane, _ in laid_out(*many)] == [*range(MOST_LANES), -1, -1, -1]
