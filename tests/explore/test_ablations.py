"""Each guard of the loader, taken out of the running code: its program ends well with it, and does not without it."""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from minidl.explore.ablations import without
from minidl.explore.guards import GUARDS
from minidl.loader import iterators, ports, worker
from minidl.prove.lab.ablation import TABLE, outcome
from minidl.wire.queues import BoundedQueue

with_all_guards = functools.cache(outcome)


USUAL = {"sentinel", "done-event", "liveness-check"}
"""Guards that are tried each time."""


@pytest.mark.live
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in USUAL else pytest.mark.slow) for name in sorted(TABLE)],
)
def test_a_program_ends_well_with_the_guard_and_not_without_it(name: str, tmp_path: Path) -> None:
    program, wrong = TABLE[name]
    before = set(os.listdir("/dev/shm"))
    with ThreadPoolExecutor() as both:  # that a program hangs takes seconds of waiting to see
        kept = both.submit(with_all_guards, program.__name__)
        lost = both.submit(outcome, program.__name__, name, tmp_path / "trace")  # recorded, as the lab shows it
    assert kept.result().what == "well"
    assert lost.result().what.startswith(wrong)
    left = {file for file in set(os.listdir("/dev/shm")) - before if str(os.getpid()) in file}
    assert not left


@pytest.mark.live
@pytest.mark.parametrize(
    "program", ["the_loader_is_killed_with_full_pipe", "is_interrupted_before_the_pin_thread_is_told"]
)
def test_what_the_explorer_has_found_in_the_live_loader_is_mended(program: str) -> None:
    assert with_all_guards(program).what == "well"


def test_every_guard_has_a_program() -> None:
    assert set(TABLE) == set(GUARDS)


@pytest.mark.parametrize("name", GUARDS)
def test_a_guard_comes_back(name: str) -> None:
    def state() -> list[object]:
        owners = (ports.Ports, BoundedQueue, worker.ManagerWatchdog, worker, iterators)
        return [{**vars(owner)} for owner in owners]

    before = state()
    with without(name):
        pass
    assert state() == before


def test_a_name_that_no_guard_has_is_an_error() -> None:
    with pytest.raises(ValueError, match="'hope' is none of 'sentinel'"), without("hope"):
        pass
