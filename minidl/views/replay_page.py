"""A replay as one self-contained HTML page: a slider, the actors and queues, and the batches between them.

Interface: `replay(trace)` -> `NotebookReplay`, a Replay that a notebook shows as a page, also in a saved notebook and
without a network; `html(at)` -> `ReplayPage`, the page as a str. This module computes the states; `replay.html` beside
it draws them.

A page holds a window of events (`MOST_EVENTS` by default), and names it. Text is escaped as in all pages (`frame`).
"""

from __future__ import annotations

import base64
import copy
import gzip
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from minidl.hang.headline import headline
from minidl.playback.state import ProtocolState, Queued, WorkerNow
from minidl.playback.stepper import Replay
from minidl.playback.words import name_of
from minidl.tracefile import events as ev
from minidl.tracefile.loaders import in_words
from minidl.tracefile.reader import Trace, read_trace
from minidl.tracefile.words import size
from minidl.views.colours import ACTORS, legend, paint
from minidl.views.frame import Page, filled

LEAST_HEIGHT, BESIDE_WORKERS, WORKER_HEIGHT = 680, 530, 54
"""Of the page in a notebook, in pixels: at least, without its workers, for each worker."""

MOST_EVENTS: Final = 5000
"""Events that a page holds by default: about 200 KB, and a second to compute."""


class ReplayPage(Page):
    """A replay's page as text."""

    shows = "replay of a minidl trace"


class NotebookReplay(Replay):
    """A Replay that a notebook shows as a page."""

    def html(
        self, path: str | os.PathLike[str] | None = None, *, begin: int | None = None, end: int | None = None
    ) -> ReplayPage | Path:
        """Return the replay as a page with a slider, or write it to `path`: see `html` in this module."""
        return html(self, path, begin=begin, end=end)

    def _repr_html_(self) -> str:
        return html(self)._repr_html_()  # type: ignore[union-attr]  # without a path, it is a page


def replay(trace: Trace | str | os.PathLike[str], loader: int | None = None) -> NotebookReplay:
    """Step through a recorded run: of a trace, or of the path of one.

    loader: the number of the iterator to follow; None takes the one with the most events. Raises TraceError if the
    path holds no trace, ValueError if no such iterator has recorded anything.
    """
    return NotebookReplay(read_trace(trace), loader)


def html(
    at: Replay, path: str | os.PathLike[str] | None = None, *, begin: int | None = None, end: int | None = None,
    compress: bool = True,
) -> ReplayPage | Path:  # fmt: skip
    """Return the replay as a page, or write the page to `path` and return that.

    begin, end: the positions to hold; by default all, or `MOST_EVENTS` around the replay's position. compress: for
    browsers of 2023 or later. Raises IndexError for positions that the replay does not have, OSError as writing does.
    """
    first, last = _window(at, begin, end)
    return _fill(describe(at, first, last), compress).written(path)


def to_focus(at: Replay) -> None:
    """Go to where the trace's headline points: the begin of that step, or of the wait for it if that is later.

    To the end if the headline points nowhere, or at another iterator.
    """
    spot = headline(at.trace).focus
    if spot is None or spot.loader != at.loader:
        at.to(len(at))
    else:
        moment = (max(spot.span, spot.begin) - at.trace.start) / 1e9
        at.at(min(max(moment, 0.0), at.last_time))


def _window(at: Replay, begin: int | None, end: int | None) -> tuple[int, int]:
    if begin is None:
        begin = 0 if end is not None or len(at) <= MOST_EVENTS else at.position - MOST_EVENTS // 2
        begin = max(0, min(begin, len(at) - MOST_EVENTS)) if end is None else max(0, end - MOST_EVENTS)
    if end is None:
        end = min(begin + MOST_EVENTS, len(at))
    if not 0 <= begin <= end <= len(at):
        raise IndexError(f"positions {begin} to {end}: this replay has 0 to {len(at)}")
    return begin, end


# --- The page's data --------------------------------------------------------------------------------------------------
def describe(at: Replay, begin: int, end: int) -> dict[str, Any]:
    """Return the page's data: the positions from `begin` to `end`."""
    mine = copy.copy(at)
    base: dict[str, Any] = {}
    now: dict[str, Any] = {}
    steps, words, changed, times = [], [], [], []
    for position, state in zip(range(begin, end + 1), mine.walk(begin, end), strict=True):
        before, now = now, picture(state)
        if position == begin:
            base = now
        else:
            steps.append({k: now.get(k) for k in (before | now) if before.get(k) != now.get(k)})
        words.append(mine.words)
        changed.append([[change.field, change.words] for change in mine.changed])
        times.append(round(state.time * 1e6))
    lanes, spans = _spans(at, times[0], times[-1])
    found = headline(at.trace)
    return {
        "headline": found.title,
        "next": found.helps,
        "wrong": found.outcome.wrong,
        "title": f"{in_words(at.trace, at.loader)} of {at.trace.path.name}",
        "total": len(at),
        "begin": begin,
        "at": min(max(at.position, begin), end) - begin,
        "times": times,
        "words": words,
        "changed": changed,
        "base": base,
        "steps": steps,
        "focus": _focus(at, begin, end),
        "waits": [
            [int(p) - begin, int(ns)]
            for p, ns in zip(at.wait_positions, at.wait_times, strict=True)
            if begin <= p <= end
        ],
        "fetches": at.fetches(begin, end),
        "batches": [int(p) - begin for p in at.batch_positions if begin <= p <= end],
        "handed_out": int((at.batch_positions < begin).sum()),
        "all_batches": at.batches,
        "iterators": [n for n in np.unique(at.trace.events["loader"]).tolist() if n > 0],
        "ending": at.ending,
        "problems": at.trace.problems,
        "lanes": lanes,
        "spans": spans,
        "actors": ACTORS,
        "legend": [asdict(sign) for sign in legend({span[-1] for span in spans}, unended=any(s[2] < 0 for s in spans))],
        "looks": {
            code: {"colour": paint(code).colour, "soft": paint(code).soft}
            for code in sorted({span[-1] for span in spans})
        },
    }


def _focus(at: Replay, begin: int, end: int) -> int:
    """Return the place of the focus in the window; -1 = it is not there."""
    there = copy.copy(at)
    to_focus(there)
    return there.position - begin if begin <= there.position <= end else -1


def picture(state: ProtocolState) -> dict[str, Any]:
    """Return a state as the page draws it. Values that change together have one key."""
    out: dict[str, Any] = {
        name: getattr(state, name)
        for name in (
            *("epoch", "send_idx", "rcvd_idx", "tasks_outstanding", "in_hand", "consumer", "yielded", "pid"),
            *("note", "violation"),
        )
    }
    out["loader"] = state.loader.name
    out["tasks"] = [[task, info.worker_id, int(info.fetched)] for task, info in state.task_info.items()]
    out["reorder"] = list(state.reorder_buffer)
    out["bytes"] = size(state.bytes_in_flight)
    out["doing"] = state.doing
    out["done"] = [name_of(which) for which in state.done_events]
    out["results"] = [_message(message) for message in state.result_queue]
    out["ready"] = [_message(message) for message in state.ready_queue]
    pin = state.pin
    out["pin"] = None if pin is None else {"state": pin.state.name, "task": pin.task, "simulated": pin.simulated}
    for worker in state.workers:
        out[f"worker {worker.worker}"] = _worker(state, worker)
    return out


def _worker(state: ProtocolState, worker: WorkerNow) -> dict[str, Any]:
    number = worker.worker
    return {
        "number": number,
        "pid": worker.pid,
        "state": worker.state.name,
        "doing": worker.doing,
        "task": -1 if worker.activity == ev.RESULT_PUT else worker.about,
        "queue": [_message(message) for message in worker.index_queue],
        "tasks": state.workers_num_tasks[number] if 0 <= number < len(state.workers_num_tasks) else None,
        "active": state.workers_status[number] if 0 <= number < len(state.workers_status) else None,
        "gone": worker.activity == ev.WORKER_GONE,
    }


def _message(message: Queued) -> list[Any]:
    return [message.name, message.task, message.worker, message.stage.value, size(message.payload + message.shared)]


_LANES: Final = {ev.CONSUMER[0]: "consumer", ev.NEXT[0]: "loader", ev.PIN[0]: "pin thread"}


def _spans(at: Replay, begin: int, end: int) -> tuple[list[str], list[list[int]]]:
    """Return the small timeline: its lanes, and [lane, begin, end, task, code] of each bar, us; end -1 = none."""
    start = at.trace.start
    spans = at.trace.spans()
    spans = spans[(spans["loader"] == at.loader) & np.isin(spans["code"], (*_LANES, ev.FETCH[0]))]
    first, last = (spans["begin"] - start) // 1000, (spans["end"] - start) // 1000
    inside = (first <= end) & ((spans["end"] < 0) | (last >= begin))
    names, bars = list(_LANES.values()), []
    for span, b, e in zip(spans[inside], first[inside].tolist(), last[inside].tolist(), strict=True):
        worker = int(span["worker"])
        lane = _LANES.get(int(span["code"])) or (f"worker {worker}" if worker >= 0 else "fetching")
        place = (names.index(lane) if lane in names else len(names), worker if lane not in names else 0, lane)
        task = span["end_task"] if span["task"] < 0 else span["task"]
        bars.append((place, b, e if span["end"] >= 0 else -1, int(task), int(span["code"])))
    lanes = sorted({place for place, *_ in bars})
    return [lane for *_, lane in lanes], [[lanes.index(place), *rest] for place, *rest in bars]


# --- The page ---------------------------------------------------------------------------------------------------------
def _fill(shown: dict[str, Any], compress: bool) -> ReplayPage:
    raw = json.dumps(shown, separators=(",", ":")).encode()
    data = base64.b64encode(gzip.compress(raw, 6, mtime=0)).decode() if compress else ""
    page = ReplayPage(filled("replay.html", title=shown["title"], shown=shown, data=data))
    workers = {key for now in (shown["base"], *shown["steps"]) for key in now if key.startswith("worker ")}
    page.height = max(LEAST_HEIGHT, BESIDE_WORKERS + WORKER_HEIGHT * len(workers))
    return page
