"""Can the model do what a live loader was recorded doing? `follow(trace)` looks for a run of it with the same events.

Each actor's events must come in the model's run as that actor recorded them; how the actors interleave is the model's
choice, since a clock says when an event was recorded, not when it took effect. What the model leaves out (a wait that
brought nothing, what a span's time was spent on) is left out of the comparison.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from minidl.explore.configurations import Configuration, Crash
from minidl.explore.guards import own
from minidl.explore.steps import MAIN, PIN_THREAD, TAKES_LOCK, Label, result_feeder
from minidl.explore.threads import model_of
from minidl.explore.trace import ToldEvent, telling_of, told
from minidl.explore.world import State
from minidl.record.made_up import Thread
from minidl.tracefile import events as ev
from minidl.tracefile.events import EVENTS, Ending, Message, Outcome, Phase

if TYPE_CHECKING:
    from minidl.tracefile.reader import Trace

Key = tuple[int, ...]
"""What is compared of an event: its code, its task, its worker, and x where that says what came, or which."""

COMPARED: Final = {
    *(ev.TASK_ASSIGNED, ev.INDEX_PUT, ev.REORDER_STORE, ev.REORDER_POP, ev.RCVD_ADVANCE, ev.YIELD, ev.NEXT[0]),
    *(ev.WORKER_EXHAUSTED, ev.RESUME_PUT, *ev.EPOCH, *ev.SHUTDOWN, ev.DONE_EVENT_SET, ev.SENTINEL_PUT, ev.FOUND_DEAD),
    *(ev.INDEX_GET[1], *ev.FETCH, ev.RESULT_PUT, ev.RESUME_ACK, ev.SENTINEL_GET, ev.WORKER_EXIT, ev.DONE_EVENT_SEEN),
    *(ev.RESULT_WRITE[1], ev.RESULT_GET[1], ev.READY_GET[1], ev.PIN[0], ev.READY_PUT, ev.PIN_EXIT),
}
_BY_X: Final = {
    *(ev.INDEX_GET[1], ev.RESULT_GET[1], ev.READY_GET[1], ev.FETCH[1], ev.RESULT_PUT, ev.DONE_EVENT_SET, ev.YIELD),
    *(ev.SENTINEL_PUT, ev.SENTINEL_GET, ev.WORKER_EXIT, ev.PIN_EXIT, ev.RCVD_ADVANCE, *ev.EPOCH, ev.RESUME_PUT),
}
_GETS: Final = (ev.INDEX_GET[1], ev.RESULT_GET[1], ev.READY_GET[1])
ROOM: Final = 64
NEVER: Final = 1 << 62
MOST_STATES: Final = 200_000
MOST_FOLLOWED: Final = 64
"""Workers of a run that can be followed."""


@dataclass
class Followed:
    """How far the model came. lost: in words, why not all of them were told; "" if they were."""

    events: int
    states: int
    lost: str

    def __bool__(self) -> bool:
        return not self.lost


def _key(code: int, arguments: tuple[int, ...]) -> Key | None:
    """What to compare of an event; None if nothing."""
    task, worker, x, *_ = (*arguments, -1, -1)[:2] + (0,) if len(arguments) < 3 else arguments
    if code not in COMPARED or (code in _GETS and x == Message.EMPTY):
        return None
    if code == ev.RESULT_WRITE[1]:
        worker = -1  # of an acknowledgement, the feeder does not know it
    return (code, int(task), int(worker), int(x) if code in _BY_X else 0)


Recorded = dict[Thread, list[tuple[Key, int]]]
"""Each actor's events, in its order, with their times (ns)."""


def recorded(trace: Trace, loader: int = 1) -> Recorded:
    """Each actor's events of one loader. Feeder threads of the loader's own process are left out."""
    rows = trace.events[trace.events["loader"] == loader]
    pins = set(rows["tid"][rows["code"] == ev.PIN_START].tolist())
    out: Recorded = defaultdict(list)
    for row in rows:
        key = _key(int(row["code"]), (int(row["task"]), int(row["worker"]), int(row["x"])))
        if key is None:
            continue
        process = trace.processes[int(row["process"])]
        if process.role == "worker":
            thread = result_feeder(process.worker) if key[0] == ev.RESULT_WRITE[1] else (process.worker, 0)
        elif key[0] == ev.RESULT_WRITE[1]:
            continue
        else:
            thread = PIN_THREAD if int(row["tid"]) in pins else MAIN
        if key[0] == ev.PIN_EXIT and out[thread][-1:] and out[thread][-1][0][0] == ev.PIN[0]:
            out[thread].pop()  # told while it pinned: in the model, it receives, pins and hands on in one step
        out[thread].append((key, int(row["time"])))
    return dict(out)


def configuration_of(trace: Trace, loader: int = 1, crashes: tuple[Crash, ...] = ()) -> Configuration:
    """The configuration in which a recorded loader ran, as far as its trace shows. Raises ValueError if it does not."""
    rows = trace.events[trace.events["loader"] == loader]
    facts = trace.loaders.get(loader, {})
    begins = rows[rows["code"] == ev.EPOCH[0]]
    if not len(begins) or not 0 < begins["y"][0] <= MOST_FOLLOWED:
        told = f"{begins['y'][0]} workers in" if len(begins) else "no begin of"
        raise ValueError(
            f"{trace.path}: iterator {loader} has {told} its first epoch: the model follows whole runs of at most "
            f"{MOST_FOLLOWED} workers"
        )
    epoch = np.cumsum(rows["code"] == ev.EPOCH[0])
    workers = int(begins["y"][0])
    fetched = rows["code"] == ev.FETCH[1]
    shares = [
        max(int(np.sum(fetched & (rows["worker"] == w) & (epoch == e) & (rows["x"] == Outcome.DATA)))
            for e in range(1, len(begins) + 1))
        for w in range(workers)
    ]  # fmt: skip
    drawn = (rows["code"] == ev.SAMPLER_NEXT[1]) & (rows["x"] > 0)
    return Configuration(
        str(trace.path),
        workers=workers,
        prefetch=int(begins["z"][0]),
        tasks=max(int(np.sum(drawn & (epoch == e))) for e in range(1, len(begins) + 1)),
        streams=tuple(shares) if facts.get("dataset_kind") == "iterable" else None,
        persistent=bool(facts.get("persistent_workers")),
        epochs=len(begins),
        pin=bool(facts.get("pin_memory")),
        in_order=facts.get("in_order", True) is not False,
        index_room=ROOM,
        result_room=ROOM,
        may_break=bool(np.any((rows["code"] == ev.EPOCH[1]) & (rows["z"] != Ending.EXHAUSTED))),
        crashes=crashes,
        threads=facts.get("transport") == "thread",
    )


def follow(trace: Trace, loader: int = 1, crashes: tuple[Crash, ...] = ()) -> Followed:
    """Look for a run of the model in which every actor has the events that were recorded."""
    configuration = configuration_of(trace, loader, crashes)
    telling = telling_of(model_of(configuration, own(configuration)))
    wanted = recorded(trace, loader)
    actors = list(wanted)
    events = sum(map(len, wanted.values()))
    kills = Crash.WORKER_KILLED in crashes
    todo: list[tuple[State, tuple[int, ...]]] = [(telling.initial, (0,) * len(actors))]
    seen = set(todo)
    best = todo[0][1]
    while todo and len(seen) < MOST_STATES:
        state, places = todo.pop()
        if sum(places) > sum(best):
            best = places
        if sum(places) == events:
            return Followed(events, len(seen), "")
        found = []
        crashing = telling.crashes(state)
        for label, after in [*crashing, *telling.steps(state)]:
            moved = _advance(told(telling, state, label, after), wanted, actors, places, kills)
            if moved is not None and (after, moved) not in seen:
                seen.add((after, moved))
                when = NEVER if (label, after) in crashing else _when(label, wanted, actors, places, moved)
                found.append((when, after, moved))
        found.sort(key=lambda way: -way[0])
        todo += [way[1:] for way in found]  # what was recorded earliest is tried first
    stuck = _stuck(wanted, actors, best)
    if todo:
        return Followed(events, len(seen), f"given up after {len(seen):,} states; the furthest run comes to {stuck}")
    return Followed(events, len(seen), f"no run of the model goes on with {stuck}")


def _advance(
    heard: list[ToldEvent], wanted: Recorded, actors: list[Thread], places: tuple[int, ...], kills: bool
) -> tuple[int, ...] | None:
    """Where each actor's record stands after these events; None if they differ from it.

    kills: a worker may have been killed, and between two events of what is one step in the model.
    """
    now = dict(zip(actors, places, strict=True))
    begun: set[Thread] = set()
    for thread, code, arguments in heard:
        key = _key(code, arguments)
        if key is None or (thread[0] < 0 and code == ev.RESULT_WRITE[1]):
            continue
        at = now.get(thread, 0)
        rest = wanted.get(thread, [])
        if at >= len(rest) and code == ev.RESULT_WRITE[1]:
            continue  # the worker's process ended before its feeder thread could record the end of its last write
        if at >= len(rest) and kills and thread in begun and thread[0] >= 0:
            continue  # ... or before it could record the rest of its last step
        if at >= len(rest) or rest[at][0] != key:
            return None
        now[thread] = at + 1
        begun.add(thread)
    return tuple(now[actor] for actor in actors)


def _when(label: Label, wanted: Recorded, actors: list[Thread], before: tuple[int, ...], after: tuple[int, ...]) -> int:
    """When a step was recorded. A step without events counts as early; taking the lock, as the write that follows."""
    places = [place for place, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]
    if label[1] == TAKES_LOCK:
        places = [place for place, actor in enumerate(actors) if label[0] == f"worker {actor[0]}'s feeder" and actor[1]]
    times = [wanted[actors[place]][before[place]][1] for place in places if before[place] < len(wanted[actors[place]])]
    return min(times, default=NEVER if label[1] == TAKES_LOCK else 0)


def _stuck(wanted: Recorded, actors: list[Thread], places: tuple[int, ...]) -> str:
    """In words: the next event of each actor, at the furthest point that the model followed to."""
    parts = []
    for actor, at in zip(actors, places, strict=True):
        if at < len(wanted[actor]):
            code, task, worker, x = wanted[actor][at][0]
            event = EVENTS[code]
            phase = "" if event.phase is Phase.INSTANT else f" {event.phase.name.lower()}"
            parts.append(f"{actor} number {at}: {event.name}{phase}, task {task}, worker {worker}, {x}")
    return "; ".join(parts)
