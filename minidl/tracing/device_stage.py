"""The device stage as events: `TracedStream` stands in for the stream that a DeviceLoader's iteration copies on.

It passes everything on, emits what the host does at once, and places timed marks around what the device does, which
become events when the device has come to them (`device_clock`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minidl.nest import tensors_in
from minidl.streams import Device, Mark, Stream
from minidl.tracing import events as ev
from minidl.tracing.device_clock import DeviceClock
from minidl.tracing.events import Outcome
from minidl.tracing.spans import CONSUMER, batch_in_use

if TYPE_CHECKING:
    from minidl.tracing.instrument import TracedPorts


@dataclass(frozen=True, slots=True)
class _Tagged:
    """What the stream returned, whose batch it is, and its turn."""

    copied: Any
    task: int
    turn: int


_turns = itertools.count()
"""Numbers of all enqueueings of this process: tasks' numbers begin again with each epoch."""


class TracedStream:
    """A side stream, watched. A batch has its task's number, or where the loader is not minidl's, a running one."""

    def __init__(self, ports: TracedPorts, inner: Stream, device: Device, prefetch: int, clock: DeviceClock) -> None:
        self.number = inner.number
        self._ports, self._inner, self._device, self._clock = ports, inner, device, clock
        self._simulated = int(device.simulated)
        self._side = clock.track(id(device), "copies")
        self._consumer = clock.track(CONSUMER, CONSUMER)
        self._count = itertools.count()
        self._depth = 0  # enqueued and not handed out
        self._handed_out = 0
        self._emit(ev.DEVICE_START, -1, prefetch, self.number, self._simulated)

    def _emit(self, code: int, task: int = -1, x: int = 0, y: int = 0, z: int = 0) -> None:
        self._ports.emit(code, task, -1, x, y, z)

    def _task(self) -> int:
        """The task that the loader has yielded last."""
        decisions, sampling = self._ports.decisions, self._ports.sampling
        if decisions is not None and decisions.delivered is not None:
            return decisions.delivered.idx
        return sampling.task - 1 if self._ports.alone and sampling is not None else next(self._count)

    def copy(self, batch: Any) -> _Tagged:
        task, turn, (pinned, pageable, tensors) = self._task(), next(_turns), self._sizes(batch)
        size = pinned + pageable
        self._clock.keep_time()
        self._emit(ev.H2D[0], task, pinned, pageable, tensors)
        self._depth += 1
        try:
            with self._on_side(ev.COPY, task, (size, self.number, self._simulated), (size, turn, self._simulated)):
                return _Tagged(self._or_left(task, lambda: self._inner.copy(batch)), task, turn)
        finally:
            self._emit(ev.H2D[1], task, self._depth, turn, self._simulated)

    def _sizes(self, batch: Any) -> tuple[int, int, int]:
        """Bytes in pinned and in pageable memory that have to be copied, and in how many tensors."""
        sizes = [0, 0]
        tensors = [t for t in tensors_in(batch) if self._device.simulated or t.device != self._device.device]
        for tensor in tensors:
            sizes[not tensor.is_pinned()] += tensor.nbytes
        return sizes[0], sizes[1], len(tensors)

    @contextlib.contextmanager
    def _on_side(
        self, span: tuple[int, int], task: int, begin: tuple[int, ...], end: tuple[int, ...]
    ) -> Iterator[None]:
        self._side.note(self._inner.mark(True), span[0], self._ports.loader, task, -1, *begin)
        try:
            yield
        finally:
            self._side.note(self._inner.mark(True), span[1], self._ports.loader, task, -1, *end)

    def _or_left(self, task: int, enqueue: Callable[[], Any]) -> Any:
        try:
            return enqueue()
        except Exception:
            self._left(task, Outcome.ERROR)
            raise

    def _left(self, task: int, outcome: Outcome) -> None:
        """The batch, or its error, has left the stage."""
        self._depth -= 1
        self._handed_out += 1
        self._emit(ev.HAND_OVER, task, outcome, self._depth, self._simulated)

    def transform(self, function: Callable[[Any], Any], tagged: _Tagged) -> _Tagged:
        task, turn = tagged.task, tagged.turn
        with self._on_side(ev.TRANSFORM, task, (turn, self._simulated), (turn, self._simulated)):
            run = self._or_left(task, lambda: self._inner.transform(function, tagged.copied))
            return _Tagged(run, task, turn)

    def mark(self, timed: bool = False) -> Mark:
        return self._inner.mark(timed)

    def hand_over(self, tagged: _Tagged, ready: Any) -> Any:
        about = self._ports.loader, tagged.task, -1, tagged.turn, self._simulated
        outcome = None  # and stays so where an interrupt leaves the batch in its place
        self._consumer.note(self._device.mark(True), ev.DEVICE_WAIT[0], *about)
        try:
            batch = self._inner.hand_over(tagged.copied, ready)
            outcome = Outcome.DATA
        except Exception:
            outcome = Outcome.ERROR
            raise
        finally:
            self._consumer.note(self._device.mark(True), ev.DEVICE_WAIT[1], *about)
            if outcome is not None:
                self._left(tagged.task, outcome)
            self._clock.poll()
        batch_in_use.set(self._ports.loader, tagged.task)
        return batch

    def wait(self, mark: Mark) -> None:
        if mark.done():
            return
        self._emit(ev.HOST_WAIT[0], -1, self._simulated)
        try:
            self._inner.wait(mark)
        finally:
            self._emit(ev.HOST_WAIT[1], -1, self._simulated)

    def close(self) -> None:
        self._inner.close()
        self._clock.poll()
        self._emit(ev.DEVICE_END, -1, self._handed_out, self._depth, self._simulated)
