"""What is drawn where: lanes, rows, ends, ways and counters, against traces whose every nanosecond is known."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import made_trace
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_trace import START, Run, made, made_killed
from oracle_trace import rows_of, trace_of, write_process

from minidl.tracefile import events as ev
from minidl.tracefile.events import EVENTS
from minidl.tracefile.reader import Trace, read_trace
from minidl.tracefile.watched import Ended
from minidl.views.chrome import to_chrome
from minidl.views.layout import LaneKind
from minidl.views.scene import BAR, EDGE, Fate, Scene, alarm, caption, per_pixel, scene_of

RECORDINGS = Path(__file__).parents[2] / "traces"
PINNED = {"batches": 12, "pin": True}


def drawn_of(path: Path, columns: str, *rows: tuple[int, ...], **same: int) -> Scene:
    """The scene of one loader process with these events."""
    return scene_of(trace_of(path, rows_of(columns, *rows, **same), loader=1))


def bars_of(drawn: Scene, title: str, name: str | None = None) -> np.ndarray:
    lane = [lane.title for lane in drawn.lanes].index(title)
    mine = drawn.bars[drawn.bars["lane"] == lane]
    return mine if name is None else mine[np.array(names_of(mine)) == name]


def names_of(bars: np.ndarray) -> list[str]:
    return [EVENTS[int(code)].name for code in bars["code"]]


def rows_in(drawn: Scene, title: str) -> dict[str, int]:
    """Each kind of step in the lane, and the row that it is in."""
    bars = bars_of(drawn, title)
    return dict(zip(names_of(bars), bars["row"].tolist(), strict=True))


# --- Lanes and rows ---------------------------------------------------------------------------------------------------
def test_a_lane_for_each_actor_in_reading_order(tmp_path: Path) -> None:
    drawn = scene_of(made(tmp_path, **PINNED))
    assert [lane.title for lane in drawn.lanes] == [
        "epochs", "consumer", "loader", "queue feeders", "pin thread", "worker 0", "feeder 0", "worker 1", "feeder 1",
    ]  # fmt: skip
    edges = [edge for lane in drawn.lanes for edge in (lane.top, lane.bottom)]
    assert edges == sorted(edges)


def test_with_slabs_there_is_no_feeder_and_each_writes_in_its_own_lane(tmp_path: Path) -> None:
    drawn = scene_of(made(tmp_path, **made_trace.SLABS))
    assert [lane.title for lane in drawn.lanes] == ["epochs", "consumer", "loader", "worker 0", "worker 1"]
    assert len(bars_of(drawn, "worker 1", "result_write")) == 6
    assert len(bars_of(drawn, "loader", "index_write")) == 12


def test_each_span_is_one_bar_in_its_actors_lane(healthy: Trace) -> None:
    drawn, spans = scene_of(healthy), healthy.spans()
    of_loader = {"next": 12, "sampler_next": 12, "result_get": 12, "result_rebuild": 12, "worker_start": 2,
                 "shutdown": 1, "join": 2}  # fmt: skip
    of_worker = {"index_get": 6, "fetch": 6, "sample": 24, "collate": 6}
    of_feeder = {"result_pickle": 6, "result_write": 6}
    assert {lane.title: Counter(names_of(bars_of(drawn, lane.title))) for lane in drawn.lanes} == {
        "epochs": {"epoch": 1}, "consumer": {"consumer": 12}, "loader": of_loader, "queue feeders": {"index_write": 12},
        "worker 0": of_worker, "feeder 0": of_feeder, "worker 1": of_worker, "feeder 1": of_feeder,
    }  # fmt: skip
    assert sorted(drawn.bars["span"].tolist()) == list(range(len(spans)))
    for name in ("begin", "end"):
        np.testing.assert_array_equal(drawn.bars[name], spans[name][drawn.bars["span"]] - START)
    assert (drawn.begin, drawn.end) == (0, int(healthy.events["time"][-1]) - START)


def test_what_happens_inside_a_step_lies_a_row_deeper(healthy: Trace) -> None:
    drawn = scene_of(healthy)
    assert rows_in(drawn, "worker 0") == {"index_get": 0, "fetch": 0, "sample": 1, "collate": 1}
    assert rows_in(drawn, "loader") == {
        "worker_start": 0, "next": 0, "sampler_next": 1, "result_get": 1, "result_rebuild": 2, "shutdown": 0, "join": 1,
    }  # fmt: skip
    assert rows_in(drawn, "queue feeders") == {"index_write": 1}  # a row for each worker; the last one seen is 1
    assert [len(lane.heights) for lane in drawn.lanes] == [1, 1, 3, 2, 2, 1, 2, 1]


def test_without_workers_everything_is_in_the_loaders_lane(tmp_path: Path) -> None:
    steps = [ev.NEXT[0], *ev.SAMPLER_NEXT, ev.FETCH[0], *ev.SAMPLE, *ev.COLLATE, ev.FETCH[1], ev.NEXT[1]]
    drawn = drawn_of(tmp_path, "code", *((code,) for code in steps), task=0)
    assert [lane.title for lane in drawn.lanes] == ["loader"]
    assert rows_in(drawn, "loader") == {"next": 0, "sampler_next": 1, "fetch": 1, "sample": 2, "collate": 2}


@pytest.mark.parametrize("run", [made_trace.HEALTHY, made_trace.HUNG, {"batches": 9, "epochs": 3, "workers": 3}])
def test_bars_of_a_row_never_overlap(tmp_path: Path, run: dict[str, Any]) -> None:
    bars = scene_of(made(tmp_path, **run)).bars
    beside = (bars["lane"][1:] == bars["lane"][:-1]) & (bars["row"][1:] == bars["row"][:-1])
    assert beside.sum() > 100
    assert (bars["begin"][1:] >= bars["end"][:-1])[beside].all()


def test_the_loaders_feeders_are_told_apart_by_queue(tmp_path: Path) -> None:
    writes = [(code, worker, 7 + worker) for worker in (2, 0) for code in ev.INDEX_WRITE]
    drawn = drawn_of(tmp_path, "code worker tid", *writes, *((code, -1, 6) for code in ev.RESULT_WRITE))
    assert [lane.kind for lane in drawn.lanes] == [LaneKind.QUEUE_FEEDERS]
    assert drawn.bars[["row", "worker"]].tolist() == [(0, -1), (1, 0), (2, 2)]


def epochs(*loaders: tuple[int, int, int]) -> list[dict[str, int]]:
    """An epoch with one `next` for each (loader, begin, end)."""
    codes = ((0, ev.EPOCH[0]), (1, ev.NEXT[0]), (-1, ev.NEXT[1]), (0, ev.EPOCH[1]))
    steps = [((end if n > 1 else begin) + by, code, loader)
             for loader, begin, end in loaders for n, (by, code) in enumerate(codes)]  # fmt: skip
    return rows_of("time code loader", *sorted(steps, key=lambda step: step[0]))


@pytest.mark.parametrize(
    ("loaders", "slots"),
    [
        ([(1, 10, 20), (2, 30, 40), (3, 50, 60)], ["iterators 1, 2, 3"]),
        ([(1, 10, 60), (2, 20, 30), (3, 40, 50)], ["iterator 1", "iterators 2, 3"]),
    ],
    ids=["one after the other", "at the same time"],
)
def test_only_iterators_that_follow_each_other_share_lanes(
    tmp_path: Path, loaders: list[tuple[int, int, int]], slots: list[str]
) -> None:
    drawn = scene_of(trace_of(tmp_path, epochs(*loaders)))
    assert [slot.title for slot in drawn.slots] == slots
    lanes = [(title, slot) for slot in range(len(slots)) for title in ("epochs", "loader")]
    assert [(lane.title, lane.slot) for lane in drawn.lanes] == lanes


def test_a_fork_servers_workers_belong_to_their_loader(tmp_path: Path) -> None:
    """Their parent is the fork server, which is in no trace."""
    worker = rows_of("code", *((code,) for code in ev.FETCH), time=15, task=0, worker=0)
    write_process(tmp_path, worker, pid=200, role="worker", worker=0, loader=1, ppid=99)
    drawn = drawn_of(tmp_path, "time code task worker", (10, ev.INDEX_PUT, 0, 0))
    assert [slot.title for slot in drawn.slots] == ["iterator 1"]
    assert stops(drawn, 0) == ["index_put", "fetch"]


def test_what_is_outside_of_all_loaders_is_of_none(tmp_path: Path) -> None:
    outside = rows_of("time code", (12, ev.COMPUTE[0]), (18, ev.COMPUTE[1]), loader=0)
    trace = trace_of(tmp_path, [*epochs((1, 10, 20)), *outside])
    assert {slot.title for slot in scene_of(trace).slots} == {"iterator 1", "no iterator"}


def test_iterators_of_two_processes_share_nothing(tmp_path: Path) -> None:
    write_process(tmp_path, epochs((1, 10, 20)), pid=100, role="loader", loader=1)
    trace = trace_of(tmp_path, epochs((2, 30, 40)), pid=200, loader=2)
    assert [slot.title for slot in scene_of(trace).slots] == ["iterator 1", "iterator 2"]


def test_two_programs_loaders_of_the_same_number_are_two(tmp_path: Path) -> None:
    drawn = scene_of(made(tmp_path, Run(batches=4), Run(batches=4, first_pid=5000)))
    assert Counter(lane.slot for lane in drawn.lanes) == {0: 8, 1: 8}
    assert Counter(drawn.batches["group"].tolist()) == {0: 4, 1: 4}


def test_only_the_workers_that_are_asked_for(healthy: Trace) -> None:
    drawn = scene_of(healthy, workers=[1])
    assert [lane.title for lane in drawn.lanes][-2:] == ["worker 1", "feeder 1"]
    assert set(drawn.bars["lane"].tolist()) == set(range(len(drawn.lanes))) == set(range(6))
    assert set(bars_of(drawn, "worker 1", "fetch")["worker"].tolist()) == {1}
    with pytest.raises(ValueError, match=r"workers=\[7\]: the trace has \[0, 1\]"):
        scene_of(healthy, workers=[1, 7])


def test_an_empty_trace_is_an_empty_scene(tmp_path: Path) -> None:
    drawn = scene_of(trace_of(tmp_path, []))
    assert (drawn.lanes, len(drawn.bars), len(drawn.marks), drawn.counters, drawn.height) == ((), 0, 0, (), 0)
    assert drawn.begin < drawn.end


# --- How bars end -----------------------------------------------------------------------------------------------------
def test_what_did_not_end_reaches_the_edge(hung: Trace) -> None:
    drawn = scene_of(hung)
    last = int(hung.events["time"][-1]) - START
    assert drawn.end == last + round(last * EDGE)
    open_ = drawn.bars[drawn.bars["fate"] == Fate.OPEN]
    assert set(open_["end"].tolist()) == {drawn.end}
    assert set(open_["known"].tolist()) == {last}, "what is drawn beyond the last event is in no number"
    said = {(drawn.lanes[bar["lane"]].title, caption(drawn, bar)[0]) for bar in open_}
    assert said == {
        ("epochs", "epoch 0"), ("loader", "next"), ("loader", "wait for task 9"), ("worker 1", "fetch 9"),
        ("worker 1", "sample 38"), ("worker 0", "idle"),
    }  # fmt: skip


@pytest.mark.parametrize("arrives", [True, False])
def test_a_write_whose_result_has_arrived_has_ended(arrives: bool, tmp_path: Path) -> None:
    """A worker that is told to end may do so before its feeder thread can say that the last write is over."""
    trace = made(tmp_path / "t", batches=12)
    rows = trace.events
    writes = rows[rows["code"] == ev.RESULT_WRITE[1]]
    last = writes[np.argmax(writes["time"])]
    gets = (rows["code"] == ev.RESULT_GET[1]) & (rows["task"] == last["task"]) & (rows["x"] == ev.Message.RESULT)
    lost = (rows["code"] == ev.RESULT_WRITE[1]) & (rows["time"] == last["time"])
    trace.events = rows[~(lost | (gets & (not arrives)))]
    drawn = scene_of(trace)
    (bar,) = drawn.bars[(drawn.bars["code"] == ev.RESULT_WRITE[0]) & (drawn.bars["task"] == last["task"])]
    assert Fate(bar["fate"]) is (Fate.LOST if arrives else Fate.OPEN)
    gets = trace.events["time"][(trace.events["code"] == ev.RESULT_GET[1]) & (trace.events["task"] == last["task"])]
    assert bar["end"] <= gets.max(initial=drawn.end + trace.start) - trace.start


def test_what_a_dead_worker_had_open_ends_with_its_last_sign_of_life(tmp_path: Path) -> None:
    worker = rows_of("time code task worker", (10, ev.FETCH[0], 0, 0))
    write_process(tmp_path, worker, pid=200, role="worker", worker=0, loader=1, ppid=100)
    found = (30, ev.FOUND_DEAD, 0, ev.Actor.WORKER, 200, -9)
    loader = (5, ev.NEXT[0], -1, 0, 0, 0), found, (90, ev.NEXT[1], -1, 0, 0, 0)
    drawn = drawn_of(tmp_path, "time code worker x y z", *loader)
    (bar,) = bars_of(drawn, "worker 0")
    assert (bar["begin"], bar["end"], bar["known"], bar["fate"]) == (5, 6, 5, Fate.OPEN)  # drawn wide enough to see
    (mark,) = drawn.marks
    assert (alarm(drawn, mark), mark["weak"]) == ("found dead worker 0", True)
    (death,) = drawn.deaths
    assert (drawn.lanes[death.lane].title, death.time) == ("worker 0", 5)
    assert death.words == "killed by SIGKILL; last sign of life"
    assert drawn.culprit == drawn.bars.tolist().index(bar.item())


AROUND = (5, ev.NEXT[0], -1, 0, 0), (9, ev.NEXT[1], -1, 0, 0)


@pytest.mark.parametrize(
    ("code", "said"), [(-9, "killed by SIGKILL"), (-99, "killed by signal 99"), (3, "exit code 3")]
)
def test_a_worker_that_did_not_leave_by_itself_is_an_alarm(tmp_path: Path, code: int, said: str) -> None:
    gone = (10, ev.WORKER_GONE, 0, 200, 0), (11, ev.WORKER_GONE, 1, 201, code)
    drawn = drawn_of(tmp_path, "time code worker x y", *AROUND, *gone)
    assert drawn.marks["alarm"].tolist() == [False, True]
    assert alarm(drawn, drawn.marks[1]) == f"worker 1 gone: {said}"


@pytest.mark.parametrize("before", [ev.TERMINATE, ev.FOUND_DEAD])
def test_a_death_is_one_alarm(tmp_path: Path, before: int) -> None:
    gone = (11, ev.WORKER_GONE, 1, 201, -15), (12, ev.WORKER_GONE, 2, 202, -15)
    drawn = drawn_of(tmp_path, "time code worker x y", *AROUND, (10, before, 1, 0, 0), *gone)
    assert drawn.marks["alarm"].tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("needed", "came", "said"),
    [
        ((3, 1), (4, 0, ev.Message.RESULT), ("wait for task 3", "for t3")),
        ((3, 1), (-1, -1, ev.Message.EMPTY), ("wait for task 3", "for t3")),
        ((-1, -1), (4, 0, ev.Message.RESULT), ("wait", "")),  # the pin thread takes what comes
    ],
    ids=["another", "nothing", "any"],
)
def test_a_wait_says_which_task_is_needed_whatever_comes(
    tmp_path: Path, needed: tuple[int, int], came: tuple[int, int, int], said: tuple[str, str]
) -> None:
    waits = (6, ev.RESULT_GET[0], *needed, 0), (8, ev.RESULT_GET[1], *came)
    steps = (5, ev.NEXT[0], 3, -1, 0), *waits, (9, ev.NEXT[1], -1, -1, 0)
    drawn = drawn_of(tmp_path, "time code task worker x", *steps)
    assert [caption(drawn, bar) for bar in bars_of(drawn, "loader")] == [("next 3", "t3"), said]


def test_a_lost_end_is_not_a_hang(tmp_path: Path) -> None:
    codes = [ev.FETCH[0], *ev.SAMPLE, ev.SAMPLE[0], *ev.COLLATE, ev.FETCH[1], ev.FETCH[0]]
    events = rows_of("time code", *((10 * n, code) for n, code in enumerate(codes, 1)), task=0, worker=0)
    drawn = scene_of(trace_of(tmp_path, events, pid=200, role="worker", worker=0, loader=1))
    sample = bars_of(drawn, "worker 0", "sample")
    assert sample["fate"].tolist() == [Fate.ENDED, Fate.LOST]
    assert sample["end"].tolist() == [20, 60]  # the second: with the fetch around it
    assert bars_of(drawn, "worker 0", "fetch")["fate"].tolist() == [Fate.ENDED, Fate.OPEN]


def test_what_ran_on_when_the_recording_ended_is_not_a_hang(tmp_path: Path) -> None:
    drawn = scene_of(trace_of(tmp_path, [{"code": ev.CONSUMER[0]}], lines=[{"kind": "trace_end"}]))
    assert drawn.bars["fate"].tolist() == [Fate.UNSEEN]


def test_what_an_iterator_left_open_ends_where_the_next_takes_over(tmp_path: Path) -> None:
    events = [e for e in epochs((1, 10, 20), (2, 30, 40)) if not (e["loader"] == 1 and e["code"] == ev.NEXT[1])]
    drawn = scene_of(trace_of(tmp_path, events))
    first = bars_of(drawn, "loader")[0]
    assert (first["end"], first["fate"]) == (20, Fate.LOST)  # 30 - 10: times count from the first event


def test_a_simulated_pin_says_so(tmp_path: Path) -> None:
    drawn = scene_of(made(tmp_path, **PINNED, simulated=True))
    np.testing.assert_array_equal(drawn.bars["simulated"], drawn.bars["code"] == ev.PIN[0])
    assert drawn.bars["simulated"].any()


# --- Batches ----------------------------------------------------------------------------------------------------------
WAY = ["index_put", "index_write", "fetch", "result_pickle", "result_write", "result_rebuild", "yield"]


def stops(drawn: Scene, batch: int) -> list[str]:
    return [EVENTS[int(code)].name for code in drawn.stops["code"][drawn.stops["batch"] == batch]]


@pytest.mark.parametrize(
    ("run", "way"), [(made_trace.HEALTHY, WAY), (PINNED, [*WAY[:-1], "pin", "ready_get", "yield"])]
)
def test_each_batch_goes_its_way(tmp_path: Path, run: dict[str, Any], way: list[str]) -> None:
    drawn = scene_of(made(tmp_path, **run))
    assert [stops(drawn, batch) for batch in range(12)] == [way] * 12
    assert drawn.batches["task"].tolist() == list(range(12))
    assert not drawn.bars["simulated"].any()


def test_arrows_leave_at_a_steps_end_and_reach_the_next_ones_begin(healthy: Trace) -> None:
    drawn = scene_of(healthy)
    arrows = drawn.arrows(drawn.pick([3]))
    codes = (ev.INDEX_WRITE[0], ev.FETCH[0], ev.RESULT_PICKLE[0], ev.RESULT_WRITE[0], ev.RESULT_REBUILD[0])
    spans = healthy.spans()
    steps = [spans[(spans["code"] == code) & (spans["task"] == 3)][0] for code in codes]
    put, out = (int(rows["time"][rows["task"] == 3][0]) for rows in map(healthy.select, ("index_put", "yield")))
    reached = [*(step["begin"] for step in steps), out]
    left = [put, *(step["end"] for step in steps)]
    left[1] = min(left[1], reached[1])  # the worker had it before the feeder was back from the write
    assert (arrows["left"] + START).tolist() == left
    assert (arrows["reached"] + START).tolist() == reached
    way = ["loader", "queue feeders", "worker 1", "feeder 1", "feeder 1", "loader", "loader"]
    assert [drawn.lanes[lane].title for lane in arrows["from_lane"]] == way[:-1]
    assert [drawn.lanes[lane].title for lane in arrows["to_lane"]] == way[1:]


def test_an_arrow_never_points_back(tmp_path: Path) -> None:
    """A reader may have its message before its writer is back from the write."""
    write = rows_of("time code", (20, ev.RESULT_WRITE[0]), (50, ev.RESULT_WRITE[1]), task=0, worker=0, tid=9)
    write_process(tmp_path, write, pid=200, role="worker", worker=0, loader=1, ppid=100)
    steps = (10, ev.INDEX_PUT), (30, ev.RESULT_REBUILD[0]), (40, ev.RESULT_REBUILD[1])
    drawn = drawn_of(tmp_path, "time code", *steps, task=0, worker=0)
    assert drawn.arrows(drawn.pick([0]))[["left", "reached"]].tolist() == [(0, 10), (20, 20)]


def test_a_task_number_is_another_batch_in_each_epoch(tmp_path: Path) -> None:
    drawn = scene_of(made(tmp_path / "trace", Run(batches=5, epochs=3)))
    assert drawn.batches["epoch"].tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert drawn.pick([2]).tolist() == [2, 7, 12]
    assert drawn.pick([(1, 1, 2)]).tolist() == [7]
    mine = drawn.bars[drawn.bars["batch"] >= 0]
    put, out = (drawn.batches[name][mine["batch"]] for name in ("put", "yielded"))
    late = np.isin(mine["code"], [ev.CONSUMER[0], ev.NEXT[0], ev.SAMPLER_NEXT[0], ev.INDEX_GET[0], ev.RESULT_GET[0]])
    assert len(mine[~late]) > 100
    assert ((mine["begin"] >= put) & (mine["end"] <= out))[~late].all()
    assert (mine["begin"] < put)[mine["code"] == ev.SAMPLER_NEXT[0]].all()  # asked for, and then sent
    assert (drawn.batches["task"][mine["batch"]] == mine["task"]).all()


def test_a_batch_that_is_not_there_is_refused(healthy: Trace) -> None:
    with pytest.raises(ValueError, match=r"no batch 12: it has tasks 0 to 11"):
        scene_of(healthy).pick([12])
    with pytest.raises(ValueError, match=r"no batch \(1, 1, 0\)"):
        scene_of(healthy).pick([(1, 1, 0)])
    assert scene_of(healthy).pick([]).tolist() == []


def test_a_hung_batchs_way_stops_where_it_hangs(hung: Trace) -> None:
    drawn = scene_of(hung)
    assert stops(drawn, 9) == ["index_put", "index_write", "fetch"]
    assert drawn.batches["yielded"][9] == -1


# --- Counters ---------------------------------------------------------------------------------------------------------
EXPORTED = {"outstanding": "tasks", "reorder buffer": "reorder buffer", "in flight": "in flight"}
"""Our counter's name -> the Chrome export's, which derives its own."""


@pytest.mark.parametrize(
    "run", [made_trace.HEALTHY, made_trace.HUNG, PINNED, {"batches": 9, "epochs": 3, "workers": 3}]
)
def test_counters_are_the_exports(tmp_path: Path, run: dict[str, Any]) -> None:
    trace = made(tmp_path, **run)
    exported: dict[str, list[tuple[int, int]]] = {}
    for e in to_chrome(trace)["traceEvents"]:
        if e["ph"] == "C":
            exported.setdefault(e["name"], []).append((round(e["ts"] * 1000), *e["args"].values()))
    counters = {c.name: list(zip(c.times.tolist(), c.values.tolist(), strict=True)) for c in scene_of(trace).counters}
    theirs = {ours: exported[name] for ours, name in EXPORTED.items()}
    assert counters == {name: steps for name, steps in theirs.items() if any(value for _, value in steps)}, (
        "a counter that is always 0 is not drawn"
    )


def outstanding(path: Path, told: list[tuple[int, int, int]], *others: tuple[int, ...]) -> Any:
    """The counter of these events of a loader, (code, x, y) every 10 ns; others: (time, tid, code, x)."""
    events = [{"time": 10 * n, "code": code, "x": x, "y": y} for n, (code, x, y) in enumerate(told, 1)]
    drawn = scene_of(trace_of(path, [*events, *rows_of("time tid code x", *others)], loader=1))
    return next(counter for counter in drawn.counters if counter.name == "outstanding")


ASSIGNED = [(ev.EPOCH[0], 0, 0), (ev.TASK_ASSIGNED, 1, 1), (ev.TASK_ASSIGNED, 2, 2), (ev.TASK_ASSIGNED, 3, 3)]


def test_out_of_order_too_a_yielded_task_is_outstanding_no_more(tmp_path: Path) -> None:
    """Task 0 is slow: 1, 2 and 3 overtake it, and from 2 on the sampler has no more to tell the count by."""
    told = [*ASSIGNED, (ev.TASK_ASSIGNED, 4, 3), *((ev.YIELD, 0, n) for n in (1, 2, 3))]
    counter = outstanding(tmp_path, [*told, (ev.RCVD_ADVANCE, 1, 0), (ev.YIELD, 0, 4)])
    assert counter.values.tolist() == [0, 1, 2, 3, 3, 2, 1, 0]
    assert counter.times.tolist() == [0, 10, 20, 30, 40, 60, 70, 80]


@pytest.mark.parametrize("pinned", [False, True])
def test_out_of_order_the_first_yield_counts_where_all_was_sent_before(tmp_path: Path, pinned: bool) -> None:
    """Tasks 1 and 2 overtake 0; that the loader passes over 1 is told before 2 comes, and says nothing of 2."""
    got = (ev.READY_GET[1] if pinned else ev.RESULT_GET[1], ev.Message.RESULT, 0)
    told = [*ASSIGNED, (ev.TASK_ASSIGNED, 4, 4), got, (ev.YIELD, 0, 1), got, (ev.RCVD_ADVANCE, 1, 2), (ev.YIELD, 0, 2)]
    told += [(ev.RCVD_ADVANCE, 3, 2), got, (ev.YIELD, 0, 3), (got[0], ev.Message.EMPTY, 0), got]
    told += [(ev.RCVD_ADVANCE, 4, 0), (ev.YIELD, 0, 4)]
    of_pin_thread = [(10 * n + 5, 9, ev.RESULT_GET[1], ev.Message.RESULT) for n in range(16 * pinned)]
    counter = outstanding(tmp_path, told, *of_pin_thread)  # the pin thread's gets are not the loader's
    assert counter.values.tolist() == [0, 1, 2, 3, 4, 3, 2, 2, 1, 0]


def test_a_window_begins_with_the_counters_value_there(healthy: Trace) -> None:
    whole = {c.name: c for c in scene_of(healthy).counters}["outstanding"]
    at = int(whole.times[len(whole.times) // 2]) + 500
    part = {c.name: c for c in scene_of(healthy, since=at / 1e9).counters}["outstanding"]
    assert part.values[0] == whole.values[np.searchsorted(whole.times, at) - 1]
    assert part.times[0] < at < part.times[1]


# --- The window -------------------------------------------------------------------------------------------------------
def test_a_window_keeps_what_it_touches(healthy: Trace) -> None:
    whole = scene_of(healthy)
    begin, end = 2_000_000, 3_000_000
    part = scene_of(healthy, since=begin / 1e9, until=end / 1e9)
    touches = (whole.bars["begin"] <= end) & (whole.bars["end"] >= begin)
    assert 0 < touches.sum() < len(whole.bars)
    np.testing.assert_array_equal(part.bars, whole.bars[touches])
    assert part.lanes == whole.lanes
    assert ((part.marks["time"] >= begin) & (part.marks["time"] <= end)).all()


@pytest.mark.parametrize("window", [
    {"since": 0.2, "until": 0.1}, {"since": 9.0}, {"until": -1.0}, {"since": 9.0, "until": 10.0}, {"until": 0.0},
    {"since": float("nan")}, {"until": float("inf")}, {"since": float("-inf")},
], ids=str)  # fmt: skip
def test_a_window_outside_the_trace_is_refused(healthy: Trace, window: dict[str, float]) -> None:
    asked = ", ".join(f"{name}={second} s" for name, second in window.items())
    why = f"{asked}: no part of the trace is in this window; the trace goes from 0"
    with pytest.raises(ValueError, match=re.escape(why)):
        scene_of(healthy, **window)


# --- Paint and pixels -------------------------------------------------------------------------------------------------
@st.composite
def some_bars(draw: st.DrawFn) -> np.ndarray:
    begins = draw(st.lists(st.integers(0, 9_000), min_size=1, max_size=60))
    bars = np.zeros(len(begins), BAR)
    bars["begin"] = begins
    bars["end"] = bars["begin"] + draw(st.lists(st.integers(0, 90), min_size=len(begins), max_size=len(begins)))
    for name, values in (("lane", 2), ("row", 2), ("code", 3)):
        bars[name] = draw(st.lists(st.integers(0, values), min_size=len(begins), max_size=len(begins)))
    return bars


@given(some_bars(), st.integers(10, 1000))
def test_narrow_bars_are_counted_and_their_time_kept(bars: np.ndarray, pixels: int) -> None:
    wide, columns = per_pixel(bars, 0, 10_000, pixels)
    size = 10_000 / pixels
    took = bars["end"] - bars["begin"]
    np.testing.assert_array_equal(wide, bars[took >= size])
    where = ["lane", "row", "code"]
    for key in np.unique(bars[where]):
        mine, theirs = took[(bars[where] == key) & (took < size)], columns[columns[where] == key]
        assert theirs["bars"].sum() == len(mine)
        if (theirs["share"] < 1).all():
            assert theirs["share"].sum() * size == pytest.approx(mine.sum())
        assert len(set(theirs["pixel"].tolist())) == len(theirs)


def test_a_bar_that_did_not_end_is_never_narrow(hung: Trace) -> None:
    drawn = scene_of(hung)
    wide, _ = per_pixel(drawn.bars, 0, drawn.end * 1000, 100)
    assert (wide["fate"] == Fate.OPEN).sum() == (drawn.bars["fate"] == Fate.OPEN).sum() > 0


def test_a_window_without_the_step_that_the_headline_is_about_has_no_culprit(tmp_path: Path) -> None:
    """Nor another step of the same thread in its place."""
    trace = made(tmp_path, batches=40, workers=2, step=10_000, cost=lambda task: 30_000_000 if task == 30 else 900_000)
    assert scene_of(trace).culprit >= 0
    first = float(trace.select("yield")["time"][10] - trace.events["time"][0]) / 1e9
    assert scene_of(trace, until=first).culprit == -1


# --- What the headline blames -----------------------------------------------------------------------------------------
LONG_HANG = made_trace.HUNG | {"poll": 5_000_000_000}


def lane_named(drawn: Scene, row: tuple[int, int]) -> tuple[str, int]:
    return drawn.lanes[row[0]].title, row[1]


def test_a_step_that_did_not_end_is_framed_and_the_wait_points_at_it(tmp_path: Path) -> None:
    drawn = scene_of(made(tmp_path, **LONG_HANG))
    framed, cause = drawn.framed, drawn.cause
    assert (framed.words, framed.alone) == ("sample 38: did not end", True)
    assert [lane_named(drawn, row) for row in framed.rows] == [("worker 1", 1)]
    assert EVENTS[int(drawn.bars["code"][drawn.waiter])].name == "result_get"
    assert lane_named(drawn, (cause.from_lane, cause.from_row)) == ("loader", 1)
    assert (cause.to_lane, cause.to_row) == framed.rows[0]
    (wait,) = (bar for bar in bars_of(drawn, "loader", "result_get") if bar["fate"])
    assert (cause.begin, cause.end) == (int(wait["begin"]), drawn.last), "both are there, and nothing beyond the end"
    at = cause.at(drawn.begin, drawn.end)
    assert cause.begin < at[0] == at[1] < cause.end
    assert cause.at(0, cause.begin) is None, "the window ends before it"


def test_a_process_that_stands_still_is_framed_as_a_whole_since_its_last_event(tmp_path: Path) -> None:
    trace = made(tmp_path, **LONG_HANG | {"stuck": ev.INDEX_GET[0]})
    drawn = scene_of(trace)
    framed, cause = drawn.framed, drawn.cause
    assert [lane_named(drawn, row) for row in framed.rows] == [("worker 1", -1)]
    assert framed.begin == int(trace.events["time"][trace.events["pid"] == 1101].max()) - trace.start
    assert framed.words.startswith("stopped?")
    assert not framed.alone, "the bar in it has its own name"
    assert (cause.to_lane, cause.to_row) == framed.rows[0]


def test_a_picture_of_a_hang_lasts_until_a_watchdog_saw_its_processes_end(tmp_path: Path) -> None:
    """A kill of them all: the watchdog sees one after the other end, seconds after the last event."""
    trace = made(tmp_path, **LONG_HANG)
    pids = [process.pid for process in trace.processes]
    killed = trace.last + 3_000_000_000
    trace.watched.ended = [Ended(pid, killed + place * 100_000, -9) for place, pid in enumerate(pids)]
    drawn = scene_of(trace)
    assert drawn.last == killed + (len(pids) - 1) * 100_000 - trace.start
    waits = drawn.bars[np.isin(drawn.bars["code"], [ev.NEXT[0], ev.SAMPLE[0]]) & (drawn.bars["fate"] == Fate.OPEN)]
    assert waits["end"].tolist() == [drawn.end, drawn.end], "a moment apart is no difference"
    assert set(waits["known"].tolist()) <= {one.at - trace.start for one in trace.watched.ended}
    focus = drawn.headline.focus
    assert focus.end == killed, "the title counts up to then"


def test_steps_alike_are_framed_in_every_worker(tmp_path: Path) -> None:
    drawn = scene_of(made(tmp_path, batches=200, step=10_000, workers=3))
    framed, cause = drawn.framed, drawn.cause
    names = [lane_named(drawn, row)[0] for row in framed.rows]
    assert names == ["worker 0", "worker 1", "worker 2"]
    code = int(drawn.bars["code"][framed.bar])
    like = drawn.bars[drawn.bars["code"] == code]
    assert (framed.begin, framed.end) == (like["begin"].min(), like["end"].max())
    assert framed.words.startswith(f"{EVENTS[code].name}: {len(like)} times, each about ")
    bar = drawn.bars[framed.bar]
    assert (cause.to_lane, cause.to_row) == (bar["lane"], bar["row"]), "one of them, as an example"
    assert bar["begin"] <= cause.begin < cause.end <= bar["end"]


@pytest.mark.heavy
@pytest.mark.parametrize("name", [
    "starved-gpu", "workers-0", "workers-4", "respawn", "iterable-uneven-shards", "head-of-line-in-order",
    "transport-upstream",
])  # fmt: skip
def test_the_frame_is_about_the_steps_that_the_title_names(name: str) -> None:
    drawn, step = scene_of(read_trace(RECORDINGS / f"{name}.minidl")), "collate" if "transport" in name else "sample"
    assert step in drawn.headline.title
    assert drawn.framed is not None
    assert drawn.framed.words.startswith(step)


def test_what_did_not_end_comes_with_what_is_to_blame_first_and_without_idle_workers(tmp_path: Path) -> None:
    drawn = scene_of(made(tmp_path / "a", **LONG_HANG))
    names = [EVENTS[int(code)].name for code in drawn.bars["code"][drawn.unended()]]
    assert names == ["sample", "fetch", "result_get", "next", "epoch"]
    stopped = scene_of(made(tmp_path / "b", **LONG_HANG | {"stuck": ev.INDEX_GET[0]}))
    first, *rest = stopped.unended()
    assert stopped.lanes[stopped.bars["lane"][first]].title == "worker 1"
    assert ev.INDEX_GET[0] not in stopped.bars["code"][rest], "the other worker is only idle"


@pytest.mark.parametrize(("idle", "words", "row"), [(False, "sample 620: did not end", 1), (True, "idle", 0)])
def test_who_waits_for_a_worker_that_died_points_at_its_lane(tmp_path: Path, idle: bool, words: str, row: int) -> None:
    recorded = RECORDINGS / "worker-sigkilled.minidl"
    drawn = scene_of(made_killed(tmp_path / "t", stuck=ev.INDEX_GET[0]) if idle else read_trace(recorded))
    framed, cause, (death,) = drawn.framed, drawn.cause, drawn.deaths
    its = [bar for bar in drawn.unended() if drawn.bars[bar]["lane"] == death.lane]
    assert (framed.words, bool(its)) == (words, not idle), "a wait for a task is no step that did not end"
    assert lane_named(drawn, (cause.to_lane, cause.to_row)) == ("worker 1", row)
    bar, wait = drawn.bars[framed.bar], drawn.bars[drawn.waiter]
    assert death.time <= bar["end"] < wait["begin"], "the loader asked for its task when it was dead"
    assert cause.at(drawn.begin, drawn.end) == (wait["begin"], bar["end"]), "the arrow slants to the bar's end"
    assert cause.at(int(bar["end"]) + 1, drawn.end) is None, "the bar is not in the window"


def test_a_picture_has_one_unit_of_time(tmp_path: Path) -> None:
    """That of its end: moments in the title and on the axis use it. How long a step took has a unit of its own."""
    short, long = scene_of(made(tmp_path / "a", **made_trace.HUNG)), scene_of(made(tmp_path / "b", **LONG_HANG))
    assert (short.unit.name, long.unit.name) == ("ms", "s")
    assert "since 6.2 ms" in short.headline.title
    late = scene_of(
        made(tmp_path / "c", batches=60, step=1_000_000, cost=lambda t: 2_000_000_000 if t == 9 else 500_000)
    )
    assert late.unit.name == "s"
    assert late.framed.words.endswith(": 375 ms")
