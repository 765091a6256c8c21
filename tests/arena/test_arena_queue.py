"""The transport "arena": its messages, and loaders that use it against those that do not."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pickle
import queue
import re
import resource
import socket
import threading
import warnings
import weakref
from collections.abc import Iterator
from multiprocessing import reduction, resource_sharer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import arena_soak
import everything
import numpy as np
import programs
import pytest
import torch
import torch.utils.data
import workloads as wl
from exceptions_everywhere import Interrupting, Interruption
from hypothesis import given
from hypothesis import strategies as st
from sizes import slow

import minidl
from minidl.arena import arena, arena_queue
from minidl.arena.arena import FREE, INLINE, SLABS, TAKEN, Host, Mappings
from minidl.arena.arena_queue import ArenaQueue
from minidl.arena.transport import SlabTransport
from minidl.data import collate
from minidl.wire.errors import ExceptionWrapper
from minidl.wire.message import Envelope
from minidl.wire.messages import RebuildFailure, Result, ResumeIteration, Sentinel
from minidl.wire.queues import SharedFlag

BIG = 4 * INLINE


class Line:
    """A queue whose writer is in this process, too."""

    def __init__(self, host: Host | None = None) -> None:
        self.done = SharedFlag()
        self.queue: Any = ArenaQueue(1, self.done, host=host)
        self.writer: Any = self.queue.writer(0)
        self.writer.enter_worker()
        self.states = self.writer._arena._states

    def put(self, idx: int, data: Any) -> None:
        self.writer.put(Envelope(Result(idx, 0, data)))

    def get(self) -> Any:
        return self.queue.get(timeout=wl.BOUND)

    def sent(self, idx: int, data: Any) -> Any:
        """Data as they come out of the queue."""
        self.put(idx, data)
        return self.get().data


class Refusing:
    """A host that locks nothing."""

    name, simulated = "a device", True

    def lock(self, address: int, size: int) -> None:
        raise OSError("no more")

    def unlock(self, address: int) -> None:
        raise AssertionError


@contextlib.contextmanager
def opened(monkeypatch: pytest.MonkeyPatch, host: Host | None = None) -> Iterator[Line]:
    monkeypatch.setattr(collate, "shared_from", 0)
    before = torch.UntypedStorage.__dict__.get("_new_shared")
    made = Line(host)
    try:
        yield made
    finally:
        made.writer.close()
        made.queue.close()
        if before is None:
            del torch.UntypedStorage._new_shared
        else:
            torch.UntypedStorage._new_shared = before  # type: ignore[assignment]
        made.writer._arena._slabs.clear()


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    with opened(monkeypatch) as made:
        yield made


def test_a_batch_is_collated_into_a_slab_and_comes_out_of_it(line: Line) -> None:
    batch = minidl.default_collate([torch.full((BIG,), float(value)) for value in range(3)])
    line.put(0, {"x": batch, "name": ["a", "b", "c"]})
    result = line.get()
    assert result.idx == 0
    assert result.data["x"].shape == (3, BIG)
    assert result.data["name"] == ["a", "b", "c"]
    assert line.states[0] == TAKEN
    assert repr(line.queue) == "<ArenaQueue: open; worker 0: 1 slab in use>"
    assert repr(line.writer) == "<ArenaWriter: of worker 0>"
    del result
    assert line.states[0] == FREE
    line.queue.close()
    line.queue.close()
    with pytest.raises(ValueError, match="<ArenaQueue: closed; worker 0: 0 slabs in use> is closed"):
        line.queue.get()


def test_descriptors_that_come_are_not_for_programs_that_are_executed(line: Line) -> None:
    line.put(0, torch.ones(BIG))
    assert line.queue._readable.wait(wl.BOUND)
    line.queue._recv_bytes()
    came = line.queue._descriptors()
    assert [os.get_inheritable(fd) for fd in came] == [False]
    assert line.get().data.eq(1).all()


def test_a_lent_slab_is_opened_once_and_sealed(line: Line) -> None:
    fd = os.memfd_create("slab", os.MFD_ALLOW_SEALING)
    own, again = (line.queue._fetch(os.getpid(), fd) for _ in range(2))
    assert own == again
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & arena.FETCHED
    line.queue._fetched.clear()
    os.close(own)
    os.close(fd)


def test_shared_memory_of_another_device_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    made = classmethod(lambda cls, size, *, device: (size, device))
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", made)
    monkeypatch.setattr(collate, "shared_from", 0)
    queue: Any = ArenaQueue(1)
    queue.writer(0).enter_worker()
    assert torch.UntypedStorage._new_shared(8, device="meta") == (8, "meta")
    queue.close()


@pytest.mark.parametrize("host", [None, Refusing()])
def test_each_worker_has_its_own_slabs_and_knows_whether_they_are_locked(host: Host | None) -> None:
    """Also when the loader is to end; and the ports decide what its mappings are, so that a trace can follow them."""
    transport, done, decided = SlabTransport(host), SharedFlag(), []
    ports: Any = SimpleNamespace(decider=lambda kind, *args: decided.append(kind) or kind(*args))
    made: Any = transport.result_queue(None, 2, done, ports)
    assert decided == [Mappings, Mappings]
    assert [(each.worker_id, each._locks and each._locks.host) for each in made._mappings] == [(0, host), (1, host)]
    assert transport.page_locked is (host is not None)
    assert [(each.worker_id, each._locked) for each in made._writers] == [(0, host is not None), (1, host is not None)]
    assert [each._done_event for each in made._writers] == [done, done]
    made.watch(later := SharedFlag())
    assert [each._done_event for each in made._writers] == [later, later], "it may be told later"
    made.close()


def test_a_writer_is_no_workers_before_it_is_entered() -> None:
    made: Any = ArenaQueue(1)
    writer = made.writer(0)
    with pytest.raises(AssertionError, match=r"^enter_worker\(\) comes first$"):
        writer.put("anything")
    writer._arena = "this process's"
    assert writer.__getstate__() == writer.__dict__ | {"_arena": None}
    made.close()


@pytest.mark.parametrize("host", [None, Refusing()])
def test_collate_asks_the_arena_for_what_no_message_takes_along(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(monkeypatch, host) as line:
        arena = line.writer._arena
        assert (collate.shared_from, arena._locked) == ((INLINE + 1, False) if host is None else (1, True))
        make: Any = torch.UntypedStorage._new_shared
        assert not make(BIG).is_shared(), "it lies in a slab"
        monkeypatch.setattr(arena, "allocate", lambda size: None)
        assert make(BIG).is_shared()
        arena.seal()


def test_an_interrupted_get_is_made_again_with_the_same_packet(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*about: Any) -> None:
        raise KeyboardInterrupt

    box: list[Any] = []
    for inbox in (None, box):
        line.put(0, 5)
        with monkeypatch.context() as patch:
            patch.setattr(line.queue, "_rebuilt", interrupted)
            with pytest.raises(KeyboardInterrupt):
                line.get()
        assert line.queue.get(block=False, inbox=inbox).data == 5
    line.put(0, [torch.ones(BIG), torch.arange(3), torch.arange(4)])
    line.queue.get(block=False, inbox=box)
    assert box[0].data == 5
    large, *small = box.pop().data
    assert (int(large.sum()), [one.tolist() for one in small]) == (BIG, [[0, 1, 2], [0, 1, 2, 3]])
    del large
    assert line.states[0] == FREE


def test_who_does_not_block_does_not_wait(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[Any] = []
    monkeypatch.setattr(line.queue._readable, "wait", waits.append)
    for options in ({"block": False}, {"timeout": 0.5}, {}):
        with pytest.raises(queue.Empty):
            line.queue.get(**options)
    assert waits == [0.0, 0.5, None]


def test_the_loaders_own_message_does_not_wait_for_room(line: Line) -> None:
    with contextlib.suppress(BlockingIOError):
        while True:
            line.queue._sender.send(bytes(1 << 12), socket.MSG_DONTWAIT)
    line.queue.put(Sentinel())


def test_descriptors_are_sent_without_waiting_for_room(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(line.writer, "_socket", SimpleNamespace(sendmsg=lambda *args: sent.append(args)))
        line.writer._descriptors = [5]
        line.writer._send(b"packet")
    assert [(packet, flags) for packet, _, flags in sent] == [([b"packet"], socket.MSG_DONTWAIT)]


@pytest.mark.parametrize("large", [[], [torch.ones(BIG)]], ids=["alone", "beside a slab"])
def test_a_storage_that_is_shorter_than_a_packets_head(line: Line, large: list[torch.Tensor]) -> None:
    assert line.sent(0, [*large, torch.arange(2)])[-1].tolist() == [0, 1]


def test_bytes_in_units() -> None:
    numbers = [100, 1 << 10, 151 << 19, 2 << 30, 3 << 40, 5 << 50]
    assert [arena_queue._in_units(number) for number in numbers] == ["100", "1K", "75.5M", "2G", "3T", "5120T"]


def test_the_loaders_own_message_wakes_the_reader(line: Line) -> None:
    threading.Timer(0.05, line.queue.put, [Sentinel()]).start()
    assert isinstance(line.get(), Sentinel)
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()
    assert not line.queue.jammed()
    line.queue.cancel_join_thread()
    line.writer.cancel_join_thread()


def test_a_writer_waits_for_room_until_the_loader_wants_no_more(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    line.writer._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    monkeypatch.setattr(line.writer, "_wait", lambda error: line.done.set())
    sent = 0
    while not line.done.is_set():
        line.put(sent, "x" * 2000)
        sent += 1
    got = []
    with contextlib.suppress(queue.Empty):
        while True:
            got.append(line.queue.get(block=False).idx)
    assert got == list(range(len(got)))
    assert len(got) == sent - 1, "the last one found no room"


def test_a_full_socket_that_is_read_again_takes_the_rest(line: Line) -> None:
    line.writer._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    writer = threading.Thread(target=lambda: [line.put(idx, "x" * 2000) for idx in range(100)])
    writer.start()
    assert [line.get().idx for _ in range(100)] == list(range(100))
    writer.join()


def test_a_worker_whose_loader_is_gone_drops_its_results(line: Line) -> None:
    line.queue.leave()
    line.put(0, torch.ones(BIG))


@pytest.mark.live
def test_a_forked_child_has_no_reading_end(line: Line) -> None:
    """Else a worker whose loader is gone would wait for it."""
    child = os.fork()
    if child == 0:
        os._exit(line.queue._receiver.fileno() == -1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert line.sent(0, 7) == 7


def test_a_queue_that_is_closed_has_no_memory_but_that_of_batches_in_use(line: Line) -> None:
    """A program may keep its iterator after the epoch."""
    for idx in range(2):
        line.put(idx, torch.full((BIG,), 3.0))
    first, second = line.get(), line.get()
    memory = [weakref.ref(each) for each in line.queue._mappings[0]._memory.values()]
    del second
    line.queue.close()
    assert [each() is None for each in memory] == [False, True]
    assert first.data.eq(3).all()
    del first
    assert memory[0]() is None
    assert list(line.states[:2]) == [FREE, FREE]


def test_descriptors_that_nobody_has_taken_are_closed(line: Line) -> None:
    line.put(0, torch.ones(BIG))
    line.queue._recv_bytes()
    (fd,) = line.queue._descriptors()
    line.queue.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.heavy
def test_a_batch_of_many_large_leaves_takes_few_slabs_and_descriptors(line: Line) -> None:
    line.put(0, [torch.full((BIG << 4,), value, dtype=torch.uint8) for value in range(80)])
    assert [int(leaf[-1]) for leaf in line.get().data] == list(range(80))
    assert 1 < len(line.writer._arena._slabs) < 10


@pytest.mark.parametrize("data", [torch.ones(BIG), ["long"] * 5 + [str(number) for number in range(20_000)]])
def test_without_a_descriptor_for_a_slab_the_batch_is_its_tasks_error(line: Line, data: Any) -> None:
    line.put(0, data)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        result = line.get()
        assert (result.idx, result.worker_id) == (0, 0)
        assert isinstance(result.data, RebuildFailure)
        assert "too many open files" in str(result.data.error)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert most > 3
    again = line.sent(1, data)
    assert len(again) == len(data)


def test_a_large_pickle_that_does_not_arrive_is_its_tasks_error(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch's loader, too; else it would wait for the task for ever. A message of no task raises the error."""
    words = [str(number) for number in range(20_000)]
    monkeypatch.setattr(torch.UntypedStorage, "from_file", full)
    line.writer.put((4, words))
    idx, failure = line.get()
    assert idx == 4
    with pytest.raises(OSError, match=r"(?s)OSError in the loader while it rebuilt a batch\..*Cannot allocate memory"):
        failure.reraise()
    line.writer.put(ResumeIteration(1, 0, str(words).encode()))
    with pytest.raises(OSError, match="Cannot allocate memory"):
        line.get()


def full(*about: Any) -> Any:
    raise RuntimeError("Cannot allocate memory (12)")


def unmapped(line: Line, patch: pytest.MonkeyPatch) -> None:
    line.put(0, torch.ones(BIG))
    patch.setattr(torch.UntypedStorage, "from_file", full)


def never_mapped(line: Line, patch: pytest.MonkeyPatch) -> None:
    line.put(0, torch.ones(BIG))
    line.get()
    line.queue._mappings[0]._memory.clear()
    line.put(1, torch.ones(BIG))


def one_descriptor_lost(line: Line, patch: pytest.MonkeyPatch) -> None:
    """It is not replaced by that of the next packet."""
    descriptors = line.queue._descriptors

    def without_the_last() -> list[int]:
        *others, last = descriptors()
        os.close(last)
        patch.undo()
        return others

    line.put(0, [torch.ones(BIG), torch.full((1 << 20,), 2.0)])
    line.put(1, torch.full((BIG,), 1.0))
    patch.setattr(line.queue, "_descriptors", without_the_last)


def neither_sent_nor_opened(line: Line, patch: pytest.MonkeyPatch) -> None:
    """The worker has ended since; or it may not be looked into."""
    nothing_more_in_flight(line.writer, patch)
    line.put(0, torch.ones(BIG))
    for slab in line.writer._arena._slabs.values():
        slab.close()


@pytest.mark.parametrize(
    ("breaks", "code", "words"),
    [
        (unmapped, errno.ENOMEM, "the batch's memory can't be mapped: Cannot allocate memory"),
        (never_mapped, errno.EBADF, "memory, slab 0, is not mapped: the packet that brings it is lost"),
        (one_descriptor_lost, errno.EMFILE, "the batch's memory did not arrive: too many open files"),
        (neither_sent_nor_opened, errno.ENOENT, f"process {os.getpid()}: No such .* Its descriptor .*`ulimit -n`"),
    ],
    ids=["unmapped", "never mapped", "a descriptor lost", "neither sent nor opened"],
)
def test_a_batch_whose_memory_does_not_arrive_is_its_tasks_error_and_the_next_ones_come(
    line: Line, monkeypatch: pytest.MonkeyPatch, breaks: Any, code: int, words: str
) -> None:
    with monkeypatch.context() as patch:
        breaks(line, patch)
        failure = line.get().data
    assert isinstance(failure, RebuildFailure)
    assert failure.error.errno == code
    assert re.search(words, str(failure.error))
    line.put(2, torch.full((BIG,), 2.0))
    came = [*received(line)]
    assert [result.data.unique().tolist() for result in came] == [[float(result.idx)] for result in came]
    assert came[-1].idx == 2


def test_more_batches_than_slabs_are_right_and_said_once(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(idx: int) -> Any:
        return line.sent(idx, torch.full((BIG,), idx % 256, dtype=torch.uint8))

    batches = [kept(idx) for idx in range(SLABS + 1)]
    words = r"keeps at most 256 slabs .* Let the program hold fewer batches\. \(more: minidl help arena\)$"
    with pytest.warns(RuntimeWarning, match=words):
        batches.append(kept(SLABS + 1))
    batches += [kept(idx) for idx in range(SLABS + 2, SLABS + 5)]
    assert [int(batch[-1]) for batch in batches] == [idx % 256 for idx in range(SLABS + 5)]


def test_a_batch_beyond_the_budget_is_right_and_the_number_to_set_is_said_once(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("MINIDL_ARENA_BYTES", "1M")
    line = request.getfixturevalue("line")
    kept = line.sent(0, torch.zeros(1 << 19, dtype=torch.uint8))
    for idx in range(1, 4):
        line.put(idx, torch.full((1 << 20,), idx, dtype=torch.uint8))
        said = contextlib.nullcontext() if idx != 2 else pytest.warns(
            RuntimeWarning,
            match=r"^A batch needs 1M\. Worker 0 keeps at most slabs of 1M in all for use again, and 512K in 1 slab "
            r"are in use\. .*Let MINIDL_ARENA_BYTES=16M be in the environment",
        )  # fmt: skip
        with said:
            assert line.get().data.eq(idx).all()
    assert kept.eq(0).all()


def test_warnings_that_are_errors_are_raised_once_and_lose_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIDL_ARENA_BYTES", "64K")
    batches, said = [], []
    with opened(monkeypatch, Refusing()) as line:
        for idx in range(5):
            line.put(idx, torch.full((BIG,), idx, dtype=torch.uint8))
            try:
                result = line.get()
            except RuntimeWarning as warning:
                said.append(str(warning)[:25])
                result = line.queue.get(block=False)
            assert result.idx == idx
            batches.append(result.data)
        del result
    assert said == ["a device cannot page-lock", "A batch needs 64K. Worker"]
    assert [batch.unique().tolist() for batch in batches] == [[idx] for idx in range(5)]


def test_what_the_last_batch_has_met_is_said_at_the_end_and_never_raised_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for filtered in (pytest.warns(RuntimeWarning, match="cannot page-lock"), contextlib.nullcontext()):
        with opened(monkeypatch, Refusing()) as line:
            assert line.sent(0, torch.ones(BIG)).eq(1).all()
            with filtered as said:
                line.queue.close()
            assert said is None or len(said) == 1
            assert line.queue._receiver.fileno() == -1


def test_a_slab_costs_the_worker_one_descriptor(line: Line) -> None:
    def opened() -> int:
        found = 0
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of the listing itself
                found += "minidl-slab" in os.readlink(f"/proc/self/fd/{fd}")
        return found

    kept, before = [], opened()
    for idx in range(4):
        kept.append(line.sent(idx, torch.ones(BIG)))
    assert opened() - before == 4


def test_a_batch_that_can_not_be_pickled_is_its_tasks_error_also_for_torchs_loader(line: Line) -> None:
    """Whose results are tuples."""
    line.writer.put((3, torch.ones(BIG)))
    idx, data = line.get()
    assert idx == 3
    assert data.eq(1).all()
    line.writer.put((4, lambda: 0))
    idx, failure = line.get()
    assert idx == 4
    with pytest.raises(Exception, match="while worker 0 pickled a batch"):
        failure.reraise()
    del data
    assert isinstance(line.sent(5, [torch.ones(BIG), lambda: 0]), ExceptionWrapper)
    assert not any(line.states)


def test_a_large_pickle_that_fits_no_slab_is_its_tasks_error(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the worker had no descriptor left. What is an error already, and is that large, ends the worker."""

    def no_descriptor(*about: int) -> Any:
        raise OSError(24, "Too many open files")

    words = [str(number) for number in range(20_000)]
    with monkeypatch.context() as patch:
        patch.setattr(arena, "Slab", no_descriptor)
        line.put(0, words)
        with pytest.raises(OSError, match="Too many open files"):
            line.get().data.reraise()
        line.writer.put((1, words))
        with pytest.raises(OSError, match="while worker 0 pickled a batch"):
            line.get()[1].reraise()
        for message in (
            Envelope(Result(2, 0, ExceptionWrapper(ValueError(words), "here"))),
            (2, torch._utils.ExceptionWrapper((ValueError, ValueError(words), None), "here")),  # type: ignore[no-untyped-call]
            ResumeIteration(1, 0, str(words).encode()),
        ):
            with pytest.raises(OSError, match="Too many open files"):
                line.writer.put(message)
    assert line.sent(3, words) == words
    assert not any(line.states), "nothing refers to the slab any more"


def nothing_more_in_flight(writer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the user had as many descriptors on their way as the kernel allows."""
    send = writer._send

    def refusing(data: bytes) -> None:
        if writer._descriptors:
            raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
        send(data)

    monkeypatch.setattr(writer, "_send", refusing)


def test_the_loader_opens_a_descriptor_that_can_not_be_sent(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing_more_in_flight(line.writer, monkeypatch)
    for idx in range(3):
        line.put(idx, [torch.full((BIG,), idx), torch.full((1 << 17,), idx)])
        assert all(leaf.eq(idx).all() for leaf in line.get().data)
    assert not any(line.states)
    assert all(slab.fetched == (slab.fd >= 0) for slab in line.writer._arena._slabs.values())


def test_a_slab_for_one_batch_is_kept_until_the_loader_has_it(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("MINIDL_ARENA_BYTES", "64K")
    line = request.getfixturevalue("line")
    nothing_more_in_flight(line.writer, monkeypatch)
    for idx in range(3):
        line.put(idx, torch.full((1 << 20,), idx, dtype=torch.uint8))
    with pytest.warns(RuntimeWarning, match="A batch needs 1M"):
        assert [int(line.get().data[-1]) for _ in range(3)] == [0, 1, 2]
    assert line.sent(3, 0) == 0
    assert line.writer._arena._lent == []


@pytest.mark.parametrize("code", [errno.ENOBUFS, errno.ENOMEM])
def test_a_packet_that_the_kernel_has_no_room_for_is_sent_later(
    line: Line, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    send, refused = line.writer._send, [code, code]

    def refusing(data: bytes) -> None:
        if refused:
            raise OSError(refused.pop(), "no memory")
        send(data)

    monkeypatch.setattr(line.writer, "_send", refusing)
    monkeypatch.setattr(arena_queue, "_STEP", 0.001)
    assert line.sent(0, torch.ones(BIG)).eq(1).all()


def test_another_error_of_the_socket_ends_the_worker(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(data: bytes) -> None:
        raise PermissionError(errno.EPERM, "not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(line.writer, "_send", refusing)
        with pytest.raises(PermissionError):
            line.put(0, torch.ones(BIG))


FLIGHT = """
import multiprocessing, resource, time, torch, minidl

class Counted(minidl.Dataset):
    def __len__(self):
        return 200
    def __getitem__(self, index):
        with made.get_lock():
            made.value += 1
        return torch.full((20_000,), index)

resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
made = multiprocessing.Value("i", 0)
full, other = (
    minidl.DataLoader(Counted(), 1, num_workers=4, prefetch_factor=ahead, transport="arena") for ahead in (30, 2)
)
waiting, end = iter(full), time.monotonic() + 60
while made.value < 4 * 30 and time.monotonic() < end:
    time.sleep(0.01)
for batches in (other, waiting):
    assert [int(batch[0, -1]) for batch in batches] == list(range(200))
print("delivered")
"""


@pytest.mark.live
def test_a_user_may_have_as_many_descriptors_on_their_way_as_one_process_may_open() -> None:
    """One loader's unread batches have more. Another loader delivers all of its own first. Root has no such limit."""
    done = programs.unprivileged(FLIGHT)
    assert (done.returncode, done.stdout) == (0, "delivered\n"), done.stderr


def test_a_batch_that_the_worker_pickles_for_another_queue_takes_no_second_slab(line: Line) -> None:
    storage: Any = torch.UntypedStorage._new_shared(BIG)  # type: ignore[no-untyped-call]  # as collate does
    batch = torch.empty(0, dtype=torch.uint8).set_(storage).fill_(7)
    copy = pickle.loads(reduction.ForkingPickler.dumps(batch))
    assert copy.is_shared()
    assert torch.equal(copy, batch)
    assert len(line.writer._arena._open) == 1
    assert line.writer._arena._open[0].filled == batch.nbytes
    line.put(0, batch)
    assert torch.equal(line.get().data, copy)
    resource_sharer.stop(timeout=10)


@given(st.integers(1 << 16, 1 << 50) | st.integers(16, 49).flatmap(lambda n: st.integers(1000 << n - 10, 1 << n)))
def test_a_number_of_bytes_that_is_said_is_one_that_the_variable_takes(number: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIDL_ARENA_BYTES", arena_queue._in_units(max(number, 1 << 16)))
        assert arena.budget() == pytest.approx(max(number, 1 << 16), rel=1e-3)


def test_the_loader_lets_go_of_slabs_that_the_worker_has_dropped(line: Line) -> None:
    """With the next message: of what is too small, and of what a forked child may see. A batch in view stays mapped."""
    for idx in range(5):
        line.put(idx, torch.full((BIG,), idx, dtype=torch.uint8))
    kept, *others = [line.get().data for _ in range(5)]
    mappings = line.queue._mappings[0]
    memory = [weakref.ref(each) for each in mappings._memory.values()]
    del others
    mappings.forked()
    assert line.sent(5, torch.ones(1 << 20)).eq(1).all()
    assert set(mappings._memory) == set(line.writer._arena._slabs) == {0}
    assert [each() is None for each in memory] == [False, True, True, True, True]
    assert kept.eq(0).all()
    assert line.sent(6, torch.ones(BIG)).eq(1).all()


# --- Loaders ----------------------------------------------------------------------------------------------------------
def _described(loader: Any) -> list[Any]:
    return [everything.described(batch) for batch in loader]


@pytest.mark.live
@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested", "ignore:TypedStorage is deprecated")
@pytest.mark.filterwarnings("ignore:torch.quantize", "ignore:The given NumPy array")
def test_all_that_a_batch_can_hold_arrives_as_in_torch(tmp_path: Path) -> None:
    """Types, bytes, strides, offsets, flags, and which leaves share their memory."""
    np.arange(everything.SIZE, dtype="i4").tofile(tmp_path / "numbers")
    dataset = everything.Everything(tmp_path / "numbers")
    options: Any = {"batch_size": None, "collate_fn": wl.as_list, "num_workers": 1}
    expected = _described(torch.utils.data.DataLoader(dataset, **options))
    assert len(expected) == 2
    assert sum(line[0] == "one memory" for line in expected[0]) == 5
    for transport in ("upstream", "arena"):
        assert _described(minidl.DataLoader(dataset, transport=transport, **options)) == expected, transport
    options |= {"multiprocessing_context": minidl.observe(transport="arena")}
    assert _described(torch.utils.data.DataLoader(dataset, **options)) == expected


@pytest.mark.live
def test_a_budget_smaller_than_a_batch_is_said_once_and_loses_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of torch's loader, and where the program keeps all batches, and warnings are errors."""
    monkeypatch.setenv("MINIDL_ARENA_BYTES", "64K")
    options: Any = {"dataset": wl.Tensors(22, 30_000), "batch_size": 4, "num_workers": 2}
    for loader in (
        minidl.DataLoader(transport="arena", **options),
        torch.utils.data.DataLoader(multiprocessing_context=minidl.observe(transport="arena"), **options),
    ):
        iterator, kept, said = iter(loader), list[Any](), list[str]()
        while len(kept) < 6:
            try:
                kept.append(next(iterator))
            except RuntimeWarning as warning:
                said.append(str(warning))
        assert next(iterator, None) is None
        assert torch.equal(torch.cat(kept).mean(1), torch.arange(22.0))
        (text,) = said
        assert re.search("keeps at most slabs of 64K in all .* MINIDL_ARENA_BYTES=", text)
        del iterator


@pytest.mark.live
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_workers_of_other_start_methods_have_slabs(context: str) -> None:
    options: Any = {"num_workers": 1, "multiprocessing_context": context, "transport": "arena"}
    with minidl.DataLoader(wl.Tensors(12, BIG), 4, **options) as loader:
        assert torch.equal(torch.cat(list(loader)).mean(1), torch.arange(12.0))


@pytest.mark.live
def test_iterable_datasets_end_and_errors_arrive() -> None:
    loader = minidl.DataLoader(wl.Stream(40), 4, collate_fn=wl.as_list, num_workers=2, transport="arena")
    assert sorted(index for batch in loader for index, _, _ in batch) == list(range(40))
    broken = minidl.DataLoader(wl.Failing(8, ValueError("bad file"), at=(5,)), num_workers=2, transport="arena")
    with pytest.raises(ValueError, match="sample index 5"):
        list(broken)


@pytest.mark.parametrize(("given", "variable"), [("pigeon", ""), (None, "pigeon")])
def test_an_unknown_transport_is_refused(given: Any, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIDL_TRANSPORT", variable)
    with pytest.raises(ValueError, match=r"'pigeon'.*'upstream', 'arena'"):
        minidl.DataLoader(wl.Numbers(2), transport=given)


@pytest.mark.live
@pytest.mark.parametrize(("seed", "way"), [place for place in enumerate(arena_soak.WAYS) if place[1] != "crowded"])
def test_what_a_program_holds_in_any_way_never_changes(seed: int, way: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "A batch needs", RuntimeWarning)
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        volume = arena_soak.soak(60, seed, way)
    assert volume.batches == 60
    assert volume.bytes > 20_000_000
    assert volume.slabs > 0


CODE = tuple(
    f"minidl.{name}" for name in ("arena.arena_queue", "arena.arena", "arena.pickling", "wire.message", "wire.atomic")
)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def received(line: Line) -> Iterator[Any]:
    with contextlib.suppress(queue.Empty):
        while True:
            yield line.queue.get(timeout=0)


@pytest.mark.parametrize(("new", "steps"), [(True, "line"), (False, "line"), *slow((True, "opcode"))])
def test_an_exception_at_any_step_of_get_loses_no_packet_and_mixes_none(line: Line, new: bool, steps: str) -> None:
    """As a signal's handler may raise one. Only the last instructions, which hand the message over, can lose it."""
    before, at, lost, done = 0, -1, [], False
    while at < 1 or not done:
        at, done = at + 1, False
        if new:
            line.writer._arena._slabs.clear()  # the next batch has a new one
        for value in (1, 2):
            line.put(value, torch.full((BIG,), float(at + value)))
        first = None
        with Interrupting(at, CODE, steps) as interrupting, contextlib.suppress(Interruption):
            first = line.get()
            done = True
        came = [*([first] if done else []), *received(line)]
        assert [int(result.data[-1]) - at for result in came] == [result.idx for result in came], interrupting.where
        assert [result.idx for result in came] in ([1, 2], [2]), interrupting.where
        if len(came) == 1:
            lost.append(interrupting.where)
        assert all(result.data.eq(result.data[-1]).all() for result in came)
        came, first = [], None
        assert set(line.states[:2]) <= {FREE}, interrupting.where
        before = before or descriptors()
        assert descriptors() == before, interrupting.where
    assert at > 40
    assert len(lost) < 12, lost


def test_a_slab_is_set_free_without_an_instruction_that_an_exception_could_come_before(line: Line) -> None:
    """The exception would be printed, since it comes in a callback, and the slab would be taken for ever."""
    line.put(0, torch.ones(BIG))
    batch = line.get()
    assert line.states[0] == TAKEN
    with Interrupting(1, CODE) as interrupting:
        del batch
    assert line.states[0] == FREE
    assert interrupting.count == 0


@pytest.mark.live
def test_what_a_user_without_capabilities_holds_never_changes_though_no_descriptor_can_be_sent() -> None:
    done = programs.unprivileged("import arena_soak; print(arena_soak.soak(60, 8, 'crowded').batches)")
    assert (done.returncode, done.stdout) == (0, "60\n"), done.stderr
