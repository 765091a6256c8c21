"""Which spans have begun and not ended: at a moment, and when the trace, its process or the program ended.

Interface: `open_at(spans, moment)` masks the spans that are open at a moment, `step_at` is the innermost one of a
process, `open_call` that of the call in which a program's trace ends; `since` says since when a wait that polls lasts.
`open_spans(trace)`, a line for each thread whose span did not end; `how_ended(trace)`, of what ended by an error or a
signal. What a program left as it was when it ended is no such span: `alive_at_end(trace)` has a line for each of those
iterators, `left_alive(trace)` their numbers. `alive_until` is the time up to which each process was seen alive.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Bools, Rows
from minidl.tracefile.events import BEGINS, CALLS, Message
from minidl.tracefile.process import Process, ProcessLife
from minidl.tracefile.reader import Trace
from minidl.tracefile.words import doing, duration, how, listed, plain


# --- At a moment ------------------------------------------------------------------------------------------------------
def open_at(spans: Rows, moment: int) -> Bools:
    """Mask the spans that have begun at a moment and not ended."""
    mask: Bools = (spans["begin"] <= moment) & ((spans["end"] < 0) | (spans["end"] > moment))
    return mask


def step_at(spans: Rows, process: int, moment: int, task: int = -1) -> np.void | None:
    """The innermost open span of a process at a moment; one of `task` if there is one."""
    there = open_at(spans, moment) & (spans["process"] == process)
    rows = spans[there & ~np.isin(spans["code"], [ev.EPOCH[0], ev.READY_GET[0]])]
    mine = rows[rows["task"] == task] if task >= 0 else rows[:0]
    rows = mine if len(mine) else rows
    return rows[-1] if len(rows) else None


_ALONE: Final = (*ev.AWAITS, ev.SAMPLER_NEXT[0])
_IN_CALL: Final = (*(code for code in CALLS if code in BEGINS and code != ev.EPOCH[0]), *_ALONE)
"""Spans of a call, or of the program's own code; and those in one that an observed loader, or iter(), shows alone."""


def open_call(trace: Trace, spans: Rows, process: int) -> np.void | None:
    """The outermost open span of a process's last call, or of its own code between two; None = there is none.

    The span of an iterator that the program left alive is none.
    """
    mine = spans[(spans["process"] == process) & (spans["loader"] > 0)]
    rows = mine[(mine["end"] < 0) & np.isin(mine["code"], _IN_CALL)]
    rows = rows[~np.isin(rows["loader"], list(left_alive(trace)))]
    returned = int(mine["end"][mine["code"] == ev.NEXT[0]].max(initial=0))  # an exception leaves its inner get open
    rows = rows[~np.isin(rows["code"], _ALONE) | (rows["begin"] > returned)]
    # They are in order of their begins: the open call began last.
    return rows[rows["loader"] == rows["loader"][-1]][0] if len(rows) else None


# --- At the end -------------------------------------------------------------------------------------------------------
def open_spans(
    trace: Trace, spans: Rows | None = None, worker: tuple[int, int] | None = None, first: int = -1
) -> list[str]:
    """In words, for each thread with a span open when the trace or its process ends: the innermost one, how long.

    worker: only of this one, (loader, worker). first: the process that comes first, -1 = none; idle workers come last.
    """
    last, until = trace.last, alive_until(trace)
    out = []
    alive = left_alive(trace)
    found = list(innermost(trace, spans))
    found.sort(key=lambda each: (int(each[1]["process"]) != first, each[1]["code"] == ev.INDEX_GET[0]))
    for process, row, ended in found:
        if worker not in (None, (process.loader, process.worker)):
            continue
        if process.whole_until:
            before = duration(last - process.whole_until)
            out.append(f"{process.name} was {doing(row)} when its recording stopped, {before} before that")
        elif ended and has_arrived(trace, row):
            continue  # the process ended before its feeder thread could say that the write has ended
        elif ended:
            out.append(f"{process.name} ended while it was {doing(row)}")
        elif int(row["loader"]) not in alive:
            took = duration(until[int(row["process"])] - since(trace, row))
            out.append(f"{process.name} has been {doing(row)} for {took}")
    return out


def has_arrived(trace: Trace, row: np.void) -> bool:
    """Whether it is the write of a result that the loader has received: it has ended, though no event says so."""
    events = trace.events
    got = (events["code"] == ev.RESULT_GET[1]) & (events["x"] == Message.RESULT) & (events["time"] >= row["begin"])
    mine = (events["loader"] == row["loader"]) & (events["task"] == row["task"])
    return bool(row["code"] == ev.RESULT_WRITE[0] and np.any(got & mine))


def left_alive(trace: Trace) -> frozenset[int]:
    """The iterators that were not shut down when the program that made them ended by itself."""
    ended = {line["process"] for line in trace.described("program_end")}
    shut_down = set(trace.events["loader"][trace.events["code"] == ev.SHUTDOWN[1]].tolist())
    made = {int(line["loader"]) for line in trace.described("loader") if line["process"] in ended}
    return frozenset(made - shut_down)


def alive_at_end(trace: Trace, spans: Rows | None = None) -> list[str]:
    """In words, for each iterator of `left_alive` that has an open span, what its processes were doing."""
    alive, found = left_alive(trace), dict[int, list[str]]()
    for process, row, ended in innermost(trace, spans):
        if not ended and not process.whole_until and int(row["loader"]) in alive:
            found.setdefault(int(row["loader"]), []).append(f"{process.name} {doing(row)}")
    return [f"iterator {number}: {listed(each, most=4)}" for number, each in sorted(found.items())]


def alive_until(trace: Trace) -> list[int]:
    """Up to when each process was there, ns: to the trace's end (see `Trace.last`), or its own last event if it ended.

    A process that was killed writes nothing about it: others find it dead some time after its last event, and a
    watchdog (see `watched`) sees when it ends, or that it is there although it emits nothing. A worker that the loader
    terminated was there until then.
    """
    events = trace.events
    until = [trace.last] * len(trace.processes)
    ended = events[events["code"] == ev.TERMINATE]
    dead = {ev.death_of(row)[0] for row in events[np.isin(events["code"], ev.DEATHS)]}
    left = set(events["process"][events["code"] == ev.WORKER_EXIT].tolist())
    for index, process in enumerate(trace.processes):
        if process.pid in dead or index in left or process.life is ProcessLife.GONE:
            own = events["time"][events["process"] == index]
            until[index] = int(own[-1]) if len(own) else process.start_ns
            if process.role == "worker":
                mine = (ended["loader"] == process.loader) & (ended["worker"] == process.worker)
                mine &= ended["time"] >= process.start_ns
                until[index] = max([until[index], *ended["time"][mine][:1].tolist()])
    if not (trace.described("trace_end") or trace.described("program_end")):  # a run that ended lived to its last event
        seen, dead_at = trace.watched.seen_alive(), {one.pid: one.at for one in trace.watched.ended}
        for index, process in enumerate(trace.processes):
            until[index] = dead_at.get(process.pid, max(until[index], seen.get(process.pid, 0)))
    return until


def how_ended(trace: Trace) -> list[str]:
    """In words: the exceptions that ended programs, and the deaths that only the watchdog has seen."""
    out = []
    for line in trace.described("uncaught"):
        at = line.get("at")
        where = f", at {at[0]}" if isinstance(at, list) and at else ""
        out.append(plain(f"{trace.processes[line['process']].name} ended with {line.get('error')}{where}"))
    gone = set(trace.events["x"][trace.events["code"] == ev.WORKER_GONE].tolist())
    over = {trace.processes[line["process"]].pid for line in trace.described("program_end")}
    names = {process.pid: process.name for process in trace.processes}
    for one in trace.watched.ended:
        if one.pid not in gone | over and one.pid in names:
            out.append(f"{names[one.pid]} was seen to end" + ("" if one.code is None else f" {how(one.code)}"))
    return out


def innermost(trace: Trace, spans: Rows | None) -> Iterator[tuple[Process, np.void, bool]]:
    """Yield for each thread with an open span: its process, the innermost span, whether the process has ended."""
    spans = trace.spans() if spans is None else spans
    unended = spans[spans["end"] < 0]
    left = set(trace.events["process"][trace.events["code"] == ev.WORKER_EXIT].tolist())
    ended = trace.events[trace.events["code"] == ev.WORKER_GONE]
    gone = set(zip(*(ended[name].tolist() for name in ("loader", "worker", "x")), strict=True))
    innermost = {(int(row["process"]), int(row["tid"])): row for row in unended}  # in order of begin: the last stays
    for (index, _), row in innermost.items():
        process = trace.processes[index]
        yield process, row, index in left or (process.loader, process.worker, process.pid) in gone


def since(trace: Trace, span: np.void) -> int:
    """Since when a thread is in this span, its innermost open one; a wait that polls has begun with its first poll."""
    if span["code"] not in ev.POLLS:
        return int(span["begin"])
    events = trace.events
    mine = events[(events["process"] == span["process"]) & (events["tid"] == span["tid"])]
    polls = np.isin(mine["code"], ev.POLLS) | np.isin(mine["code"], ev.POLLED) & (mine["x"] == Message.EMPTY)
    other = np.flatnonzero(~polls)
    waits = mine[other[-1] + 1 :] if len(other) else mine
    return int(waits["time"][0]) if len(waits) else int(span["begin"])  # it has read, and got nothing out yet
