"""What Python says of this process's own threads."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest

from minidl.evidence import stacks


def test_no_collection_begins_while_the_frames_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could wait for ever for the lock that is held meanwhile."""
    seen = []

    def frames() -> dict[int, Any]:
        seen.append(gc.isenabled())
        return {}

    monkeypatch.setattr(sys, "_current_frames", frames)
    stacks.current_frames()
    assert gc.isenabled()
    gc.disable()
    try:
        stacks.current_frames()
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert seen == [False, False]


def test_py_spy_has_a_bound_for_all_processes_together() -> None:
    why: dict[int, str] = {}
    assert stacks.spied([1, 2], why.__setitem__, program="/no/py-spy", altogether=0.0) == {}
    assert why == dict.fromkeys((1, 2), "py-spy took 0 s for the processes before")
