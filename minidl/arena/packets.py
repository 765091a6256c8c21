"""Messages over a Unix socket that keeps their bounds: one is there as a whole or not at all, and needs no lock.

A pipe is a stream of bytes. A writer that is killed in the middle of a message leaves a part of it, and two writers
need a lock that a killed one never releases. A socket of the type SOCK_SEQPACKET takes a message in one step or refuses
it, so any number of processes may write to one.

`Readable` is how both ends wait. `TaskQueue` goes from the loader to one worker, without a feeder thread.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import operator
import os
import queue
import select
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

from minidl.arena.pickling import packed, unpacked
from minidl.live_repr import LiveRepr, counted
from minidl.wire import signal_handling
from minidl.wire.atomic import at_once, each_once
from minidl.wire.queues import NoThreadError

PACKET = 1 << 15
"""Bytes of a message's part that is sent at once; a socket holds 208 KiB by default."""

_WHOLE, _PART = b"\0", b"\1"
"""What a packet begins with: the last part of a message, or one before it."""

LATER = (errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM)
"""Errors of a packet that may be sent later: the socket is full, or the kernel has no memory for the packet now."""

_STEP = 0.1
"""Seconds after which a thread that waits for room looks whether the queue is closed."""

_SOON = 30e-6
"""Seconds for which a reader looks again and again before it sleeps: to be woken costs both sides as much."""

_FEWEST, _MOST = 1, 64
"""Waits in which a reader sleeps at once, after it has looked in vain."""


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """A receiving and a sending end."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Readable:
    """Waits until a socket has something to read.

    It looks for a short time before it sleeps. Where that is in vain, because messages take longer or other processes
    need the cores, it does so more and more rarely. Between two looks it yields its core. Two processes that wake each
    other tend to stay on one core, since only one of them can run at a time. A reader that looked all the time would
    keep the sender from it; while both can run, the kernel moves one of them to an idle core.
    """

    def __init__(self, receiver: socket.socket) -> None:
        self._poll = select.poll()
        self._poll.register(receiver, select.POLLIN)
        self._rests = 0  # waits that are left in which it sleeps at once
        self._rest = _FEWEST

    @signal_handling.wait
    def wait(self, seconds: float | None) -> bool:
        """Wait for at most `seconds`, None = without a bound; whether there is something to read, or the end."""
        signal_handling.raise_now()
        look = self._poll.poll
        if look(0):
            return True
        if self._rests:
            self._rests -= 1
        elif seconds != 0:
            end = time.perf_counter() + _SOON
            while time.perf_counter() < end:
                os.sched_yield()
                if look(0):
                    self._rest = max(_FEWEST, self._rest // 2)
                    return True
            self._rests = self._rest = min(_MOST, 4 * self._rest)
        return bool(look(None if seconds is None else seconds * 1e3))


_of_this_process: weakref.WeakSet[Any] = weakref.WeakSet()


def let_children_leave(queue: Any) -> None:
    """Let each forked child call `queue.leave()`: a worker must see that the loader is gone, though the child lives."""
    _of_this_process.add(queue)


def _after_fork_in_child() -> None:
    for each in tuple(_of_this_process):
        each.leave()


os.register_at_fork(after_in_child=_after_fork_in_child)


class TaskQueue(LiveRepr):
    """Messages from the loader to one worker, which the calling thread writes.

    Only if the socket is full, a thread writes the rest once there is room, so `put` never waits. Pickled, it is the
    worker's end.
    """

    def __init__(self) -> None:
        self._receiver, self._sender = socket_pair()
        self._unsent: collections.deque[bytes] = collections.deque()
        self._writing = threading.RLock()
        self._thread: threading.Thread | None = None
        self._open_for_reading()
        let_children_leave(self)  # none of them writes tasks

    def _open_for_reading(self) -> None:
        self._closed = False
        self._parts: list[bytes] = []
        self._readable = Readable(self._receiver)

    def __getstate__(self) -> dict[str, Any]:
        return {"_receiver": self._receiver}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._receiver = state["_receiver"]
        self._open_for_reading()

    def _phrases(self) -> Iterator[str]:
        yield "closed" if self._closed else "open"
        if unsent := len(getattr(self, "_unsent", ())):
            yield f"{counted(unsent, 'packet')} not written"

    # --- The loader's end
    def put(self, message: Any) -> None:
        """Pickle and write a message. Raises NoThreadError if it can't be written yet, and no thread can be started."""
        if self._closed:
            raise ValueError(f"Queue {self!r} is closed")
        self._send_bytes(packed(message))

    def _send_bytes(self, data: bytes) -> None:
        last = (len(data) - 1) // PACKET * PACKET
        parts = [_PART + data[begin : begin + PACKET] for begin in range(0, last, PACKET)]
        self._unsent.extend([*parts, _WHOLE + data[last:]])  # all of them, or none
        if not self._flush() and self._thread is None:
            with signal_handling.put_off_all():
                self._start_thread()

    def _start_thread(self) -> None:
        self._thread = threading.Thread(target=self._write_rest, name="task_queue", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # since Python 3.12, while the program exits
            self._thread = None
            raise NoThreadError(str(error)) from error

    def _flush(self) -> bool:
        """Write what there is room for; False: the socket is full.

        A thread may put while this runs; then the one that has begun writes it. So may a signal's handler, between two
        packets, which are sent and dropped in one step.
        """
        had = self._writing._is_owned()  # type: ignore[attr-defined]  # this is a signal's handler
        try:
            while self._unsent and (had or self._writing.acquire(blocking=False)):
                first = map(operator.itemgetter(0), (self._unsent,))
                sent = map(self._sender.send, first, (socket.MSG_DONTWAIT,))
                at_once(each_once(sent), self._unsent.popleft)
        except IndexError:  # a signal's handler has written the rest
            return True
        except (BrokenPipeError, ConnectionResetError):  # the worker is gone
            self._unsent.clear()
        except OSError as error:
            if error.errno not in LATER:
                raise
            return False
        finally:
            while not had and self._writing._is_owned():  # type: ignore[attr-defined]
                self._writing.release()
        return True

    def _write_rest(self) -> None:
        room = select.poll()
        with contextlib.suppress(OSError):  # the queue is closed
            room.register(self._sender, select.POLLOUT)
            while not self._closed:
                room.poll(_STEP * 1e3)
                if self._flush():
                    self._thread = None  # from here, a put that finds the socket full starts another thread
                    if self._flush():  # ... and this writes what was put before
                        return

    @property
    def failure(self) -> str:
        """Why a message was lost that this process has put; "" if none was."""
        ended = self._thread is not None and not self._thread.is_alive() and not self._closed
        return "the thread that writes it has ended" if ended else ""

    def cancel_join_thread(self) -> None:
        """No thread is joined."""

    def forget_names(self) -> None:
        """It has no semaphores."""

    def let_go(self) -> None:
        """The worker has ended: `close` has closed both ends, which ends the thread that writes the rest."""

    def close(self) -> None:
        """Close this process's ends; also those that an interrupted call has left open."""
        if hasattr(self, "_closed"):
            self._closed = True
            self._receiver.close()
            self.leave()

    def leave(self) -> None:
        """Close the writing end."""
        if hasattr(self, "_sender"):
            self._sender.close()

    __del__ = close

    # --- The worker's end
    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The next message. Raises queue.Empty if no whole one has come within `timeout` seconds."""
        seconds = timeout if block else 0.0
        deadline = None if seconds is None else time.monotonic() + seconds
        while self._readable.wait(seconds):
            packet = self._receiver.recv(PACKET + 1)
            if not packet:  # the loader is gone: the worker asks whether it lives, but not without a rest
                time.sleep(_STEP if seconds is None else min(seconds, _STEP))
                break
            self._parts.append(packet[1:])
            if packet[:1] == _WHOLE:
                data, self._parts = b"".join(self._parts), []
                return unpacked(memoryview(data))
            seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
        raise queue.Empty
