"""A Ctrl-C while the recorder writes an event: the trace stays a behaviour of the protocol, or says what it lacks."""

from __future__ import annotations

import dis
import functools
import itertools
import types
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import workloads as wl
from exceptions_everywhere import Interrupting, Interruption

import minidl
from minidl.check import examine
from minidl.tracefile.reader import read_trace

RECORDING = {f"minidl.record.{name}" for name in ("decisions", "loader_spans", "recorder")}

CHECKS = {"CALL", "CALL_FUNCTION_EX", "CALL_FUNCTION", "CALL_METHOD", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE"}
"""Instructions after which CPython runs the handlers of signals: not after a call of a function in Python."""


@functools.cache
def after_checks(code: types.CodeType) -> frozenset[int]:
    """The offsets of the instructions before which a signal's handler may run."""
    instructions = list(dis.get_instructions(code))
    pairs = itertools.pairwise(instructions)
    return frozenset(after.offset for before, after in pairs if before.opname in CHECKS)


class Signalling(Interrupting):
    """Raises only where a signal's handler may."""

    came_back = False

    def _step(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "return":
            self.came_back = True
        elif event == "opcode":
            came_back, self.came_back = self.came_back, False
            if not came_back and frame.f_lasti in after_checks(frame.f_code):
                return super()._step(frame, event, arg)
        return self._step


@pytest.mark.live
@pytest.mark.parametrize(("workers", "stride"), [(0, 3), (2, 11)])
def test_a_trace_that_a_ctrl_c_cuts_into_is_no_breach(workers: int, stride: int, tmp_path: Path) -> None:
    """Not in the shutdown, where a join's end may be missing."""
    at, runs, reached = 1, 0, True
    while reached:
        hit = Signalling(at, RECORDING)
        with minidl.trace(tmp_path / f"{at}"):
            loader = minidl.DataLoader(wl.Numbers(4), 2, num_workers=workers)
            iterator = iter(loader)
            try:
                with hit:
                    for _ in iterator:
                        pass
            except Interruption:
                pass
            loader.close()
            del iterator
        reached = bool(hit.where)
        runs += reached
        found = examine(read_trace(tmp_path / f"{at}"))
        if "_shut_down" not in hit.where and "join" not in str(found.first):
            assert found.first is None, hit.where
        at += stride
    assert runs > 8
