"""The device stage as events: `TracedStream` replaces a DeviceLoader's side stream.

It passes all calls on. It emits the host's work at once, and places timed marks around the device's work, which become
events when the device has reached them (`device_clock`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from minidl.device.nest import tensors_in
from minidl.device.streams import AcceleratorDevice, AcceleratorMark, AcceleratorStream
from minidl.record.device_clock import DeviceClock
from minidl.record.shared import Shared
from minidl.record.step_parts import batch_in_use, here
from minidl.tracefile import events as ev
from minidl.tracefile.events import Outcome


@dataclass(frozen=True, slots=True)
class _Tagged:
    """The stream's result, with its task and its turn."""

    copied: Any
    task: int
    turn: int


_turns = itertools.count()
"""Numbers of this process's copies: tasks' numbers begin again with each epoch."""


class TracedStream:
    """A traced side stream.

    A batch has its task's number, or a running number if the loader is not minidl's.
    """

    def __init__(
        self, shared: Shared, inner: AcceleratorStream, device: AcceleratorDevice, prefetch: int, clock: DeviceClock
    ) -> None:
        self.number = inner.number
        self._shared, self._inner, self._device, self._clock = shared, inner, device, clock
        self._simulated = int(device.simulated)
        self._side = clock.track(id(device), "copies")
        self._count = itertools.count()
        self._depth = 0  # enqueued and not handed out
        self._handed_out = 0
        self._emit(ev.DEVICE_START, -1, prefetch, self.number, self._simulated)

    def _emit(self, code: int, task: int = -1, x: int = 0, y: int = 0, z: int = 0) -> None:
        self._shared.emit(code, task, -1, x, y, z)

    def _task(self) -> int:
        """Return the task that the loader has yielded last."""
        shared = self._shared
        if shared.delivered is not None:
            return shared.delivered.idx
        return shared.next_task - 1 if shared.single_process and shared.next_task >= 0 else next(self._count)

    def copy(self, batch: Any) -> _Tagged:
        task, turn, (pinned, pageable, tensors) = self._task(), next(_turns), self._sizes(batch)
        size = pinned + pageable
        self._clock.keep_time()
        self._emit(ev.H2D[0], task, pinned, pageable, tensors)
        self._depth += 1
        try:
            with self._on_side(ev.COPY, task, (size, self.number, self._simulated), (size, turn, self._simulated)):
                return _Tagged(self._enqueued(task, lambda: self._inner.copy(batch)), task, turn)
        finally:
            self._emit(ev.H2D[1], task, self._depth, turn, self._simulated)

    def _sizes(self, batch: Any) -> tuple[int, int, int]:
        """Return the bytes to copy from pinned and from pageable memory, and the tensors."""
        sizes = [0, 0]
        tensors = [tensor for tensor in tensors_in(batch) if tensor.device != self._device.device]
        for tensor in tensors:
            sizes[not tensor.is_pinned()] += tensor.nbytes
        return sizes[0], sizes[1], len(tensors)

    @contextlib.contextmanager
    def _on_side(
        self, span: tuple[int, int], task: int, begin: tuple[int, ...], end: tuple[int, ...]
    ) -> Iterator[None]:
        self._side.note(self._inner.mark(True), span[0], self._shared.loader, task, -1, *begin)
        try:
            yield
        finally:
            self._side.note(self._inner.mark(True), span[1], self._shared.loader, task, -1, *end)

    def _enqueued(self, task: int, enqueue: Callable[[], Any]) -> Any:
        """Return `enqueue()`; if it raises, or Ctrl-C interrupts it, the batch leaves the stage."""
        here.thread.enter_next()  # the stage's own copies are no part of the consumer's step
        try:
            return enqueue()
        except BaseException:
            self._left(task, Outcome.ERROR)
            raise
        finally:
            here.thread.leave_next()

    def _left(self, task: int, outcome: Outcome) -> None:
        """Emit that the batch, or its error, has left the stage."""
        self._depth -= 1
        self._handed_out += 1
        self._emit(ev.HAND_OVER, task, outcome, self._depth, self._simulated)

    def transform(self, function: Callable[[Any], Any], tagged: _Tagged) -> _Tagged:
        task, turn = tagged.task, tagged.turn
        with self._on_side(ev.TRANSFORM, task, (turn, self._simulated), (turn, self._simulated)):
            run = self._enqueued(task, lambda: self._inner.transform(function, tagged.copied))
            return _Tagged(run, task, turn)

    def mark(self, timed: bool = False) -> AcceleratorMark:
        return self._inner.mark(timed)

    def hand_over(self, tagged: _Tagged, ready: Any) -> Any:
        about = self._shared.loader, tagged.task, -1, tagged.turn, self._simulated
        outcome = None  # remains None if an interrupt leaves the batch in the stage
        consumer = self._clock.consumer()
        consumer.note(self._device.mark(True), ev.DEVICE_WAIT[0], *about)
        try:
            batch = self._inner.hand_over(tagged.copied, ready)
            outcome = Outcome.DATA
        except Exception:
            outcome = Outcome.ERROR
            raise
        finally:
            consumer.note(self._device.mark(True), ev.DEVICE_WAIT[1], *about)
            if outcome is not None:
                self._left(tagged.task, outcome)
            self._clock.poll()
        batch_in_use.loader, batch_in_use.task = self._shared.loader, tagged.task
        return batch

    def wait(self, mark: AcceleratorMark, seconds: float) -> bool:
        if mark.done():
            return True
        self._emit(ev.HOST_WAIT[0], -1, self._simulated)
        try:
            return self._inner.wait(mark, seconds)
        finally:
            self._emit(ev.HOST_WAIT[1], -1, self._simulated)

    def close(self) -> None:
        self._inner.close()
        self._clock.poll()
        self._emit(ev.DEVICE_END, -1, self._handed_out, self._depth, self._simulated)
