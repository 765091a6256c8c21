"""All interleavings of a worker, its loader, a device and forked processes around two slabs: is one written while seen?

Interface: `explore_slabs(guards)` -> `Explored`; `GUARDS`: what each is for; `run()`: `minidl explore --slabs`.

The worker decides with `arena.may_write`, as the live one. A batch lies in one slab. In any order: the worker takes a
slab, sends it and may keep the batch; the loader gets messages, keeps batches and drops them; each of both may fork a
process, which sees what its parent sees, and drops it without telling anybody; the worker may be killed. The loader has
page-locked one of the slabs: a device is told to copy its batch, and reads it later. It is wrong if a slab is written
while a process, a message or the device has its batch, if the device reads pages that the worker has given back, and if
a program that keeps its batches gets no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Final

from minidl.explore.search import breadth_first
from minidl.transport.arena import FREE, KEPT, TAKEN, may_give_back, may_write


def _guard(what: str) -> bool:
    """A guard that is there, with what it does."""
    return field(default=True, metadata={"for": what})


@dataclass(frozen=True, slots=True)
class Guards:
    """What keeps slabs from harm; a field is False where the guard is taken away."""

    byte: bool = _guard("the worker looks at the slab's byte, which the loader sets to FREE")
    own_root: bool = _guard("the worker looks whether it still has the batch itself: collate may keep it")
    fork_of_loader: bool = _guard("a fork of the loader sets the bytes of the batches that it sees to KEPT")
    fork_of_worker: bool = _guard("a fork of the worker marks the slabs whose batches it sees")
    alone: bool = _guard("a batch gets a slab for itself if no other is free")
    copy_event: bool = _guard("who copies from a locked slab keeps its batch until the event behind the copy")
    locked_memory: bool = _guard("no memory of a locked slab is given back to the system")


GUARDS: Final = {guard.name: str(guard.metadata["for"]) for guard in fields(Guards)}


@dataclass(frozen=True, slots=True)
class _Slab:
    """One slab: its byte and the worker's mark, and who has its batch: the message, which processes, and the device.

    locked: by the loader; torn: the locked pages are no longer those that the worker writes.
    """

    byte: int = FREE
    inherited: bool = False
    sent: bool = False
    worker: bool = False
    loader: bool = False
    child: bool = False
    device: bool = False
    told: bool = True  # the loader's callback will set the byte
    locked: bool = False
    torn: bool = False

    @property
    def seen_by(self) -> str:
        """Who has the batch that lies in it; "" if nobody."""
        who = (("a message", self.sent), ("the worker", self.worker), ("the program", self.loader))
        others = ("a forked process", self.child), ("the device", self.device)
        return next((name for name, has in (*who, *others) if has), "")


@dataclass(frozen=True, slots=True)
class _State:
    """writing: the slab that the worker fills, -1 = none; fault: what has gone wrong."""

    slabs: tuple[_Slab, ...] = (_Slab(locked=True), _Slab())
    writing: int = -1
    queue: tuple[int, ...] = ()
    lives: bool = True
    fault: str = ""

    def with_slab(self, number: int, **changes: bool | int) -> _State:
        slabs = list(self.slabs)
        slabs[number] = replace(slabs[number], **changes)  # type: ignore[arg-type]
        return replace(self, slabs=tuple(slabs))


Step = tuple[str, _State]


@dataclass(frozen=True, slots=True)
class Explored:
    """How many states there are, and the shortest run to a fault: its steps, "" and () if there is none."""

    states: int
    fault: str = ""
    run: tuple[str, ...] = ()


def explore_slabs(guards: Guards = Guards()) -> Explored:  # frozen
    """Go through all states, breadth first; stop at the first fault."""
    states, found = breadth_first(_State(), lambda state: (state.fault, _steps(state, guards)))
    return Explored(states) if found is None else Explored(states, found.bad, tuple(found.labels))


def _steps(state: _State, guards: Guards) -> Iterator[Step]:
    if state.lives:
        yield from _of_worker(state, guards)
        yield "the worker is killed", replace(state, lives=False, writing=-1)
    if state.queue:
        number = state.queue[0]
        got = replace(state, queue=state.queue[1:]).with_slab(number, sent=False, loader=True, told=True)
        yield f"the loader gets slab {number}", got
    for number, slab in enumerate(state.slabs):
        if slab.device:
            fault = f"the device reads pages of slab {number} that the worker has given back" if slab.torn else ""
            yield f"the device has read slab {number}", replace(state.with_slab(number, device=False), fault=fault)
        elif slab.loader and slab.locked:
            yield f"the device is told to copy slab {number}", state.with_slab(number, device=True)
        if slab.loader and not (slab.device and guards.copy_event):
            free = {"byte": FREE} if slab.told else {}
            yield f"the program drops the batch in slab {number}", state.with_slab(number, loader=False, **free)
        if slab.child:
            yield f"a forked process drops the batch in slab {number}", state.with_slab(number, child=False)
    if any(slab.loader and not slab.child for slab in state.slabs):
        forked = state
        for number, slab in enumerate(state.slabs):
            if slab.loader:
                kept = {"byte": KEPT, "told": False} if guards.fork_of_loader else {}
                forked = forked.with_slab(number, child=True, **kept)
        yield "the program forks", forked


def _of_worker(state: _State, guards: Guards) -> Iterator[Step]:
    if state.writing >= 0:
        number = state.writing
        sent = replace(state, writing=-1, queue=(*state.queue, number))
        yield f"the worker sends slab {number}", sent.with_slab(number, sent=True, worker=False)
        yield f"the worker sends slab {number}, and keeps the batch", sent.with_slab(number, sent=True, worker=True)
    else:
        yield _take(state, guards)
    for number, slab in enumerate(state.slabs):
        if slab.locked and slab.byte == FREE and not slab.torn and may_give_back(guards.locked_memory):
            yield f"the worker gives memory of slab {number} back", state.with_slab(number, torn=True)
        if slab.worker and number != state.writing:
            yield f"the worker drops the batch in slab {number}", state.with_slab(number, worker=False)
            if not slab.child:
                marked = {"inherited": True} if guards.fork_of_worker else {}
                yield "the worker forks", state.with_slab(number, child=True, **marked)


def _take(state: _State, guards: Guards) -> Step:
    """What the worker does for the next batch."""
    for number, slab in enumerate(state.slabs):
        byte, own = slab.byte if guards.byte else FREE, slab.worker and guards.own_root
        if may_write(byte, own, slab.inherited):
            seen = slab.seen_by
            fault = f"slab {number} is written while {seen} has its batch" if seen else ""
            taken = state.with_slab(number, byte=TAKEN, worker=False)
            return f"the worker takes slab {number}", replace(taken, writing=number, fault=fault)
        if byte != TAKEN and not own:  # a forked process may see it: new memory under this number
            slabs = list(state.slabs)
            slabs[number] = _Slab(byte=TAKEN, locked=slab.locked)
            return f"the worker makes slab {number} anew", replace(state, slabs=tuple(slabs), writing=number)
    if guards.alone or state.queue:
        return "the worker makes a slab for one batch", state
    keeps = "the program keeps its batches, waits for the next, and the worker waits for a slab"
    return "the worker finds no slab", replace(state, fault=keeps)


def run() -> int:
    """Print what is found with all guards, and the shortest bad run without each; 1 if a guard is not needed."""
    whole, idle = explore_slabs(), 0
    lines = [f"slabs: {whole.states:,} states, {whole.fault or 'no slab is written while its batch is seen'}"]
    for guard, what in GUARDS.items():
        found = explore_slabs(replace(Guards(), **{guard: False}))
        idle += not found.fault
        lines += [f"without {guard} ({what}):", f"    {found.fault or 'nothing goes wrong'}"]
        lines += [f"    {'; '.join(found.run)}"] if found.run else []
    print("\n".join(lines))
    return int(bool(whole.fault or idle))
