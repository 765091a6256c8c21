"""A trace as one self-contained HTML page: it needs no network, no server and no other file.

Interface: `html(trace)` -> `Page`, a str that a notebook displays as the page itself, also in a saved notebook;
`html(trace, path)` writes it. `before_and_after` is a page of two traces on one time axis. `page.html` beside this
file, with the parts of its script in `timeline/`, draws the Scene, within the frame of all pages (see `frame`).

Numbers go into the page as typed arrays, compressed and in base64 (for browsers older than 2023: `compress=False`).
Text goes in as JSON, and the script displays it as text only.
"""

from __future__ import annotations

import base64
import gzip
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, overload

import numpy as np
import numpy.typing as npt

from minidl.references import source_line
from minidl.tracefile.arrays import Ints, Rows, distinct, starts
from minidl.tracefile.events import EVENTS, Event, Phase
from minidl.tracefile.join import beside
from minidl.tracefile.loaders import dataloaders, name_of
from minidl.tracefile.reader import Trace, read_trace
from minidl.views.colours import ACTORS, BATCHES, HATCHED, paint
from minidl.views.frame import Page, filled
from minidl.views.sampled import sampled
from minidl.views.scene import (
    FADING,
    Counter,
    Fate,
    Scene,
    alarm,
    batches_of,
    is_named,
    legend_of,
    numbered,
    opening_of,
    scene_of,
    title_of,
)

Columns = dict[str, npt.NDArray[Any]]

EXACT: Final = 1 << 53
"""Integers up to here are numbers in JavaScript; a column with larger ones goes as 64-bit integers."""

_OWN = ("bx", "by", "bz", "ex", "ey", "ez")

_CPU_FIELDS = [
    (code, side + column)
    for code, event in EVENTS.items() if event.phase is Phase.BEGIN
    for side, own in (("b", event), ("e", EVENTS[code + 1]))
    for column, field in own.columns.items() if field.is_cpu
]  # fmt: skip


@overload
def html(
    trace: Trace | str | os.PathLike[str],
    path: None = None,
    *,
    since: float | None = ...,
    until: float | None = ...,
    workers: Iterable[int] | None = ...,
    title: str | None = ...,
    compress: bool = ...,
    perfetto: str = ...,
) -> Page: ...
@overload
def html(
    trace: Trace | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    since: float | None = ...,
    until: float | None = ...,
    workers: Iterable[int] | None = ...,
    title: str | None = ...,
    compress: bool = ...,
    perfetto: str = ...,
) -> Path: ...
def html(
    trace: Trace | str | os.PathLike[str], path: str | os.PathLike[str] | None = None, *, since: float | None = None,
    until: float | None = None, workers: Iterable[int] | None = None, title: str | None = None, compress: bool = True,
    perfetto: str = "",
) -> Page | Path:  # fmt: skip
    """Return a trace, or the one at a path, as a page; or write the page to `path` and return that.

    since, until: seconds from the trace's first event; workers: those to show; title: by default the trace's name.
    perfetto: address of a Perfetto that shows the same trace, for the page to link to (see `viewer`).
    Raises ValueError for a window or a worker that is not in the trace, OSError as writing does.
    """
    trace = read_trace(trace)
    scene = scene_of(trace, since=since, until=until, workers=workers)
    return page_of(scene, title, compress=compress, perfetto=perfetto).written(path)


def page_of(scene: Scene, title: str | None = None, *, compress: bool = True, perfetto: str = "") -> Page:
    """Return a scene as a page: see `html`."""
    words = describe(scene, title_of(scene.trace) if title is None else title) | {"perfetto": perfetto}
    return joined(*packed(words, columns(scene), 4 if compress else 0))


def before_and_after(
    traces: Sequence[Trace], loaders: Sequence[tuple[int, ...]], headline: str, evidence: Sequence[str], path: Path
) -> Path:
    """Write a page of two traces, A above B, on one time axis: the first batches of their `loaders` have one moment.

    headline: the title; evidence: lines below it. Raises OSError as writing does.
    """
    batches = [batches_of(trace, numbers) for trace, numbers in zip(traces, loaders, strict=True)]
    firsts = [trace.start + int(times[0]) for trace, times in zip(traces, batches, strict=True)]
    scene = scene_of(beside([trace.path for trace in traces], firsts))
    words = describe(scene, " and ".join(map(title_of, traces)))
    begin, took = firsts[0] - scene.trace.start, opening_of(batches)
    words["headline"] |= {
        "kind": "compared", "wrong": False, "sentence": headline, "evidence": list(evidence), "next": "", "bar": -1,
        "begin": begin - took // 50, "end": begin + took + took // 50,
    }  # fmt: skip
    words["slots"] = [f"{'AB'[slot.rank]} \N{MIDDLE DOT} {slot.name}" for slot in scene.slots]
    joined(*packed(words | {"perfetto": "", "framed": None, "cause": None}, columns(scene), 4)).written(path)
    return path


# --- The words ------------------------------------------------------------------------------------------------------
def describe(scene: Scene, title: str) -> dict[str, Any]:
    """Return everything about a scene that is not a column of numbers."""
    trace = scene.trace
    return {
        "title": title,
        "headline": _headline(scene),
        "deaths": [{"lane": death.lane, "time": death.time, "words": death.words} for death in scene.deaths],
        "colours": {"actors": ACTORS, "batches": BATCHES, "hatched": HATCHED},
        "legend": [asdict(sign) for sign in legend_of(scene)],
        "framed": None if scene.framed is None else asdict(scene.framed),
        "cause": None if scene.cause is None else asdict(scene.cause),
        "unended": scene.unended(),
        "end_of_trace": f"end of the trace, {scene.unit.at(scene.last)}",
        "timeouts": [number for number, facts in trace.loaders.items() if facts.get("timeout_s")],
        "events": len(trace),
        "begin": scene.begin,
        "end": scene.end,
        "last": min(scene.end, scene.last),
        "problems": trace.problems,
        "facts": _facts(trace),
        "slots": [slot.title for slot in scene.slots],
        "dataloaders": _dataloaders(scene),
        "iterators": {n: f"DataLoader of {name_of(of)}" for n, of in trace.loaders.items() if of.get("made_at")},
        "lanes": [
            {
                "title": lane.title, "kind": lane.kind.name.lower(), "slot": lane.slot, "worker": lane.worker,
                "top": lane.top, "actor": lane.actor(len(scene.slots)),
                "heights": lane.heights,
            }
            for lane in scene.lanes
        ],
        "runs": _runs(scene.bars, "lane", "row"),
        "markRuns": _runs(scene.marks, "lane"),
        "kinds": {code: _kind(code) for code in np.union1d(scene.bars["code"], scene.marks["code"]).tolist()},
        "fates": {int(fate): words for fate, words in scene.fates.items()},
        "live": None,
        "fading": [int(fate) for fate in FADING],
        "alarms": {int(at): alarm(scene, scene.marks[at])[:80] for at in np.flatnonzero(scene.marks["alarm"])},
        "counters": [{"name": c.name, "unit": c.unit, "slot": c.slot} for c in _counters(scene)],
        "processes": [process.name for process in trace.processes],
        "ownEpochs": scene.own_epochs,
        "texts": list(_texts(scene)),
    }  # fmt: skip


def _dataloaders(scene: Scene) -> list[tuple[str, list[int]]]:
    """Return the DataLoaders to choose from, each with its slots; the iterators of one have slots of their own."""
    named = [(f"rank {one.rank} {one.name}" if one.rank >= 0 else one.name, one) for one in dataloaders(scene.trace)]
    slots = (
        (name, [n for n, slot in enumerate(scene.slots) if set(slot.loaders) & set(one.iterators)])
        for name, one in named
    )
    return [(name, mine) for name, mine in slots if mine]


def _headline(scene: Scene) -> dict[str, Any]:
    """Return the title of the page, its evidence, and where the page opens: a bar (-1 = none), a window."""
    found, (begin, end) = scene.headline, scene.opening
    return {
        "kind": found.outcome.value, "wrong": found.outcome.wrong, "sentence": found.title, "evidence": found.notes(),
        "next": found.helps, "bar": scene.culprit, "begin": begin, "end": end,
    }  # fmt: skip


def _facts(trace: Trace) -> list[tuple[str, str]]:
    """Return what the trace says about its origin."""
    manifest = trace.manifest
    facts = [("trace", str(trace.path))]
    for name in ("command", "host", "versions", "detail"):
        if (value := manifest.get(name)) is not None:
            facts.append((name, _plain(value)))
    facts += [(f"iterator {number}", _plain(params)) for number, params in sorted(trace.loaders.items())]
    return facts


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(of)}" for key, of in value.items() if of not in ("", None))
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _kind(code: int) -> dict[str, Any]:
    """Return an event's words on the page, and its look."""
    event = EVENTS[code]
    span = event.phase is Phase.BEGIN
    look = paint(code) if span else None
    return {
        "name": event.name,
        "label": look.label if look else event.name,
        "colour": look.colour if look else event.colour,
        "soft": bool(look and look.soft),
        "waits": bool(look and look.waits),
        "before": numbered(code)[1] if span else "",
        "letter": numbered(code)[2] if span else "",
        "stage": event.stage,
        "meaning": event.meaning,
        "ours": ", ".join(source_line(name, "minidl") for name in event.ours.split(", ")),
        "upstream": source_line(event.upstream, "torch"),
        "article": event.article,
        "begin": _fields(event),
        "end": _fields(EVENTS[code + 1]) if span else [],
    }


def _fields(event: Event) -> list[dict[str, Any]]:
    return [
        {
            "name": field.name, "unit": field.unit,
            "values": {int(m): m.name.lower().replace("_", " ") for m in field.enum} if field.enum else None,
        }
        for field in event.fields if not field.is_cpu
    ]  # fmt: skip


_NAMED = [code for code, event in EVENTS.items() if is_named(event)]


def _texts(scene: Scene) -> dict[str, int]:
    """Return the texts of marks and spans, each with its number; 0 = none."""
    texts = {"": 0}
    for process, number in _named(scene):
        texts.setdefault(scene.trace.strings.get((process, number), ""), len(texts))
    for code in np.unique(scene.marks["code"]).tolist():
        if any(field.unit == "string" for field in EVENTS[code].fields):
            for row in scene.trace.events[scene.marks["event"][scene.marks["code"] == code]]:
                texts.setdefault(scene.trace.text(row), len(texts))
    return texts


def _named(scene: Scene) -> list[list[int]]:
    """Return (process, number in it) of each text that a bar has, without repetition."""
    spans = scene.spans[scene.bars["span"][np.isin(scene.bars["code"], _NAMED)]]
    return distinct(spans, "process", "bx")


# --- The numbers ----------------------------------------------------------------------------------------------------
def columns(scene: Scene) -> Columns:
    """Return a scene's arrays by the names that the script uses. Sorted times (ns) are differences, see `_steps`."""
    return {
        **_bar_columns(scene),
        **_mark_columns(scene),
        **{f"batch.{name}": scene.batches[name] for name in ("epoch", "task", "put", "yielded")},
        **{f"stop.{name}": scene.stops[name] for name in ("batch", "lane", "row", "code", "begin", "end")},
        **{f"counter.{n}.time": _steps(c.times) for n, c in enumerate(_counters(scene))},
        **{f"counter.{n}.value": c.values for n, c in enumerate(_counters(scene))},
    }


def _counters(scene: Scene) -> list[Counter]:
    return [*scene.counters, *sampled(scene)]


def _bar_columns(scene: Scene) -> Columns:
    bars, spans = scene.bars, scene.spans[scene.bars["span"]]
    out: Columns = {"bar.begin": _steps(bars["begin"]), "bar.took": bars["end"] - bars["begin"]}
    out["bar.known"] = np.where(bars["fate"] == Fate.ENDED, 0, bars["known"] - bars["begin"])
    for name in ("code", "fate", "simulated", "task", "worker", "number", "batch"):
        out[f"bar.{name}"] = bars[name]
    out["bar.wanted"] = spans["begin_task"]  # of a wait: the task that was needed, not the one that came
    for name in ("loader", "process", "tid", "cpu", "cpu_wait", *_OWN):
        out[f"bar.{name}"] = spans[name].copy()
    for code, column in _CPU_FIELDS:
        out[f"bar.{column}"][bars["code"] == code] = 0  # they are in columns of their own
    texts, strings = _texts(scene), scene.trace.strings
    for process, number in _named(scene):
        mine = (spans["process"] == process) & np.isin(bars["code"], _NAMED)
        for name in ("bx", "ex"):
            out[f"bar.{name}"][mine & (spans[name] == number)] = texts[strings.get((process, number), "")]
    return out


def _mark_columns(scene: Scene) -> Columns:
    marks, events = scene.marks, scene.trace.events[scene.marks["event"]]
    out: Columns = {"mark.time": _steps(marks["time"])}
    for name in ("code", "task", "worker", "batch", "alarm", "weak"):
        out[f"mark.{name}"] = marks[name]
    for name in ("loader", "process", "tid", "x", "y", "z"):
        out[f"mark.{name}"] = events[name].copy()
    texts = _texts(scene)
    for code in np.unique(marks["code"]).tolist():
        for column, field in EVENTS[code].columns.items():
            if field.unit == "string":
                mine = marks["code"] == code
                out[f"mark.{column}"][mine] = [texts[scene.trace.text(row)] for row in events[mine]]
    return out


def _runs(rows: Rows, *keys: str) -> list[list[int]]:
    """Return where the rows with the same keys are: [*keys, first, count]."""
    first = np.flatnonzero(starts(*(rows[key] for key in keys)))
    count = np.diff(np.append(first, len(rows)))
    runs: list[list[int]] = np.stack([*(rows[key][first] for key in keys), first, count], axis=1).tolist()
    return runs


def _steps(times: Ints) -> Ints:
    """Return differences: small numbers, which compress well. The script adds them up again."""
    return np.diff(times, prepend=0)


# --- The page -------------------------------------------------------------------------------------------------------
def packed(words: dict[str, Any], numbers: Columns, level: int) -> tuple[dict[str, Any], str]:
    """Return the words, with where each column lies in the numbers, and these in base64. level: of gzip, 0 = none."""
    layout, data = _joined(numbers)
    data = gzip.compress(data, level, mtime=0) if level else data
    return {**words, "columns": layout, "compressed": level > 0}, base64.b64encode(data).decode()


def joined(words: dict[str, Any], numbers: str, connect: str = "") -> Page:
    """Return the page. connect: see `frame.filled`."""
    return Page(filled("page.html", connect=connect, title=words["title"], words=words, numbers=numbers))


def _joined(numbers: Columns) -> tuple[list[tuple[str, str, int, int]], bytes]:
    """Return all columns as bytes, each in the smallest type that fits: [name, type, offset, length] of each, bytes."""
    layout, parts, offset = [], [], 0
    for name, column in numbers.items():
        small = _smallest(column)
        data = small.tobytes()
        data += b"\0" * (-len(data) % 8)
        layout.append((name, small.dtype.str[1:], offset, len(small)))
        parts.append(data)
        offset += len(data)
    return layout, b"".join(parts)


def _smallest(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    low, high = (int(column.min()), int(column.max())) if len(column) else (0, 0)
    for kind in ("u1", "i1", "u2", "i2", "u4", "i4"):
        info = np.iinfo(kind)
        if info.min <= low and high <= info.max:
            return column.astype(f"<{kind}")
    return column.astype("<f8" if low >= -EXACT and high <= EXACT else "<i8")
