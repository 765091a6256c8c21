"""All interleavings around slabs: nothing goes wrong, and each guard is needed."""

from __future__ import annotations

import functools
from dataclasses import fields, replace

import pytest
from sizes import slow

from minidl import cli
from minidl.explore import slab_life
from minidl.explore.slab_life import GUARDS, Guards

explore_slabs = functools.cache(slab_life.explore_slabs)


@pytest.mark.heavy
def test_no_slab_is_written_while_its_batch_is_seen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is a batch lost; and the command says so, with each guard and what it is for."""
    assert {field.name for field in fields(Guards)} == GUARDS.keys()
    monkeypatch.setattr(slab_life, "explore_slabs", explore_slabs)
    assert cli.main(["explore", "--slabs"]) == 0
    told = capsys.readouterr().out
    states = int(told.split()[1].replace(",", ""))
    assert states > 50_000
    assert "states, no slab is written while its batch is seen" in told
    assert "nothing goes wrong" not in told
    assert all(f"without {guard} ({what}):" in told for guard, what in GUARDS.items())


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
        ("present", "a batch before this one is lost"),
        ("own_descriptors", "the descriptor of slab 0 was used up before its batch is delivered"),
        ("armed_at_delivery", "slab 0 is written while a message has its batch"),
        ("lost_is_kept", "slab 0 is named, and the loader has not mapped it"),
        ("lent_is_kept", "the descriptor of slab 0 was closed before the loader has opened it"),
        *slow(("dropped_is_undone", "slab 1 is named, and the loader has not mapped it")),
        ("storage_keeps_root", "slab 0 is written while an array has its batch"),
    ],
)
def test_without_a_guard_a_run_goes_wrong(guard: str, fault: str) -> None:
    found = explore_slabs(replace(Guards(), **{guard: False}))
    assert found.fault == fault
    assert "the worker takes slab 0" in found.run


def test_descriptors_of_a_lost_packet_are_taken_for_those_of_the_next() -> None:
    """As long as an exception could lose a packet, and the reader kept the descriptors of all packets in one list."""
    found = explore_slabs(Guards(present=False, own_descriptors=False))
    assert found.fault == "slab 1 is mapped by the descriptor of slab 0"
    assert "Ctrl-C ends the loader's get" in found.run
