"""The state of a process when it starts a worker: its threads, and the hazards of a fork.

Interface: `about(method)` describes this process for the side file, kind "start".

A forked child has only the thread that forked. In it, a lock that another thread held stays locked forever, and a pool
without its threads does nothing. So the trace has the other threads with the line of each.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import types
from typing import Any, Final

import torch

from minidl.record import stack_samples

_FRAMES: Final = 4
_MOST_THREADS: Final = 100


def about(method: str) -> dict[str, Any]:
    """Describe this process before it starts a worker.

    method: "fork", "spawn" or "forkserver". threads: Python's, apart from the one that starts the worker, with their
    innermost frames; native_threads: those that Python did not start, as OpenMP's, -1 = unknown. hazards: what a fork
    breaks: "threads", which may hold locks, and "cuda", which is initialised.
    """
    frames = current_frames()
    del frames[threading.get_ident()]  # a frame in a local of its own is a cycle, which keeps its callers' objects
    others = [one for one in threading.enumerate() if one.ident != threading.get_ident()]
    native = _native_threads() - 1 - len(others) - stack_samples.is_on()
    facts: dict[str, Any] = {
        "method": method,
        "threads": [
            {"name": one.name, "tid": one.native_id, "daemon": one.daemon, "at": _at(frames.get(one.ident or 0))}
            for one in others[:_MOST_THREADS]
        ],
        "native_threads": max(-1, native),
        "torch_threads": torch.get_num_threads(),
        "cuda": torch.cuda.is_initialized(),  # type: ignore[no-untyped-call]
    }
    found = (("threads", others), ("cuda", facts["cuda"]))
    return facts | {"hazards": [name for name, there in found if there and method == "fork"]}


def current_frames() -> dict[int, types.FrameType]:
    """The innermost frame of each thread of this process, by the thread's ident.

    Until Python 3.12.4 (gh-106883), a collection of garbage that begins inside `sys._current_frames` may wait for ever
    for the lock that this function holds.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


def _native_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return -1


def _at(frame: types.FrameType | None) -> list[str]:
    """Return the innermost frames as "file:line function"."""
    out: list[str] = []
    while frame is not None and len(out) < _FRAMES:
        out.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return out
