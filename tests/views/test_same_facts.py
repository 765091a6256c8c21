"""One trace, four views: the viewer's document, the figure, the page and the terminal say what the table of lanes says.

The table is `scene.scene`. Each view is read back from what it gives out: JSON, shapes, the page's columns, characters.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_trace
import numpy as np
import pytest
import workloads as wl
from made_trace import Run
from pages import Read
from perfetto_file import PerfettoFile
from pictures import artists
from recorded import drain, record

import minidl
from minidl.tracefile import events as ev
from minidl.tracefile.events import EVENTS, Phase
from minidl.tracefile.reader import Trace, read_trace
from minidl.views import scene
from minidl.views.chrome import to_chrome
from minidl.views.colours import WAITING, paint
from minidl.views.export import Export, LaneRole
from minidl.views.layout import LaneKind
from minidl.views.page import html
from minidl.views.picture import timeline
from minidl.views.scene import AT_END, FADING, FATES, IDLE, Fate, Scene, per_pixel, scene_of
from minidl.views.text import LETTERS, render

WIDTH = 240
SECONDS = r"(\d+\.\d{9}) s"


# --- The traces -------------------------------------------------------------------------------------------------------
def recorded(directory: Path) -> None:
    """Two epochs of persistent workers behind a pin thread that only copies; in the second, one sample fails."""
    data = wl.Failing(12, wl.SimpleError("no"), at=(5,))
    with minidl.DataLoader(data, batch_size=2, num_workers=2, persistent_workers=True, pin_memory=True) as loader:
        for _ in range(2):
            drain(iter(loader), 6)


def killed(directory: Path) -> None:
    """A worker is killed in a sample, and found dead."""
    iterator = wl.killed_in_a_sample(directory)
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(iterator)


def outlived(directory: Path) -> None:
    """The recording ends before the iterator does; both workers have served a batch by then."""
    LEFT.append(iter(minidl.DataLoader(wl.Tensors(40), batch_size=2, num_workers=2)))
    drain(LEFT[-1], 2)


LEFT: list[Any] = []

REAL: dict[str, Callable[[Path], None]] = {run.__name__: run for run in (recorded, killed, outlived)}


def imagined() -> dict[str, list[Run]]:
    """Runs that never happened; made anew for each test, since a Run runs once."""
    return {
        "healthy": [Run(**made_trace.HEALTHY)],
        "head of line": [Run(batches=16, workers=4, cost=lambda task: 9_000_000 if task % 8 == 2 else 900_000)],
        "hung": [Run(**made_trace.HUNG)],
        "simulated pin": [Run(batches=8, workers=1, pin=True, simulated=True, epochs=2)],
        "two loaders": [Run(batches=6), Run(batches=6, loader=2, first_pid=3000)],
    }


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trace]:
    """A trace by its name; each is made once."""

    @functools.cache
    def found(name: str) -> Trace:
        place = tmp_path_factory.mktemp("made") / "trace"
        if name not in REAL:
            return read_trace(made_trace.write(place, *imagined()[name]))
        path = record(REAL[name], place.parent)
        for iterator in LEFT:
            iterator.close()
        LEFT.clear()
        return read_trace(path)

    return found


@pytest.fixture(params=[*(pytest.param(name, marks=pytest.mark.live) for name in REAL), *imagined()])
def trace(request: pytest.FixtureRequest, traces: Callable[[str], Trace]) -> Trace:
    return traces(request.param)


def test_the_replays_counts_are_the_tables(trace: Trace) -> None:
    """At each moment at which one of the table's counters changes."""
    drawn = scene_of(trace)
    for number, slot in enumerate(drawn.slots):
        at = minidl.replay(trace, *slot.loaders)
        counters = {counter.name: counter for counter in drawn.counters if counter.slot == number}
        assert "in flight" in counters
        times = at.trace.events["time"][at.rows].tolist()
        for state, now, following in zip(at.walk(1), times, [*times[1:], times[-1] + 1], strict=True):
            if following <= now:
                continue  # more happens at this moment, or the clocks are at odds
            told = {"in flight": state.bytes_in_flight, "reorder buffer": len(state.reorder_buffer)}
            assert told == {name: value_at(counters.get(name), now - drawn.start) for name in told}


def value_at(counter: scene.Counter | None, time: int) -> int:
    """A counter's value; of one that is not drawn, 0."""
    seen = 0 if counter is None else np.searchsorted(counter.times, time, side="right")
    return int(counter.values[seen - 1]) if seen else 0


# --- What the table says ----------------------------------------------------------------------------------------------
def arrows(drawn: Scene, batch: int) -> list[tuple[int, int, int, int, int]]:
    found = drawn.arrows(np.array([batch]))
    return found[["from_lane", "left", "to_lane", "reached", "code"]].tolist()


# --- The page ---------------------------------------------------------------------------------------------------------
def test_the_page(trace: Trace) -> None:
    drawn, page = scene_of(trace), Read(str(html(trace)))
    lanes = [(lane["title"], len(lane["heights"])) for lane in page.words["lanes"]]
    assert lanes == [(lane.title, len(lane.heights)) for lane in drawn.lanes]
    assert page.words["slots"] == [slot.title for slot in drawn.slots]
    assert page.rows() == drawn.bars[["lane", "row"]].tolist()
    for number, counter in enumerate(drawn.counters):
        assert page.words["counters"][number] == {name: getattr(counter, name) for name in ("name", "unit", "slot")}
        assert np.cumsum(page[f"counter.{number}.time"].astype(np.int64)).tolist() == counter.times.tolist()
        assert page[f"counter.{number}.value"].tolist() == counter.values.tolist()
    for name in ("code", "fate", "simulated", "task", "worker", "batch"):
        assert page[f"bar.{name}"].tolist() == drawn.bars[name].tolist(), name
    own = () if drawn.spans["cpu"].any() else ("bx", "by", "bz", "ex", "ey", "ez")  # those of CPU time are left out
    for name in ("loader", "process", "tid", "cpu", "cpu_wait", *own):
        assert page[f"bar.{name}"].tolist() == drawn.spans[name][drawn.bars["span"]].tolist(), name
    np.testing.assert_array_equal(page.begin, drawn.bars["begin"])
    np.testing.assert_array_equal(page.end, drawn.bars["end"])
    events = trace.events[drawn.marks["event"]]
    np.testing.assert_array_equal(np.cumsum(page["mark.time"].astype(np.int64)) + drawn.start, events["time"])
    for name in ("code", "task", "worker", "x", "y", "z"):
        assert page[f"mark.{name}"].tolist() == events[name].tolist(), name
    assert page.words["fates"] == {str(int(fate)): words for fate, words in FATES.items()}
    for batch in range(len(drawn.batches)):
        mine = page["stop.batch"] == batch
        stops = [page[f"stop.{name}"][mine].astype(np.int64).tolist() for name in ("lane", "begin", "end", "code")]
        told = [
            (lane, min(left, reached), to_lane, reached, code)
            for (lane, _, left, _), (to_lane, reached, _, code) in itertools.pairwise(zip(*stops, strict=True))
        ]
        assert told == arrows(drawn, batch)
    for kind, look in page.words["kinds"].items():
        if EVENTS[int(kind)].phase is Phase.BEGIN:
            assert (look["label"], look["colour"]) == (paint(int(kind)).label, paint(int(kind)).colour)


# --- The figure -------------------------------------------------------------------------------------------------------
@pytest.mark.heavy
def test_the_figure(trace: Trace) -> None:
    """Each bar's begin and end as far as they are sure after a double of ms."""
    drawn = scene_of(trace)
    tasks = sorted(set(drawn.batches["task"].tolist()))[:4]
    figure = timeline(trace, batches=tasks, width=60)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [lane.title for lane in drawn.lanes]
    scale = {"s": 1e9, "ms": 1e6, "µs": 1e3, "ns": 1}[figure.axes[-1].get_xlabel().split()[0]]
    solid = []
    for key, shape in artists(figure, "bars"):
        for path in shape.get_paths():
            x = np.round(path.vertices[:4, 0] * scale).astype(np.int64)
            solid.append((*key, int(x.min()) // 1000, int(x.max()) // 1000))
    fading = Counter(tuple(key) for key, _ in artists(figure, "open"))
    wide, _ = per_pixel(drawn.bars, drawn.begin, drawn.end, int((60 - 1.15 - 0.3) * 144))
    faded = np.isin(wide["fate"], FADING)
    assert fading == Counter(wide[faded][["lane", "row", "code"]].tolist())
    firm = wide[~faded][["lane", "row", "code", "begin", "end"]].tolist()
    assert sorted(solid) == sorted((*key, begin // 1000, end // 1000) for *key, begin, end in firm)
    expected = Counter(drawn.arrows(drawn.pick(tasks))["batch"].tolist())
    assert Counter(key[0] for key, _ in artists(figure, "arrow")) == expected
    words = {text.get_text() for legend in figure.legends for text in legend.get_texts()}
    assert ("simulated" in words) == bool(drawn.bars["simulated"].any())


# --- The viewer -------------------------------------------------------------------------------------------------------
def ns(us: float) -> int:
    return round(us * 1000)


def test_the_viewer(trace: Trace) -> None:
    drawn, last = scene_of(trace), 10**18
    told: Counter[tuple[str, int, int]] = Counter()
    for e in to_chrome(trace)["traceEvents"]:
        if e["ph"] in "XB" and e["name"] not in ("index_put", "yield", "arrived"):
            begin, name = ns(e["ts"]), re.sub(r"( for task| worker)? \d+(?= \(|$)", "", e["name"])
            told[name, begin, begin + ns(e["dur"]) if e["ph"] == "X" else last] += 1
    expected: Counter[tuple[str, int, int]] = Counter()
    for bar in drawn.bars[drawn.bars["code"] != ev.EPOCH[0]]:
        name = paint(int(bar["code"])).label.replace("idle", "idle (no task)")
        name += " (simulated)" if bar["simulated"] else ""
        fate = Fate(bar["fate"])
        end = last if fate is not Fate.ENDED and bar["end"] >= drawn.end else int(bar["end"])
        expected[f"{name} ({FATES[fate]})" if fate in FATES else name, int(bar["begin"]), end] += 1
    assert told == expected


def test_the_viewers_tracks_are_the_lanes(trace: Trace) -> None:
    """The loader's and each worker's, in the lanes' order; a worker's threads are of its process."""
    drawn, document = scene_of(trace), to_chrome(trace)
    workers = [int(lane.name.split()[1]) for lane in Export(trace).lanes if lane.role is LaneRole.WORKER]
    assert workers == [lane.worker for lane in drawn.lanes if lane.kind is LaneKind.WORKER]
    titles = {e["pid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"}
    tasks: Counter[tuple[str, str, Any]] = Counter()
    for e in document["traceEvents"]:
        if e["ph"] in "XB" and e["cat"] in ("worker", "feeder") and e["name"] != "index_put":
            tasks[titles[e["pid"]].split(" of ")[0], e["args"]["event"], e["args"].get("task")] += 1
    expected: Counter[tuple[str, str, Any]] = Counter()
    for bar in drawn.bars:
        lane, event = drawn.lanes[bar["lane"]], EVENTS[int(bar["code"])]
        if event.track.value in ("worker", "feeder"):
            title = f"worker {lane.worker}" if lane.worker >= 0 else "loader"
            expected[title, event.name, int(bar["task"]) if bar["task"] >= 0 else None] += 1
    assert tasks == expected


def test_both_of_the_viewers_formats_say_the_same(trace: Trace, tmp_path: Path) -> None:
    """Slices with their lengths and values, instants, counts, and from which slice to which the batches go."""
    document, file = to_chrome(trace)["traceEvents"], PerfettoFile(trace, tmp_path)
    by_phase: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for e in document:
        by_phase[e["ph"]].append(e)
    slices, headline = by_phase["X"] + by_phase["B"], scene_of(trace).headline.title
    until = {e["id2"]["local"]: ns(e["ts"]) for e in by_phase["e"]}
    expected = Counter((e["name"], ns(e["ts"]), ns(e["ts"]) + ns(e["dur"]) if "dur" in e else -1) for e in slices)
    expected += Counter((e["name"], ns(e["ts"]), until[e["id2"]["local"]]) for e in by_phase["b"])
    assert Counter((one.name, one.begin, one.end) for one in file.slices if one.name != headline) == expected
    values = Counter((e["name"], tuple(v for v in e["args"].values() if v is not None)) for e in slices)
    lasting = "epoch", "batch", headline
    told = [one for one in file.slices if not one.name.startswith(lasting)]
    assert Counter((one.name, tuple(one.args.values())) for one in told) == values
    instants = Counter((e["name"], ns(e["ts"])) for e in by_phase["i"])
    assert Counter((one.name, one.begin) for one in file.instants) == instants
    counts = sorted((ns(e["ts"]), value) for e in by_phase["C"] for value in e["args"].values())
    assert sorted(itertools.chain.from_iterable(file.counts.values())) == counts
    points: dict[tuple[str, int], list[int]] = defaultdict(list)
    for e in document:
        if e["ph"] in "stf":
            points[e["cat"], e["id"]].append(ns(e["ts"]))
    assert len(file.flows) == len(points)
    flows = sorted([(one.begin, one.end) for one in flow] for flow in file.flows.values())
    for times in sorted(points.values()):  # each arrow's points lie in the slices of one of the other format's
        flows.remove(next(flow for flow in flows if len(flow) == len(times) and all(map(_lies_in, times, flow))))


def _lies_in(time: int, of: tuple[int, int]) -> bool:
    begin, end = of
    return begin <= time and (time <= end or end < 0)


def test_the_viewers_arrows(trace: Trace) -> None:
    drawn = scene_of(trace)
    ways: dict[int, list[int]] = {}
    for e in to_chrome(trace)["traceEvents"]:
        if e["ph"] in "stf" and e["cat"] == "batch":
            ways.setdefault(e["id"], []).append(ns(e["ts"]))
    expected: dict[int, list[int]] = {}
    for batch in np.unique(drawn.stops["batch"]).tolist():
        stops = drawn.stops[drawn.stops["batch"] == batch]
        inside = np.isin(stops["code"], AT_END)  # an arrow must end inside a slice
        if len(stops) > 1:
            expected[batch] = sorted((stops["begin"] - inside).tolist())
    assert {batch: sorted(times) for batch, times in ways.items()} == expected


# --- The terminal -----------------------------------------------------------------------------------------------------
def picture(text: str) -> dict[str, str]:
    """The lanes of the terminal's picture, by name, several loaders' under their headings."""
    out, heading = {}, ""
    lines = text.split("\n\n")[1].splitlines()[1:]
    width = max(len(m[0]) for line in lines if (m := re.match(r"\w+( \w+)?(?= )", line)))
    for line in lines:
        if re.fullmatch(r"iterators? [\d, ]+:", line):
            heading = line
        else:
            name = re.match(r"(epochs|consumer|loader|queue feeders|pin thread|worker \d+|feeder \d+)( |$)", line)
            assert name, line
            out[heading + name[1]] = line
    assert width
    return out


def own_time(drawn: Scene, lane: int, begin: float, end: float) -> dict[str, float]:
    """ns of [begin, end] that each kind of step took in a lane, what lies inside a step not counted as the step."""
    spans = drawn.spans
    mine = [bar for bar in drawn.bars if bar["lane"] == lane and bar["begin"] < end and bar["end"] > begin]
    cuts = sorted({begin, end, *(float(t) for b in mine for t in (b["begin"], b["end"]) if begin < t < end)})
    out: dict[str, float] = {}
    for left, right in itertools.pairwise(cuts):
        threads: dict[tuple[int, int], Any] = {}
        for bar in mine:
            if bar["begin"] <= left and bar["end"] >= right:
                span = spans[bar["span"]]
                thread = int(span["process"]), int(span["tid"])
                if thread not in threads or (bar["begin"], -bar["end"]) >= threads[thread][0]:
                    threads[thread] = (bar["begin"], -bar["end"]), bar
        for _, bar in threads.values():
            kind = paint(int(bar["code"])).label
            if bar["fate"] in FADING:
                kind = "still waiting" if kind in WAITING else "did not end"
            out[kind] = out.get(kind, 0) + right - left
    return out


@pytest.mark.heavy
def test_the_terminals_lanes_and_characters(trace: Trace) -> None:
    """Each cell's letter, but for numbers and words written over it, is that of what took most time there."""
    drawn = scene_of(trace)
    drawn_lanes = picture(render(trace, WIDTH, colour=False))
    there = [number for number in range(len(drawn.lanes)) if (drawn.bars["lane"] == number).any()]
    titles = {n: drawn.slots[drawn.lanes[n].slot].title + ":" if len(drawn.slots) > 1 else "" for n in there}
    assert list(drawn_lanes) == [titles[n] + drawn.lanes[n].title for n in there]
    label = max(len(drawn.lanes[number].title) for number in there) + 1
    cells = WIDTH - label
    for line, lane in zip(drawn_lanes.values(), there, strict=True):
        shown = line[label:].ljust(cells)
        wrong = 0
        for cell in range(0, cells, 3):
            begin, end = (drawn.end * n // cells for n in (cell, cell + 1))
            time = own_time(drawn, lane, begin, end)
            most = max(time.values(), default=0)
            wanted = {LETTERS[kind] for kind, spent in time.items() if spent == most} or {" "}
            wanted |= {letter.lower() for letter in wanted}
            wrong += shown[cell] not in wanted and not shown[cell].isdigit()
        words = re.search(r"> (.*(did not end|recording ended)|idle) >", shown)
        assert wrong <= (len(words[1]) // 3 + 3 if words else 0), shown


def test_the_terminal_says_what_is_simulated_and_lists_what_has_no_end(trace: Trace) -> None:
    drawn, text = scene_of(trace), render(trace, WIDTH, colour=False)
    assert ("(simulated)" in text.split("\n\n")[-1]) == bool(drawn.bars["simulated"].any())
    told = Counter()
    for line in text.splitlines():
        for fate, words in FATES.items():
            if m := re.match(rf"{words}: ([\w ]+): (\w+).*, since {SECONDS}(?: until {SECONDS})?$", line):
                end = round(float(m[4]) * 1e9) if m[4] else drawn.last
                told[m[1], m[2], int(fate), round(float(m[3]) * 1e9), end] += 1
    assert told == Counter(
        (drawn.lanes[b["lane"]].title, paint(int(b["code"])).label, int(b["fate"]), int(b["begin"]), int(b["known"]))
        for b in drawn.bars[drawn.bars["fate"] != Fate.ENDED]
        if b["fate"] == Fate.LOST or int(b["code"]) not in IDLE
    )


@pytest.mark.heavy
def test_the_terminals_arrows(trace: Trace) -> None:
    drawn = scene_of(trace)
    for task in sorted(set(drawn.batches["task"].tolist())):
        told: list[Any] = []
        for line in render(trace, WIDTH, colour=False, batch=task).splitlines():
            if m := re.match(rf"  {SECONDS}  (.*?) +-> {SECONDS}  (.*?) +(\w+)$", line):
                told.append((m[2], round(float(m[1]) * 1e9), m[4], round(float(m[3]) * 1e9), m[5]))
        expected = [
            (drawn.lanes[a].title, left, drawn.lanes[b].title, reached, EVENTS[code].name)
            for batch in drawn.pick([task]).tolist()
            for a, left, b, reached, code in arrows(drawn, batch)
        ]
        assert told == expected
