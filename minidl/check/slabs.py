"""Rules on slabs: each lives as its table says, so none is written while a process can see its batch."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Final

from minidl.check.view import LoaderView, Violation, rule
from minidl.loader.protocol import Lifecycle, TableKey
from minidl.tracefile import events as ev
from minidl.tracefile.events import SlabEnd, SlabSource


class SlabState(TableKey):
    """States of one slab of a worker (transport "arena"), as both processes together see it."""

    FREE = enum.auto()  # no process can see what is in it
    WRITING = enum.auto()  # the worker makes a batch in it
    SENT = enum.auto()  # the message that names it is on its way
    VISIBLE = enum.auto()  # something in the reader's process refers to its batch
    GIVEN_UP = enum.auto()  # a forked child may see its batch, or its descriptor did not arrive


class SlabEvent(TableKey):
    """Events of a slab. The worker makes, takes and sends; the reader does the rest."""

    MAKE = enum.auto()  # new memory under this number
    TAKE = enum.auto()  # the memory that is there
    SEND = enum.auto()
    MAP = enum.auto()
    FREE = enum.auto()
    DROP = enum.auto()  # its message could not be rebuilt
    KEEP = enum.auto()  # a child was forked
    LOSE = enum.auto()  # its descriptor did not arrive


_S, _SE = SlabState, SlabEvent
SLAB_TABLE: Mapping[SlabState, Mapping[SlabEvent, SlabState]] = {
    _S.FREE: {_SE.TAKE: _S.WRITING, _SE.MAKE: _S.WRITING},
    _S.WRITING: {_SE.SEND: _S.SENT},
    _S.SENT: {_SE.MAP: _S.VISIBLE, _SE.DROP: _S.FREE, _SE.KEEP: _S.GIVEN_UP, _SE.LOSE: _S.GIVEN_UP},
    _S.VISIBLE: {_SE.FREE: _S.FREE, _SE.KEEP: _S.GIVEN_UP},
    _S.GIVEN_UP: {_SE.MAKE: _S.WRITING},
}


class SlabLifecycle(Lifecycle[SlabState, SlabEvent]):
    """The lifecycle of one slab: written only while no process can see it. Not in torch."""

    def __init__(self, worker_id: int, number: int) -> None:
        super().__init__(f"slab {number} of worker {worker_id}", SlabState.FREE, SLAB_TABLE)


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
