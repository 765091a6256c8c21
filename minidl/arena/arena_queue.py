"""The result queue of the transport "arena": one socket for all workers, and slabs for what their batches hold.

The worker's main thread pickles a batch and writes one packet; there is no feeder thread. The packet holds what is
small, and names the slabs with the rest (`arena`). A slab's descriptor goes along with its first packet, so a batch
outlives the worker. If too many are on their way, the loader opens the worker's own (`Arena.lend`). The kernel takes a
packet in one step (`packets`): workers need no lock, and one that is killed leaves no part of a message.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import queue
import select
import socket
import struct
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch._utils

from minidl.arena.arena import (
    ALONE,
    BUDGET_VARIABLE,
    FETCHED,
    SLABS,
    Arena,
    Host,
    Mappings,
    PageLocks,
    Slab,
    budget,
    reading,
)
from minidl.arena.packets import LATER, Readable, let_children_leave, socket_pair
from minidl.arena.pickling import SlabPickler, filling, packed, unpacked
from minidl.data import collate
from minidl.guides import more
from minidl.live_repr import LiveRepr, counted
from minidl.wire.atomic import Step, at_once
from minidl.wire.errors import ExceptionWrapper
from minidl.wire.message import Envelope
from minidl.wire.messages import RebuildFailure, Result

_HEAD = struct.Struct("!HHhQI")
"""The worker; slabs; the slab with the pickle, or -1; its offset; bytes of small storages."""

_SLAB = struct.Struct("!HQii")
"""A slab: number; size, 0 if the worker has dropped it; and, unless it is mapped, the process that has its descriptor
(0: it comes along), and the descriptor there (-1: it is mapped)."""

_LENGTH = struct.Struct("!Q")  # of the pickle in a slab

_LARGE = 1 << 14
"""Bytes from which a pickle lies in a slab: a socket holds little, and the loader may be busy."""

_PACKET = 1 << 16
"""More bytes than a packet has: a pickle, small storages (`arena.SMALL`), and names of slabs."""

_DESCRIPTORS = 253
"""At most so many go with one packet, by the kernel's rules."""

_CONTROL = socket.CMSG_SPACE(4 * _DESCRIPTORS)
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC

_STEP = 0.1
"""Seconds after which a worker whose socket is full looks whether the loader wants no more."""


class ArenaWriter(LiveRepr):
    """A worker's end. Pickled, and inherited, with the worker's other arguments.

    locked: whether the loader page-locks the worker's slabs.
    """

    def __init__(
        self,
        worker_id: int,
        sender: socket.socket,
        board: torch.Tensor,
        done_event: Any,
        budget: int,
        locked: bool,
    ) -> None:
        self.worker_id = worker_id
        self._budget, self._locked = budget, locked
        self._socket = sender
        self._board = board
        self._done_event = done_event
        self._arena: Arena | None = None
        self._descriptors: list[int] = []  # that go with the next packet

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_arena": None}

    def _phrases(self) -> Iterator[str]:
        yield f"of worker {self.worker_id}"

    def enter_worker(self, arena_of: Callable[[memoryview, int, bool], Arena] = Arena) -> None:
        """This process is the worker: collate makes its large tensors in slabs from here."""
        self._arena = arena = arena_of(_row(self._board, self.worker_id), self._budget, self._locked)

        def _new_shared(cls: type, size: int, *, device: Any = "cpu") -> torch.UntypedStorage:
            made = arena.allocate(size) if torch.device(device).type == "cpu" else None
            return make(size, device=device) if made is None else made

        collate.shared_from = arena.inline + 1
        make: Callable[..., Any] = torch.UntypedStorage._new_shared
        torch.UntypedStorage._new_shared = classmethod(_new_shared)  # type: ignore[assignment]

    def put(self, message: Any) -> None:
        """Pickle and write a message. It waits while the socket is full, and drops it once the loader wants no more."""
        arena = self._arena
        assert arena is not None, "enter_worker() comes first"
        place, offset = -1, 0
        try:
            if isinstance(message, Envelope):
                message.pickler = SlabPickler
            with filling(arena):
                data = packed(message, SlabPickler)
            if len(data) >= _LARGE:
                place, offset = arena.place(data)
                data = _LENGTH.pack(len(data)) + _without_data(message)
        except Exception as error:
            self._on_queue_feeder_error(error, message)
            return
        slabs, small = arena.seal()
        if slabs:
            self._put_slabs(arena, slabs, (place, offset, len(small)), small + data)
        else:
            self._send_bytes(_HEAD.pack(self.worker_id, 0, -1, 0, len(small)) + small + data)

    def _put_slabs(self, arena: Arena, slabs: list[Slab], about: tuple[int, int, int], data: bytes | bytearray) -> None:
        """Send the descriptors of new slabs along; or their numbers, if too many are on their way.

        The kernel counts those of all sockets of a user, and lets them be as many as one process may have open. The
        loader, or another program, may read nothing until this message has come, so the worker can't wait for room.
        """
        new = [slab for slab in slabs if not slab.announced]
        dropped, arena.dropped = arena.dropped, set()  # no message in them is unread

        def packet(holder: int) -> bytes:
            named = [_SLAB.pack(slab.number, slab.size, holder, -1 if slab.announced else slab.fd) for slab in slabs]
            named += [_SLAB.pack(number, 0, 0, -1) for number in dropped]
            return b"".join((_HEAD.pack(self.worker_id, len(named), *about), *named, data))

        self._descriptors = [slab.fd for slab in new]
        try:
            self._send_bytes(packet(0))
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            self._descriptors = []
            self._send_bytes(packet(os.getpid()))
            arena.lend(new)
        else:
            for slab in new:
                slab.announced = True
                slab.close()

    def _on_queue_feeder_error(self, error: Exception, message: Any) -> None:
        """Send the error in place of a batch that can't be pickled, or whose pickle fits no slab.

        Raises it if that is an error already, or another message. (multiprocessing's name.)
        """
        content = getattr(message, "message", message)  # of an Envelope, or of what observes torch's loader
        if isinstance(content, Result) and not isinstance(content.data, ExceptionWrapper):
            content.data = message.instead_of(content.data, error)
        elif isinstance(content, tuple) and not isinstance(content[1], torch._utils.ExceptionWrapper):  # torch's loader
            where = f"while worker {self.worker_id} pickled a batch"
            message = content[0], torch._utils.ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]
        else:
            raise error
        self.put(message)

    def _send_bytes(self, data: bytes) -> None:
        while True:
            try:
                self._send(data)
            except (BrokenPipeError, ConnectionResetError):  # the loader has closed its end
                return
            except OSError as error:
                if error.errno not in LATER:
                    raise
                if self._done_event.is_set():
                    return
                self._wait(error)
            else:
                return

    def _send(self, data: bytes) -> None:
        if self._descriptors:
            control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", self._descriptors))]
            self._socket.sendmsg([data], control, socket.MSG_DONTWAIT)
            self._descriptors = []
        else:
            self._socket.send(data, socket.MSG_DONTWAIT)

    def _wait(self, error: OSError) -> None:
        out = select.poll()
        if isinstance(error, BlockingIOError):
            out.register(self._socket, select.POLLOUT)
        out.poll(_STEP * 1e3)

    def cancel_join_thread(self) -> None:
        """There is no feeder thread."""

    def close(self) -> None:
        """Close the worker's end."""
        self._socket.close()


def _without_data(message: Any) -> bytes:
    """A result without its data, for a reader that can't map the slab with its pickle; b"" for another message."""
    content = getattr(message, "message", message)  # of an Envelope, or of what observes torch's loader
    if isinstance(content, Result):
        return packed(Result(content.idx, content.worker_id, None))
    return packed((content[0], None)) if isinstance(content, tuple) else b""


def _failed(error: OSError, result: memoryview) -> Any:
    """The result, with the error in place of its data. Raises the error if there is no result."""
    if not result:
        raise error
    message = unpacked(result)
    if isinstance(message, Result):
        message.data = RebuildFailure(error)
        return message
    where = "in the loader while it rebuilt a batch"
    return message[0], torch._utils.ExceptionWrapper((type(error), error, None), where)  # type: ignore[no-untyped-call]


def _root(mappings: Mappings, number: int, size: int, descriptor: Callable[[], int] | None) -> Any:
    """A root for the batch in a slab, which is mapped by a descriptor if it is new; or why there is none."""
    if descriptor is not None:
        try:
            mappings.map(number, size, descriptor())
        except OSError as error:
            return error
        except RuntimeError as error:
            return OSError(errno.ENOMEM, f"the batch's memory can't be mapped: {error}")
    try:
        return mappings.root(number)
    except KeyError:
        return OSError(
            errno.EBADF, f"the batch's memory, slab {number}, is not mapped: the packet that brings it is lost"
        )


def _next(descriptors: Iterator[int]) -> int:
    fd = next(descriptors, -1)
    if fd < 0:  # this process had no room for all of them
        raise OSError(errno.EMFILE, "the descriptor of the batch's memory did not arrive: too many open files")
    return fd


def _row(board: torch.Tensor, worker_id: int) -> memoryview:
    return memoryview(board[worker_id].numpy())  # type: ignore[arg-type]


def _in_units(number: int) -> str:
    """A number of bytes as MINIDL_ARENA_BYTES takes it: "2G", "75.5M"."""
    power = min(4, max(0, (number.bit_length() - 1) // 10))
    return f"{number / 1024**power:.4g}{['', 'K', 'M', 'G', 'T'][power]}"


class ArenaQueue(LiveRepr):
    """The reader's end, in the loader's process: `get` takes the next message of any worker.

    `put` is for the loader's own sentinel, which wakes the pin thread. host: page-locks the slabs for a device.
    """

    _closed = True  # as long as it is not made

    def __init__(
        self,
        num_workers: int,
        done_event: Any = None,
        mappings: Callable[[memoryview, int, PageLocks | None], Mappings] = Mappings,
        host: Host | None = None,
    ) -> None:
        self._budget = budget()
        self._board = torch.zeros((num_workers, SLABS), dtype=torch.uint8)
        self._board.share_memory_()  # type: ignore[no-untyped-call]
        self._receiver, self._sender = socket_pair()
        self._writers = [
            ArenaWriter(worker_id, self._sender, self._board, done_event, self._budget, host is not None)
            for worker_id in range(num_workers)
        ]
        self._untold: list[str] = []  # warnings
        locks = None if host is None else PageLocks(host, self._untold.append)
        self._mappings = [mappings(_row(self._board, worker_id), worker_id, locks) for worker_id in range(num_workers)]
        self._readable = Readable(self._receiver)
        self._buffer = bytearray(_PACKET)
        self._packet = memoryview(self._buffer)
        self._arrived: list[Any] = []  # what recvmsg_into has returned for the packet in the buffer, until it is ended
        self._fetched: dict[int, int] = {}  # for this packet, from a worker: its descriptors -> those of this process
        self._closed = self._told = False
        let_children_leave(self)  # none of them is the reader

    def _phrases(self) -> Iterator[str]:
        yield "closed" if self._closed else "open"
        for worker_id, mappings in enumerate(self._mappings):
            yield f"worker {worker_id}: {counted(mappings.visible, 'slab')} in use"

    def watch(self, done_event: Any) -> None:
        """Let the workers look at this done event, which torch's loader makes after its queue."""
        for writer in self._writers:
            writer._done_event = done_event

    def writer(self, worker_id: int) -> ArenaWriter:
        """The end that a worker gets."""
        return self._writers[worker_id]

    def put(self, message: Any) -> None:
        """Let the reader get this message of the loader itself. If the socket is full, other messages wake it."""
        data = _HEAD.pack(0, 0, -1, 0, 0) + packed(message)
        with contextlib.suppress(BlockingIOError):
            self._sender.send(data, socket.MSG_DONTWAIT)

    def get(self, block: bool = True, timeout: float | None = None, inbox: list[Any] | None = None) -> Any:
        """The next message. Raises queue.Empty if none has come within `timeout` seconds.

        inbox: the message is put there in the step that takes it from the queue.
        What earlier batches have met is said first: a program may turn warnings into errors, and loses no message.
        """
        if self._closed:
            raise ValueError(f"Queue {self!r} is closed")
        if self._untold:
            warnings.warn(self._untold.pop(0), RuntimeWarning, stacklevel=2)
        if not self._arrived:
            if not self._readable.wait(timeout if block else 0.0):
                raise queue.Empty
            return self._rebuilt(self._recv_bytes(), [] if inbox is None else inbox)
        return self._rebuilt(self._whole(), [] if inbox is None else inbox)  # an exception has ended an earlier get

    def _recv_bytes(self) -> memoryview:
        """Receive a packet. It stays the present one until its message is delivered."""
        self._arrived.extend(map(self._receiver.recvmsg_into, [[self._packet]], [_CONTROL], [_FLAGS]))  # at once
        return self._whole()

    def _whole(self) -> memoryview:
        return self._packet[: self._arrived[0][0]]

    def _descriptors(self) -> list[int]:
        """Those that came with the present packet."""
        return [fd for arrived in self._arrived for *_, fds in arrived[1] for fd in array.array("i", fds)]

    def _rebuilt(self, packet: memoryview, inbox: list[Any]) -> Any:
        """The message of the present packet, which ends here. An exception before leaves it as it was."""
        worker_id, count, place, offset, small = _HEAD.unpack_from(packet)
        begin = _HEAD.size + count * _SLAB.size
        data = packet[begin + small :]
        if not count:
            with reading([bytearray(packet[begin : begin + small])]):
                message = unpacked(data)
            at_once(self._arrived.clear, partial(inbox.append, message))
            return message
        mappings, descriptors = self._mappings[worker_id], self._descriptors()
        forks, slabs = mappings.forks, self._slabs(packet, worker_id, count, iter(descriptors))
        roots = [*(root for _, root in slabs), bytearray(packet[begin : begin + small])]
        if place >= 0 and isinstance(roots[place], OSError):
            message = _failed(roots[place], data[_LENGTH.size :])
        else:
            if place >= 0:
                data = memoryview(roots[place]).cast("B")[offset : offset + _LENGTH.unpack_from(data)[0]]
            with reading(roots):
                message = unpacked(data)
        steps = self._end_packet(descriptors)
        mappings.deliver(slabs, forks, partial(inbox.append, message), roots.clear, *steps)
        return message

    def _slabs(
        self, packet: memoryview, worker_id: int, count: int, descriptors: Iterator[int]
    ) -> list[tuple[int, Any]]:
        """The numbers of a packet's slabs, with a root for each, or the error for which there is none; maps the new."""
        slabs: list[tuple[int, Any]] = []
        mappings = self._mappings[worker_id]
        for number, size, holder, fd in _SLAB.iter_unpack(packet[_HEAD.size : _HEAD.size + _SLAB.size * count]):
            if size == 0:  # these come last
                mappings.forget(number)
                continue
            if number in ALONE:
                self._tell(worker_id, size)
            own = None if fd < 0 else partial(self._fetch, holder, fd) if holder else partial(_next, descriptors)
            slabs.append((number, _root(mappings, number, size, own)))
        return slabs

    def _fetch(self, holder: int, fd: int) -> int:
        """A descriptor of this process for a slab that a worker has lent (`Arena.lend`). Raises OSError."""
        try:
            if fd not in self._fetched:
                opening = map(os.open, [f"/proc/{holder}/fd/{fd}"], [os.O_RDWR | os.O_CLOEXEC])
                self._fetched.update(zip([fd], opening, strict=False))  # at once
            with contextlib.suppress(PermissionError):  # sealed by a get that an exception has ended
                fcntl.fcntl(self._fetched[fd], fcntl.F_ADD_SEALS, FETCHED)
        except OSError as error:
            raise OSError(
                error.errno,
                f"the batch's memory can't be opened in its worker, process {holder}: {error.strerror}. Its descriptor "
                "could not be sent, since too many of this user's are on their way in sockets: increase `ulimit -n`",
            ) from None
        return self._fetched[fd]

    def _end_packet(self, descriptors: list[int]) -> Iterator[Step]:
        """What ends the present packet, with which these descriptors came: steps."""
        yield self._arrived.clear
        for fd in (*descriptors, *self._fetched.values()):
            yield partial(os.close, fd)
        yield self._fetched.clear

    def _tell(self, worker_id: int, needed: int) -> None:
        """Note once, for the next `get`, that a batch has a slab for itself, and what to do about it."""
        if self._told:
            return
        slabs, in_use = self._mappings[worker_id].in_use()
        if slabs < SLABS:
            limit = f"slabs of {_in_units(self._budget)} in all"
            larger = _in_units(1 << (in_use + 8 * needed - 1).bit_length())
            remedy = f"Let {BUDGET_VARIABLE}={larger} be in the environment, or let the program hold fewer batches."
        else:
            limit, remedy = counted(SLABS, "slab"), "Let the program hold fewer batches."
        self._untold.append(
            f"A batch needs {_in_units(needed)}. Worker {worker_id} keeps at most {limit} for use again, and "
            f"{_in_units(in_use)} in {counted(slabs, 'slab')} are in use. This batch, and each further one that does "
            f"not fit, gets memory of its own, which is as slow as the other transport. {remedy} ({more('slabs')})"
        )
        self._told = True

    def forget_names(self) -> None:
        """It has no semaphores."""

    def jammed(self) -> bool:
        """No worker holds a lock that another one needs."""
        return False

    def cancel_join_thread(self) -> None:
        """There is no feeder thread."""

    def close(self) -> None:
        """Close this process's ends. Batches that it has got keep their memory.

        What the last batch has met is said here, but never raised: the shutdown goes on.
        """
        if not self._closed:
            self._sender.close()
            self.leave()
            for text in self._untold:
                with contextlib.suppress(RuntimeWarning):
                    warnings.warn(text, RuntimeWarning, stacklevel=2)

    def let_go(self) -> None:
        """All workers have ended: close it, though the program may keep the iterator, which would keep the slabs."""
        self.close()

    def leave(self) -> None:
        """Close the reading end, and let go of the slabs."""
        if not self._closed:
            self._receiver.close()
            if self._arrived:
                at_once(*self._end_packet(self._descriptors()))
            for mappings in self._mappings:  # the program may keep the iterator
                mappings.close()
            self._closed = True  # last: after an exception, the next call goes on

    __del__ = close
