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
from made_trace import MIB, START, Run, made
from oracle_trace import rows_of, trace_of, write_process

from minidl.hang.headline import headline
from minidl.tracefile import events as ev
from minidl.tracefile.attachments import SLICE, Name, SliceTrack, arrows, chunk, closing, description
from minidl.tracefile.events import EVENTS, Event, Message, Phase
from minidl.tracefile.reader import Trace, read_trace
from minidl.tracefile.watched import Sample, Vitals, Watched
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
    events = rows_of("code time", (ev.FETCH[0], 7), (ev.FETCH[0], far), (ev.FETCH[1], far + 1001))
    text = write_chrome(trace_of(tmp_path, events), tmp_path / "out.json").read_text()
    assert f'"ts":{(far - 7) // 1000}.{(far - 7) % 1000:03d},"dur":1.001' in text


@pytest.mark.parametrize("run", [made_trace.HEALTHY, made_trace.HUNG, {"batches": 6, "pin": True, "epochs": 2}])
def test_every_slice_nests_in_the_one_around_it(tmp_path: Path, run: dict[str, Any]) -> None:
    for track, slices in tracks(to_chrome(made(tmp_path, **run))).items():
        assert partly_overlapping(slices) == [], track


def test_an_epoch_that_ends_inside_a_step_does_not_cut_it(tmp_path: Path) -> None:
    steps = rows_of("time code", (1, ev.EPOCH[0]), (51, ev.SHUTDOWN[0]), (61, ev.EPOCH[1]), (91, ev.SHUTDOWN[1]))
    (shutdown,) = named(to_chrome(trace_of(tmp_path, steps)), "shutdown", "X")
    assert ns(shutdown["dur"]) == 40


def test_an_open_span_is_a_begin_without_an_end(hung: Trace) -> None:
    document = to_chrome(hung)
    assert not [e for e in document["traceEvents"] if e["ph"] == "E"]
    (sample,) = named(document, "sample (did not end)", "B")
    assert (sample["name"], sample["args"]["index"]) == ("sample 38 (did not end)", 9 * 4 + 2)


def test_where_only_the_end_is_lost_the_span_around_it_bounds_it(tmp_path: Path) -> None:
    steps = (10, ev.FETCH[0]), (20, ev.COLLATE[0]), (50, ev.FETCH[1]), (60, ev.INDEX_GET[0])
    document = to_chrome(trace_of(tmp_path, rows_of("time code", *steps, task=1, worker=0, x=4)))
    (collate,) = named(document, "collate (its end is not in the trace)", "X")
    assert (ns(collate["ts"]), ns(collate["dur"]), collate["args"]["count [samples]"]) == (10, 30, 4)


def test_arguments_are_in_words_with_units_and_say_what_the_event_stands_for(healthy: Trace) -> None:
    document, event = to_chrome(healthy), EVENTS[ev.FETCH[0]]
    fetch, alloc = named(document, "fetch")[0]["args"], named(document, "shm_alloc")[0]
    assert (fetch["task"], fetch["worker"], fetch["count [samples]"], fetch["outcome"]) == (0, 0, 4, "data")
    for name in ("meaning", "ours", "upstream", "article"):
        assert fetch[name] == getattr(event, name)
    assert (alloc["ph"], alloc["s"], alloc["args"]["bytes [B]"]) == ("i", "t", MIB)
    assert (alloc["args"]["place"], alloc["args"]["reason"]) == ("collate", "collate_shortcut")


def test_a_slice_tells_its_cpu_time(tmp_path: Path, healthy: Trace) -> None:
    """In ms, and not the event's own field beside it; a trace without it says nothing."""
    trace = made(tmp_path / "t", batches=4, cpu=lambda took: (took // 4, took // 8))
    (span, *_) = (row for row in trace.spans() if row["code"] == ev.FETCH[0])
    args = named(to_chrome(trace), "fetch")[0]["args"]
    told = {key: value for key, value in args.items() if key.startswith("cpu")}
    assert told == {"cpu_ms": span["cpu"] / 1e6, "cpu_wait_ms": span["cpu_wait"] / 1e6}
    assert not [e for e in to_chrome(healthy)["traceEvents"] if "cpu_ms" in e.get("args", {})]


def test_a_wait_tells_the_task_it_needs_from_the_one_that_came(hung: Trace) -> None:
    waits = [e["args"] for e in named(to_chrome(hung), "wait", "X")]
    others = [w for w in waits if w["message"] == "result" and w["awaited task"] != w["task"]]
    assert [(w["awaited task"], w["task"]) for w in others] == [(2, 3), (9, 10), (9, 12)]
    assert not [w for w in waits if w["message"] == "empty"], "polls that continue one wait are one wait"


def test_texts_survive_whatever_is_in_them(tmp_path: Path) -> None:
    texts = ['a "b" \\ c', "line\nline", "100 % %d %s", "данные 数据", "</script>\x00"]
    events = rows_of("z", *((n,) for n in range(1, len(texts) + 1)), code=ev.TASK_ERROR, task=0, worker=0)
    events.append({"code": ev.DONE_EVENT_SET, "x": 99})  # no such done event: a later version's?
    lines = [{"kind": "string", "id": n, "text": text} for n, text in enumerate(texts, 1)]
    lines.append({"kind": "thread", "tid": 101, "name": 'odd "name" %s'})
    trace = trace_of(tmp_path, events, lines=lines, role="worker", worker=0, loader=1)
    document = to_chrome(trace)
    assert "данные 数据" in write_chrome(trace, tmp_path / "out.json").read_text("utf-8"), "the viewer reads no \\u"
    assert [e["args"]["text"] for e in named(document, "task_error")] == texts
    assert [e["args"]["name"] for e in named(document, "thread_name")] == ["worker 0", 'odd "name" %s']
    assert named(document, "done_event_set")[0]["args"]["which"] == 99


def test_processes_and_threads_have_names_and_an_order(healthy: Trace) -> None:
    document = to_chrome(healthy)
    processes = {e["pid"]: e["args"]["name"] for e in named(document, "process_name")}
    assert processes == {1000: "loader", 1100: "worker 0", 1101: "worker 1"}
    order = {e["pid"]: e["args"]["sort_index"] for e in named(document, "process_sort_index")}
    assert order[1000] < order[1100] < order[1101]
    assert {(e["pid"], e["tid"]): e["args"]["name"] for e in named(document, "thread_name")} == {
        (1000, 1): "consumer", (1000, 1000): "loader", (1000, 1001): "feeder to worker 0",
        (1000, 1002): "feeder to worker 1", (1100, 1100): "worker 0", (1100, 1150): "feeder",
        (1101, 1101): "worker 1", (1101, 1151): "feeder",
    }  # fmt: skip
    assert {e["tid"] for e in named(document, "consumer")} == {1}


def test_loaders_come_before_all_workers_and_workers_in_order(tmp_path: Path) -> None:
    roles = [(31, "worker", 1, 1), (32, "worker", 0, 2), (33, "worker", 0, 1), (34, "loader", -1, 2)]
    for pid, role, worker, loader in roles:
        write_process(tmp_path, [{"code": ev.NEXT[0]}], pid=pid, start_ns=pid, role=role, worker=worker, loader=loader)
    trace = read_trace(tmp_path)
    lanes = [lane for lane in Export(trace).lanes if lane.role in (LaneRole.LOADER, LaneRole.WORKER)]
    assert [trace.processes[lane.process].pid for lane in lanes] == [34, 33, 31, 32]


def test_what_is_simulated_says_so(tmp_path: Path) -> None:
    document = to_chrome(made(tmp_path, batches=3, pin=True, simulated=True))
    names = Counter(plain(e["name"]) for e in document["traceEvents"] if e["name"].startswith("pin"))
    assert names == {"pin (simulated)": 3, "pin_start (simulated)": 1}


def test_two_processes_with_the_same_pid_stay_apart(tmp_path: Path) -> None:
    for start in (1, 50):
        events = rows_of("time code", (start, ev.FETCH[0]), (start + 9, ev.FETCH[1]), task=0)
        write_process(tmp_path, events, pid=77, start_ns=start, role="worker", worker=0)
    assert {e["pid"] for e in named(to_chrome(read_trace(tmp_path)), "fetch")} == {77, PSEUDO_TID + 1}


def test_loaders_iterated_together_keep_their_own_lanes(tmp_path: Path) -> None:
    """`for a, b in zip(one, two)`: the two epochs, and the two training steps, overlap in part."""
    steps = rows_of(
        "time code loader",
        (1, ev.EPOCH[0], 1), (11, ev.EPOCH[0], 2), (21, ev.CONSUMER[0], 1), (31, ev.CONSUMER[0], 2),
        (41, ev.CONSUMER[1], 1), (51, ev.CONSUMER[1], 2), (61, ev.EPOCH[1], 1), (71, ev.EPOCH[1], 2),
    )  # fmt: skip
    document = to_chrome(trace_of(tmp_path, steps))
    assert sorted((ns(e["ts"]), ns(e["dur"])) for e in named(document, "consumer")) == [(20, 20), (30, 20)]
    assert {e["tid"] for e in named(document, "consumer")} == {1, 2}
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
    steps = rows_of(
        "time code task tid",
        (1, ev.INDEX_PUT, 0, 100), (2, ev.INDEX_PUT, 1, 100), (3, ev.NEXT[0], -1, 100), (4, ev.FETCH[0], 0, 109),
        (5, ev.SAMPLE[0], 0, 109), (6, ev.SAMPLE[1], 0, 109), (6, ev.SAMPLE[0], 0, 109), (31, ev.SAMPLE[1], 0, 109),
        (32, ev.FETCH[1], 0, 109), (33, ev.FETCH[0], 1, 109), (34, ev.FETCH[1], 1, 109), (41, ev.YIELD, 0, 100),
        (42, ev.NEXT[1], 0, 100), (51, ev.NEXT[0], -1, 100), (52, ev.YIELD, 1, 100), (53, ev.NEXT[1], 1, 100),
        worker=0,
    )  # fmt: skip
    flows = [e for e in to_chrome(trace_of(tmp_path, steps))["traceEvents"] if e.get("cat") == "cause"]
    assert [(e["ph"], e["id"], e["tid"], ns(e["ts"])) for e in flows] == [
        ("s", 0, 109, 3), ("f", 0, 100, 3), ("s", 1, 109, 5), ("f", 1, 100, 5),
    ]  # fmt: skip


def test_what_comes_before_its_put_belongs_to_no_batch(tmp_path: Path) -> None:
    """As where a ring has lost the put of an earlier epoch's task 1."""
    steps = rows_of(
        "time code task", (1, ev.INDEX_PUT, 0), (11, ev.FETCH[0], 1), (21, ev.FETCH[1], 1), (31, ev.INDEX_PUT, 1),
        (41, ev.FETCH[0], 0), (51, ev.FETCH[1], 0), worker=0,
    )  # fmt: skip
    flows = [event for event, _ in innermost(to_chrome(trace_of(tmp_path, steps)))]
    assert [(e["ph"], ns(e["ts"])) for e in flows] == [("s", 0), ("f", 40)]


def test_anchors_are_short_and_end_before_the_next_event_of_their_thread(healthy: Trace) -> None:
    anchors = [e for name in ("index_put", "yield") for e in named(to_chrome(healthy), name, "X")]
    assert len(anchors) == 24
    main = np.sort(healthy.events["time"][healthy.events["tid"] == 1000]) - START
    for e in anchors:
        later = main[main > ns(e["ts"])]
        assert ns(e["dur"]) == min(ANCHOR_NS, (later[0] - ns(e["ts"])) // 2)


def test_a_batch_is_in_flight_from_its_put_to_its_yield(healthy: Trace) -> None:
    flights = named(to_chrome(healthy), "batch")
    tasks = {e["id2"]["local"]: e["args"]["task"] for e in flights if e["ph"] == "b"}
    puts, yields = healthy.select("index_put"), healthy.select("yield")
    for rows, phase in ((puts, "b"), (yields, "e")):
        times = dict(zip(rows["task"].tolist(), (rows["time"] - START).tolist(), strict=True))
        assert {tasks[e["id2"]["local"]]: ns(e["ts"]) for e in flights if e["ph"] == phase} == times


def test_what_never_comes_back_is_in_flight_to_the_traces_end_and_says_so(hung: Trace) -> None:
    last = int(hung.events["time"][-1]) - START
    lost = [e for e in named(to_chrome(hung), "batch (did not end)") if e["ph"] in "be"]
    assert {(e["name"], ns(e["ts"])) for e in lost if e["ph"] == "e"} == {
        (f"batch {task} (did not end)", last) for task in (9, 10, 11, 12)
    }
    assert {e["args"]["ended by"] for e in lost if e["ph"] == "b"} == {"did not end"}


def test_batches_given_up_with_their_epoch_end_with_it(tmp_path: Path) -> None:
    steps = rows_of(
        "time code task", (1, ev.EPOCH[0], -1), (11, ev.INDEX_PUT, 0), (21, ev.INDEX_PUT, 1), (31, ev.INDEX_PUT, 2),
        (41, ev.YIELD, 0), (51, ev.WORKER_EXHAUSTED, 1), (61, ev.EPOCH[1], -1), worker=0,
    )  # fmt: skip
    flights = named(to_chrome(trace_of(tmp_path, steps)), "batch")
    how = {e["args"]["task"]: e["args"]["ended by"] for e in flights if e["ph"] == "b"}
    assert how == {0: "yield", 1: "worker_exhausted", 2: "given up: the epoch ended"}
    assert sorted(ns(e["ts"]) for e in flights if e["ph"] == "e") == [40, 50, 60]


def counter(document: Json, name: str, pid: int = 1000) -> list[tuple[int, int]]:
    """(ns, value) of the counter that the viewer would show under `name`."""
    counts = [(e, *e["args"].items()) for e in document["traceEvents"] if e["ph"] == "C" and e["pid"] == pid]
    return [(ns(e["ts"]), value) for e, (unit, value) in counts if f"{e['name']} {unit}".strip() == name]


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
    collate, feeder = ev.Place.COLLATE, ev.Place.FEEDER
    steps = rows_of(
        "time code x y z",
        (1, ev.EPOCH[0], 0, 0, 0), (11, ev.INDEX_PUT, 0, 0, 0), (21, ev.SHM_ALLOC, 7, collate, 0),
        (31, ev.RESULT_PICKLE[0], 0, 0, 0), (41, ev.SHM_ALLOC, 500, feeder, 0), (51, ev.RESULT_PICKLE[1], 90, 1, 500),
        (61, ev.YIELD, 0, 0, 0), (71, ev.SHM_ALLOC, 7, collate, 0), task=0, worker=0,
    )  # fmt: skip
    shown = counter(to_chrome(trace_of(tmp_path, steps)), "in flight bytes", pid=100)
    assert shown == [(20, 7), (50, 597), (60, 0)]


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
    events = rows_of("code", *((code,) for code in (ev.INDEX_PUT, *ev.INDEX_WRITE)), worker=1, task=0, tid=7)
    thread = {"kind": "thread", "tid": 7, "name": "evaluation"}
    document = to_chrome(trace_of(tmp_path, events, loader=1, lines=[thread]))
    assert [e["args"]["name"] for e in named(document, "thread_name") if e["tid"] == 7] == ["evaluation"]


def test_what_a_watchdog_has_sampled_is_counted(tmp_path: Path) -> None:
    trace = made(tmp_path, batches=4)
    one = Vitals("S", 100, 2_000, 40, 9, 3)
    trace.watched = Watched(5, [
        Sample(START - 1_000_000, {}, 600),  # before the first event: no time that can be drawn
        Sample(START + 1_000_000, {1000: one, 1100: one._replace(rss_kib=-1)}, 500),
        Sample(START + 3_000_000, {1000: one._replace(cpu_ms=101, rss_kib=2_500)}, 400),
    ])  # fmt: skip
    document = to_chrome(trace)
    assert counter(document, "CPU percent") == [(3_000_000, 50)]
    assert counter(document, "memory KiB") == [(1_000_000, 2_000), (3_000_000, 2_500)]
    assert counter(document, "shared memory KiB") == [(1_000_000, 40), (3_000_000, 40)]
    assert counter(document, "descriptors open", pid=1100) == [(1_000_000, 9)]
    assert counter(document, "memory KiB", pid=1100) == [], "it could not be read"
    assert counter(document, "/dev/shm bytes free") == [(1_000_000, 500), (3_000_000, 400)]
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
    assert {e["ph"] for e in to_chrome(trace_of(tmp_path, []))["traceEvents"]} == {"M"}


def test_a_loader_without_workers_has_no_flows_and_no_lane(tmp_path: Path) -> None:
    steps = (1, ev.EPOCH[0]), (2, ev.NEXT[0]), (3, ev.FETCH[0]), (9, ev.FETCH[1]), (10, ev.YIELD), (11, ev.NEXT[1])
    document = to_chrome(trace_of(tmp_path, rows_of("time code", *steps, task=0)))
    assert not [e for e in document["traceEvents"] if e["ph"] in "stf" or e["name"] == "batch in flight"]
    assert named(document, "fetch", "X")


# --- What other recorders saw -----------------------------------------------------------------------------------------
MAIN, FEEDER = SliceTrack(1100, 1100, "MainThread"), SliceTrack(1100, 1150, "QueueFeederThread")


def attached(
    path: Path, *rows: tuple[int, ...], tail: bytes = b"", tracks: Any = (MAIN, FEEDER), kind: str = "functions"
) -> Json:
    """The document of a healthy run with an attachment; rows: begin and end since the first event, track, name."""
    made_trace.write(path, Run(**made_trace.HEALTHY))
    slices = np.array([(START + begin, START + end, *where) for begin, end, *where in rows], SLICE)
    names = [Name("f", "a.py:1"), Name('"</script>" \u202e %s', "b.py:2"), Name("g")]
    data = description(kind, "program", "1", tracks[0].pid, "", 0) + chunk(tracks, names, slices, {0: {"n": 5}}) + tail
    (path / f"{kind}-1.attachment.jsonl").write_bytes(data)
    return to_chrome(read_trace(path))


def guests(document: Json, kind: str = "functions") -> list[Json]:
    return [e for e in document["traceEvents"] if e.get("cat") == kind and e["ph"] == "X"]


def test_functions_are_drawn_under_their_worker_to_the_nanosecond(tmp_path: Path) -> None:
    document = attached(tmp_path, (1_000, 9_001, 0, 0), (2_000, 3_000, 0, 1), (2_000, 8_000, 1, 2), tail=closing())
    drawn = guests(document)
    titles = {(e["pid"], e["tid"]): e["args"]["name"] for e in named(document, "thread_name")}
    assert [(titles[e["pid"], e["tid"]], e["name"], ns(e["ts"]), ns(e["dur"]), e["args"]) for e in drawn] == [
        ("functions: MainThread", "f", 1_000, 8_001, {"defined at": "a.py:1", "n": 5}),
        ("functions: MainThread", '"</script>" \u202e %s', 2_000, 1_000, {"defined at": "b.py:2"}),
        ("functions: QueueFeederThread", "g", 2_000, 6_000, {}),
    ]
    assert {e["pid"] for e in drawn} == {1100}
    assert min(e["tid"] for e in drawn) >= ATTACHED_IDS
    assert document["otherData"]["attachments"]["functions-1.attachment.jsonl"]["kind"] == "functions"


def test_guests_share_no_track_with_the_loader_and_overlap_nothing(tmp_path: Path) -> None:
    rows = (0, 5_000_000, 0, 0), (4_000_000, 6_000_000, 0, 0), (4_999_999, 5_500_000, 1, 0), (5_000, 5_000, 1, 1)
    document = attached(tmp_path, *rows, tracks=[MAIN, MAIN._replace(tid=7)], tail=closing())
    for track, slices in tracks(document).items():
        assert partly_overlapping(slices) == [], track
    titles = sorted(e["args"]["name"] for e in named(document, "thread_name") if e["tid"] >= ATTACHED_IDS)
    assert titles == ["functions: MainThread", "functions: MainThread", "functions: MainThread (2)"]
    theirs = {(e["pid"], e["tid"]) for e in guests(document)}
    others = {(e["pid"], e["tid"]) for e in document["traceEvents"] if e["ph"] == "X" and e["cat"] != "functions"}
    assert not theirs & others


def test_the_batches_arrows_are_as_without_guests(tmp_path: Path, healthy: Trace) -> None:
    documents = to_chrome(healthy), attached(tmp_path, (0, 9_000_000, 0, 0), tail=closing())
    without, beside = ([e for e in document["traceEvents"] if e["ph"] in "stf"] for document in documents)
    assert without == beside != []


def test_kernels_stand_in_a_process_of_their_device_with_an_arrow_from_their_launch(tmp_path: Path) -> None:
    threads = SliceTrack(1000, 1000, "thread 1000"), SliceTrack(0, 7, "stream 7", "GPU 0")
    rows = (1_000, 2_000, 0, 0), (5_000, 9_000, 1, 1), (6_000, 10_000, 1, 2)
    document = attached(tmp_path, *rows, tail=arrows([(0, 1)]) + closing(), tracks=threads, kind="profiler")
    call, kernel, second = guests(document, "profiler")
    assert call["pid"] == 1000
    assert kernel["pid"] == second["pid"] >= ATTACHED_IDS
    titles = {e["pid"]: e["args"]["name"] for e in named(document, "process_name")}
    assert titles[kernel["pid"]] == "GPU 0 (profiler)"
    flows = [e for e in document["traceEvents"] if e.get("cat") == "profiler" and e["ph"] in "sf"]
    assert [(e["ph"], e["pid"], e["tid"], e["ts"]) for e in flows] == [
        ("s", call["pid"], call["tid"], 1.0), ("f", kernel["pid"], kernel["tid"], 5.0),
    ]  # fmt: skip


def test_what_the_trace_did_not_see_begin_is_cut_or_left_out_and_said(tmp_path: Path) -> None:
    document = attached(tmp_path, (-5_000, -1_000, 0, 0), (-2_000, 3_000, 0, 1), (0, 1_000, 0, 2), tail=closing())
    assert [(e["ts"], e["dur"]) for e in guests(document)] == [(0, 3), (0, 1)]
    assert "functions: 1 slices end before the first event and are not drawn" in document["otherData"]["problems"]


def test_a_guest_that_broke_off_says_so_where_it_did(tmp_path: Path) -> None:
    document = attached(tmp_path, (1_000, 2_000, 0, 0), (500, 7_000, 0, 0), tracks=[MAIN])
    (lost,) = named(document, "functions lost")
    (track,) = {(e["pid"], e["tid"]) for e in guests(document)}
    assert (lost["ts"], lost["ph"], (lost["pid"], lost["tid"])) == (7, "i", track)
    assert "it ends with its last save" in lost["args"]["lacks"][0]
    assert "it ends with its last save" in " ".join(document["otherData"]["problems"])


def test_several_attachments_of_a_kind_are_drawn_as_one(tmp_path: Path) -> None:
    attached(tmp_path, (0, 100_000, 0, 0), tail=closing())
    first = tmp_path / "functions-1.attachment.jsonl"
    (tmp_path / "functions-2.attachment.jsonl").write_bytes(first.read_bytes())
    (tmp_path / "functions-3.attachment.jsonl").write_bytes(b"nothing")
    one, other = guests(to_chrome(read_trace(tmp_path)))
    assert one["tid"] == other["tid"]
    assert one["args"] == other["args"] == {"defined at": "a.py:1", "n": 5}


def test_an_attachment_that_cannot_be_read_leaves_the_trace_as_it_is(tmp_path: Path, healthy: Trace) -> None:
    made_trace.write(tmp_path, Run(**made_trace.HEALTHY))
    (tmp_path / "functions-1.attachment.jsonl").write_bytes(b'{"attachment":1,"kind":5}\n[[[\n')
    document = to_chrome(read_trace(tmp_path))
    assert document["traceEvents"] == to_chrome(healthy)["traceEvents"]
    assert "line 2 is damaged" in " ".join(document["otherData"]["problems"])


def test_the_headline_is_a_note_on_the_lane_that_it_points_at(tmp_path: Path) -> None:
    trace = made(tmp_path / "t", **made_trace.HUNG | {"poll": 5_000_000_000})
    found, document = headline(trace), to_chrome(trace)
    (note,) = (e for e in document["traceEvents"] if e.get("cat") == "headline")
    assert note["name"] == found.title == document["otherData"]["headline"][0]
    assert note["args"]["next step"] == found.next_step
    assert (note["pid"], note["tid"], ns(note["ts"])) == (1101, found.focus.tid, found.focus.begin - START)
    fine = to_chrome(made(tmp_path / "fine", batches=3))
    assert not [e for e in fine["traceEvents"] if e.get("cat") == "headline"]
