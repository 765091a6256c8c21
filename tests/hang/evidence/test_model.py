"""Evidence goes through JSON unchanged, and a text that is none is refused by the field that is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from minidl.hang.evidence.model import (
    Descriptor,
    EvidenceError,
    FileLock,
    Frame,
    RunEvidence,
    SeenProcess,
    SeenThread,
    Syscall,
)

CALL = Syscall("flock", "LOCK_EX", (5, 2), (5,), timeout=-1.0)
THREAD = SeenThread(
    7, "python", ("S", "S"), (1.5, 1.5), (3, 3), "flock", CALL, CALL, stack=(Frame("get", "a.py", 3, {"i": "4"}),)
)
PROCESS = SeenProcess(
    7, 1, "python", ("python", "train.py"), "S", 12.5, threads=(THREAD,), descriptors=(Descriptor(5, "file", "/x", 9),)
)
EVIDENCE = RunEvidence(10, 0.5, 7, 8, processes=(PROCESS,), locks=(FileLock(1, "FLOCK", "WRITE", 7, 2, 9, True),))


def test_json_keeps_everything_and_leaves_out_what_is_the_default() -> None:
    assert RunEvidence.from_json(EVIDENCE.to_json()) == EVIDENCE
    assert "owner" not in json.loads(EVIDENCE.to_json())["processes"][0]["threads"][0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"processes": [1]}, r"evidence\.processes\[0\]: expected an object, got int"),
        ({"interval": "0.5"}, r"evidence\.interval: expected float, got str"),
        ({"moment": True}, r"evidence\.moment: expected int, got bool"),
        ({"locks": {}}, r"evidence\.locks: expected a list"),
        ({"version": 99}, "version 99"),
        ({"processes": [{"pid": 7}]}, r"processes\[0\]: command, name, ppid, started, state is missing"),
    ],
)
def test_what_is_no_evidence_is_refused_by_its_field(change: dict[str, object], said: str) -> None:
    with pytest.raises(EvidenceError, match=said):
        RunEvidence.from_json(json.dumps({**json.loads(EVIDENCE.to_json()), **change}))


@pytest.mark.parametrize(
    ("change", "slept"),
    [
        ({}, True),
        ({"switches": (3, 4)}, False),
        ({"cpu": (1.5, 1.6)}, False),
        ({"syscall_before": Syscall("read")}, False),
    ],
)
def test_a_thread_slept_if_nothing_of_it_changed(change: dict[str, Any], slept: bool) -> None:
    assert replace(THREAD, **change).slept is slept
