"""What led to a batch, step by step: `minidl before`.

Interface: `critical_path(trace, batch)`, the text: the batch's own steps, and the critical path, both by `Trace.order`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np

from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Bools, Ints, distinct
from minidl.tracefile.batches import epochs
from minidl.tracefile.events import EVENTS, Phase, Track
from minidl.tracefile.loaders import first_epochs
from minidl.tracefile.open_spans import open_spans
from minidl.tracefile.words import duration, percent, plain

if TYPE_CHECKING:
    from minidl.tracefile.reader import Trace


MOST_LINES: Final = 40
"""The default number of steps."""


def critical_path(
    trace: Trace, batch: int, *, loader: int | None = None, epoch: int | None = None, lines: int = MOST_LINES
) -> str:
    """What led to the yield of task `batch`, or to its last event: its own steps, and the critical path.

    Each step of the critical path is the last cause of the step after it.

    loader, epoch: choose one of several tasks with that number; default: the last one sent. lines: the most steps to
    print, the latest ones; 0 = all. Times are ms since the trace's first event, on one clock. Raises ValueError if
    there is no such batch.
    """
    put, last, titles = _batch(trace, batch, loader, epoch)
    chain = trace.order.chain(last)
    names = _actors(trace)
    own = np.flatnonzero(trace.order.before(last, batch) & ~trace.order.before(put) & _about_task(trace, put))
    out = [*titles, *_told(trace, np.append(in_order(trace, own), last), names, 0)]
    if trace.events["code"][last] != ev.YIELD:
        out += open_spans(trace, worker=(int(trace.events["loader"][put]), int(trace.events["worker"][put])))
    out += [
        "",
        "The critical path: each step is the last cause of the next one:",
        *_told(trace, chain, names, lines),
    ]
    return "\n".join([*out, _shares(trace, chain, names)])


def in_order(trace: Trace, way: Ints) -> Ints:
    """The events of `way` by time, and by cause at equal times."""
    order = trace.order
    causes = [np.count_nonzero(order.before(at)[way]) for at in way.tolist()]
    return way[np.lexsort((order.rank[way], order.process[way], causes, trace.events["time"][way]))]


def _told(trace: Trace, way: Ints, names: dict[tuple[int, int], str], lines: int) -> list[str]:
    """A line for each step of `way`."""
    steps = list(_steps(trace, way))
    left_out = max(0, len(steps) - lines) if lines else 0
    width = max(len(name) for name in names.values())
    out, before = [f"{'...':>13}  {left_out} earlier steps"] if left_out else [], ""
    for at, words in steps[left_out:]:
        who = names[trace.order.thread(at)]
        ms = (trace.events["time"][at] - trace.events["time"][0]) / 1e6
        out.append(f"{ms:10.3f} ms  {who if who != before else '':<{width}}  {words}")
        before = who
    return out


def _about_task(trace: Trace, at: int) -> Bools:
    """Mask the events of the loader of `at`, without waits, which only name the task that they wait for."""
    waits = np.isin(trace.events["code"], [*ev.AWAITS, ev.NEXT[0], ev.TIMED_OUT])
    mask: Bools = (trace.events["loader"] == trace.events["loader"][at]) & ~waits
    return mask


def _batch(trace: Trace, task: int, loader: int | None, epoch: int | None) -> tuple[int, int, list[str]]:
    """Return the batch's put; its yield, or its last known event; and the lines of a title."""
    events, rank = trace.events, trace.order.rank
    mine = (events["task"] == task) & (True if loader is None else events["loader"] == loader)
    born = np.flatnonzero(mine & (events["code"] == ev.INDEX_PUT))
    if not len(born):  # a loader without workers sends nothing
        born = np.flatnonzero(mine & (events["code"] == ev.FETCH[0]))
    born = born[np.argsort(trace.events["time"][born], kind="stable")]
    first = first_epochs(trace)
    numbers = np.maximum(0, epochs(events, events["loader"][born], events["time"][born]))
    numbers += np.array([first.get(number, 0) for number in events["loader"][born].tolist()], np.int64)
    found = np.flatnonzero((numbers == epoch) | (epoch is None))
    if not len(found):
        sent = events["task"][np.isin(events["code"], [ev.INDEX_PUT, ev.FETCH[0]]) & (events["task"] >= 0)
                              & (True if loader is None else events["loader"] == loader)]  # fmt: skip
        have = f"tasks {sent.min()} to {sent.max()}" if len(sent) else "no batches"
        of = "".join(f" of {what} {n}" for what, n in (("iterator", loader), ("epoch", epoch)) if n is not None)
        raise ValueError(f"the trace has no batch {task}{of}: it has {have}")
    put = int(born[found[-1]])
    mine &= _about_task(trace, put) & ~trace.order.before(put)
    for later in born[born != put].tolist():
        if trace.order.happened_before(put, later):
            mine &= trace.order.before(later)
    name = f"batch {task} of iterator {events['loader'][put]}, epoch {numbers[found[-1]]}"
    many = f"{len(found)} batches have the number {task}: this is the last one; --iterator and --epoch choose another"
    titles = [many] if len(found) > 1 else []
    since = "(times since the trace's first event). Its own steps"
    yields = np.flatnonzero(mine & (events["code"] == ev.YIELD))
    if len(yields):
        return put, int(yields[rank[yields].argmin()]), [*titles, f"What led to the yield of {name} {since}:"]
    known = np.flatnonzero(mine)
    last = int(known[trace.events["time"][known].argmax()])
    return put, last, [*titles, f"B{name[1:]}, was never yielded {since}, as far as known:"]


def _actors(trace: Trace) -> dict[tuple[int, int], str]:
    """Name each thread, by the track of an event that only such a thread emits."""
    several = len(trace.loaders) > 1
    out: dict[tuple[int, int], str] = {}
    for kind, track in (("pin thread", Track.PIN), ("feeder", Track.FEEDER), ("", None)):
        codes = [code for code, event in EVENTS.items() if track in (event.track, None)]
        for process, tid in distinct(trace.events[np.isin(trace.events["code"], codes)], "process", "tid"):
            who = trace.processes[process]
            number = f" {who.worker}" if who.role == "worker" else ""
            name = "queue feeder" if (kind, number) == ("feeder", "") else f"{kind or who.role}{number}"
            out.setdefault((process, tid), f"{name} of iterator {who.loader}" if several and number else name)
    return out


def _steps(trace: Trace, chain: Ints) -> Iterator[tuple[int, str]]:
    """Yield the chain's steps, each as its event and words. The words of a step include its inner steps."""
    code, mates = trace.events["code"], trace.order.mates
    inside = {at: place for place, at in enumerate(chain.tolist())}
    place = 0
    while place < len(chain):
        at = int(chain[place])
        event, mate = EVENTS[int(code[at])], int(mates[at])
        if event.phase is Phase.BEGIN and mate in inside and event.code not in _FRAMES:
            within = [int(i) for i in chain[place + 1 : inside[mate]]]
            if all(trace.order.thread(i) == trace.order.thread(at) for i in within):
                yield at, f"{_about(trace, mate, at)}: {_took(trace, at, mate)}{_parts(trace, within)}"
                place = inside[mate] + 1
                continue
        if event.phase is Phase.BEGIN:
            yield at, f"{_about(trace, at)} begins{'' if mate >= 0 else '; its end is not in the trace'}"
        elif event.phase is Phase.END:
            took = f", after {_took(trace, mate, at)}" if mate >= 0 else ""
            yield at, f"{_about(trace, at, mate)} ends{took}"
        else:
            yield at, _about(trace, at)
        place += 1


_FRAMES: Final = (ev.EPOCH[0], ev.SHUTDOWN[0])


def _about(trace: Trace, at: int, other: int = -1) -> str:
    """Return an event's name and task. Only the end of a span may have the task."""
    row = trace.events[at]
    task = int(row["task"]) if row["task"] >= 0 or other < 0 else int(trace.events["task"][other])
    words = EVENTS[int(row["code"])].name
    if row["code"] in ev.SAMPLE and row["y"] >= 0:
        words += f" {row['y']}"
    if task >= 0:
        words += f" of task {task}"
    text = trace.text(row)
    return f"{words} ({plain(text)})" if text else words


def _took(trace: Trace, begin: int, end: int) -> str:
    return duration(int(trace.events["time"][end] - trace.events["time"][begin]))


def _parts(trace: Trace, within: list[int]) -> str:
    """Return the inner steps of a step by name, and the longest sample."""
    spent: dict[str, list[int]] = {}
    longest = (-1, -1)
    depth = 0
    for at in within:
        event, mate = EVENTS[int(trace.events["code"][at])], int(trace.order.mates[at])
        if event.phase is Phase.END:
            depth -= 1
            continue
        if event.phase is Phase.BEGIN:
            if depth == 0 and mate >= 0:
                took = int(trace.events["time"][mate] - trace.events["time"][at])
                spent.setdefault(event.name, []).append(took)
                if event.code == ev.SAMPLE[0]:
                    longest = max(longest, (took, int(trace.events["y"][at])))
            depth += 1
    parts = [f"{len(took)} {name} {duration(sum(took))}" for name, took in spent.items()]
    if len(spent.get("sample", ())) > 1:
        parts.append(f"the longest sample {duration(longest[0])}, index {longest[1]}")
    return f" ({', '.join(parts)})" if parts else ""


def _shares(trace: Trace, chain: Ints, names: dict[tuple[int, int], str]) -> str:
    """Return each thread's share of the time from the chain's first event to its last."""
    spent: dict[str, int] = {}
    for before, at in zip(chain[:-1].tolist(), chain[1:].tolist(), strict=True):
        same = trace.order.thread(before) == trace.order.thread(at)
        who = names[trace.order.thread(at)] if same else "between threads"
        spent[who] = spent.get(who, 0) + max(0, int(trace.events["time"][at] - trace.events["time"][before]))
    total = sum(spent.values())
    shares = [f"{percent(ns / total)} {who}" for who, ns in sorted(spent.items(), key=lambda item: -item[1]) if ns]
    return f"{duration(total)} in all" + (f": {', '.join(shares)}" if shares else "")
