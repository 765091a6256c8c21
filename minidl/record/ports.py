"""Ports that record: what `minidl.loader.ports.Ports` hands out, wrapped.

The pure classes come as subclasses that emit what they decided (`decisions`); queues, events, processes and threads as
proxies that emit and pass on (`channels`); samples and collation are followed by a progress (`fetching`). Nothing here
changes what the loader does, and an emit never raises. The loader holds no line that exists only for tracing.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from minidl.arena.arena import budget
from minidl.data.fetch import Progress
from minidl.device import sim
from minidl.device.nest import tensors_in
from minidl.device.streams import AcceleratorDevice, AcceleratorStream
from minidl.loader import ports
from minidl.loader.progress import ProgressBoard, WorkerProgress
from minidl.record import device_clock, functions, recorder, watchdog
from minidl.record.channels import (
    TRACED_QUEUES,
    Proxy,
    TracedDoneEvent,
    TracedEnvelope,
    TracedProcess,
    TracedThread,
    emit_failed,
)
from minidl.record.cpu_time import spent
from minidl.record.datasets import fingerprint
from minidl.record.decisions import TRACED, TracedEpochPosition
from minidl.record.device_stream import TracedStream
from minidl.record.fetching import TracedWorkerProgress
from minidl.record.group import place_in_group
from minidl.record.harmless import harmless
from minidl.record.recorder import spanned
from minidl.record.sampling import TracedSampler, dealt_by, nested_samplers
from minidl.record.shared import Shared
from minidl.tracefile import events as ev
from minidl.wire.errors import ExceptionWrapper
from minidl.wire.messages import Result, Task


@harmless(0)
def nbytes(data: Any) -> int:
    """Bytes of a batch's tensors."""
    return sum(tensor.nbytes for tensor in tensors_in(data))


class TracedPorts(Shared, ports.Ports):
    """Ports of one iterator, which has the number `loader` in the trace."""

    def note(self, note: ports.Note) -> None:
        if isinstance(note, ports.Opened):
            self.describe(**facts(note.iterator, note.loader, note.loader.transport))
        elif isinstance(note, ports.WorkerEntered):
            self.seed = note.seed
            if self.own is not None:
                self.own.role("worker", worker=note.worker_id, loader=self.loader)
            else:
                enter_worker(self, note.worker_id)
        elif isinstance(note, ports.FoundAlive):
            self.emit(ev.LIVENESS_CHECK, x=note.workers)
        elif isinstance(note, ports.FoundDead):
            actor = ev.Actor[note.what.upper().replace(" ", "_")]
            self.emit(ev.FOUND_DEAD, -1, note.worker_id, actor, note.pid, note.exit_code or 0)
        elif isinstance(note, ports.Chosen):
            text = recorder.start(self.config).string(note.reason[:1000])
            self.emit(ev.WORKERS_CHOSEN, -1, -1, note.workers, note.before, text)
        else:
            self.emit(ev.TIMED_OUT, note.idx, note.worker_id, int(note.seconds * 1e9))

    def decider(self, kind: Callable[..., ports.D], *args: Any) -> ports.D:
        traced: ports.D = TRACED[kind](self, *args)
        return traced

    # --- in the loader's process
    def follow_epoch(self, position: TracedEpochPosition) -> None:
        position.emit, position.shared, self.position = self.emit, self, position

    def sampler_iter(self, sampler: Iterable[Any], draws: Callable[[Any], Iterator[Any]] = iter) -> Iterator[Any]:
        if (dealt := dealt_by(sampler)) is not None:
            self.emit(ev.SHARE, -1, -1, *dealt[1])
        return TracedSampler(self, draws(sampler))

    def progress(self) -> Progress:
        self.single_process = True
        return self.follow(-1)

    def queue(self, which: ports.WhichQueue, queue: Any, worker_id: int = -1) -> Any:
        self.pinned |= which == "ready"
        return TRACED_QUEUES[which](self, queue, worker_id)

    def done_event(self, which: ports.WhichDoneEvent, event: Any) -> Any:
        numbers = {"workers": ev.DoneEvent.WORKERS, "pin thread": ev.DoneEvent.PIN_THREAD}
        return TracedDoneEvent(self, super().done_event(which, event), numbers[which])

    def worker(self, context: Any, worker_id: int, target: Callable[..., None], args: tuple[Any, ...]) -> Any:
        process = TracedProcess(self, super().worker(context, worker_id, target, args), worker_id)
        self.workers.append(process)
        return process

    def pin_memory_thread(self, thread: threading.Thread) -> Any:
        return TracedThread(self, thread)

    # --- messages
    def envelope(self, message: Task | Result) -> Any:
        if isinstance(message, Result) and isinstance(message.data, ExceptionWrapper):
            text = self.recording.string(message.data.last_line[:1000])
            position, index = self.fetching.at if self.fetching is not None else (-1, -1)
            self.emit(ev.TASK_ERROR, message.idx, message.worker_id, position, index, text)
        return TracedEnvelope(message, self.loader, self.cpu)

    # --- in a worker
    def in_thread(self, *things: Any) -> tuple[Any, ...]:
        own = recorder.Recorder(self.config, threading.get_native_id())
        ports = type(self)(self.config, self.loader, own)
        return ports, *(thing.seen_by(ports) if isinstance(thing, Proxy) else thing for thing in things)

    def worker_progress(self, board: ProgressBoard, worker_id: int) -> WorkerProgress:
        progress = TracedWorkerProgress(worker_id, board.row(worker_id))
        progress.watch = self.follow(worker_id)
        if self.own is None:  # torch's global generator is no thread's own
            progress.initialised = functools.partial(self.describe_seed, worker_id)
        return progress

    # --- in the pin thread
    def pinning(self, pin_memory: Callable[[Any], Any], device: str) -> Callable[[Result], Any]:
        self.simulated = simulated = device == sim.NAME

        def pin(result: Result) -> Any:
            about = result.idx, result.worker_id
            with spanned(self.emit, ev.PIN, *about, nbytes(result.data), int(simulated)) as end:
                end += 0, int(simulated), 0
                began = self.cpu()
                try:
                    pinned = pin_memory(result.data)
                except Exception as error:
                    emit_failed(error, self.loader, *about)
                    raise
                end[2] = spent(began, self.cpu())
                end[0] = nbytes(pinned)
            return pinned

        return pin

    # --- in the device stage
    def device_stream(self, device: AcceleratorDevice, prefetch: int, loader: Any) -> AcceleratorStream | TracedStream:
        clock = device_clock.clock_of(device, self.loader)
        stream: AcceleratorStream = super().device_stream(device, prefetch, loader)
        if clock is None:
            return stream
        if self.next_task < 0:  # not minidl's loader: it is not described yet
            self.describe(dataset=type(loader).__qualname__)
        about = {"device": device.name, "prefetch": prefetch, "simulated": device.simulated}
        recorder.start(self.config).describe("device", loader=self.loader, **about)
        return TracedStream(self, stream, device, prefetch, clock)


def enter_worker(shared: Shared, worker_id: int) -> None:
    """Begin to record in a worker: its role, the memory that it shares and, if that is asked for, its functions."""
    config, loader = shared.config, shared.loader
    recording = recorder.start(config)
    recording.role("worker", worker=worker_id, loader=loader)
    watchdog.answer(recording)
    watch_new_shared(shared, worker_id)
    if config.functions_min_us is not None:
        functions.start(config.directory, config.functions_min_us, worker_id, loader)


def watch_new_shared(shared: Shared, worker_id: int) -> None:
    """In a worker, emit each shared-memory segment that collate makes.

    Our collate and torch's both get it from UntypedStorage. A storage in a slab is not shared by torch's means.
    """
    make: Callable[..., Any] = torch.UntypedStorage._new_shared

    def _new_shared(cls: type, size: int, *args: Any, **kwargs: Any) -> Any:
        storage = make(size, *args, **kwargs)
        if storage.is_shared():
            task = shared.fetching.task if shared.fetching is not None else -1
            place, reason = ev.Place.COLLATE, ev.Reason.COLLATE_SHORTCUT
            shared.emit(ev.SHM_ALLOC, task, worker_id, storage.nbytes(), place, reason)
        return storage

    torch.UntypedStorage._new_shared = classmethod(_new_shared)  # type: ignore[assignment]


def facts(iterator: Any, loader: Any, transport: str = "upstream") -> dict[str, Any]:
    """Return the parameters of an iterator of `loader`, for the side file; fewer if the program's objects raise."""
    least = {"dataset_kind": "iterable" if iterator._dataset_kind else "map", "num_workers": iterator._num_workers}
    return _facts(iterator, loader, transport) or least


@harmless(None)
def _facts(iterator: Any, loader: Any, transport: str) -> dict[str, Any]:
    outer, group = iterator._index_sampler, place_in_group()
    return {
        "dataloader": _dataloader(outer),
        "made_at": _short(getattr(loader, "_made_at", "")),
        "dataset_length": None if iterator._dataset_kind else _length(iterator._dataset),
        "dataset": type(iterator._dataset).__qualname__,
        "dataset_kind": "iterable" if iterator._dataset_kind else "map",
        "dataset_fingerprint": fingerprint(iterator._dataset) if group else "",  # which only several ranks compare
        "num_workers": iterator._num_workers,
        "prefetch_factor": getattr(iterator, "_prefetch_factor", None),  # torch's iterator without workers has neither
        "in_order": getattr(iterator, "_in_order", True),
        "persistent_workers": iterator._persistent_workers,
        "pin_memory": iterator._pin_memory,
        "pin_memory_device": iterator._pin_memory_device,
        "slabs_locked": getattr(getattr(iterator, "_transport", None), "page_locked", False),
        "timeout_s": iterator._timeout,
        "transport": transport if iterator._num_workers else None,
        **({"arena_bytes": budget()} if transport == "arena" and iterator._num_workers else {}),
        "batch_size": getattr(outer, "batch_size", None),
        "drop_last": iterator._drop_last or getattr(outer, "drop_last", False) is True,
        "collate_fn": getattr(iterator._collate_fn, "__qualname__", repr(iterator._collate_fn)),
        **_of_samplers(outer),
        **group,
    }


def _of_samplers(outer: Any) -> dict[str, Any]:
    """The settings of a loader's sampler and of those in it."""
    nest, dealing = list(nested_samplers(outer)), dealt_by(outer)
    settings = {name: _of_nest(nest, name) for name in ("shuffle", "seed", "drop_last", "replacement", "even_batches")}
    return {
        "dealt_in": None if dealing is None else "batches" if dealing[0] is outer else "samples",
        "sampler": type(nest[-1]).__qualname__,
        "sampler_repeats": next((n for name in _REPEATS if type(n := getattr(nest[-1], name, None)) is int), 1),
        **{f"sampler_{name}": value for name, value in settings.items() if isinstance(value, int)},
    }


def _of_nest(nest: list[Any], name: str) -> Any:
    """A setting of the innermost sampler; whether batches are even is one of the outer's that deals them out."""
    asked = nest if name == "even_batches" else nest[-1:]
    return next((getattr(one, name) for one in asked if hasattr(one, name)), None)


_REPEATS = ("num_repeats", "repetitions")
"""What samplers call the number of times that they give each sample: timm's, torchvision's."""

_dataloaders: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_numbers = itertools.count(1)  # a number is not given again: a loader that is gone was another one


def _dataloader(index_sampler: Any) -> int:
    """Return a number that the iterators of one DataLoader share; 0 = unknown."""
    try:
        if index_sampler not in _dataloaders:
            _dataloaders[index_sampler] = next(_numbers)
        return _dataloaders[index_sampler]
    except TypeError:
        return 0


def _short(place: str) -> str:
    """Return "/folder/train.py:12" as "train.py:12": without the folder that Python found the program in."""
    folders = [os.path.join(os.path.abspath(folder), "") for folder in sys.path]
    return place.removeprefix(max((f for f in folders if place.startswith(f)), key=len, default=""))


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:  # the user did not ask for a length, so no error of __len__ is shown
        return None
