"""A trace as Chrome trace JSON, the format of the Perfetto UI, chrome://tracing and viztracer's --combine.

Interface: `write_chrome(trace, path)` streams the document to a file; `to_chrome(trace)` returns it as a dict. `export`
says what is drawn; `perfetto` writes the same in the Perfetto UI's own format.

A slice with an end is an X event. One without is a B without E, which fades to the right in the UI. Slices that overlap
are async ones. Times are microseconds since the first event, exact to the nanosecond. The UI picks its colours by name
and ignores `cname`, so the colours of `colours.paint` cannot be used there.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import compress, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from minidl.tracefile.arrays import Bools, Ints, starts
from minidl.tracefile.batches import NEVER
from minidl.tracefile.packs import whole
from minidl.views.drawn import Counts, DrawnSlices, Flows, Instants, Overlapping, Things, encoded
from minidl.views.export import Drawn, Export, Progress, rank_of

if TYPE_CHECKING:
    from os import PathLike

    from minidl.tracefile.reader import Trace

CHUNK: Final = 20_000
"""Lines that are joined before they are written."""


def to_chrome(trace: Trace) -> dict[str, Any]:
    """Return the whole document: {"traceEvents": [...], "otherData": {...}, "displayTimeUnit": "ns"}.

    Slower and larger than `write_chrome`: for traces that fit into memory several times.
    """
    document: dict[str, Any] = json.loads("".join(_document(Export(trace))))
    return document


def write_chrome(trace: Trace, path: str | PathLike[str], progress: Progress | None = None) -> Path:
    """Write the document to `path`, replacing what is there, and return the path. Raises OSError as `open` does.

    progress is called after each kind of event.
    """
    target = Path(path)
    with whole(target) as draft, draft.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(_document(Export(trace), progress))
    return target


def _document(export: Export, progress: Progress | None = None) -> Iterator[str]:
    """Yield the JSON text, piece by piece."""
    yield f'{{"displayTimeUnit":"ns","otherData":{compact(export.about())},\n"traceEvents":[\n'
    yield ",\n".join(_metadata(export))
    for thing in export.things(progress):
        rest = iter(_lines(thing))
        while chunk := list(islice(rest, CHUNK)):
            yield ",\n" + ",\n".join(chunk)
    yield "\n]}\n"


def _metadata(export: Export) -> Iterator[str]:
    """Yield the names of processes and threads, and the order of processes."""

    def name(kind: str, pid: int, tid: int, **args: object) -> str:
        return compact({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args})

    processes = export.trace.processes
    ranks = sorted({rank_of(process) for process in processes})
    for index, (pid, process) in enumerate(zip(export.pids, processes, strict=True)):
        yield name("process_name", pid, 0, name=export.of_rank(export.actor(index), index))
        yield name("process_sort_index", pid, 0, sort_index=ranks.index(rank_of(process)))
        if process.note:
            yield name("process_labels", pid, 0, labels=process.note)
    for lane in export.lanes:
        yield name("thread_name", export.pids[lane.process], lane.tid, name=export.of_rank(lane.name, lane.process))
    for title, pid in export.attached.processes.items():
        yield name("process_name", pid, 0, name=title)
    for pid, tid, title in export.attached.threads:
        yield name("thread_name", pid, tid, name=title)


# --- Lines ------------------------------------------------------------------------------------------------------------
compact: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""Writes short JSON. It is not restricted to ASCII, since the Perfetto UI shows \\u escapes as they are."""


class _Column(NamedTuple):
    """What differs from line to line: a hole of a "%" format, and the values that fill it."""

    hole: str
    values: tuple[list[Any], ...]


def _objects(fields: Mapping[str, object], count: int, mine: Bools | None = None) -> Iterable[str]:
    """Return `count` JSON objects with these fields, each a column or the same for all; or those that are `mine`.

    Formatting with "%" is several times faster than `json.dumps` of an object for each.
    """
    form, columns = _form(fields)
    if mine is not None:
        columns, count = [list(compress(column, mine)) for column in columns], int(mine.sum())
    return map(form.__mod__, zip(*columns, strict=True)) if columns else [form % ()] * count


def _form(value: object) -> tuple[str, list[list[Any]]]:
    """Return JSON as a "%" format, and the columns that fill its holes; every other "%" is literal."""
    match value:
        case _Column():
            return value.hole, list(value.values)
        case dict():
            parts = {compact(name).replace("%", "%%"): _form(inner) for name, inner in value.items()}
            text = ",".join(f"{name}:{form}" for name, (form, _) in parts.items())
            return f"{{{text}}}", [column for _, columns in parts.values() for column in columns]
    return compact(value).replace("%", "%%"), []


def _lines(thing: Drawn) -> Iterator[str]:
    """Yield what is drawn as JSON objects, each a line."""
    match thing:
        case Overlapping():
            yield from _async(thing)
        case DrawnSlices():
            ends = thing.end < NEVER
            lasts = _us(np.where(ends, thing.end - thing.begin, 0))
            yield from _objects({"ph": "X", **_head(thing), "dur": lasts, **_rest(thing)}, len(thing), ends)
            yield from _objects({"ph": "B", **_head(thing), **_rest(thing)}, len(thing), ~ends)
        case Instants():
            yield from _objects({"ph": "i", "s": "t", **_head(thing), **_rest(thing)}, len(thing))
        case Flows() if len(thing.times):
            first = starts(thing.numbers)
            phases = np.where(first, "s", np.where(np.append(first[1:], True), "f", "t"))
            about = {"bp": "e", "cat": thing.category, "name": thing.name, "id": _whole(thing.numbers)}
            at = {"pid": _whole(thing.pids), "tid": _whole(thing.tids), "ts": _us(thing.times)}
            yield from _objects({"ph": _texts(phases.tolist()), **about, **at}, len(first))
        case Counts():
            where: dict[str, object] = {"cat": "loader", "name": thing.name, "pid": thing.pid, "tid": thing.pid}
            values = {"ts": _us(thing.times), "args": {thing.unit: _whole(thing.values)}}
            yield from _objects({"ph": "C", **where, **values}, len(thing.times))


def _async(thing: Overlapping) -> Iterator[str]:
    """Yield the slices of a kind as pairs of a begin and an end.

    The UI names a track by what comes first on it, and shows the tracks of one name as one: so an instant with the
    track's name comes first.
    """
    local = {"local": _texts(f"{thing.kind}{at}" for at in range(len(thing)))}
    for phase, more in (
        ("n", {"name": _texts(thing.tracks)}), ("b", {"args": _arguments(thing)}), ("e", {"ts": _us(thing.end)}),
    ):  # fmt: skip
        yield from _objects({"ph": phase, "cat": thing.category, "id2": local, **_head(thing), **more}, len(thing))


def _head(thing: Things) -> dict[str, object]:
    return {
        "name": _texts(thing.names), "pid": _whole(thing.pids), "tid": _whole(thing.tids), "ts": _us(thing.begin),
    }  # fmt: skip


def _rest(thing: Things) -> dict[str, object]:
    out: dict[str, object] = {"cat": thing.category} if thing.category else {}
    if thing.own or thing.columns or thing.same:
        out["args"] = _arguments(thing)
    return out


def _arguments(thing: Things) -> object:
    if thing.own:
        known = {id(one): compact(one) for one in thing.own}
        return _Column("%s", ([known[id(one)] for one in thing.own],))
    return {**{name: _texts(values) for name, values in thing.columns.items()}, **thing.same}


def _texts(values: Iterable[Hashable]) -> _Column:
    return _Column("%s", (encoded(values, compact),))


def _whole(numbers: Ints) -> _Column:
    return _Column("%d", (numbers.tolist(),))


def _us(ns: Ints) -> _Column:
    """Return microseconds, with the nanoseconds after the point."""
    return _Column("%d.%03d", ((ns // 1000).tolist(), (ns % 1000).tolist()))
