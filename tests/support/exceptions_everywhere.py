"""An exception at every place where a signal's handler may raise one: before each line, or each instruction.

`python tests/support/exceptions_everywhere.py [line|opcode] [stride] [name...]` sweeps `next()` of the loaders below:
in each run the third next() of an epoch is interrupted one step later, and then the epoch goes on. Each batch must come
once with its own content, or an error must say that one may be lost.
"""

from __future__ import annotations

import collections
import faulthandler
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from types import FrameType, TracebackType
from typing import Any

import torch

import minidl

CODE = {
    f"minidl.{name}"
    for name in (
        "dispatcher", "driver", "iterators", "liveness", "messages", "protocol", "resume", "sampler", "shutdown",
        "stateful", "transport.arena", "transport.arena_queue", "transport.atomic", "transport.message",
        "transport.packets", "transport.queues", "transport.tensors",
    )
}  # fmt: skip

BOUND = 60.0
"""Seconds that an epoch may take; a wait for what is lost has no end."""


MISSES = 8
"""Calls of next() in a row that have ended before the step, after which a sweep ends."""


class Interruption(BaseException):
    """What is raised."""


class Interrupting:
    """In this thread and block, raises at the `at`-th step of the modules' code; counts the steps. at 0: at none.

    steps: "line" or "opcode" (an instruction). where: the place where it has raised; "" if nowhere.
    """

    def __init__(self, at: int, modules: Collection[str], steps: str = "opcode", error: Any = Interruption) -> None:
        self.at, self.modules, self.steps, self.error = at, modules, steps, error
        self.count = 0
        self.where = ""

    def __enter__(self) -> Interrupting:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if frame.f_globals.get("__name__") not in self.modules or frame.f_code.co_name == "__del__":
            return None  # CPython prints what is raised in a __del__
        frame.f_trace_opcodes, frame.f_trace_lines = self.steps == "opcode", self.steps == "line"
        return self._step

    def _step(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        if event == self.steps:
            self.count += 1
            if self.count == self.at:
                self.where = f"{frame.f_globals['__name__']}:{frame.f_lineno} {frame.f_code.co_name}+{frame.f_lasti}"
                sys.settrace(None)
                raise self.error
        return self._step


class Marked(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Items whose content says which they are."""

    def __init__(self, size: int = 24) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3000,), float(index)), index


LOADERS: dict[str, dict[str, Any]] = {
    "arena": {"transport": "arena"},
    "arena, as they come": {"transport": "arena", "in_order": False},
    "arena, pinned": {"transport": "arena", "pin_memory": True},
    "upstream": {"transport": "upstream"},
    "upstream, as they come": {"transport": "upstream", "in_order": False},
    "upstream, pinned": {"transport": "upstream", "pin_memory": True},
}
"""Pinned: with MINIDL_SIMULATE_DEVICE=1."""

Run = tuple[str, str]
"""What became of a run, "again", "error" or what is wrong; and the place of the exception."""


def sweep(options: dict[str, Any], steps: str, stride: int = 1, first: int = 1) -> Iterator[Run]:
    """Interrupt next() at every `stride`-th step, each time in a new epoch of the same workers."""
    loader = minidl.DataLoader(Marked(), batch_size=2, num_workers=2, persistent_workers=True, **options)
    at, missed, iterator = first, 0, iter(loader)
    while True:
        faulthandler.dump_traceback_later(BOUND, exit=True)
        interrupting, seen, said = _epoch(iterator, at, steps)
        faulthandler.cancel_dump_traceback_later()
        if not interrupting.where:  # a next() has more steps if the batch is not there yet
            missed += 1
            if missed == MISSES:
                return
            iterator = iter(loader)
            continue
        missed = 0
        whole = sorted(seen) == list(range(24)) and (seen == sorted(seen) or not options.get("in_order", True))
        lost = "return data" if _is_the_consumers(interrupting.where) else f"{len(seen)} of 24 samples: {seen}"
        yield said or ("again" if whole else lost), interrupting.where
        at += stride
        iterator = iter(loader)


def _epoch(iterator: Any, at: int, steps: str) -> tuple[Interrupting, list[int], str]:
    interrupting, seen = Interrupting(at, CODE, steps), list[int]()
    try:
        for number in range(100):
            batch = None
            if number == 2:
                try:
                    with interrupting:
                        batch = next(iterator)
                except Interruption:
                    continue
            else:
                batch = next(iterator)
            content, indices = batch
            if not content.eq(indices[:, None]).all():
                return interrupting, seen, f"the content of other samples than {indices.tolist()}"
            seen += indices.tolist()
    except StopIteration:
        pass
    except RuntimeError as error:
        return interrupting, seen, "error" if str(error) else "an error that says nothing"
    return interrupting, seen, ""


def _is_the_consumers(where: str) -> bool:
    """Whether the exception came between the last step of next() and the consumer's first."""
    return " __next__+" in where


def main(steps: str = "line", stride: str = "1", *names: str) -> int:
    """Sweep, print, and return how many runs are wrong."""
    os.environ["MINIDL_SIMULATE_DEVICE"] = "1"
    table: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    places, wrong = collections.defaultdict(set), 0
    for name in names or LOADERS:
        began = time.monotonic()
        for number, (what, where) in enumerate(sweep(LOADERS[name], steps, int(stride)), 1):
            module = where.partition(":")[0]
            places[module].add(where.partition(" ")[0])
            kind = what if what in ("again", "error", "return data") else "wrong"
            table[module][kind] += 1
            if kind == "wrong":
                wrong += 1
                print(f"{name}: {where}: {what}", flush=True)
            if number % 100 == 0:
                print(f"{name}: {number} runs, {time.monotonic() - began:.0f} s", flush=True)
        print(f"{name}: done after {time.monotonic() - began:.0f} s", flush=True)
    print(f"{'module':32}{'lines':>7}{'runs':>7}{'again':>7}{'error':>7}{'handed':>8}{'wrong':>7}")
    for module, counts in sorted(table.items()):
        counted = [counts[kind] for kind in ("again", "error", "return data", "wrong")]
        print(f"{module:32}{len(places[module]):7}{counts.total():7}" + "{:7}{:7}{:8}{:7}".format(*counted))
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main(*sys.argv[1:])))
