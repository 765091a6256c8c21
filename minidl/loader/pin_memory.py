"""Page-locked memory, and the thread that copies batches into it on their way to the consumer.

The copy to a GPU is done by DMA, which needs memory that can't be paged out; from pageable memory CUDA would first copy
into a staging buffer of its own, synchronously. `_pin_memory_loop` stands between the workers' result queue and the
queue that the loader reads. Article 1 §2.4.6, article 4 §pin_memory; upstream: `torch.utils.data._utils.pin_memory`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.multiprocessing

from minidl.data.collate import mapping_like, sequence_like, tuple_like
from minidl.live_repr import LiveRepr
from minidl.loader.driver import MP_STATUS_CHECK_INTERVAL
from minidl.loader.ports import Ports
from minidl.loader.protocol import PinEvent, PinLifecycle
from minidl.wire.errors import ExceptionWrapper
from minidl.wire.messages import RebuildFailure, Result, Sentinel, WorkerExhausted


def accelerator_type() -> str | None:
    """Type of the accelerator that memory is pinned for ("cuda", ...), or None if there is none."""
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        return None if device is None else device.type
    return None


def pin_memory(data: Any, device: str | None = None) -> Any:
    """`data` with every tensor in it in page-locked memory; structures keep their types if these can be copied.

    An object with a `pin_memory` method is asked to do it itself. `device` is upstream's parameter, and without effect.
    """
    if hasattr(data, "pin_memory"):  # a tensor has it, too
        return data.pin_memory()
    if isinstance(data, (str, bytes)):
        return data
    if isinstance(data, Mapping):
        return mapping_like(data, {key: pin_memory(value) for key, value in data.items()})
    if isinstance(data, tuple):
        return tuple_like(data, (pin_memory(item) for item in data))
    if isinstance(data, Sequence):
        return sequence_like(data, [pin_memory(item) for item in data])
    return data


class PinMemoryThread(LiveRepr, threading.Thread):
    """The thread, which runs `target(*args, lifecycle)`. failure: the exception that ended it."""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...], lifecycle: PinLifecycle) -> None:
        super().__init__(name="pin_memory", target=target, args=(*args, lifecycle), daemon=True)
        self.failure: BaseException | None = None
        self.lifecycle = lifecycle

    def _phrases(self) -> Iterator[str]:
        yield "not started" if self.ident is None else self.lifecycle.state.name
        if self.native_id is not None:
            yield f"thread {self.native_id}"
        if self.failure is not None:
            yield f"ended by {type(self.failure).__name__}"

    def run(self) -> None:
        try:
            super().run()
        except BaseException as error:
            self.failure = error


def _pin_memory_loop(
    result_queue: Any,
    ready_queue: Any,
    device_id: int,
    done_event: Any,
    device: str,
    ports: Ports,
    lifecycle: PinLifecycle,
) -> None:
    """Pin results until `done_event` is set (upstream: `_pin_memory_loop`; article 1 §2.4.6; article 4 §shutdown).

    An error in pinning one batch becomes that task's result. Any other error ends the thread and is kept in its
    `failure`.
    """
    torch.set_num_threads(1)  # the copies must not take every core
    torch.multiprocessing._set_thread_name("pt_data_pin")
    torch.accelerator.set_device_index(device_id)
    pin = ports.pinning(pin_memory, device)
    lifecycle.handle(PinEvent.READY)

    def one_step() -> None:
        # A function of its own, so that no batch is held by a local variable while the next one is waited for.
        try:
            message = result_queue.get(timeout=MP_STATUS_CHECK_INTERVAL)
        except queue.Empty:
            return
        if isinstance(message, Sentinel):
            lifecycle.handle(PinEvent.WOKEN)
            return
        lifecycle.handle(PinEvent.RESULT)
        if isinstance(message, Result) and not done_event.is_set():
            message = _pinned(message, pin, f"in pin memory thread for device {device_id}")
        lifecycle.handle(PinEvent.PINNED)
        if not done_event.is_set():
            ready_queue.put(message)
            lifecycle.handle(PinEvent.PUT)

    try:
        while not done_event.is_set():
            one_step()
    except BaseException:
        lifecycle.handle(PinEvent.DIED)
        raise
    lifecycle.handle(PinEvent.DONE)


def _pinned(result: Result, pin: Callable[[Result], Any], where: str) -> Result:
    if isinstance(result.data, (ExceptionWrapper, RebuildFailure, WorkerExhausted)):
        return result
    try:
        return Result(result.idx, result.worker_id, pin(result), result.state)
    except Exception as error:
        wrapper = ExceptionWrapper(error, where, f"Task {result.idx}: pinning.")
        return Result(result.idx, result.worker_id, wrapper, result.state)
