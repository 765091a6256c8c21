"""Rules on slabs: each lives as the protocol's table says, so none is written while a process can see its batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from minidl.check.view import LoaderView, Violation, rule
from minidl.loader.protocol import SLAB_TABLE, SlabEvent, SlabLifecycle, SlabState
from minidl.tracefile import events as ev
from minidl.tracefile.events import SlabEnd, SlabSource

_RELEASES: Final = {SlabEnd.KEPT: SlabEvent.KEEP, SlabEnd.LOST: SlabEvent.LOSE}
_AFTER: Final = {event: state for row in SLAB_TABLE.values() for event, state in row.items()}
"""Where an event leads. It depends on no state, so a slab whose beginning is not there can be followed too."""

_BEFORE_IT_CAME: Final = (SlabState.WRITING, SlabState.SENT)


UNSEEN, SENT, RELEASED = "slab-unseen", "slab-sent", "slab-released"


def _rule(name: str, demand: str, means: str) -> None:
    @rule(name, demand, means)
    def broken(loader: LoaderView) -> Iterator[Violation]:
        return (violation for found, violation in _followed(loader) if found == name)


_rule(
    UNSEEN,
    "a worker writes into a slab only when the batch that was in it is released, and no forked child may see it",
    "A batch that the program still has was overwritten: it holds parts of two batches.",
)
_rule(
    SENT,
    "a slab is sent once filled, and mapped or given back once for each time that it was sent",
    "A batch came without its memory, or memory without a batch: what was rebuilt is not what the worker sent.",
)
_rule(
    RELEASED,
    "a slab is released once for each time that it was mapped",
    "The worker may have been told that a slab is free while a later batch in it is in use.",
)


def _followed(loader: LoaderView) -> Iterator[tuple[str, Violation]]:
    """Take each slab through its lifecycle; which rule an impossible event breaks."""
    lives: dict[tuple[int, int], tuple[SlabLifecycle, int]] = {}  # with the row of the last event
    for row in loader.pick(ev.SLAB_TAKE, ev.SLAB_SEND, ev.SLAB_MAP, ev.SLAB_RELEASE).tolist():
        slab = int(loader.worker[row]), int(loader.x[row])
        if row < loader.lacks.since or slab[0] in loader.lacks.absent:
            continue
        event = _event(loader, row)
        life, before = lives.get(slab, (SlabLifecycle(*slab), -1))
        lives[slab] = life, row
        if before >= 0 and not life.allows(event):
            reason = f"slab {slab[1]} is {life.state.name.lower().replace('_', ' ')}"
            yield _rule_of(event, life.state), loader.broken(reason, row, before)
        life.state = _AFTER[event]


def _event(loader: LoaderView, row: int) -> SlabEvent:
    code = loader.code[row]
    if code == ev.SLAB_TAKE:
        return SlabEvent.TAKE if loader.z[row] == SlabSource.RECYCLED else SlabEvent.MAKE
    if code == ev.SLAB_RELEASE:
        other = SlabEvent.FREE if loader.task[row] >= 0 else SlabEvent.DROP
        return _RELEASES.get(SlabEnd(int(loader.z[row])), other) if loader.z[row] in list(SlabEnd) else other
    return SlabEvent.SEND if code == ev.SLAB_SEND else SlabEvent.MAP


def _rule_of(event: SlabEvent, state: SlabState) -> str:
    if event in (SlabEvent.TAKE, SlabEvent.MAKE):
        return UNSEEN
    return SENT if event in (SlabEvent.SEND, SlabEvent.MAP) or state in _BEFORE_IT_CAME else RELEASED
