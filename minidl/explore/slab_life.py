"""All interleavings of a worker, its loader, a device and forked processes around two slabs: is one written while seen?

Interface: `explore_slabs(guards)` -> `Explored`; `GUARDS`: what each is for; `run()`: `minidl explore --slabs`.

Both decide with `arena.may_write`, `may_free` and `may_give_back`, as the live ones. A batch lies in one slab. In any
order:

- The worker takes a slab, drops it or makes it anew; sends its packet, and may keep the batch. A new slab's descriptor
  goes with the packet.
- The loader receives a packet, maps the slab if it is new, rebuilds the message, delivers it.
- One of four troubles a run. The worker is killed; a Ctrl-C ends the loader's `get` between any two of these steps; the
  loader has no room for the descriptor; too many are on their way, so the slab is lent: the loader opens the worker's.
- The program keeps batches, drops them, and moves one by `share_memory_()` while an array sees it. Each process may
  fork another, which sees what its parent sees, and drops it without telling anybody.
- The loader has page-locked one of the slabs: a device is told to copy its batch, and reads it later.

It is wrong if a slab is written while a process, a message or the device has its batch; if the device reads pages that
the worker has given back; if a batch is lost, or another one comes in its place; and if a program that keeps its
batches gets no more. Not here: several slabs in one packet, sizes and the budget, and the order of memory accesses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, NamedTuple

from minidl.arena.arena import FREE, KEPT, TAKEN, may_free, may_give_back, may_write
from minidl.explore.search import breadth_first


def _guard(what: str) -> Any:
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
    present: bool = _guard("a packet stays the present one until its message is delivered")
    own_descriptors: bool = _guard("descriptors belong to the packet that they came with, as often as it is read")
    armed_at_delivery: bool = _guard("a batch that goes sets the byte only once its message was delivered")
    lost_is_kept: bool = _guard("a slab that the loader could not map gets the byte KEPT: the worker makes another")
    lent_is_kept: bool = _guard("the worker keeps the descriptor of a slab that it has lent until it was opened")
    dropped_is_undone: bool = _guard("a number that a new slab has got is no longer told as dropped")
    storage_keeps_root: bool = _guard("a storage keeps the slab that it was in, also once it has moved")


GUARDS: Final = {guard.name: str(guard.metadata["for"]) for guard in fields(Guards)}

ALONG, LENT, KNOWN = "along", "lent", "known"
"""How a packet brings its slab: with a descriptor, with the worker's number of it, or not at all: it is mapped."""


class _Slab(NamedTuple):
    """One slab: its byte and the worker's mark, and who has its batch: the message, which processes, and the device.

    made: the worker has memory under this number; announced: it has sent it; mapped: so has the loader, of this memory.
    locked: by the loader; torn: the locked pages are no longer those that the worker writes.
    """

    byte: int = FREE
    made: bool = True
    announced: bool = False
    mapped: bool = False
    inherited: bool = False
    sent: bool = False
    worker: bool = False
    loader: bool = False
    array: bool = False
    child: bool = False
    device: bool = False
    told: bool = True  # the loader's callback will set the byte
    locked: bool = False
    torn: bool = False

    @property
    def seen_by(self) -> str:
        """The process that has the batch which lies in it; "" if none."""
        who = (("a message", self.sent), ("the worker", self.worker), ("the program", self.loader))
        others = ("an array", self.array), ("a forked process", self.child), ("the device", self.device)
        return next((name for name, has in (*who, *others) if has), "")


Packet = tuple[int, str, tuple[int, ...]]
"""The slab of a message, how it comes, and numbers that the worker has dropped."""


class _State(NamedTuple):
    """writing: the slab that the worker fills, -1 = none; dropped: numbers to be told; fault: what has gone wrong.

    present: the packet that the loader reads, rooted: whether its batch has a root, forked: whether a process was
    forked since; fds: slabs whose descriptors the loader has; lost: a message is gone. ctrl_c, lends, lacks: whether a
    Ctrl-C, a lent slab, and a lack of descriptors may still come.
    """

    slabs: tuple[_Slab, ...] = (_Slab(locked=True), _Slab())
    writing: int = -1
    dropped: tuple[int, ...] = ()
    queue: tuple[Packet, ...] = ()
    present: Packet | None = None
    rooted: bool = False
    forked: bool = False
    fds: tuple[int, ...] = ()
    lost: bool = False
    lives: bool = True
    trouble: bool = True
    fault: str = ""

    def with_slab(self, number: int, **changes: bool | int) -> _State:
        slabs = list(self.slabs)
        slabs[number] = slabs[number]._replace(**changes)  # type: ignore[arg-type]
        return self._replace(slabs=tuple(slabs))


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
        if state.trouble:
            yield "the worker is killed", state._replace(lives=False, writing=-1, trouble=False)
    yield from _of_reader(state, guards)
    for number, slab in enumerate(state.slabs):
        yield from _of_batch(state, number, slab, guards)
    yield from _fork_of_loader(state, guards)


# --- The loader and its program ---------------------------------------------------------------------------------------
def _of_reader(state: _State, guards: Guards) -> Iterator[Step]:
    """The loader's `get`, step by step."""
    if state.present is None:
        if state.queue:
            yield from _receive(state)
        return
    number, how, _ = state.present
    slab = state.slabs[number]
    if not state.rooted:
        if how == KNOWN or (slab.mapped and guards.own_descriptors):
            fault = "" if slab.mapped else f"slab {number} is named, and the loader has not mapped it"
            yield f"the loader makes a root of slab {number}", state._replace(rooted=True, fault=fault)
        else:
            yield from _map(state, number, how, guards)
    else:
        yield f"the loader delivers the batch in slab {number}", _delivered(state, guards)
    if state.trouble:
        yield "Ctrl-C ends the loader's get", _struck(state, guards)


def _receive(state: _State) -> Iterator[Step]:
    packet, state = state.queue[0], state._replace(queue=state.queue[1:])
    number, how, _ = packet
    state = state._replace(present=packet, rooted=False, forked=False)
    if how == ALONG:
        yield f"the loader receives slab {number}", state._replace(fds=(*state.fds, number))
        if state.trouble:
            lacks = f"the loader receives slab {number}, and has no room for its descriptor"
            yield lacks, state._replace(trouble=False)
    else:
        yield f"the loader receives slab {number}", state


def _map(state: _State, number: int, how: str, guards: Guards) -> Iterator[Step]:
    """Map the slab of the present packet, or deliver an error."""
    slab = state.slabs[number]
    if how == LENT and not guards.lent_is_kept:
        fault = f"the descriptor of slab {number} was closed before the loader has opened it"
        yield f"the loader opens slab {number}", state._replace(fault=fault)
    elif how == LENT:
        yield f"the loader opens and maps slab {number}", state.with_slab(number, mapped=True)
    elif not state.fds:
        fault = f"the descriptor of slab {number} was used up before its batch is delivered" if slab.mapped else ""
        yield f"the loader has no descriptor of slab {number}", _unmapped(state, number, guards)._replace(fault=fault)
    else:
        fd = state.fds[0]
        left = state.fds if guards.own_descriptors else state.fds[1:]
        fault = f"slab {number} is mapped by the descriptor of slab {fd}" if fd != number else ""
        mapped = state._replace(fds=left, rooted=not guards.own_descriptors, fault=fault)
        yield f"the loader maps slab {number}", mapped.with_slab(number, mapped=True)


def _unmapped(state: _State, number: int, guards: Guards) -> _State:
    """The program gets an error in place of the batch."""
    byte = KEPT if guards.lost_is_kept else FREE
    return _ended(state.with_slab(number, sent=False, byte=byte))


def _ended(state: _State) -> _State:
    """The packet ends: what the worker has dropped is let go of, and its descriptors are closed."""
    assert state.present is not None
    for number in state.present[2]:
        state = state.with_slab(number, mapped=False)
    fault = state.fault or ("a batch before this one is lost" if state.lost else "")
    return state._replace(present=None, rooted=False, forked=False, fds=(), fault=fault)


def _delivered(state: _State, guards: Guards) -> _State:
    assert state.present is not None
    number = state.present[0]
    free = may_free(state.slabs[number].byte, state.forked) or not guards.fork_of_loader
    kept = {"told": True} if free else {"byte": KEPT, "told": False}
    return _ended(state.with_slab(number, sent=False, loader=True, **kept))


def _struck(state: _State, guards: Guards) -> _State:
    """An exception ends the `get`; the next one begins with the present packet, or with another."""
    assert state.present is not None
    number = state.present[0]
    after = state._replace(trouble=False, rooted=False)
    if state.rooted and not guards.armed_at_delivery:
        after = after.with_slab(number, byte=FREE)
    if guards.present:
        return after
    fds = () if guards.own_descriptors else state.fds
    return after._replace(present=None, forked=False, fds=fds, lost=True)


def _of_batch(state: _State, number: int, slab: _Slab, guards: Guards) -> Iterator[Step]:
    """What the program, the device and forked processes do with a batch that they have."""
    if slab.device:
        fault = f"the device reads pages of slab {number} that the worker has given back" if slab.torn else ""
        yield f"the device has read slab {number}", state.with_slab(number, device=False)._replace(fault=fault)
    elif slab.loader and slab.locked:
        yield f"the device is told to copy slab {number}", state.with_slab(number, device=True)
    free: dict[str, int] = {"byte": FREE} if slab.told else {}
    if slab.loader and not (slab.device and guards.copy_event):
        yield f"the program drops the batch in slab {number}", state.with_slab(number, loader=False, **free)
        if not guards.storage_keeps_root:
            moved = state.with_slab(number, loader=False, array=True, **free)
            yield f"the program moves the batch in slab {number}, which an array sees", moved
    if slab.array:
        yield f"the program drops the array in slab {number}", state.with_slab(number, array=False)
    if slab.child:
        yield f"a forked process drops the batch in slab {number}", state.with_slab(number, child=False)


def _fork_of_loader(state: _State, guards: Guards) -> Iterator[Step]:
    reads = state.present[0] if state.present is not None and state.rooted else -1
    sees = [number for number, slab in enumerate(state.slabs) if (slab.loader or number == reads) and not slab.child]
    if not sees:
        return
    forked = state._replace(forked=state.forked or reads >= 0)
    for number, slab in enumerate(state.slabs):
        if slab.loader:
            kept = {"byte": KEPT, "told": False} if guards.fork_of_loader else {}
            forked = forked.with_slab(number, child=True, **kept)
    if reads >= 0:
        forked = forked.with_slab(reads, child=True)
    yield "the program forks", forked


# --- The worker -------------------------------------------------------------------------------------------------------
def _of_worker(state: _State, guards: Guards) -> Iterator[Step]:
    if state.writing >= 0:
        yield from _send(state)
    else:
        yield from _take(state, guards)
    for number, slab in enumerate(state.slabs):
        if slab.locked and slab.byte == FREE and not slab.torn and may_give_back(guards.locked_memory):
            yield f"the worker gives memory of slab {number} back", state.with_slab(number, torn=True)
        if slab.worker and number != state.writing:
            yield f"the worker drops the batch in slab {number}", state.with_slab(number, worker=False)
            if not slab.child:
                marked = {"inherited": True} if guards.fork_of_worker else {}
                yield "the worker forks", state.with_slab(number, child=True, **marked)


def _send(state: _State) -> Iterator[Step]:
    number = state.writing
    slab = state.slabs[number]
    for how in (KNOWN,) if slab.announced else (ALONG, LENT) if state.trouble else (ALONG,):
        packet = number, how, state.dropped
        trouble = state.trouble and how != LENT
        sent = state._replace(writing=-1, queue=(*state.queue, packet), dropped=(), trouble=trouble)
        name = f"the worker {'lends' if how == LENT else 'sends'} slab {number}"
        yield name, sent.with_slab(number, sent=True, announced=True, worker=False)
        yield f"{name}, and keeps the batch", sent.with_slab(number, sent=True, announced=True, worker=True)


def _take(state: _State, guards: Guards) -> Iterator[Step]:
    """What the worker does for the next batch."""
    for number, slab in enumerate(state.slabs):
        byte, own = slab.byte if guards.byte else FREE, slab.worker and guards.own_root
        if slab.made and may_write(byte, own, slab.inherited):
            seen = slab.seen_by
            fault = f"slab {number} is written while {seen} has its batch" if seen else ""
            taken = state.with_slab(number, byte=TAKEN, worker=False)
            yield f"the worker takes slab {number}", taken._replace(writing=number, fault=fault)
            return
        if slab.made and byte != TAKEN and not own:  # a forked process may see it
            dropped = tuple(sorted({*state.dropped, number}))
            yield f"the worker drops slab {number}", state.with_slab(number, made=False)._replace(dropped=dropped)
            return
    for number, slab in enumerate(state.slabs):
        if not slab.made:  # new memory under this number; who sees the old one goes on with that
            slabs = list(state.slabs)
            slabs[number] = _Slab(byte=TAKEN, locked=slab.locked)
            dropped = tuple(n for n in state.dropped if n != number or not guards.dropped_is_undone)
            made = state._replace(slabs=tuple(slabs), writing=number, dropped=dropped)
            yield f"the worker makes slab {number} anew", made
    if guards.alone or state.queue or state.present is not None:
        yield "the worker makes a slab for one batch", state
        return
    keeps = "the program keeps its batches, waits for the next, and the worker waits for a slab"
    yield "the worker finds no slab", state._replace(fault=keeps)


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
