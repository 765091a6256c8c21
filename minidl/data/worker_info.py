"""Worker information: what a worker, a process or a thread, knows about itself.

Interface: `get_worker_info()` returns None outside workers and a `WorkerInfo` in a worker.
Rule of use: the worker loop sets `_worker_info`, or that of its thread, once, before any user code runs; no other code
writes it.
If it is unset, torch's own worker information is the answer, so a dataset written for minidl also splits its work in
torch's workers. `collate` asks `in_worker_process()` whether a batch goes straight into shared memory.

Article 1 §2.4.5, article 3 §collate. Upstream: torch/utils/data/_utils/worker.py.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any

import torch.utils.data
import torch.utils.data._utils.worker as torch_worker


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Information about one worker; fields, defaults and repr are those of torch 2.13.

    id: 0 to num_workers - 1. seed: this worker's base seed, base_seed + id. dataset: this worker's own copy.
    rng: the random generators of a thread worker, None for a process. worker_method: "multiprocessing" or "thread".
    """

    id: int
    num_workers: int
    seed: int
    dataset: Any
    rng: Any = None
    worker_method: str | None = "multiprocessing"


_worker_info: WorkerInfo | None = None


class _ThreadsInfo(threading.local):
    info: WorkerInfo | None = None


_of_thread = _ThreadsInfo()
os.register_at_fork(after_in_child=lambda: leave_thread())


def enter_thread(info: WorkerInfo) -> None:
    """From here, this thread is a worker, also for torch's `get_worker_info`.

    A program may have imported torch's function by name, so the function itself has to answer. Elsewhere than in such
    a thread it answers as before.
    """
    _of_thread.info = info
    torch_worker._minidl_of_thread = _of_thread  # type: ignore[attr-defined]
    answer = lambda: _minidl_of_thread.info or _worker_info  # type: ignore[name-defined]  # noqa: E731, F821
    torch_worker.get_worker_info.__code__ = answer.__code__


def leave_thread() -> None:
    """This thread is a worker no longer."""
    _of_thread.info = None


_torch_worker_info = torch.utils.data.get_worker_info  # kept: a program may put our function in torch's place


def get_worker_info() -> WorkerInfo | None:
    """Return the current worker's information, or None in the main process.

    In a worker of torch's own DataLoader this is torch's object, which has the same attributes.
    """
    if _of_thread.info is not None:
        return _of_thread.info
    if _worker_info is not None:
        return _worker_info
    theirs: WorkerInfo | None = _torch_worker_info()  # type: ignore[assignment]
    return theirs


def in_worker_process() -> bool:
    """Whether the calling thread works for a loader in another process."""
    return _of_thread.info is None and get_worker_info() is not None
