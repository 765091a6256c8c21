"""A replay as one HTML page that needs nothing else: a slider, the actors and queues, and the batches between them.

Interface: `html(at)` -> `ReplayPage`, a str that a notebook shows as the page itself, also where it was saved without a
network; `Replay.html` calls it. The states are worked out here; `stepper.html` beside this file draws them.

Rules of use: a page holds a window of events (`MOST_EVENTS` by default), and says so. Text goes in as JSON with every
character escaped that HTML could take for its own, and is only ever shown as text; a content security policy allows the
page's own script, by its hash, and nothing else.
"""

from __future__ import annotations

import base64
import copy
import gzip
import html as markup
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from minidl.tracing import events as ev
from minidl.tracing.ledger import size
from minidl.tracing.page import Page, as_json, framed
from minidl.tracing.state import Activity, ProtocolState, Queued, WorkerNow

if TYPE_CHECKING:
    from minidl.tracing.stepper import Replay

MOST_EVENTS: Final = 5000
"""Events that a page holds unless it is told which: some 200 KB, and a second to work out."""


class ReplayPage(Page):
    """A replay's page as text. A notebook shows it in a frame of its own, which runs its script and reaches nothing."""

    height = 780
    shows = "replay of a minidl trace"

    def __repr__(self) -> str:
        return f"<ReplayPage of {len(self):,} characters; Replay.html(path) writes it to a file>"


def html(
    at: Replay, path: str | os.PathLike[str] | None = None, *, begin: int | None = None, end: int | None = None,
    compress: bool = True,
) -> ReplayPage | Path:  # fmt: skip
    """The replay as a page: returned as text, or written to `path`, which is then returned.

    begin, end: the positions to hold; by default all, or `MOST_EVENTS` around where the replay is. compress: a browser
    of 2023 or later reads that. Raises IndexError for positions that the replay has not, OSError as writing does.
    """
    first, last = _window(at, begin, end)
    page = _fill(describe(at, first, last), compress)
    if path is None:
        return page
    target = Path(path)
    target.write_text(page, encoding="utf-8")
    return target


def _window(at: Replay, begin: int | None, end: int | None) -> tuple[int, int]:
    if begin is None:
        begin = 0 if end is not None or len(at) <= MOST_EVENTS else at.position - MOST_EVENTS // 2
        begin = max(0, min(begin, len(at) - MOST_EVENTS)) if end is None else max(0, end - MOST_EVENTS)
    if end is None:
        end = min(begin + MOST_EVENTS, len(at))
    if not 0 <= begin <= end <= len(at):
        raise IndexError(f"positions {begin} to {end}: this replay has 0 to {len(at)}")
    return begin, end


# --- What the page is told --------------------------------------------------------------------------------------------
def describe(at: Replay, begin: int, end: int) -> dict[str, Any]:
    """All that the page shows, of the positions from `begin` to `end`."""
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
    return {
        "title": f"loader {at.loader} of {at.trace.path.name}",
        "total": len(at),
        "begin": begin,
        "at": min(max(at.position, begin), end) - begin,
        "times": times,
        "words": words,
        "changed": changed,
        "base": base,
        "steps": steps,
        "batches": [int(p) - begin for p in at.batch_positions if begin <= p <= end],
        "handed_out": int((at.batch_positions < begin).sum()),
        "all_batches": at.batches,
        "ending": at.ending,
        "problems": at.trace.problems,
        "lanes": lanes,
        "spans": spans,
    }


def picture(state: ProtocolState) -> dict[str, Any]:
    """A state as the page draws it: what changes together lies under one key."""
    out: dict[str, Any] = {
        name: getattr(state, name)
        for name in (
            *("epoch", "send_idx", "rcvd_idx", "tasks_outstanding", "sampling", "in_hand", "waiting_for", "consumer"),
            *("yielded", "pid", "known", "note", "violation"),
        )
    }
    out["loader"] = state.loader.name
    out["tasks"] = [[task, info.worker_id, int(info.fetched)] for task, info in state.task_info.items()]
    out["reorder"] = list(state.reorder_buffer)
    out["bytes"] = size(state.bytes_in_flight)
    out["done"] = [which.name.lower().replace("_", " ") for which in state.done_events]
    out["joining"] = [f"{who.name.lower().replace('_', ' ')} {n if n >= 0 else ''}".strip() for who, n in state.joining]
    out["results"] = [_message(message) for message in state.result_queue]
    out["ready"] = [_message(message) for message in state.ready_queue]
    pin = state.pin
    out["pin"] = None if pin is None else {"state": pin.state.name, "task": pin.task, "simulated": pin.simulated}
    for worker in state.workers:
        out[f"worker {worker.worker}"] = _worker(state, worker)
    return out


_WITH_TASK: Final = {Activity.TAKEN, Activity.FETCHING, Activity.SAMPLE, Activity.COLLATING}


def _worker(state: ProtocolState, worker: WorkerNow) -> dict[str, Any]:
    number = worker.worker
    return {
        "number": number,
        "pid": worker.pid,
        "state": worker.state.name,
        "doing": worker.doing,
        "task": worker.task if worker.activity in _WITH_TASK else -1,
        "queue": [_message(message) for message in worker.index_queue],
        "tasks": state.workers_num_tasks[number] if 0 <= number < len(state.workers_num_tasks) else None,
        "active": state.workers_status[number] if 0 <= number < len(state.workers_status) else None,
        "gone": worker.activity is Activity.GONE,
    }


def _message(message: Queued) -> list[Any]:
    return [message.name, message.task, message.worker, message.stage.value, size(message.payload + message.shared)]


_LANES: Final = {ev.NEXT[0]: "in next()", ev.CONSUMER[0]: "training loop", ev.PIN[0]: "pin thread"}


def _spans(at: Replay, begin: int, end: int) -> tuple[list[str], list[list[int]]]:
    """The small timeline: its lanes, and [lane, begin, end, task] of each bar in microseconds; end -1 = none."""
    start = int(at.trace.events["time"][0]) if len(at.trace) else 0
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
        bars.append((place, b, e if span["end"] >= 0 else -1, int(task)))
    lanes = sorted({place for place, *_ in bars})
    return [lane for *_, lane in lanes], [[lanes.index(place), *rest] for place, *rest in bars]


# --- The page ---------------------------------------------------------------------------------------------------------
def _fill(told: dict[str, Any], compress: bool) -> ReplayPage:
    """The template with its holes filled. Two pages of one replay are the same, byte for byte."""
    data = as_json(told)
    if compress:
        raw = json.dumps(told, separators=(",", ":")).encode()
        data = base64.b64encode(gzip.compress(raw, 6, mtime=0)).decode()
    kind = "application/octet-stream" if compress else "application/json"
    return ReplayPage(framed("stepper.html", {"TITLE": markup.escape(told["title"]), "KIND": kind, "DATA": data}))
