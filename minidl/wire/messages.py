"""What travels between the loader and its workers, as dataclasses; no actor changes a message.

A `Task` goes down a worker's index queue and comes back as a `Result` on the queue that all workers share. Besides,
the loader sends `ResumeIteration` (a persistent worker begins a new epoch, and answers with the same message) and
`Sentinel` (leave your loop). Upstream sends tuples, `None` and two marker classes for the same four things.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)  # not frozen: creating a frozen instance takes four times as long
class Task:
    """Indices to fetch. `idx` is the value of `send_idx` when it was sent; `index` what the sampler gave for it."""

    idx: int
    worker_id: int
    index: Any


@dataclass(slots=True)
class Result:
    """What became of a task: a batch, an `ExceptionWrapper`, a `WorkerExhausted` or a `RebuildFailure`.

    state: the number of the worker's batches in this epoch and, packed, its state after them; None = not sent.
    """

    idx: int
    worker_id: int
    data: Any
    state: tuple[int, bytes] | None = None


@dataclass(frozen=True, slots=True)
class WorkerExhausted:
    """A worker's copy of an iterable dataset has ended (upstream: `_IterableDatasetStopIteration`)."""

    worker_id: int


@dataclass(frozen=True, slots=True)
class RebuildFailure:
    """The message arrived whole, and rebuilding its data failed on the reading side."""

    error: Exception


@dataclass(frozen=True, slots=True)
class ResumeIteration:
    """Begin epoch number `epoch` with a new fetcher; a worker acknowledges by sending it back with its id.

    state: in the acknowledgement, the packed state in which the worker's last epoch has left its dataset.
    """

    epoch: int
    worker_id: int = -1
    state: bytes | None = None


@dataclass(frozen=True, slots=True)
class Sentinel:
    """The last message: a worker leaves its loop; the pin thread wakes, and looks at its done event.

    Upstream sends `None` to a worker and `(None, None)` to the pin thread.
    """
