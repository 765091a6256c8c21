"""State that the traced objects of one iterator share: its number, its `emit`."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any, Final, Protocol

import torch

from minidl.loader.dispatcher import Deliver, Dispatcher
from minidl.record import forks, recorder, stack_samples, watchdog
from minidl.record.cpu_time import cpu_clock, run_delay, shortest
from minidl.record.draws import Draws
from minidl.record.fetching import TracedProgress
from minidl.record.harmless import harmless
from minidl.record.recorder import TraceConfig
from minidl.resume.position import EpochPosition


class WorkerHandle(Protocol):
    """The handle of a worker's process."""

    gone: bool

    def emit_gone(self) -> bool:
        """Emit, once, how the process ended; return whether it still runs."""


class Shared:
    """One iterator as one process records it; picklable for the workers.

    loader: its number in the trace. cpu, delay: the calling thread's CPU clock and run delay.

    Attributes of the loader's process: `dispatcher`, None without workers; `delivered`, the dispatcher's last step
    that yields a batch; `position`, the present epoch's; `next_task`, which the sampler is asked for next, -1 before an
    epoch; `workers`; `single_process`, if there are none; `pinned`, if a pin thread reads the result queue;
    `simulated`, if pinning is. Where batches are fetched: `fetching`. In a worker: `received`, the task that came last;
    `seed`, its own.
    """

    own: recorder.Recorder | None = None
    """Of a worker that is a thread: what records it alone."""

    def __init__(self, config: TraceConfig, loader: int, own: recorder.Recorder | None = None) -> None:
        self.config = config
        self.loader = loader
        self.own = own
        self.emit = recorder.emitter_for(config, loader) if own is None else own.emitter(loader)
        self.cpu, self.delay = cpu_clock(config.cpu_time), run_delay(config.cpu_time)
        self.pid = os.getpid()
        self.dispatcher: Dispatcher | None = None
        self.delivered: Deliver | None = None
        self.position: EpochPosition | None = None
        self.next_task = -1
        self.workers: list[WorkerHandle] = []
        self.single_process = self.pinned = self.simulated = False
        self.fetching: TracedProgress | None = None
        self.received = -1
        self.seed = 0
        self.dataloader: object = None  # its number, once the iterator is described
        self.started: dict[str, Any] = {}  # what this process was like when the last worker was started

    def __getstate__(self) -> tuple[TraceConfig, int]:
        return self.config, self.loader

    def __setstate__(self, state: tuple[TraceConfig, int]) -> None:
        self.__init__(*state)  # type: ignore[misc]  # a spawned worker opens a recorder of its own

    @property
    def recording(self) -> recorder.Recorder:
        """What records this process, or this thread."""
        return self.own or recorder.start(self.config)

    def follow(self, worker_id: int) -> TracedProgress:
        """Begin to follow what this thread fetches: a worker's, or with -1 the loader's own."""
        self.fetching = TracedProgress(
            self.emit, worker_id, self.cpu, self.delay, self.config.detail == "sample", shortest(self.config.cpu_time)
        )
        return self.fetching

    def describe(self, **loader: object) -> None:
        """Describe the loader in the side file: its number and its parameters."""
        recording = recorder.start(self.config)
        recording.role("loader", loader=self.loader)
        recording.describe("loader", loader=self.loader, **loader)
        self.dataloader = loader.get("dataloader")
        workers = loader.get("num_workers", 0)
        watchdog.fold_if_many(self.config, workers if isinstance(workers, int) else 0)
        watchdog.answer(recording)
        _expect_program_end()

    @harmless(None)
    def describe_start(self, method: str, worker_id: int) -> None:
        """Describe this process before it starts a worker, if it is not as it was before the one before."""
        facts = forks.about(method)
        known = facts | {"threads": [(one["name"], one["tid"]) for one in facts["threads"]]}
        if known != self.started:
            self.started = known
            recorder.start(self.config).describe("start", loader=self.loader, worker=worker_id, **facts)

    def describe_seed(self, worker_id: int) -> None:
        """Describe, in a worker, torch's seed as worker_init_fn has left it; later, whether fetching draws."""
        about = {"loader": self.loader, "worker": worker_id}
        recording = self.recording
        recording.describe("seed", **about, seed=torch.initial_seed())
        if self.fetching is not None:
            self.fetching.draws = Draws(lambda drawn: recording.describe("drawn", **about, drawn=drawn))

    def emit_gone(self) -> int:
        """Emit the ends of workers that have ended; return how many have not."""
        return sum(worker.emit_gone() for worker in self.workers) if self.pid == os.getpid() else 0

    def emit_pauses(self, worker: int = -1) -> None:
        """Emit the collector's pauses, between two steps of the loader, the pin thread or a worker."""
        recording = recorder.active() if self.own is None else None
        if recording is not None and recorder.emit_of(self.loader) is not recorder.no_emit:
            recording.emit_pauses(self.loader, worker)

    def let_go(self) -> None:
        """Drop references in cycles, so that ended workers' descriptors are closed now."""
        self.workers = [worker for worker in self.workers if not worker.gone]
        self.dispatcher = self.delivered = self.position = None
        self.next_task = -1


live: weakref.WeakSet[Shared] = weakref.WeakSet()
"""Iterators that this process has made and not let go."""


def write_uncaught(error: BaseException | None) -> None:
    """Write down, if a trace is on, which exception ends the program or the traced block; None = none does.

    at: "file:line function" of its innermost frames, innermost first. Each exception is written once.
    """
    recording = recorder.active()
    if recording is None or error is None or (_uncaught is not None and _uncaught() is error):
        return
    _remember(error)
    frames = traceback.extract_tb(error.__traceback__)[: -_FRAMES - 1 : -1]
    at = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    text = traceback.format_exception_only(type(error), error)[-1].strip()
    text = text if len(text) <= 1000 else f"{text[:200]}\n...\n{text[-795:]}"  # a worker's ends with its error
    recording.describe("uncaught", monotonic_ns=time.monotonic_ns(), error=text, at=at)


_FRAMES: Final = 8
_uncaught: Callable[[], BaseException | None] | None = None


def _remember(error: BaseException) -> None:
    global _uncaught
    with contextlib.suppress(TypeError):  # some kinds take no weak reference
        _uncaught = weakref.ref(error)


def write_program_end() -> None:
    """Write down, if a trace is on, that the program ends now: the iterators that live are left as they are."""
    recording = recorder.active()
    if recording is not None:
        stack_samples.end()
        write_uncaught(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None))
        for shared in tuple(live):
            shared.emit_gone()
        recording.emit_pauses()
        for thread in threading.enumerate():  # those that record nothing, too: the watchdog knows them by number
            if thread.native_id is not None:  # else it has not begun
                recording.describe("thread", tid=thread.native_id, name=thread.name, ident=thread.ident)
        recording.describe("program_end", monotonic_ns=time.monotonic_ns())


_expects_its_end = 0  # pid


def _expect_program_end() -> None:
    """Have `write_program_end` called when this process ends by itself, which may be a forked rank.

    multiprocessing calls it in each process that it starts, and in the main one; before it ends daemonic processes.
    """
    global _expects_its_end
    if _expects_its_end != os.getpid():
        _expects_its_end = os.getpid()
        Finalize(None, write_program_end, exitpriority=100)


def number_loader(directory: str) -> int:
    """Return a number for a loader of the trace in `directory`.

    An iterator of an earlier trace that still has workers keeps its number: their messages come to this process too.
    """
    while True:
        number = recorder.number_loader(directory)
        if not any(shared.loader == number and shared.workers for shared in tuple(live)):
            return number
