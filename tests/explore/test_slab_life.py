"""All interleavings around slabs: nothing goes wrong, and each guard is needed."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from minidl import cli
from minidl.explore.slab_life import GUARDS, Guards, explore_slabs


def test_no_slab_is_written_while_its_batch_is_seen() -> None:
    found = explore_slabs()
    assert (found.fault, found.run) == ("", ())
    assert found.states > 500


@pytest.mark.parametrize(
    ("guard", "fault"),
    [
        ("byte", "slab 0 is written while a message has its batch"),
        ("own_root", "slab 0 is written while the worker has its batch"),
        ("fork_of_loader", "slab 0 is written while a forked process has its batch"),
        ("fork_of_worker", "slab 0 is written while a forked process has its batch"),
        ("alone", "the program keeps its batches, waits for the next, and the worker waits for a slab"),
        ("copy_event", "slab 0 is written while the device has its batch"),
        ("locked_memory", "the device reads pages of slab 0 that the worker has given back"),
    ],
)
def test_without_a_guard_a_run_goes_wrong(guard: str, fault: str) -> None:
    found = explore_slabs(replace(Guards(), **{guard: False}))
    assert found.fault == fault
    assert "the worker takes slab 0" in found.run


def test_each_guard_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert {field.name for field in fields(Guards)} == GUARDS.keys()
    assert cli.main(["explore", "--slabs"]) == 0
    told = capsys.readouterr().out
    assert "no slab is written while its batch is seen" in told
    assert "nothing goes wrong" not in told
