"""Worker information: what a worker process knows about itself.

Interface: `get_worker_info()` returns None in the main process and a `WorkerInfo` in a worker.
Rule of use: the worker loop sets `_worker_info` once, before any user code runs; no other code writes it.
If it is unset, torch's own worker information is the answer, so a dataset written for minidl also splits its work in
torch's workers. `collate` reads it to decide whether a batch goes straight into shared memory.

Article 1 §2.4.5, article 3 §collate. Upstream: torch/utils/data/_utils/worker.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.utils.data


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Information about one worker; fields, defaults and repr are those of torch 2.13.

    id: 0 to num_workers - 1. seed: this worker's base seed, base_seed + id. dataset: this process's own copy.
    rng: the random generators of a thread worker, None for a process. worker_method: "multiprocessing" or "thread".
    """

    id: int
    num_workers: int
    seed: int
    dataset: Any
    rng: Any = None
    worker_method: str | None = "multiprocessing"


_worker_info: WorkerInfo | None = None
_torch_worker_info = torch.utils.data.get_worker_info  # kept: a program may put our function in torch's place


def get_worker_info() -> WorkerInfo | None:
    """Return the current worker's information, or None in the main process.

    In a worker of torch's own DataLoader this is torch's object, which has the same attributes.
    """
    if _worker_info is not None:
        return _worker_info
    theirs: WorkerInfo | None = _torch_worker_info()  # type: ignore[assignment]
    return theirs
