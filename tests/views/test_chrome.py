"""The Chrome trace document: exact times, proper nesting, open spans, flows, lanes, counters, names."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import made_trace
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_trace import MIB, START, Run, made
from oracle_trace import write_process

from minidl.hang.headline import headline
from minidl.tracefile import events as ev
from minidl.tracefile import watched
from minidl.tracefile.attachments import SLICE, Name, SliceTrack, arrows, chunk, closing, description
from minidl.tracefile.events import EVENTS, Event, Message, Phase
from minidl.tracefile.reader import Trace, read_trace
from minidl.tracefile.spans import SPAN, nest
from minidl.tracefile.watched import Sample, Vitals
from minidl.views.attached import ATTACHED_IDS
from minidl.views.chrome import to_chrome, write_chrome
from minidl.views.colours import paint
from minidl.views.export import ANCHOR_NS, COUNTERS, PSEUDO_TID, SAMPLED, Export, LaneRole

Json = dict[str, Any]
WAY = ["index_put", "write", "fetch", "pickle", "write", "rebuild", "yield"]
PINNED_WAY = [*WAY[:-1], "pin", "arrived", "yield"]


def ns(us: float) -> int:
    return round(us * 1000)


def named(document: Json, name: str, phase: str | None = None) -> list[Json]:
    """The events with this name, whatever their numbers, and with this phase."""
    return [e for e in document["traceEvents"] if plain(e["name"]) == name and phase in (None, e["ph"])]


def plain(name: str) -> str:
    """A slice's name without its number."""
    return re.sub(r"( for task| worker)? \d+(?= \(|$)", "", name)


def tracks(document: Json) -> dict[tuple[int, int], list[tuple[int, int, str]]]:
    """(pid, tid) -> its slices as (begin, end, name) in ns; an open one ends at 10**18."""
    out = defaultdict(list)
    for e in document["traceEvents"]:
        if e["ph"] in "XB":
            begin = ns(e["ts"])
            out[e["pid"], e["tid"]].append(
                (begin, begin + ns(e["dur"]) if e["ph"] == "X" else 10**18, plain(e["name"]))
            )
    return out


def partly_overlapping(slices: list[tuple[int, int, Any]]) -> list[tuple[Any, Any]]:
    return [(a, b) for a in slices for b in slices if a[0] < b[0] < a[1] < b[1]]


def test_times_are_written_from_whole_nanoseconds(tmp_path: Path) -> None:
    """2**53 ns after boot, a float of microseconds would be off by more than a nanosecond."""
    far = 2**53 + 1
    events = [
        {"code": ev.FETCH[0], "time": 7},
        {"code": ev.FETCH[0], "time": far},
        {"code": ev.FETCH[1], "time": far + 1001},
    ]
    write_process(tmp_path, events, role="worker", worker=0)
    text = write_chrome(read_trace(tmp_path), tmp_path / "out.json").read_text()
    assert f'"ts":{(far - 7) // 1000}.{(far - 7) % 1000:03d},"dur":1.001' in text


def test_every_slice_nests_in_the_one_around_it(tmp_path: Path) -> None:
    for number, run in enumerate((made_trace.HEALTHY, made_trace.HUNG, {"batches": 6, "pin": True, "epochs": 2})):
        document = to_chrome(made(tmp_path / str(number), Run(**run)))
        for track, slices in tracks(document).items():
            assert partly_overlapping(slices) == [], track


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(-1, 30)), max_size=12))
def test_whatever_the_spans_are_they_are_drawn_nested(raw: list[tuple[int, int, int]]) -> None:
    spans = np.zeros(len(raw), SPAN)
    spans["begin"] = [begin for _, begin, _ in raw]
    spans["end"] = [-1 if length < 0 else begin + length for _, begin, length in raw]
    track = np.array([t for t, _, _ in raw], np.int64)
    until, parent = nest(spans, track)
    for lane in set(track.tolist()):
        mine = track == lane
        drawn = [10**9 if e < 0 else e for e in until[mine].tolist()]
        slices = [(b, e, i) for i, (b, e) in enumerate(zip(spans["begin"][mine].tolist(), drawn, strict=True))]
        assert partly_overlapping(slices) == []
    for child, around in enumerate(parent.tolist()):
        if around >= 0:
            assert track[child] == track[around]
            assert spans["begin"][around] <= spans["begin"][child]
            assert until[around] == -1 or spans["begin"][child] < until[around] >= until[child]
    assert (until[spans["end"] >= 0] <= spans["end"][spans["end"] >= 0]).all()
    assert ((until >= spans["begin"]) | (until == -1)).all()


def test_of_two_spans_that_begin_together_the_longer_is_around_the_other() -> None:
    spans = np.zeros(3, SPAN)
    spans["end"] = [5, -1, 9]
    until, around = nest(spans, np.zeros(3, np.int64))
    assert (until.tolist(), around.tolist()) == ([5, -1, 9], [2, -1, 1])


def test_an_epoch_that_ends_inside_a_step_does_not_cut_it(tmp_path: Path) -> None:
    steps = [(0, ev.EPOCH[0]), (50, ev.SHUTDOWN[0]), (60, ev.EPOCH[1]), (90, ev.SHUTDOWN[1])]
    write_process(tmp_path, [{"time": 1 + t, "code": c} for t, c in steps], role="loader")
    (shutdown,) = named(to_chrome(read_trace(tmp_path)), "shutdown", "X")
    assert ns(shutdown["dur"]) == 40


def test_an_open_span_is_a_begin_without_an_end_and_says_so(hung: Trace) -> None:
    document = to_chrome(hung)
    begins = {(e["name"], e["args"].get("task")) for e in document["traceEvents"] if e["ph"] == "B"}
    assert begins == {
        ("fetch 9 (did not end)", 9),
        ("sample 38 (did not end)", 9),
        ("next (did not end)", None),
        ("wait for task 9 (did not end)", None),
        ("idle (no task) (did not end)", None),
    }
    assert not [e for e in document["traceEvents"] if e["ph"] == "E"]
    (sample,) = named(document, "sample (did not end)")
    assert sample["args"]["index"] == 9 * 4 + 2


def test_where_only_the_end_is_lost_the_span_around_it_bounds_it(tmp_path: Path) -> None:
    codes = [(10, ev.FETCH[0]), (20, ev.COLLATE[0]), (50, ev.FETCH[1]), (60, ev.INDEX_GET[0])]
    write_process(tmp_path, [{"time": t, "code": c, "task": 1, "worker": 0, "x": 4} for t, c in codes])
    document = to_chrome(read_trace(tmp_path))
    (collate,) = named(document, "collate (its end is not in the trace)", "X")
    assert (ns(collate["ts"]), ns(collate["dur"])) == (10, 30)
    assert collate["args"]["count [samples]"] == 4


def test_arguments_are_in_words_with_units_and_say_what_the_event_stands_for(healthy: Trace) -> None:
    document = to_chrome(healthy)
    fetch = named(document, "fetch")[0]["args"]
    event = EVENTS[ev.FETCH[0]]
    assert (fetch["task"], fetch["worker"], fetch["count [samples]"], fetch["outcome"]) == (0, 0, 4, "data")
    assert {k: fetch[k] for k in ("meaning", "ours", "upstream", "article")} == {
        "meaning": event.meaning, "ours": event.ours, "upstream": event.upstream, "article": event.article,
    }  # fmt: skip
    alloc = named(document, "shm_alloc")[0]
    assert (alloc["ph"], alloc["s"], alloc["args"]["bytes [B]"]) == ("i", "t", MIB)
    assert (alloc["args"]["place"], alloc["args"]["reason"]) == ("collate", "collate_shortcut")


def test_a_slice_tells_its_cpu_time(tmp_path: Path, healthy: Trace) -> None:
    """In ms, and not the event's own field beside it; a trace without it says nothing."""
    trace = made(tmp_path / "t", batches=4, cpu=lambda took: (took // 4, took // 8))
    (span, *_) = (row for row in trace.spans() if row["code"] == ev.FETCH[0])
    args = named(to_chrome(trace), "fetch")[0]["args"]
    assert (args["cpu_ms"], args["cpu_wait_ms"]) == (span["cpu"] / 1e6, span["cpu_wait"] / 1e6)
    assert not [key for key in args if key.startswith("cpu") and not key.endswith("_ms")]
    assert not [e for e in to_chrome(healthy)["traceEvents"] if "cpu_ms" in e.get("args", {})]


def test_a_wait_tells_the_task_it_needs_from_the_one_that_came(hung: Trace) -> None:
    waits = [e["args"] for e in named(to_chrome(hung), "wait", "X")]
    early = [
        (w["awaited task"], w["task"]) for w in waits if w["message"] == "result" and w["awaited task"] != w["task"]
    ]
    assert early == [(2, 3), (9, 10), (9, 12)]
    assert not [w for w in waits if w["message"] == "empty"], "polls that continue one wait are one wait"


def test_texts_survive_whatever_is_in_them(tmp_path: Path) -> None:
    texts = ['a "b" \\ c', "line\nline", "100 % %d %s", "данные 数据", "</script>\x00"]
    events = [{"code": ev.TASK_ERROR, "task": 0, "worker": 0, "z": n} for n in range(1, len(texts) + 1)]
    events.append({"code": ev.DONE_EVENT_SET, "x": 99})  # no such done event: a later version's?
    lines = [{"kind": "string", "id": n, "text": text} for n, text in enumerate(texts, 1)]
    lines.append({"kind": "thread", "tid": 101, "name": 'odd "name" %s'})
    write_process(tmp_path, events, lines=lines, role="worker", worker=0, loader=1)
    trace = read_trace(tmp_path)
    document = to_chrome(trace)
    assert "данные 数据" in write_chrome(trace, tmp_path / "out.json").read_text("utf-8"), "the viewer reads no \\u"
    assert [e["args"]["text"] for e in named(document, "task_error")] == texts
    assert named(document, "thread_name")[0]["args"]["name"] == "worker 0"
    assert named(document, "thread_name")[1]["args"]["name"] == 'odd "name" %s'
    assert named(document, "done_event_set")[0]["args"]["which"] == 99


def test_processes_and_threads_have_names_and_an_order(healthy: Trace) -> None:
    document = to_chrome(healthy)
    assert {e["pid"]: e["args"]["name"] for e in named(document, "process_name")} == {
        1000: "loader", 1100: "worker 0", 1101: "worker 1",
    }  # fmt: skip
    order = {e["pid"]: e["args"]["sort_index"] for e in named(document, "process_sort_index")}
    assert order[1000] < order[1100] < order[1101]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in named(document, "thread_name")}
    assert threads[1100, 1150] == "feeder"
    assert [threads[1000, 1001 + n] for n in range(2)] == ["feeder to worker 0", "feeder to worker 1"]
    assert {e["tid"] for e in named(document, "consumer")} == {1}
    assert [threads[key] for key in ((1000, 1), (1000, 1000), (1100, 1100))] == ["consumer", "loader", "worker 0"]


def test_loaders_come_before_all_workers_and_workers_in_order(tmp_path: Path) -> None:
    roles = [(31, "worker", 1, 1), (32, "worker", 0, 2), (33, "worker", 0, 1), (34, "loader", -1, 2)]
    for pid, role, worker, loader in roles:
        write_process(tmp_path, [{"code": ev.NEXT[0]}], pid=pid, start_ns=pid, role=role, worker=worker, loader=loader)
    trace = read_trace(tmp_path)
    lanes = [lane for lane in Export(trace).lanes if lane.role in (LaneRole.LOADER, LaneRole.WORKER)]
    assert [trace.processes[lane.process].pid for lane in lanes] == [34, 33, 31, 32]


@pytest.mark.parametrize(("simulated", "suffix"), [(False, ""), (True, " (simulated)")])
def test_what_is_simulated_says_so(tmp_path: Path, simulated: bool, suffix: str) -> None:
    document = to_chrome(made(tmp_path, Run(batches=3, pin=True, simulated=simulated)))
    names = Counter(plain(e["name"]) for e in document["traceEvents"] if e["name"].startswith("pin"))
    assert names == {f"pin{suffix}": 3, f"pin_start{suffix}": 1}


def test_two_processes_with_the_same_pid_stay_apart(tmp_path: Path) -> None:
    for start in (1, 50):
        events = [{"code": ev.FETCH[0], "time": start, "task": 0}, {"code": ev.FETCH[1], "time": start + 9, "task": 0}]
        write_process(tmp_path, events, pid=77, start_ns=start, role="worker", worker=0)
    assert {e["pid"] for e in named(to_chrome(read_trace(tmp_path)), "fetch")} == {77, PSEUDO_TID + 1}


def test_loaders_iterated_together_keep_their_own_lanes(tmp_path: Path) -> None:
    """`for a, b in zip(one, two)`: the two epochs, and the two training steps, overlap in part."""
    steps = [
        (0, ev.EPOCH[0], 1), (10, ev.EPOCH[0], 2), (20, ev.CONSUMER[0], 1), (30, ev.CONSUMER[0], 2),
        (40, ev.CONSUMER[1], 1), (50, ev.CONSUMER[1], 2), (60, ev.EPOCH[1], 1), (70, ev.EPOCH[1], 2),
    ]  # fmt: skip
    write_process(tmp_path, [{"time": 1 + t, "code": c, "loader": n} for t, c, n in steps], role="loader")
    document = to_chrome(read_trace(tmp_path))
    assert sorted((ns(e["ts"]), ns(e["dur"])) for e in named(document, "consumer")) == [(20, 20), (30, 20)]
    assert len({e["tid"] for e in named(document, "consumer")}) == 2
    threads = [(e["tid"], e["args"]["name"]) for e in named(document, "thread_name")]
    assert threads == [(1, "consumer"), (2, "consumer"), (100, "loader")]
    (second,) = {e["id2"]["local"] for e in document["traceEvents"] if e["name"] == "iterator 2: epoch"}
    assert [ns(e["ts"]) for e in document["traceEvents"] if e["ph"] in "be" and e["id2"]["local"] == second] == [10, 70]


def innermost(document: Json) -> Iterator[tuple[Json, str]]:
    """Each flow event with the name of the innermost slice of its thread that holds its time."""
    lanes = tracks(document)
    for e in document["traceEvents"]:
        if e["ph"] in "stf" and e["cat"] == "batch":
            at = ns(e["ts"])
            around = [s for s in lanes[e["pid"], e["tid"]] if s[0] <= at < max(s[1], s[0] + 1)]
            yield e, max(around)[2] if around else "nothing"


@pytest.mark.parametrize(("pin", "epochs", "way"), [(False, 1, WAY), (True, 2, PINNED_WAY)])
def test_each_batch_is_one_flow_through_the_processes(tmp_path: Path, pin: bool, epochs: int, way: list[str]) -> None:
    document = to_chrome(made(tmp_path, Run(batches=6, pin=pin, epochs=epochs)))
    flows: dict[int, list[tuple[float, str, str]]] = defaultdict(list)
    for event, name in innermost(document):
        assert (event["bp"], event["name"]) == ("e", "batch")
        flows[event["id"]].append((event["ts"], event["ph"], name))
    assert len(flows) == 6 * epochs
    for steps in flows.values():
        assert [name for _, _, name in sorted(steps)] == way
        assert "".join(phase for _, phase, _ in sorted(steps)) == "s" + "t" * (len(way) - 2) + "f"


def test_a_wait_has_arrows_from_the_fetch_and_the_slowest_sample_that_it_waited_for(tmp_path: Path) -> None:
    """Task 1 was there when it was asked for. An arrow ends in the step that has begun last."""
    steps = [
        (0, ev.INDEX_PUT, 0, 0), (1, ev.INDEX_PUT, 1, 0), (2, ev.NEXT[0], -1, 0), (3, ev.FETCH[0], 0, 9),
        (4, ev.SAMPLE[0], 0, 9), (5, ev.SAMPLE[1], 0, 9), (5, ev.SAMPLE[0], 0, 9), (30, ev.SAMPLE[1], 0, 9),
        (31, ev.FETCH[1], 0, 9), (32, ev.FETCH[0], 1, 9), (33, ev.FETCH[1], 1, 9), (40, ev.YIELD, 0, 0),
        (41, ev.NEXT[1], 0, 0), (50, ev.NEXT[0], -1, 0), (51, ev.YIELD, 1, 0), (52, ev.NEXT[1], 1, 0),
    ]  # fmt: skip
    events = [{"time": 1 + t, "code": c, "task": n, "worker": 0, "tid": 100 + thread} for t, c, n, thread in steps]
    write_process(tmp_path, events, role="loader")
    flows = [e for e in to_chrome(read_trace(tmp_path))["traceEvents"] if e.get("cat") == "cause"]
    assert [(e["ph"], e["id"], e["tid"], ns(e["ts"])) for e in flows] == [
        ("s", 0, 109, 3), ("f", 0, 100, 3), ("s", 1, 109, 5), ("f", 1, 100, 5),
    ]  # fmt: skip


def test_what_comes_before_its_put_belongs_to_no_batch(tmp_path: Path) -> None:
    """As where a ring has lost the put of an earlier epoch's task 1."""
    steps = [(0, ev.INDEX_PUT, 0), (10, ev.FETCH[0], 1), (20, ev.FETCH[1], 1), (30, ev.INDEX_PUT, 1),
             (40, ev.FETCH[0], 0), (50, ev.FETCH[1], 0)]  # fmt: skip
    write_process(tmp_path, [{"time": 1 + t, "code": c, "task": n, "worker": 0} for t, c, n in steps], role="loader")
    flows = [
        (e["ph"], ns(e["ts"]))
        for e in to_chrome(read_trace(tmp_path))["traceEvents"]
        if e["ph"] in "stf" and e["cat"] == "batch"
    ]
    assert flows == [("s", 0), ("f", 40)]


def test_the_flow_of_a_batch_that_hangs_ends_in_the_fetch_that_does(hung: Trace) -> None:
    ways = defaultdict(list)
    for event, name in innermost(to_chrome(hung)):
        ways[event["id"]].append(name)
    assert ["fetch (did not end)", "index_put", "write"] in [sorted(way) for way in ways.values()]


def test_anchors_are_short_and_end_before_the_next_event_of_their_thread(healthy: Trace) -> None:
    anchors = [e for name in ("index_put", "yield") for e in named(to_chrome(healthy), name, "X")]
    assert len(anchors) == 24
    main = np.sort(healthy.events["time"][healthy.events["tid"] == 1000]) - START
    for e in anchors:
        later = main[main > ns(e["ts"])]
        assert ns(e["dur"]) == min(ANCHOR_NS, (later[0] - ns(e["ts"])) // 2)


def test_a_batch_is_in_flight_from_its_put_to_its_yield(healthy: Trace) -> None:
    flights = named(to_chrome(healthy), "batch")
    begin = {e["id2"]["local"]: e for e in flights if e["ph"] == "b"}
    end = {e["id2"]["local"]: ns(e["ts"]) for e in flights if e["ph"] == "e"}
    puts, yields = healthy.select("index_put"), healthy.select("yield")
    assert [ns(e["ts"]) for e in begin.values()] == (puts["time"] - START).tolist()
    assert {begin[n]["args"]["task"]: at for n, at in end.items()} == {
        int(y["task"]): int(y["time"]) - START for y in yields
    }


def test_what_never_comes_back_is_in_flight_to_the_traces_end_and_says_so(hung: Trace) -> None:
    last = int(hung.events["time"][-1]) - START
    lost = [e for e in named(to_chrome(hung), "batch (did not end)") if e["ph"] in "be"]
    assert {(e["name"], ns(e["ts"])) for e in lost if e["ph"] == "e"} == {
        (f"batch {task} (did not end)", last) for task in (9, 10, 11, 12)
    }
    assert {e["args"]["ended by"] for e in lost if e["ph"] == "b"} == {"did not end"}


def test_batches_given_up_with_their_epoch_end_with_it(tmp_path: Path) -> None:
    steps = [(0, ev.EPOCH[0], -1), (10, ev.INDEX_PUT, 0), (20, ev.INDEX_PUT, 1), (30, ev.INDEX_PUT, 2),
             (40, ev.YIELD, 0), (50, ev.WORKER_EXHAUSTED, 1), (60, ev.EPOCH[1], -1)]  # fmt: skip
    write_process(tmp_path, [{"time": 1 + t, "code": c, "task": n, "worker": 0} for t, c, n in steps], role="loader")
    flights = named(to_chrome(read_trace(tmp_path)), "batch")
    how = {e["args"]["task"]: e["args"]["ended by"] for e in flights if e["ph"] == "b"}
    assert how == {0: "yield", 1: "worker_exhausted", 2: "given up: the epoch ended"}
    assert sorted(ns(e["ts"]) for e in flights if e["ph"] == "e") == [40, 50, 60]


def counter(document: Json, name: str, pid: int = 1000) -> list[tuple[int, int]]:
    """(ns, value) of the counter that the viewer would show under `name`."""
    found = []
    for e in document["traceEvents"]:
        if e["ph"] == "C" and e["pid"] == pid:
            ((unit, value),) = e["args"].items()
            if f"{e['name']} {unit}".strip() == name:
                found.append((ns(e["ts"]), value))
    return found


def at(steps: list[tuple[int, int]], time: int) -> int:
    return [value for t, value in steps if t <= time][-1]


def test_the_loaders_counters_follow_its_own_numbers(tmp_path: Path) -> None:
    trace = made(tmp_path, Run(batches=8, epochs=2))
    document = to_chrome(trace)
    epochs = trace.select("epoch", Phase.BEGIN)["time"] - START
    for name, event, field in (
        ("send_idx", "task_assigned", "x"), ("rcvd_idx", "rcvd_advance", "x"),
        ("tasks outstanding", "task_assigned", "y"), ("reorder buffer batches", "reorder_store", "y"),
    ):  # fmt: skip
        steps = counter(document, name)
        for row in trace.select(event):
            assert at(steps, row["time"] - START) == row[field], name
        for begin in epochs.tolist():
            assert at(steps, begin) == 0, name


def test_outstanding_counts_a_stored_batch_as_received(hung: Trace) -> None:
    steps = counter(to_chrome(hung), "tasks outstanding")
    assigned, received = hung.select("task_assigned")["time"], hung.select("result_get", Phase.END)
    received = received["time"][received["x"] == Message.RESULT]
    end = int(hung.events["time"][-1])
    assert at(steps, end - START) == len(assigned) - len(received) == 2


def test_bytes_that_the_feeder_copies_are_counted_once(tmp_path: Path) -> None:
    """Both its shm_alloc and the end of its result_pickle tell them."""
    steps = [
        (0, ev.EPOCH[0], ()), (10, ev.INDEX_PUT, ()), (20, ev.SHM_ALLOC, (7, ev.Place.COLLATE)),
        (30, ev.RESULT_PICKLE[0], ()), (40, ev.SHM_ALLOC, (500, ev.Place.FEEDER)),
        (50, ev.RESULT_PICKLE[1], (90, 1, 500)), (60, ev.YIELD, ()), (70, ev.SHM_ALLOC, (7, ev.Place.COLLATE)),
    ]  # fmt: skip
    events = [
        dict(zip("xyz", own, strict=False)) | {"time": 1 + t, "code": c, "task": 0, "worker": 0} for t, c, own in steps
    ]
    write_process(tmp_path, events, role="loader")
    steps_shown = counter(to_chrome(read_trace(tmp_path)), "in flight bytes", pid=100)
    assert steps_shown == [(20, 7), (50, 597), (60, 0)]


def test_queue_depths_of_a_worker(healthy: Trace) -> None:
    document = to_chrome(healthy)
    for pid in (1100, 1101):
        index, result = (counter(document, name, pid) for name in ("index queue tasks", "result queue batches"))
        assert max(v for _, v in index) == 2
        assert max(v for _, v in result) == 1
        assert (min(index)[1], index[-1][1], result[-1][1]) == (1, 0, 0)
        assert all(v >= 0 for _, v in index + result)


@pytest.mark.parametrize("run", [made_trace.HEALTHY, made_trace.HUNG])
def test_every_counter_is_documented(tmp_path: Path, run: dict[str, Any]) -> None:
    document = to_chrome(made(tmp_path, Run(**run)))
    shown = {f"{e['name']} {next(iter(e['args']))}".strip() for e in document["traceEvents"] if e["ph"] == "C"}
    assert shown == set(COUNTERS) == set(document["otherData"]["counters"])


def test_a_thread_that_writes_its_own_tasks_is_no_feeder(tmp_path: Path) -> None:
    """With slabs there are no feeder threads; the program may iterate in a thread of its own."""
    write = {"worker": 1, "task": 0, "tid": 7}
    events = [write | {"code": code} for code in (ev.INDEX_PUT, *ev.INDEX_WRITE)]
    thread: dict[str, object] = {"kind": "thread", "tid": 7, "name": "evaluation"}
    write_process(tmp_path, events, role="loader", loader=1, lines=[thread])
    document = to_chrome(read_trace(tmp_path))
    assert [e["args"]["name"] for e in named(document, "thread_name") if e["tid"] == 7] == ["evaluation"]


def test_what_a_watchdog_has_sampled_is_counted(tmp_path: Path) -> None:
    place = made_trace.write(tmp_path, Run(4))
    start = int(read_trace(place).events["time"][0])
    one = Vitals("S", 100, 2_000, 40, 9, 3)
    samples = [
        Sample(start - 1_000_000, {}, 600),  # before the first event: no time that can be drawn
        Sample(start + 1_000_000, {1000: one, 1100: one._replace(rss_kib=-1)}, 500),
        Sample(start + 3_000_000, {1000: one._replace(cpu_ms=101, rss_kib=2_500)}, 400),
    ]
    lines = [watched.description("0", 1000, 5), *map(watched.sample, samples)]
    (place / "watch-1-1.attachment.jsonl").write_bytes(b"".join(lines))
    document = to_chrome(read_trace(place))
    assert counter(document, "CPU percent", pid=1000) == [(3_000_000, 50)]
    assert counter(document, "memory KiB", pid=1000) == [(1_000_000, 2_000), (3_000_000, 2_500)]
    assert counter(document, "shared memory KiB", pid=1000) == [(1_000_000, 40), (3_000_000, 40)]
    assert counter(document, "descriptors open", pid=1100) == [(1_000_000, 9)]
    assert counter(document, "memory KiB", pid=1100) == [], "it could not be read"
    assert counter(document, "/dev/shm bytes free", pid=1000) == [(1_000_000, 500), (3_000_000, 400)]
    assert set(document["otherData"]["counters"]) == {*COUNTERS, *SAMPLED}


def shown_as(event: Event) -> str:
    """An event's name in the UI, without its number: the label that every view gives a kind of span."""
    label = paint(event.code).label if event.phase is Phase.BEGIN else event.name
    return "idle (no task)" if label == "idle" else label


def test_every_event_of_the_trace_is_in_the_document(hung: Trace) -> None:
    document = to_chrome(hung)
    shown = Counter(
        plain(e["name"]).removesuffix(" (did not end)") for e in document["traceEvents"] if e["ph"] in "XBib"
    )
    there = Counter(shown_as(EVENTS[int(c)]) for c in hung.events["code"] if EVENTS[int(c)].phase is not Phase.END)
    there["wait"] -= made_trace.HUNG["polls"]  # they continue one wait
    assert {name: count for name, count in shown.items() if name in there} == there
    last = max(ns(e["ts"] + e.get("dur", 0)) for e in document["traceEvents"] if "ts" in e)
    assert last == hung.events["time"][-1] - hung.events["time"][0], "the UI's trace ends before the run does"


def test_the_file_is_the_document_and_progress_reaches_the_end(healthy: Trace, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = write_chrome(healthy, tmp_path / "out.json", lambda done, of: seen.append((done, of)))
    assert json.loads(path.read_text(encoding="utf-8")) == to_chrome(healthy)
    assert seen == sorted(seen)
    assert seen[-1] == (len(healthy), len(healthy))


def test_the_document_says_where_it_comes_from_and_what_it_lacks(tmp_path: Path) -> None:
    trace = made(tmp_path, Run(batches=2))
    trace.problems.append("something is missing")
    facts = to_chrome(trace)["otherData"]
    assert facts["problems"] == ["something is missing"]
    assert facts["manifest"]["versions"]["torch"] == "2.13.0"
    assert facts["first_event_ns"] == START


def test_a_trace_without_events_is_an_empty_document(tmp_path: Path) -> None:
    write_process(tmp_path, [], role="loader")
    document = to_chrome(read_trace(tmp_path))
    assert {e["ph"] for e in document["traceEvents"]} == {"M"}


def test_a_loader_without_workers_has_no_flows_and_no_lane(tmp_path: Path) -> None:
    steps = [(0, ev.EPOCH[0]), (1, ev.NEXT[0]), (2, ev.FETCH[0]), (8, ev.FETCH[1]), (9, ev.YIELD), (10, ev.NEXT[1])]
    write_process(tmp_path, [{"time": 1 + t, "code": c, "task": 0} for t, c in steps], role="loader")
    document = to_chrome(read_trace(tmp_path))
    assert not [e for e in document["traceEvents"] if e["ph"] in "stf" or e["name"] == "batch in flight"]
    assert named(document, "fetch", "X")


# --- What other recorders saw -----------------------------------------------------------------------------------------
def attached(
    path: Path, kind: str, tracks: list[SliceTrack], rows: list[tuple[int, int, int, int]], tail: bytes = b""
) -> Trace:
    """A healthy made trace with an attachment; rows: begin and end since its first event, track, name."""
    made_trace.write(path, Run(**made_trace.HEALTHY))
    slices = np.array([(START + begin, START + end, track, name) for begin, end, track, name in rows], SLICE)
    names = [Name("f", "a.py:1"), Name('"</script>" \u202e %s', "b.py:2"), Name("g")]
    data = description(kind, "program", "1", tracks[0].pid, "", 0) + chunk(tracks, names, slices, {0: {"n": 5}}) + tail
    (path / f"{kind}-1.attachment.jsonl").write_bytes(data)
    return read_trace(path)


MAIN, FEEDER = SliceTrack(1100, 1100, "MainThread"), SliceTrack(1100, 1150, "QueueFeederThread")


def guests(document: Json, kind: str) -> list[Json]:
    return [e for e in document["traceEvents"] if e.get("cat") == kind and e["ph"] == "X"]


def test_functions_are_drawn_under_their_worker_to_the_nanosecond(tmp_path: Path) -> None:
    rows = [(1_000, 9_001, 0, 0), (2_000, 3_000, 0, 1), (2_000, 8_000, 1, 2)]
    document = to_chrome(attached(tmp_path, "functions", [MAIN, FEEDER], rows, closing()))
    drawn = guests(document, "functions")
    assert [(e["name"], ns(e["ts"]), ns(e["dur"])) for e in drawn] == [
        ("f", 1_000, 8_001), ('"</script>" \u202e %s', 2_000, 1_000), ("g", 2_000, 6_000),
    ]  # fmt: skip
    assert {e["pid"] for e in drawn} == {1100}
    assert [e["args"] for e in drawn] == [{"defined at": "a.py:1", "n": 5}, {"defined at": "b.py:2"}, {}]
    titles = {(e["pid"], e["tid"]): e["args"]["name"] for e in named(document, "thread_name")}
    assert [titles[e["pid"], e["tid"]] for e in drawn] == [
        "functions: MainThread", "functions: MainThread", "functions: QueueFeederThread",
    ]  # fmt: skip
    assert all(e["tid"] >= ATTACHED_IDS for e in drawn)
    assert document["otherData"]["attachments"]["functions-1.attachment.jsonl"]["kind"] == "functions"


def test_guests_share_no_track_with_the_loader_and_overlap_nothing(tmp_path: Path) -> None:
    rows = [(0, 5_000_000, 0, 0), (4_000_000, 6_000_000, 0, 0), (4_999_999, 5_500_000, 1, 0), (5_000, 5_000, 1, 1)]
    document = to_chrome(attached(tmp_path, "functions", [MAIN, MAIN._replace(tid=7)], rows, closing()))
    for track, slices in tracks(document).items():
        assert partly_overlapping(slices) == [], track
    titles = sorted(e["args"]["name"] for e in named(document, "thread_name") if e["tid"] >= ATTACHED_IDS)
    assert titles == ["functions: MainThread", "functions: MainThread", "functions: MainThread (2)"]
    kinds = {(e["pid"], e["tid"]): set() for e in document["traceEvents"] if e["ph"] == "X"}
    for e in document["traceEvents"]:
        if e["ph"] == "X":
            kinds[e["pid"], e["tid"]].add(e["cat"] == "functions")
    assert all(len(kind) == 1 for kind in kinds.values())


def test_the_batches_arrows_are_as_without_guests(tmp_path: Path, healthy: Trace) -> None:
    document = to_chrome(attached(tmp_path / "with", "functions", [MAIN], [(0, 9_000_000, 0, 0)], closing()))
    flows = [[e for e in d["traceEvents"] if e["ph"] in "stf"] for d in (to_chrome(healthy), document)]
    assert flows[0] == flows[1] != []


def test_kernels_stand_in_a_process_of_their_device_with_an_arrow_from_their_launch(tmp_path: Path) -> None:
    gpu = SliceTrack(0, 7, "stream 7", "GPU 0")
    rows = [(1_000, 2_000, 0, 0), (5_000, 9_000, 1, 1), (6_000, 10_000, 1, 2)]
    trace = attached(
        tmp_path, "profiler", [SliceTrack(1000, 1000, "thread 1000"), gpu], rows, arrows([(0, 1)]) + closing()
    )
    document = to_chrome(trace)
    call, kernel, second = guests(document, "profiler")
    assert call["pid"] == 1000
    assert kernel["pid"] == second["pid"] >= ATTACHED_IDS
    assert {e["args"]["name"] for e in named(document, "process_name") if e["pid"] == kernel["pid"]} == {
        "GPU 0 (profiler)"
    }
    flows = [e for e in document["traceEvents"] if e.get("cat") == "profiler" and e["ph"] in "sf"]
    assert [(e["ph"], e["pid"], e["tid"], e["ts"]) for e in flows] == [
        ("s", call["pid"], call["tid"], 1.0), ("f", kernel["pid"], kernel["tid"], 5.0),
    ]  # fmt: skip


def test_what_the_trace_did_not_see_begin_is_cut_or_left_out_and_said(tmp_path: Path) -> None:
    rows = [(-5_000, -1_000, 0, 0), (-2_000, 3_000, 0, 1), (0, 1_000, 0, 2)]
    document = to_chrome(attached(tmp_path, "profiler", [MAIN], rows, closing()))
    assert [(e["ts"], e["dur"]) for e in guests(document, "profiler")] == [(0, 3), (0, 1)]
    assert "profiler: 1 slices end before the first event and are not drawn" in document["otherData"]["problems"]


def test_a_guest_that_broke_off_says_so_where_it_did(tmp_path: Path) -> None:
    document = to_chrome(attached(tmp_path, "functions", [MAIN], [(1_000, 2_000, 0, 0), (500, 7_000, 0, 0)]))
    (lost,) = named(document, "functions lost")
    (track,) = {(e["pid"], e["tid"]) for e in guests(document, "functions")}
    assert (lost["ts"], lost["ph"], (lost["pid"], lost["tid"])) == (7, "i", track)
    assert "it ends with its last save" in lost["args"]["lacks"][0]
    assert any("it ends with its last save" in problem for problem in document["otherData"]["problems"])


def test_several_attachments_of_a_kind_are_drawn_as_one(tmp_path: Path) -> None:
    trace = attached(tmp_path, "functions", [MAIN], [(0, 100_000, 0, 0)], closing())
    first = tmp_path / "functions-1.attachment.jsonl"
    (tmp_path / "functions-2.attachment.jsonl").write_bytes(first.read_bytes())
    (tmp_path / "functions-3.attachment.jsonl").write_bytes(b"nothing")
    document = to_chrome(read_trace(trace.path))
    assert len(guests(document, "functions")) == 2
    assert len({e["tid"] for e in guests(document, "functions")}) == 1
    assert [e["args"] for e in guests(document, "functions")] == [{"defined at": "a.py:1", "n": 5}] * 2


def test_an_attachment_that_cannot_be_read_leaves_the_trace_as_it_is(tmp_path: Path, healthy: Trace) -> None:
    path = made_trace.write(tmp_path, Run(**made_trace.HEALTHY))
    (path / "functions-1.attachment.jsonl").write_bytes(b'{"attachment":1,"kind":5}\n[[[\n')
    document = to_chrome(read_trace(path))
    assert document["traceEvents"] == to_chrome(healthy)["traceEvents"]
    assert any("line 2 is damaged" in problem for problem in document["otherData"]["problems"])


def test_the_headline_is_a_note_on_the_lane_that_it_points_at(tmp_path: Path) -> None:
    trace = made(tmp_path / "t", Run(**made_trace.HUNG | {"poll": 5_000_000_000}))
    found, document = headline(trace), to_chrome(trace)
    (note,) = (e for e in document["traceEvents"] if e.get("cat") == "headline")
    assert note["name"] == found.title == document["otherData"]["headline"][0]
    assert note["args"]["next step"] == found.next_step
    assert (note["pid"], note["tid"]) == (1101, found.focus.tid)
    assert ns(note["ts"]) == found.focus.begin - START
    assert not [
        e for e in to_chrome(made(tmp_path / "fine", Run(batches=3)))["traceEvents"] if e.get("cat") == "headline"
    ]
