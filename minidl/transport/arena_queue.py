"""The result queue of the transport "arena": a socket from each worker, and slabs for what its batches hold.

The worker's main thread pickles a batch and writes one message; there is no feeder thread. The message holds what is
small, and names the slabs with the rest (`arena`). A slab's descriptor goes along with its first message, so nothing
is fetched from the worker, and a batch outlives it. Each worker has its own socket, and no lock: one that is killed in
the middle of a message leaves the others' messages whole.
"""

from __future__ import annotations

import array
import collections
import contextlib
import errno
import os
import pickle
import queue
import select
import socket
import struct
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._utils

from minidl import signal_handling
from minidl.live_repr import LiveRepr, counted
from minidl.transport.arena import ALONE, SLABS, Arena, Mappings, Slab, reading
from minidl.transport.message import dumps
from minidl.transport.tensors import filling

_HEAD = struct.Struct("!IBbQ")  # bytes that follow the head; slabs; the slab with the pickle, or -1; its offset
_SLAB = struct.Struct("!H?QQ")  # number; whether its descriptor comes along; size; inode

_LARGE = 1 << 14
"""Bytes from which a pickle lies in a slab: a socket holds little, and the loader may be busy."""

_PIECE = 1 << 16
_DESCRIPTORS = 32
"""At most so many come with one read."""

_STEP = 0.1
"""Seconds after which a worker whose socket is full looks whether the loader wants no more."""


class ArenaWriter(LiveRepr):
    """A worker's end. Pickled, and inherited, with the worker's other arguments."""

    _socket: socket.socket

    def __init__(self, worker_id: int, sender: socket.socket, board: torch.Tensor, done_event: Any) -> None:
        self.worker_id = worker_id
        self._socket = sender
        self._board = board
        self._done_event = done_event
        self._arena: Arena | None = None
        self._descriptors: list[int] = []  # that go with the next message
        self._siblings: list[ArenaWriter] = []  # which a forked worker has inherited

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_siblings": [], "_arena": None}

    def _phrases(self) -> Iterator[str]:
        yield f"of worker {self.worker_id}"

    def enter_worker(self, arena_of: Callable[[memoryview], Arena] = Arena) -> None:
        """This process is the worker: collate makes its tensors in slabs from here."""
        for sibling in self._siblings:
            if sibling is not self:
                sibling.close()
        self._siblings = []
        self._arena = arena = arena_of(_row(self._board, self.worker_id))

        def _new_shared(cls: type, size: int, *, device: Any = "cpu") -> torch.UntypedStorage:
            made = arena.allocate(size) if torch.device(device).type == "cpu" else None
            return make(size, device=device) if made is None else made

        make: Callable[..., Any] = torch.UntypedStorage._new_shared
        torch.UntypedStorage._new_shared = classmethod(_new_shared)  # type: ignore[assignment]

    def put(self, message: Any) -> None:
        """Pickle and write a message. It waits while the socket is full, and drops it once the loader wants no more."""
        arena = self._arena
        assert arena is not None, "enter_worker() comes first"
        try:
            with filling(arena):
                data, _ = dumps(message)
        except Exception as error:  # of torch's loader: an Envelope does not fail
            self._on_queue_feeder_error(error, message)
            return
        place, offset = -1, 0
        if len(data) >= _LARGE:
            place, offset = arena.place(data)
            data = struct.pack("!Q", len(data))
        slabs = arena.seal()
        names = b"".join(_SLAB.pack(slab.number, not slab.announced, slab.size, slab.inode) for slab in slabs)
        self._descriptors = [slab.fd for slab in slabs if not slab.announced]
        self._send_bytes(_HEAD.pack(len(names) + len(data), len(slabs), place, offset) + names + data)
        _announced(slabs)

    def _on_queue_feeder_error(self, error: Exception, message: Any) -> None:
        """Send torch's loader, in place of a batch that can't be pickled, the error. (multiprocessing's name.)"""
        idx, _ = message
        where = f"while worker {self.worker_id} pickled a batch"
        self.put((idx, torch._utils.ExceptionWrapper(where=where)))  # type: ignore[no-untyped-call]

    def _send_bytes(self, data: bytes) -> None:
        rest = memoryview(data)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the loader has closed its end
            while rest:
                try:
                    sent = self._send(rest)
                except BlockingIOError:
                    if self._done_event.is_set():
                        return
                    self._wait()
                else:
                    rest = rest[sent:]

    def _send(self, data: memoryview) -> int:
        if not self._descriptors:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", self._descriptors))]
        sent = self._socket.sendmsg([data], control, socket.MSG_DONTWAIT)
        self._descriptors = []
        return sent

    def _wait(self) -> None:
        out = select.poll()
        out.register(self._socket, select.POLLOUT)
        out.poll(_STEP * 1e3)

    def cancel_join_thread(self) -> None:
        """There is no feeder thread."""

    def close(self) -> None:
        """Close this process's copy of the socket."""
        if hasattr(self, "_socket"):  # not if it was not made whole
            self._socket.close()

    __del__ = close


def _announced(slabs: list[Slab]) -> None:
    for slab in slabs:
        slab.announced = True


def _row(board: torch.Tensor, worker_id: int) -> memoryview:
    return memoryview(board[worker_id].numpy())  # type: ignore[arg-type]


class _FromWorker:
    """The loader's end of one worker's socket: bytes and descriptors that have come, cut into messages."""

    def __init__(self, receiver: socket.socket, mappings: Mappings) -> None:
        self.socket = receiver
        self.mappings = mappings
        self._bytes = bytearray()
        self._descriptors: collections.deque[int] = collections.deque()

    def read(self) -> bool:
        """Read what is there; False at the end: the worker has closed its end, or is dead."""
        ancillary: list[Any]
        try:
            data, ancillary, _, _ = self.socket.recvmsg(
                _PIECE, socket.CMSG_SPACE(4 * _DESCRIPTORS), socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        for _, _, descriptors in ancillary:
            self._descriptors.extend(array.array("i", descriptors))
        self._bytes += data
        return bool(data)

    def messages(self) -> Iterator[bytes]:
        """The whole messages that have come."""
        while len(self._bytes) >= _HEAD.size:
            end = _HEAD.size + _HEAD.unpack_from(self._bytes)[0]
            if len(self._bytes) < end:
                return
            message = bytes(self._bytes[:end])
            del self._bytes[:end]
            yield message

    def roots(self, message: bytes, count: int) -> list[Any]:
        """A root for each slab of a message, or the error for which there is none; maps those that are new."""
        roots: list[Any] = []
        for place in range(count):
            number, new, size, inode = _SLAB.unpack_from(message, _HEAD.size + _SLAB.size * place)
            error = self._map(number, size, inode) if new else None
            roots.append(self.mappings.root(number) if error is None else error)
        return roots

    def _map(self, number: int, size: int, inode: int) -> OSError | None:
        """Map a slab; or why that can't be done."""
        # A descriptor that finds no room in this process is lost, and a later message's may be here already.
        if not self._descriptors or os.fstat(self._descriptors[0]).st_ino != inode:
            self.mappings.lost(number)
            return OSError(errno.EMFILE, "the descriptor of the batch's memory did not arrive: too many open files")
        fd = self._descriptors.popleft()
        try:
            self.mappings.map(number, size, fd)
        except RuntimeError as error:
            self.mappings.lost(number)
            return OSError(errno.ENOMEM, f"the batch's memory can't be mapped: {error}")
        finally:
            os.close(fd)
        return None

    @property
    def pending(self) -> int:
        """Bytes of a message that has not come whole."""
        return len(self._bytes)

    def close(self) -> None:
        self.socket.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())

    __del__ = close


_queues: weakref.WeakSet[ArenaQueue] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """A child is not the reader: a worker must see that the loader is gone, though the child lives."""
    for each in tuple(_queues):
        each.leave()


os.register_at_fork(after_in_child=_after_fork_in_child)


class ArenaQueue(LiveRepr):
    """The reader's end, in the loader's process: `get` takes the next message of any worker.

    `put` is for the loader's own sentinel, which wakes the pin thread.
    """

    _closed = True  # as long as it is not made

    def __init__(
        self, num_workers: int, done_event: Any = None, mappings: Callable[[memoryview, int], Mappings] = Mappings
    ) -> None:
        self._board = torch.zeros((num_workers, SLABS), dtype=torch.uint8)
        self._board.share_memory_()  # type: ignore[no-untyped-call]
        pairs = [socket.socketpair() for _ in range(num_workers)]
        self._writers = [
            ArenaWriter(worker_id, sender, self._board, done_event) for worker_id, (_, sender) in enumerate(pairs)
        ]
        for writer in self._writers:
            writer._siblings = self._writers
        self._poll = select.poll()
        self._incoming: dict[int, _FromWorker] = {}  # by descriptor
        for worker_id, (receiver, _) in enumerate(pairs):
            its = mappings(_row(self._board, worker_id), worker_id)
            self._incoming[receiver.fileno()] = _FromWorker(receiver, its)
            self._poll.register(receiver, select.POLLIN)
        self._messages: collections.deque[tuple[_FromWorker | None, Any]] = collections.deque()
        self._news = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._news, select.POLLIN)
        self._closed = self._told = False
        self._sender: Any = None  # whose message was taken last
        _queues.add(self)

    def _phrases(self) -> Iterator[str]:
        yield "closed" if self._closed else counted(len(self._messages), "message") + " read"
        for worker_id, incoming in enumerate(self._incoming.values()):
            torn = f", {incoming.pending} B of a message" if incoming.pending else ""
            yield f"worker {worker_id}: {counted(incoming.mappings.visible, 'slab')} in use{torn}"

    def watch(self, done_event: Any) -> None:
        """Let the workers look at this done event, which torch's loader makes after its queue."""
        for writer in self._writers:
            writer._done_event = done_event

    def writer(self, worker_id: int) -> ArenaWriter:
        """The end that a worker gets."""
        return self._writers[worker_id]

    def put(self, message: Any) -> None:
        """Let the reader get this message of the loader itself."""
        self._messages.append((None, message))
        os.eventfd_write(self._news, 1)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The next message. Raises queue.Empty if none has come whole within `timeout` seconds."""
        if self._closed:
            raise ValueError(f"Queue {self!r} is closed")
        self._keep_only_readers()
        seconds = timeout if block else 0.0
        deadline = None if seconds is None else time.monotonic() + seconds
        while not self._messages:
            ready = self._wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if not ready:
                raise queue.Empty
            for fd, _ in ready:
                self._read(fd)
        if self._messages[0][0] is None:
            return self._messages.popleft()[1]
        return self._rebuilt(self._recv_bytes())

    @signal_handling.wait
    def _wait(self, seconds: float | None) -> list[tuple[int, int]]:
        if signal_handling.put_off:
            signal_handling.raise_now()
        return self._poll.poll(None if seconds is None else seconds * 1e3)

    def _read(self, fd: int) -> None:
        incoming = self._incoming.get(fd)
        if incoming is None:
            os.eventfd_read(self._news)
            return
        if not incoming.read():
            self._poll.unregister(fd)  # the liveness check finds out why
        self._messages.extend((incoming, message) for message in incoming.messages())

    def _recv_bytes(self) -> bytes:
        self._sender, data = self._messages.popleft()
        return data  # type: ignore[no-any-return]

    def _rebuilt(self, message: bytes) -> Any:
        _, count, place, offset = _HEAD.unpack_from(message)
        data: Any = memoryview(message)[_HEAD.size + count * _SLAB.size :]
        roots = self._sender.roots(message, count)
        if place >= 0:
            if isinstance(roots[place], OSError):
                raise roots[place]
            data = memoryview(roots[place])[offset : offset + int.from_bytes(data, "big")]
        if not self._told and any(
            _SLAB.unpack_from(message, _HEAD.size + _SLAB.size * number)[0] in ALONE for number in range(count)
        ):
            self._told = True
            warnings.warn(
                f"More than {SLABS} batches of one worker are in use at once. Each further one gets memory of its own, "
                "which is as slow as the other transport.",
                RuntimeWarning,
                stacklevel=2,
            )
        with reading(roots):
            return pickle.loads(data)

    def _keep_only_readers(self) -> None:
        """The workers have started, and have their ends: a copy here would hide that one is gone."""
        for writer in self._writers:
            writer.close()
        self._writers = []

    def forget_names(self) -> None:
        """It has no semaphores."""

    def jammed(self) -> bool:
        """No worker holds a lock that another one needs."""
        return False

    def cancel_join_thread(self) -> None:
        """There is no feeder thread."""

    def close(self) -> None:
        """Close this process's ends. Batches that it has got keep their memory."""
        if not self._closed:
            self._keep_only_readers()
            self.leave()

    def leave(self) -> None:
        """Close the reading ends."""
        if not self._closed:
            self._closed = True
            for incoming in self._incoming.values():
                incoming.close()
            os.close(self._news)
            self._messages.clear()

    __del__ = leave
