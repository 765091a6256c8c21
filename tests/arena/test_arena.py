"""Slabs: what one side can see, the other one never writes."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import io
import itertools
import mmap
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import reduction, resource_sharer
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sizes import slow

import minidl
from minidl.arena import arena as module
from minidl.arena.arena import (
    ALONE,
    BUDGET,
    BUDGET_VARIABLE,
    FREE,
    INLINE,
    KEPT,
    SLABS,
    TAKEN,
    Arena,
    Host,
    Mappings,
    PageLocks,
    Slab,
    reading,
)
from minidl.arena.pickling import SlabPickler, filling, is_filling
from minidl.wire.message import dumps
from minidl.wire.tensors import TensorPickler, rebuild_tensor

BIG = 4 * INLINE
"""Bytes that go into a slab."""


Message = tuple[bytes, list[tuple[int, int, int]], bytearray]
"""A pickle; its slabs: number, size and, at their first use, descriptor; and its small storages."""


class Pair:
    """A worker's side and a loader's, in one process."""

    def __init__(self, slabs: int = SLABS, budget: int = BUDGET, host: Host | None = None) -> None:
        self.states = memoryview(bytearray(slabs))
        self.arena = Arena(self.states, budget, host is not None)
        self.told: list[str] = []
        self.mappings = Mappings(self.states, 0, None if host is None else PageLocks(host, self.told.append))

    def pickled(self, batch: Any) -> Message:
        with filling(self.arena):
            data, _ = dumps(batch, SlabPickler)
        slabs, small = self.arena.seal()
        named = [(slab.number, slab.size, -1 if slab.announced else os.dup(slab.fd)) for slab in slabs]
        for slab in slabs:
            slab.announced = True
        return data, named, bytearray(small)

    def rebuilt(self, message: Message) -> Any:
        roots: list[Any] = []
        forks = self.mappings.forks
        for number, size, fd in message[1]:
            if fd >= 0:
                self.mappings.map(number, size, fd)
                os.close(fd)
            roots.append(self.mappings.root(number))
        self.mappings.deliver([(named[0], root) for named, root in zip(message[1], roots, strict=True)], forks)
        roots.append(message[2])
        with reading(roots):
            del roots
            return pickle.loads(message[0])

    def sent(self, batch: Any) -> Any:
        return self.rebuilt(self.pickled(batch))

    def made(self, size: int, value: int) -> torch.Tensor:
        """A tensor of bytes where collate would make it."""
        storage: Any = self.arena.allocate(size)
        return torch.empty(0, dtype=torch.uint8).set_(storage).fill_(value)

    @property
    def used(self) -> list[int]:
        return [number for number, state in enumerate(self.states) if state != FREE]


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    if made.used:  # something may refer to itself
        gc.collect()
    assert made.used == []
    made.arena._slabs.clear()  # pytest holds the fixture for longer
    made.mappings._memory.clear()
    resource_sharer.stop(timeout=10)


def test_a_tensor_that_collate_makes_is_not_copied(pair: Pair) -> None:
    tensor = pair.made(BIG, 7)
    batch = pair.sent([tensor])
    tensor[0] = 9  # the same memory
    assert batch[0][0] == 9
    assert batch[0].tolist()[1:] == [7] * (BIG - 1)


def test_what_lies_in_a_slab_is_found_there(pair: Pair) -> None:
    tensors = [pair.made(9000, 1), pair.made(9000, 2), torch.zeros(9000, dtype=torch.uint8), torch.zeros(9000).byte()]
    (opened,) = pair.arena._open
    places = [pair.arena._placed(tensor.data_ptr(), 9000) for tensor in tensors]
    assert places == [(0, number * 9024) for number in range(4)]
    assert (opened.filled, opened.copied) == (4 * 9000, 2 * 9000)
    pair.states[0] = FREE


def test_a_storage_keeps_the_root_also_when_its_bytes_move() -> None:
    memory = mmap.mmap(-1, 1 << 16)
    root = module._root(memory, 1 << 16)
    storage, kept = module._storage(root, 64, 128), weakref.ref(root)
    assert storage.data_ptr() == ctypes.addressof(root) + 64
    del root
    storage.share_memory_()
    assert kept() is not None
    del storage
    assert kept() is None


def test_a_slab_that_gets_no_memory_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, size: int) -> None:
        raise OSError("no space")

    monkeypatch.setattr(module.os, "ftruncate", full)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="no space"):
        Slab(0, 1 << 16)
    assert os.listdir("/proc/self/fd") == before


def test_a_slab_is_lent_until_the_loader_has_opened_it(pair: Pair) -> None:
    one, other = Slab(ALONE[0], 1 << 16), Slab(ALONE[1], 1 << 16)
    pair.arena.lend([one])
    pair.arena.seal()
    assert (one.announced, pair.arena._lent) == (True, [one])
    fcntl.fcntl(one.fd, fcntl.F_ADD_SEALS, module.FETCHED)
    pair.arena.seal()
    pair.arena.lend([other])
    assert pair.arena._lent == [other]


def test_memory_of_a_batch_that_the_worker_keeps_is_not_given_back(pair: Pair) -> None:
    kept = pair.made(BIG, 7)
    batches = [pair.sent(kept), *(pair.sent(pair.made(BIG, number)) for number in range(4))]
    del batches
    for number in range(3):
        pair.sent(pair.made(BIG, number))
    assert kept.eq(7).all()


def test_a_slab_is_used_again_once_both_sides_have_dropped_the_batch(pair: Pair) -> None:
    kept_here = pair.made(BIG, 1)
    kept_there = pair.sent(kept_here)
    assert pair.used == [0]
    del kept_there
    assert pair.used == []
    second = pair.sent(pair.made(BIG, 2))
    assert pair.used == [1], "the worker still has its batch in slab 0"
    del kept_here, second
    third = pair.sent(pair.made(BIG, 3))
    assert pair.used in ([0], [1])
    assert third.eq(3).all()
    del third


def test_a_batch_of_more_than_the_slab_holds_goes_into_several_and_the_next_one_into_one(pair: Pair) -> None:
    first = [torch.full((size,), size % 251, dtype=torch.uint8) for size in (70_000, 3000, 200_000)]
    message = pair.pickled(first)
    assert len(message[1]) == 3 - 1
    back = pair.rebuilt(message)
    assert all(torch.equal(one, other) for one, other in zip(first, back, strict=True))
    message = pair.pickled(first)
    assert len(message[1]) == 1
    assert pair.rebuilt(message)[2].eq(200_000 % 251).all()


def test_a_fence_is_between_the_last_read_of_a_batch_and_the_byte(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(module, "FENCE", (lambda: seen.append(pair.states[0]),))
    batch = pair.sent(pair.made(BIG, 1))
    part = batch[3:]
    del batch
    assert seen == []
    del part
    assert (seen, pair.states[0]) == ([TAKEN], FREE)


def test_a_slab_that_is_too_small_by_now_is_given_up(pair: Pair) -> None:
    pair.sent(torch.zeros(BIG))
    small = weakref.ref(pair.arena._slabs[0])
    pair.sent(torch.zeros(1 << 20))
    assert small() is None
    assert len(pair.arena._slabs) == 1


def memory_of(pair: Pair) -> list[int]:
    """Bytes of memory that each of the worker's slabs has."""
    return [os.fstat(slab.fd).st_blocks * 512 for slab in pair.arena._slabs.values()]


def test_a_slab_gives_back_what_an_unusual_batch_has_needed(pair: Pair) -> None:
    pair.sent(torch.ones(1 << 22))
    assert memory_of(pair) == [1 << 24]
    for number in range(6):
        assert pair.sent(torch.full((1 << 13,), float(number))).eq(number).all()
    assert sum(memory_of(pair)) <= 1 << 20


def test_batches_of_usual_sizes_give_nothing_back(pair: Pair) -> None:
    """A page that is given back costs a fault when it is written again, as each page of a new segment does."""
    for size in (300_000, 500_000, 300_000, 300_000, 500_000):
        pair.sent(torch.ones(size))
    assert sum(memory_of(pair)) >= 2_000_000


@pytest.mark.heavy
def test_slabs_that_a_loader_needs_no_more_give_their_memory_back(pair: Pair) -> None:
    kept = [pair.sent(torch.ones(1 << 18)) for _ in range(9)]
    assert sum(memory_of(pair)) == 9 << 20
    del kept
    for _ in range(9):
        assert pair.sent(torch.ones(1 << 18)).eq(1).all()
    assert sum(memory_of(pair)) == (1 + module.SPARE) << 20
    again = [pair.sent(torch.full((1 << 18,), float(number))) for number in range(9)]
    assert [batch.unique().item() for batch in again] == list(range(9))
    del again


class Locking:
    """A host whose lock fails once more than `room` bytes are locked. now: address -> bytes; ever: sizes."""

    name, simulated = "a device", True

    def __init__(self, room: int = 1 << 40) -> None:
        self.room, self.now, self.ever = room, dict[int, int](), list[int]()

    def lock(self, address: int, size: int) -> None:
        if sum(self.now.values()) + size > self.room:
            raise OSError("no more")
        self.now[address] = size
        self.ever.append(size)

    def unlock(self, address: int) -> None:
        self.now.pop(address, None)


def test_a_slab_is_locked_once_and_until_the_last_batch_in_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the loader is gone before; a slab that is made anew, in place of one that is too small, is locked too.

    A forked child unlocks nothing.
    """
    host = Locking()
    pair = Pair(host=host)
    for _ in range(3):
        assert pair.sent(pair.made(BIG, 1)).eq(1).all()
    assert host.ever == [1 << 16]
    batch = pair.sent(pair.made(1 << 17, 2))
    assert host.ever == [1 << 16, 1 << 17]
    address = batch.untyped_storage().data_ptr()
    assert {start: size for start, size in host.now.items() if start <= address < start + size} == host.now
    del pair
    gc.collect()
    assert list(host.now.values()) == [1 << 17]
    del batch
    gc.collect()
    assert host.now == {}
    other = Pair(host=host)
    other.sent(other.made(BIG, 1))
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "getpid", lambda: -1)
        other.mappings.close()
    assert list(host.now.values()) == [1 << 16]


class Interrupted(Locking):
    """Ctrl-C comes when memory has been locked, and each time before it is unlocked."""

    raised = 0

    def lock(self, address: int, size: int) -> None:
        super().lock(address, size)
        if len(self.ever) == 1:
            raise KeyboardInterrupt

    def unlock(self, address: int) -> None:
        self.raised += 1
        if self.raised % 2:
            raise KeyboardInterrupt
        super().unlock(address)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_memory_stays_locked_after_an_exception_of_a_signals_handler() -> None:
    host = Interrupted()
    pair = Pair(host=host)
    with pytest.raises(KeyboardInterrupt):
        pair.sent(pair.made(BIG, 1))
    pair.mappings.close()
    gc.collect()
    assert (host.ever, host.now, host.raised) == ([1 << 16], {}, 2)


def test_a_locked_slab_gives_no_memory_back_and_holds_small_storages_too() -> None:
    """The device would go on reading the pages that were locked; what is in the message is in pageable memory."""
    pair = Pair(host=Locking())
    assert pair.sent(pair.made(16 << 20, 1)).eq(1).all()
    for _ in range(10):
        assert pair.sent(pair.made(9, 2)).tolist() == [2] * 9
    assert memory_of(pair) == [16 << 20]
    _, slabs, small = pair.pickled([torch.ones(1, dtype=torch.uint8)])
    assert (len(slabs), len(small)) == (1, 0)


def test_a_slab_for_one_batch_is_not_locked() -> None:
    host = Locking()
    pair = Pair(slabs=1, host=host)
    batches = [pair.sent(pair.made(BIG, number)) for number in range(3)]
    assert len(host.ever) == 1
    assert list(pair.mappings._memory) == [0], "and not kept"
    del batches


def test_without_room_for_locked_memory_that_is_said_once_and_batches_come_as_before() -> None:
    host = Locking(room=1 << 16)
    pair = Pair(host=host)
    first = pair.sent(pair.made(BIG, 1))
    others = [pair.sent(pair.made(BIG, number)) for number in (2, 3)]
    (told,) = pair.told
    assert told == (
        "a device cannot page-lock the memory of batches: no more. From here on their copies block the loop; "
        "`ulimit -l unlimited`, or transport='upstream', may help."
    )
    assert [int(batch[0]) for batch in (first, *others)] == [1, 2, 3]
    assert len(host.now) == 1


def test_a_lock_says_whether_it_locks_and_is_left_to_the_system_at_the_end() -> None:
    locks = PageLocks(Locking(room=100), [].append)
    memory = [np.zeros(100, np.uint8), np.zeros(1, np.uint8)]
    assert [locks.lock(one) for one in (*memory, memory[1])] == [True, False, False]
    registered: Any = weakref.finalize
    (finalizer,) = (one for one in registered._registry if one.alive and one.peek()[0] is memory[0])
    assert not finalizer.atexit


def test_small_storages_travel_in_the_message(pair: Pair) -> None:
    batch = {"a": torch.arange(5), "b": torch.zeros(0), "c": torch.ones(INLINE, dtype=torch.uint8)}
    message = pair.pickled(batch)
    assert message[1] == []
    back = pair.rebuilt(message)
    assert back["a"].tolist() == [0, 1, 2, 3, 4]
    assert back["b"].shape == (0,)
    assert back["c"].eq(1).all()
    assert pair.made(INLINE, 3).untyped_storage().nbytes() == INLINE
    assert pair.arena._open == []


def test_a_message_has_room_for_so_many_small_storages(pair: Pair) -> None:
    """A packet holds no more."""
    many = [torch.full((INLINE,), number, dtype=torch.uint8) for number in range(module.SMALL // INLINE + 1)]
    full, more = pair.pickled(many[1:]), pair.pickled(many)
    assert [(len(slabs), len(small)) for _, slabs, small in (full, more)] == [(0, module.SMALL), (1, module.SMALL)]
    assert [one.unique().tolist() for one in pair.rebuilt(more)] == [[number] for number in range(len(many))]


@pytest.mark.parametrize("lazy", [torch.Tensor.conj, lambda tensor: torch.conj(tensor).imag])
def test_what_is_lazy_is_computed_before_it_is_sent(pair: Pair, lazy: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A conjugate is one by a flag, and so is a negative: their bytes are those of the other tensor."""
    tensor = torch.arange(BIG) * (1 + 2j)
    view = lazy(tensor)
    assert view.is_conj() != view.is_neg()
    back = pair.sent([view])[0]
    assert torch.equal(back, view)
    assert torch.equal(pair.sent([tensor, view])[1], view)
    assert torch.equal(pickle.loads(dumps([view])[0])[0], view), "without slabs"
    del back


def test_a_plain_tensor_takes_the_short_way_and_no_other_does() -> None:
    pickler = TensorPickler(io.BytesIO())
    assert pickler.reducer_override(torch.ones(3))[0] is rebuild_tensor
    hooked = torch.ones(3)
    hooked._backward_hooks = {0: print}  # type: ignore[assignment]
    others = [
        torch.ones(3, requires_grad=True),
        hooked,
        torch.nn.Parameter(torch.ones(3), requires_grad=False),
        torch.ones(3).to_sparse(),
        torch.ones(3, device="meta"),
        torch.ones(3, device="meta").untyped_storage(),
    ]
    assert [pickler.reducer_override(other) for other in others] == [NotImplemented] * len(others)
    assert pickler.tensors == 1 + 4, "all that lie in main memory"


def test_what_begins_where_a_slab_ends_is_not_in_it(pair: Pair) -> None:
    """The next slab, for example."""
    opened = [SimpleNamespace(address=begin, slab=SimpleNamespace(size=100)) for begin in (1000, 1100)]
    pair.arena._open[:] = opened
    homes = [pair.arena._home(address) for address in (999, 1000, 1099, 1100, 1199, 1200)]
    pair.arena._open.clear()
    assert homes == [-1, 0, 0, 1, 1, -1]


def test_what_was_filled_copied_and_shared_is_counted(pair: Pair) -> None:
    """A trace says so. What is sent twice is counted once."""
    made, array = pair.made(BIG, 1), np.zeros(2 * BIG, np.uint8)
    new = [torch.ones(BIG, dtype=torch.uint8) for _ in range(4)]
    storages = [one.untyped_storage() for one in new[2:]]
    with filling(pair.arena):
        _, pickler = dumps([made, *new[:2], new[0][5:], array, array.copy(), *storages, storages[0]], SlabPickler)
    pair.arena.place(bytes(100))
    pair.arena.place(bytes(50))
    filled, copied = (sum(getattr(one, name) for one in pair.arena._open) for name in ("filled", "copied"))
    assert (filled, copied, pickler.shared_bytes) == (9 * BIG + 150, 8 * BIG + 150, 9 * BIG)
    for slab in pair.arena.seal()[0]:
        pair.states[slab.number] = FREE


def no_descriptor(*about: int) -> Slab:
    raise OSError(24, "Too many open files")


def test_without_a_slab_a_storage_goes_the_other_way(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Slab", no_descriptor)
    batch = pair.sent(torch.ones(BIG))
    assert batch.eq(1).all()
    assert batch.is_shared()
    assert pair.sent(np.ones(BIG)).sum() == BIG
    assert pair.arena.allocate(BIG) is None


def test_without_a_slab_a_kept_batch_stays_where_it_is(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = pair.made(BIG, 1)
    array = kept.numpy()
    assert pair.sent(kept).eq(1).all()
    with monkeypatch.context() as patch:
        patch.setattr(module, "Slab", no_descriptor)
        again = pair.sent([kept])[0]
    assert again.is_shared()
    kept[0] = 9
    assert (array[0], int(again[0])) == (9, 1)
    del kept, array


def test_batches_beyond_the_last_slab_get_memory_of_their_own() -> None:
    pair = Pair(slabs=2)
    batches = [pair.sent(torch.full((BIG,), value, dtype=torch.uint8)) for value in range(5)]
    assert [batch.unique().tolist() for batch in batches] == [[0], [1], [2], [3], [4]]
    assert len(pair.mappings._memory) == 2
    message = pair.pickled(torch.zeros(BIG))
    assert [number in ALONE for number, _, _ in message[1]] == [True]
    assert pair.rebuilt(message).eq(0).all()
    del batches
    assert pair.used == []


def test_a_worker_keeps_slabs_up_to_its_budget() -> None:
    """Each batch needs 1 MiB, and the third one is the last for which there is room. What is free is used first."""
    pair = Pair(budget=3 << 20)
    batches = [pair.sent(torch.full((1 << 20,), value, dtype=torch.uint8)) for value in range(5)]
    assert sum(slab.size for slab in pair.arena._slabs.values()) == 3 << 20
    assert pair.used == [0, 1, 2]
    assert [batch.unique().tolist() for batch in batches] == [[0], [1], [2], [3], [4]]
    del batches[1]
    batches.append(pair.sent(torch.full((1 << 20,), 5, dtype=torch.uint8)))
    assert pair.used == [0, 1, 2]
    assert len(pair.mappings._memory) == 3
    assert [int(batch[-1]) for batch in batches] == [0, 2, 3, 4, 5]


def test_a_batch_larger_than_the_budget_gets_a_slab_for_itself() -> None:
    pair = Pair(budget=1 << 16)
    for value in range(3):
        message = pair.pickled([torch.full((1 << 17,), value, dtype=torch.uint8), torch.ones(BIG)])
        back = pair.rebuilt(message)
        assert all(number in ALONE for number, _, _ in message[1])
        assert back[0].eq(value).all()
    assert pair.arena._slabs == {}
    small = pair.sent([torch.ones(3), torch.zeros(INLINE, dtype=torch.uint8)])
    assert small[0].tolist() == [1, 1, 1]


def test_a_hundred_small_batches_may_be_kept_and_the_slab_sent_last_is_taken_first(pair: Pair) -> None:
    kept = [pair.sent(pair.made(BIG, value)) for value in range(100)]
    assert pair.used == list(range(100))
    del kept[10:13]
    kept.append(pair.sent(pair.made(BIG, 100)))
    assert pair.used == [*range(10), 12, *range(13, 100)]
    assert [int(batch[0]) for batch in kept] == [*range(10), *range(13, 101)]
    del kept


@pytest.mark.parametrize(
    "unusual",
    [{50: 5}, {50: 10}, {50: 19}, {50: 30}, dict.fromkeys(range(0, 400, 20), 4)],
    ids=["5", "10", "19", "30", "each 20th"],
)
def test_an_unusual_batch_leaves_room_for_slabs_of_the_usual_ones(unusual: dict[int, int]) -> None:
    """Of 400 batches of 1 MiB, of which the loader holds five, some have more MiB."""
    states = memoryview(bytearray(SLABS))
    arena, held, alone = Arena(states, 20 << 20, False), list[int](), list[bool]()
    for place in range(400):
        arena._room(unusual.get(place, 1) << 20)
        (slab,), _ = arena.seal()
        held.append(slab.number)
        alone.append(slab.number in ALONE)
        if len(held) > 5 and (number := held.pop(0)) not in ALONE:
            states[number] = FREE
    assert sum(alone[51:]) == 0


@pytest.mark.parametrize(
    ("text", "number"),
    [("", BUDGET), ("2G", 2 << 30), ("1.5g", 3 << 29), ("512 MiB", 512 << 20), ("65536", 1 << 16), ("1024TB", 1 << 50)],
)
def test_the_budget_is_what_the_environment_says(text: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BUDGET_VARIABLE, text)
    assert module.budget() == number


@pytest.mark.parametrize("text", ["0", "-1G", "63K", "lots", "2 gigs", "1e9", "G", "nan", "1025T", "9" * 400])
def test_what_is_no_budget_is_refused_with_the_remedy(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BUDGET_VARIABLE, text)
    for construct in (
        lambda: minidl.DataLoader([0], num_workers=1, transport="arena"),
        lambda: minidl.observe(transport="arena"),
    ):
        with pytest.raises(ValueError, match=rf"MINIDL_ARENA_BYTES='{text}'.*, from 64K to 1024T, as .*2G$"):
            construct()
    minidl.DataLoader([0], num_workers=1, transport="upstream")


def test_a_tensor_and_its_storage_in_one_batch_are_one_memory(pair: Pair) -> None:
    for size in (1, BIG):
        tensor = torch.zeros(size, dtype=torch.uint8)
        back = pair.sent([tensor, tensor.untyped_storage(), torch.zeros(size)])
        back[1].fill_(7)
        assert back[0].eq(7).all()
        back = pair.sent([tensor.untyped_storage(), tensor])
        back[0].fill_(7)
        assert back[1].eq(7).all()
        del back


def test_what_a_slab_tells_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    pair = Pair()
    monkeypatch.setattr(pair.mappings, "_telling", lambda *about: told.append(about))
    batch = pair.sent(pair.made(BIG, 1))
    ((key, number, root),) = told
    assert list(pair.mappings._roots) == [key]
    assert (number, len(root)) == (0, 1 << 16)
    del told[:], root, batch
    assert pair.used == []


def test_a_slab_that_was_never_mapped_may_be_forgotten(pair: Pair) -> None:
    pair.mappings.forget(5)
    pair.mappings.close()


def test_a_child_frees_nothing_and_begins_anew(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = pair.sent(pair.made(BIG, 1))
    monkeypatch.setattr(module, "_all_parties", lambda: [pair.arena, pair.mappings])
    module._before_fork()
    module._after_fork_in_child()
    assert (module._forks_begun, module.state_of_gone(), pair.mappings.visible) == (0, FREE, 0)
    del batch
    assert pair.used == [0]
    pair.states[0] = FREE


def test_what_the_two_sides_may_do_with_a_slab() -> None:
    both = (False, True)
    may_write = [case for case in itertools.product((FREE, TAKEN, KEPT), both, both) if module.may_write(*case)]
    may_free = [case for case in itertools.product((FREE, TAKEN, KEPT), both) if module.may_free(*case)]
    assert (may_write, may_free) == ([(FREE, False, False)], [(TAKEN, False)])
    assert [module.may_give_back(locked) for locked in both] == [True, False]


@pytest.mark.parametrize("forks", [0, 1, 2])
def test_a_message_that_was_rebuilt_during_a_fork_does_not_free_its_slabs(forks: int) -> None:
    pair = Pair()
    before = pair.mappings.forks
    for _ in range(2):
        slab = pair.arena._take(BIG)
        pair.mappings.map(slab.number, slab.size, slab.fd)
    roots = [pair.mappings.root(number) for number in range(2)]
    for _ in range(forks):
        pair.mappings.forked()
    pair.mappings.deliver(list(enumerate(roots)), before)
    assert pair.mappings.visible == (0 if forks else 2)
    del roots
    assert list(pair.states[:2]) == [KEPT if forks else FREE] * 2


def test_what_a_child_may_see_stays_inherited_at_the_next_fork(pair: Pair) -> None:
    batch = pair.made(BIG, 1)
    pair.arena.forks()
    pair.sent(batch)
    del batch
    pair.arena.forks()
    assert [(slab.inherited, slab.visible) for slab in pair.arena._slabs.values()] == [(True, False)]


def test_a_fork_is_told_to_the_slabs_of_all_workers_and_loaders() -> None:
    pairs = [Pair(), Pair()]
    batches = [pair.sent(pair.made(BIG, 1)) for pair in pairs]
    made = [pair.made(BIG, 1) for pair in pairs]
    module._before_fork()
    module._after_fork_in_parent()
    assert [[slab.inherited for slab in pair.arena._slabs.values()] for pair in pairs] == [[False, True]] * 2
    assert [pair.used for pair in pairs] == [[0, 1]] * 2
    assert [pair.states[0] for pair in pairs] == [KEPT] * 2
    del batches, made


@pytest.mark.live
def test_a_fork_keeps_what_both_processes_see() -> None:
    pair = Pair()
    batch, unseen = pair.sent(pair.made(BIG, 1)), pair.pickled(pair.made(BIG, 2))
    child = os.fork()
    if child == 0:
        pair.states[0] = FREE  # as if its number were another slab's by now
        module._before_fork()
        module._after_fork_in_parent()
        untouched = pair.states[0] == FREE
        pair.states[0] = TAKEN
        del batch
        os._exit(not (untouched and pair.states[0] == TAKEN))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "it frees nothing, and keeps nothing when it forks"
    assert list(pair.states[:2]) == [KEPT, TAKEN]
    del batch
    second = pair.rebuilt(unseen)
    assert list(pair.states[:2]) == [KEPT, TAKEN]
    third = pair.sent(pair.made(BIG, 3))
    assert pair.states[0] == TAKEN, "the number is that of a new slab"
    assert third.eq(3).all()
    assert second.eq(2).all()
    del second
    assert list(pair.states[:2]) == [TAKEN, FREE]


def test_what_goes_while_a_process_is_forked_is_kept(pair: Pair) -> None:
    """Another thread may drop a batch after the fork, and before the thread that forks can mark it."""
    batch, other = pair.sent(pair.made(BIG, 1)), pair.sent(pair.made(BIG, 2))
    module._before_fork()
    del batch
    assert list(pair.states[:2]) == [KEPT, TAKEN]
    module._after_fork_in_parent()
    assert list(pair.states[:2]) == [KEPT, KEPT]
    del other
    assert list(pair.states[:2]) == [KEPT, KEPT]
    third = pair.sent(pair.made(BIG, 3))
    fourth = pair.sent(pair.made(BIG, 4))
    assert list(pair.states[:2]) == [TAKEN, TAKEN], "the numbers are those of new slabs"
    del third, fourth
    assert list(pair.states[:2]) == [FREE, FREE]


def test_two_threads_may_fork_at_once() -> None:
    """What goes before both have forked is kept."""
    module._before_fork()
    module._before_fork()
    module._after_fork_in_parent()
    states = [module.state_of_gone()]
    module._after_fork_in_parent()
    assert [*states, module.state_of_gone()] == [KEPT, FREE]


@pytest.mark.live
def test_a_worker_that_forks_does_not_write_again_what_its_child_may_see(pair: Pair) -> None:
    kept = pair.made(BIG, 1)
    pair.sent(kept)
    unseen = pair.made(BIG, 2)
    pair.sent(unseen)
    del unseen
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    del kept
    slabs = dict(pair.arena._slabs)
    third, fourth = pair.sent(pair.made(BIG, 3)), pair.sent(pair.made(BIG, 4))
    assert pair.arena._slabs[0] is not slabs[0]
    assert pair.arena._slabs[1] is slabs[1]
    del third, fourth


def test_a_worker_gives_no_memory_back_that_its_child_may_see(pair: Pair) -> None:
    """Of the slabs that stay free, the last ones give their memory back: but not to a child's cost."""
    kept = []
    for value in range(5):
        kept.append(pair.made(BIG, value))
        pair.sent(kept[-1])
    seen, slab = kept.pop(), pair.arena._slabs[4]
    del kept
    pair.arena.forks()
    del seen
    for _ in range(4):
        pair.sent(pair.made(BIG, 9))
    assert slab.memory[0] == 4
    assert memory_of(pair).count(0) == 1


def test_a_slab_that_is_filled_while_another_thread_forks_is_not_taken_again(pair: Pair) -> None:
    """The child may see it, though the thread that forks has marked the slabs already."""
    module._before_fork()
    kept = pair.made(BIG, 1)
    module._after_fork_in_parent()
    pair.sent(kept)
    slab = pair.arena._slabs[0]
    del kept
    pair.sent(pair.made(BIG, 2))
    assert pair.arena._slabs[0] is not slab
    assert slab.memory[0] == 1


def test_only_the_workers_own_thread_fills_slabs_and_only_within_its_block(pair: Pair) -> None:
    """In another thread all travels as without them, and a subclass stays one."""
    batch, got = [np.arange(3), torch.arange(3), torch.nn.Parameter(torch.ones(3), requires_grad=False)], list[Any]()
    thread = threading.Thread(target=lambda: got.extend([pair.arena.allocate(BIG), is_filling(), dumps(batch)[0]]))
    assert not is_filling()
    with filling(pair.arena):
        assert is_filling()
        thread.start()
        thread.join()
    assert not is_filling()
    assert got[:2] == [None, False]
    back = pickle.loads(got[2])
    assert [(type(one), one.tolist()) for one in back] == [(type(one), one.tolist()) for one in batch]


def test_an_array_lies_in_a_slab_and_may_be_written(pair: Pair) -> None:
    """If it is no small one; what differs in kind and layout, all transports carry as torch does."""
    small, large = (pair.pickled(np.zeros(size, np.uint8)) for size in (INLINE, INLINE + 1))
    assert (small[1], len(large[1])) == ([], 1)
    assert pair.rebuilt(large).nbytes == INLINE + 1
    fixed = np.zeros((2, BIG), dtype=[("a", "i4"), ("b", "f8")])
    fixed.flags.writeable = False
    back = pair.sent([fixed, np.asfortranarray(fixed), fixed])
    assert [one.flags.f_contiguous for one in back] == [False, True, False]
    assert [one.flags.writeable for one in back] == [True] * 3
    assert back[0] is back[-1]
    back[0]["a"][0, 0] = -1
    assert fixed["a"][0, 0] == 0
    part = back[0]["b"][5:]
    del back
    assert pair.used != []
    del part
    assert pair.used == []


def test_an_array_of_another_packages_type_keeps_it(pair: Pair) -> None:
    """Its `str` says only how many bytes an element has. As for bfloat16 of ml_dtypes."""
    rational = pytest.importorskip("numpy._core._rational_tests").rational
    array = np.array([rational(1, 3), rational(2, 5)] * BIG, dtype=rational)
    back = pair.sent(array)
    assert back.dtype == rational
    assert np.array_equal(back, array)
    assert pair.used == [0]
    del back


def test_an_array_that_fits_no_slab_travels_as_in_torch(pair: Pair) -> None:
    fixed = np.arange(3)
    fixed.flags.writeable = False
    for array in (fixed, np.array([{}] * BIG), np.zeros((0, 3)), np.arange(BIG).astype(">i4")):
        back = pair.sent(array)
        assert back.tolist() == array.tolist()
        assert back.flags.writeable
        assert back.flags.owndata
    assert pair.arena._slabs == {}


def test_a_small_part_of_a_large_storage_does_not_take_all_of_it_along(pair: Pair) -> None:
    """As in torch, the storage moves to shared memory once, and its parts stay parts of it."""
    dataset = torch.arange(1 << 20)
    first, second = pair.sent(dataset[5:9]), pair.sent([dataset[6:7], dataset[:8]])
    assert pair.arena._slabs == {}
    assert dataset.is_shared()
    first[1] = -1
    assert second[0].item() == second[1][6].item() == dataset[6].item() == -1
    half = pair.sent(torch.arange(1 << 20)[1 << 19 :])
    assert len(pair.arena._slabs) == 1
    part = pair.sent(pair.made(1 << 20, 7)[:9])
    assert part.eq(7).all()
    assert not part.is_shared()
    kept = pair.made(1 << 20, 8)
    pair.sent(kept)
    array = kept.numpy()
    assert pair.sent(kept[:9]).eq(8).all(), "of a batch that the worker keeps"
    kept[0] = 9
    assert array[0] == 9, "the storage is where it was"
    del half, part, kept, array


@pytest.mark.parametrize("pickled", [lambda batch: dumps(batch)[0], reduction.ForkingPickler.dumps])
@pytest.mark.parametrize("of_the_worker", [True, False])
def test_a_queue_of_the_program_gets_a_copy(pair: Pair, pickled: Any, of_the_worker: bool) -> None:
    """torch would move the storage, away from the array, to a segment of its own.

    A sampler may draw indices from a batch, and a worker may send one to another process of the program.
    """
    made = pair.made(BIG, 1)
    there, small = pair.sent([made, torch.zeros(2)])
    batch = made if of_the_worker else there
    array, small_array = batch.numpy(), small.numpy()
    copy, part, small_copy = pickle.loads(pickled([batch, batch[3:5], small]))
    assert [each.is_shared() for each in (copy, part, batch)] == [True, True, False]
    copy[4] = 3
    assert part.tolist() == [1, 3]
    batch[4] = small[0] = 9
    assert array[4] == small_array[0] == 9, "the storages are where they were"
    assert (copy[4], small_copy[0]) == (3, 0)
    del made, there, batch
    assert pair.used == ([] if of_the_worker else [0]), "the array is what is left"
    del array
    assert torch.equal(pickle.loads(pickled(torch.ones(9))), torch.ones(9))


class Holder(torch.nn.Module):
    """A module with a batch as its buffer."""

    def __init__(self, batch: torch.Tensor) -> None:
        super().__init__()
        self.batch = torch.nn.Buffer(batch)


def replace_data(tensor: torch.Tensor) -> None:
    tensor.data = torch.zeros(3)


CALLS: dict[str, Callable[[Any], object]] = {
    "share_memory_": lambda tensor: tensor.share_memory_(),
    "of its storage": lambda tensor: tensor.untyped_storage().share_memory_(),
    "of a view": lambda tensor: tensor[7:].share_memory_(),
    "of a module": lambda tensor: Holder(tensor).share_memory(),
    "by a descriptor": lambda tensor: tensor.untyped_storage()._share_fd_cpu_(),
    "by a name": lambda tensor: tensor.untyped_storage()._share_filename_cpu_(),
    "queue": lambda tensor: pickle.loads(reduction.ForkingPickler.dumps(tensor)),
    "set_": lambda tensor: tensor.set_(),
    "data": replace_data,
    "swap": lambda tensor: torch.utils.swap_tensors(tensor, torch.zeros(3)),
    "resize_": lambda tensor: tensor.resize_(10 * BIG),
    "resize_ to less": lambda tensor: tensor.resize_(3),
    "resize_ of the storage": lambda tensor: tensor.untyped_storage().resize_(0),
    "resize": lambda tensor: tensor.numpy().resize(10 * BIG, refcheck=False),
    "byteswap": lambda tensor: tensor.untyped_storage().byteswap(torch.uint8),
}
ALIASES: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda tensor: tensor.numpy(),
    "memoryview": lambda tensor: memoryview(tensor[5:].numpy()),
    "dlpack": lambda tensor: np.from_dlpack(tensor[:]),
    "view": lambda tensor: tensor[3:],
    "graph": lambda tensor: (torch.ones(len(tensor), requires_grad=True) * tensor.data).sum(),
}
"""Of a view or `data` where torch would keep the tensor itself: set_() frees any tensor's memory under an array."""


def _seen(alias: Any) -> Any:
    if isinstance(alias, torch.Tensor) and alias.grad_fn is not None:
        made: Any = alias.grad_fn
        return made.next_functions[0][0]._saved_other.numpy()
    return np.asarray(alias)


@pytest.mark.parametrize("where", ["slab", *slow("message", "worker")])
@pytest.mark.parametrize("call", CALLS)
def test_whatever_moves_a_storage_its_slab_is_kept_for_all_that_refer_to_it(pair: Pair, call: str, where: str) -> None:
    size = BIG if where != "message" else INLINE
    for name, alias_of in ALIASES.items():
        tensor = pair.made(size, 1)
        there = pair.sent(tensor)
        if where != "worker":
            tensor = there
        del there
        alias = alias_of(tensor)
        with contextlib.suppress(RuntimeError, ValueError):  # as what torch shares, it can't be resized
            CALLS[call](tensor)
        del tensor
        gc.collect(1)  # what is as young as this test
        for value in range(2, 5):  # would come into the slab, if it were free
            assert pair.sent(pair.made(size, value)).eq(value).all()
        assert (_seen(alias) == 1).all(), name
        del alias


def test_a_slab_can_not_be_truncated(pair: Pair) -> None:
    """The other process would die of a bus error."""
    pair.sent(pair.made(BIG, 1))
    slab = pair.arena._slabs[0]
    for size in (0, slab.size * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(slab.fd, size)


def test_a_slab_whose_descriptor_is_lost_is_made_again() -> None:
    pair = Pair()
    with filling(pair.arena):
        data, _ = dumps(torch.ones(BIG), SlabPickler)
    (slab,), _ = pair.arena.seal()
    slab.announced = True
    pair.mappings.lost(slab.number)
    pair.mappings.lost(ALONE[0])
    with reading([OSError("too many open files"), bytearray()]), pytest.raises(OSError, match="too many open files"):
        pickle.loads(data)
    assert pair.sent(torch.ones(BIG)).eq(1).all()
    assert pair.arena._slabs[0] is not slab


class Rereads:
    """An object that reads another batch while it is rebuilt, as one may that iterates a loader."""

    other: Any = None

    def __setstate__(self, state: Any) -> None:
        Rereads.other = Rereads.other()
        self.__dict__ = state


def test_a_batch_may_be_read_while_another_one_is_rebuilt(pair: Pair) -> None:
    reader = Rereads()
    reader.__dict__["some"] = 1
    other, message = pair.pickled(torch.full((BIG,), 3.0)), pair.pickled([reader, torch.full((BIG,), 4.0)])
    Rereads.other = lambda: pair.rebuilt(other)
    assert pair.rebuilt(message)[1].eq(4).all()
    assert Rereads.other.eq(3).all()
    Rereads.other = None


ACTS = ("drop", "view", "numpy", "mutate", "read", "forget")
operations = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.lists(st.integers(0, 90_000), min_size=1, max_size=4), st.booleans()),
        st.tuples(st.sampled_from(ACTS), st.integers(0, 30), st.none()),
    ),
    max_size=40,
)


@given(operations, st.integers(1, 4), st.sampled_from([1 << 16, 1 << 19, BUDGET]))
def test_what_is_visible_never_changes(program: list[tuple[str, Any, Any]], slabs: int, budget: int) -> None:
    """Random batches are sent, kept whole or in part, mutated and dropped, on both sides, in any order."""
    pair = Pair(slabs, budget)
    unread: list[tuple[Message, list[int]]] = []
    seen: list[tuple[Any, int]] = []  # what somebody holds, and the byte that it is full of
    value = 0
    for what, choice, kept_by_the_worker in program:
        if what == "send":
            parts = []
            for size in choice:
                value = (value + 1) % 251
                parts.append(pair.made(size, value) if size % 2 else torch.full((size,), value, dtype=torch.uint8))
            values = [int(part[0]) if len(part) else 0 for part in parts]
            unread.append((pair.pickled(parts), values))
            if kept_by_the_worker:
                seen += zip(parts, values, strict=True)
        elif what == "read" and unread:
            message, values = unread.pop(choice % len(unread))
            seen += zip(pair.rebuilt(message), values, strict=True)
        elif what == "forget" and unread:  # a message that is read and dropped
            pair.rebuilt(unread.pop(choice % len(unread))[0])
        elif seen:
            place = choice % len(seen)
            held, byte = seen[place]
            if what == "drop":
                del seen[place]
            elif what == "view":
                seen[place] = held[len(held) // 3 :], byte
            elif what == "numpy":
                seen[place] = torch.from_numpy(held.numpy()), byte
            elif what == "mutate" and byte not in [
                *(other for at, (_, other) in enumerate(seen) if at != place),
                *(other for _, values in unread for other in values),
            ]:
                held.fill_(251 + byte % 5)  # nobody else holds, or will get, a part of the same tensor
                seen[place] = held, 251 + byte % 5
            del held
        assert all(tensor.eq(byte).all() for tensor, byte in seen)
    for message, _ in unread:
        pair.rebuilt(message)
