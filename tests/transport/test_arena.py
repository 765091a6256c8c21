"""Slabs: what one side can see, the other one never writes."""

from __future__ import annotations

import gc
import os
import pickle
import resource
import weakref
from collections.abc import Iterator
from multiprocessing import resource_sharer
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minidl.transport import arena as module
from minidl.transport.arena import ALONE, FREE, INLINE, KEPT, SLABS, TAKEN, Arena, Mappings, Slab, reading
from minidl.transport.message import dumps
from minidl.transport.tensors import filling

BIG = 4 * INLINE
"""Bytes that go into a slab."""


Message = tuple[bytes, list[tuple[int, int, int]], bytearray]
"""A pickle; its slabs: number, size and, at their first use, descriptor; and its small storages."""


class Pair:
    """A worker's side and a loader's, in one process."""

    def __init__(self, slabs: int = SLABS) -> None:
        self.states = memoryview(bytearray(slabs))
        self.arena = Arena(self.states)
        self.mappings = Mappings(self.states)

    def pickled(self, batch: Any) -> Message:
        with filling(self.arena):
            data, _ = dumps(batch)
        slabs, small = self.arena.seal()
        named = [(slab.number, slab.size, -1 if slab.announced else os.dup(slab.fd)) for slab in slabs]
        for slab in slabs:
            slab.announced = True
        return data, named, bytearray(small)

    def rebuilt(self, message: Message) -> Any:
        roots = []
        for number, size, fd in message[1]:
            if fd >= 0:
                self.mappings.map(number, size, fd)
                os.close(fd)
            roots.append(self.mappings.root(number))
        roots.append(message[2])
        with reading(roots):
            del roots
            return pickle.loads(message[0])

    def sent(self, batch: Any) -> Any:
        return self.rebuilt(self.pickled(batch))

    def made(self, size: int, value: int) -> torch.Tensor:
        """A tensor of bytes where collate would make it."""
        return torch.empty(0, dtype=torch.uint8).set_(self.arena.allocate(size)).fill_(value)

    @property
    def used(self) -> list[int]:
        return [number for number, state in enumerate(self.states) if state != FREE]


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    gc.collect()
    assert made.used == []
    made.arena._slabs.clear()  # pytest holds the fixture for longer
    made.mappings._memory.clear()
    resource_sharer.stop(timeout=10)


def test_a_tensor_that_collate_makes_is_not_copied(pair: Pair) -> None:
    tensor = pair.made(BIG, 7)
    batch, copied = pair.sent([tensor]), pair.arena.copied_bytes
    assert copied == 0
    tensor[0] = 9  # the same memory
    assert batch[0][0] == 9
    assert batch[0].tolist()[1:] == [7] * (BIG - 1)


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


def test_a_slab_that_is_too_small_by_now_is_given_up(pair: Pair) -> None:
    pair.sent(torch.zeros(BIG))
    small = weakref.ref(pair.arena._slabs[0])
    pair.sent(torch.zeros(1 << 20))
    assert small() is None
    assert len(pair.arena._slabs) == 1


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


def test_views_of_one_storage_stay_views_of_one_storage(pair: Pair) -> None:
    base = torch.arange(10_000.0)
    back = pair.sent([base, base[100:200], base.view(100, 100).t()])
    back[0][150] = -1
    assert back[1][50] == -1
    assert back[2][50, 1] == -1
    assert back[2].stride() == (1, 100)


def test_what_the_dataset_has_shared_stays_shared(pair: Pair) -> None:
    shared = torch.zeros(BIG).share_memory_()
    back = pair.sent(shared)
    shared[3] = 5
    assert back[3] == 5
    assert pair.used == []


def test_without_a_descriptor_for_a_slab_the_storage_goes_the_other_way(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_descriptor(number: int, size: int) -> Slab:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(module, "Slab", no_descriptor)
    assert pair.sent(torch.ones(BIG)).eq(1).all()
    assert pair.arena.fallbacks == 1


def test_a_slab_that_can_not_be_sized_leaves_no_descriptor() -> None:
    before, limits = os.listdir("/proc/self/fd"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(OSError, match="large"):
            Slab(0, 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_batches_beyond_the_last_slab_get_memory_of_their_own() -> None:
    pair = Pair(slabs=2)
    batches = [pair.sent(torch.full((BIG,), value, dtype=torch.uint8)) for value in range(5)]
    assert [batch.unique().tolist() for batch in batches] == [[0], [1], [2], [3], [4]]
    assert len(pair.mappings._memory) == 2
    message = pair.pickled(torch.zeros(BIG))
    assert [number for number, _, _ in message[1]] == [ALONE]
    assert pair.rebuilt(message).eq(0).all()
    del batches
    assert pair.used == []


@pytest.mark.live
def test_a_fork_keeps_what_both_processes_see() -> None:
    pair = Pair()
    batch, unseen = pair.sent(pair.made(BIG, 1)), pair.pickled(pair.made(BIG, 2))
    child = os.fork()
    if child == 0:
        del batch  # no callback of this process frees the slab
        os._exit(pair.states[0])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == TAKEN
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


def test_a_slab_whose_descriptor_is_lost_is_made_again() -> None:
    pair = Pair()
    with filling(pair.arena):
        data, _ = dumps(torch.ones(BIG))
    (slab,), _ = pair.arena.seal()
    slab.announced = True
    pair.mappings.lost(slab.number)
    pair.mappings.lost(ALONE)
    with reading([None, bytearray()]), pytest.raises(OSError, match="too many open files"):
        pickle.loads(data)
    assert pair.sent(torch.ones(BIG)).eq(1).all()
    assert pair.arena._slabs[0] is not slab


ACTS = ("drop", "view", "numpy", "mutate", "read", "forget")
operations = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.lists(st.integers(0, 90_000), min_size=1, max_size=4), st.booleans()),
        st.tuples(st.sampled_from(ACTS), st.integers(0, 30), st.none()),
    ),
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@given(operations, st.integers(1, 4))
def test_what_is_visible_never_changes(program: list[tuple[str, Any, Any]], slabs: int) -> None:
    """Random batches are sent, kept whole or in part, mutated and dropped, on both sides, in any order."""
    pair = Pair(slabs)
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
