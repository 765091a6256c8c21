"""The table of faults: what is selected, and what follows from a fault."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from minidl.prove.faults.cells import (
    NOT_OF_MINI,
    OF_MINI,
    OF_THREADS,
    SHUTDOWN,
    STEPS,
    TRANSPORTS,
    Cell,
    Expected,
    Follows,
    cells,
)

OPTIONS = {
    "method": ("fork", "spawn", "forkserver"),
    "pin": (False, True),
    "persistent": (False, True),
    "kind": ("map", "iterable"),
}
CELLS = list(cells())


def test_every_fault_of_every_step_is_there_once_in_each_form() -> None:
    assert len(CELLS) == len(set(CELLS)) >= 200
    assert {(cell.step, cell.fault) for cell in CELLS} == {(s, f) for s, step in STEPS.items() for f in step.faults}
    assert {f"shutdown: {name}" for name in SHUTDOWN} < STEPS.keys()


def test_each_fault_meets_each_choice_of_an_option_that_its_step_leaves_open() -> None:
    for name, step in STEPS.items():
        for fault in step.faults:
            same = [cell for cell in CELLS if (cell.step, cell.fault) == (name, fault)]
            for option in {"pin", "persistent", "kind"} - step.needs.keys():
                assert {getattr(cell, option) for cell in same} == set(OPTIONS[option]), (name, fault, option)
            assert len({cell.method == "fork" for cell in same}) == (1 if "method" in step.needs else 2)


def test_any_two_options_meet() -> None:
    for (a, of_a), (b, of_b) in itertools.combinations(OPTIONS.items(), 2):
        assert {(getattr(cell, a), getattr(cell, b)) for cell in CELLS} == set(itertools.product(of_a, of_b))


@pytest.mark.parametrize("transport", TRANSPORTS[1:3])
def test_a_step_of_one_transport_is_left_out_on_another(transport: str) -> None:
    other = list(cells(transport))
    assert {cell.transport for cell in other} == {transport}
    assert {cell.step for cell in CELLS} - {cell.step for cell in other} == {"hand-over"}


def test_the_loader_on_one_page_has_no_faults_within_queues() -> None:
    other = list(cells("mini"))
    assert {cell.step for cell in other} == set(OF_MINI)
    assert not {cell.fault for cell in other} & set(NOT_OF_MINI)
    (pinned,) = {cell.outcome.says for cell in other if (cell.step, cell.fault) == ("pin", "sys.exit")}
    assert pinned == "SystemExit: 3|Pin memory thread exited unexpectedly"


def test_threads_have_steps_and_faults_of_their_own_each_in_two_opposite_loaders() -> None:
    other = list(cells("thread"))
    assert len(other) == len(set(other)) == 2 * sum(len(step.faults) for step in OF_THREADS.values())
    for one, opposite in zip(other[::2], other[1::2], strict=True):
        for option in {"pin", "persistent", "kind", "in_order"} - OF_THREADS[one.step].needs.keys():
            same = getattr(one, option) == getattr(opposite, option)
            assert same == (option == "in_order" and "both" in one.fault)


DIES = "exited unexpectedly|killed by signal"
THREAD: dict[str, Any] = {"method": "thread", "transport": "thread"}


@pytest.mark.parametrize(("cell", "outcome"), [
    (Cell("copy", "exception", **THREAD), Expected(Follows.ERROR, "the injected fault")),
    (Cell("sample", "sys.exit of both", **THREAD), Expected(Follows.DEATH, DIES, 3)),
    (Cell("sample", "KeyboardInterrupt", **THREAD), Expected(Follows.DEATH, DIES, 1)),
    (Cell("sample", "hangs", **THREAD), Expected(Follows.TIMEOUT, "timed out")),
    (Cell("sample", "SIGINT while it hangs", **THREAD), Expected(Follows.RAISED, "KeyboardInterrupt")),
    (Cell("sample", "SIGKILL", **THREAD), Expected(Follows.ENDED, code=-9)),
    (Cell("sample", "descriptors", **THREAD), Expected(Follows.ERROR, "Too many open files", must=False)),
    (Cell("sampler", "sys.exit", **THREAD), Expected(Follows.RAISED, "SystemExit: 3")),
    (Cell("pin", "exception", **THREAD), Expected(Follows.ERROR, "the injected fault")),
    (Cell("pin", "hangs", **THREAD), Expected(Follows.TIMEOUT, "timed out")),
    (Cell("shutdown: kill", "SIGINT", **THREAD), Expected(Follows.RAISED, "KeyboardInterrupt")),
    (Cell("use", "exit while a sample hangs", **THREAD), Expected(Follows.NOTHING)),
    (Cell("sample", "exception"), Expected(Follows.ERROR, "the injected fault")),
    (Cell("sample", "SIGSTOP"), Expected(Follows.TIMEOUT, "timed out")),
    (Cell("sample", "SIGKILL of both"), Expected(Follows.DEATH, DIES, -9)),
    (Cell("sample", "SIGTERM of the group"), Expected(Follows.ENDED, code=-15)),
    (Cell("sample", "descriptors"), Expected(Follows.ERROR, "Too many open files")),
    (Cell("loop", "descriptors"), Expected(Follows.RAISED, "Too many open files")),
    (Cell("loop", "SIGINT"), Expected(Follows.RAISED, "KeyboardInterrupt")),
    (Cell("loop", "SIGSEGV"), Expected(Follows.ENDED, code=-11)),
    (Cell("between epochs", "SIGTERM of a worker"), Expected(Follows.DEATH, DIES, 0)),
    (Cell("shutdown: kill", "SIGKILL"), Expected(Follows.ENDED, code=-9)),
    (Cell("use", "del"), Expected(Follows.NOTHING)),
], ids=str)  # fmt: skip
def test_the_outcome_follows_from_the_fault_and_from_who_has_it(cell: Cell, outcome: Expected) -> None:
    assert cell.outcome == outcome


def test_a_cell_is_named_by_what_makes_it_special() -> None:
    assert str(Cell("sample", "SIGKILL of both")) == "sample, SIGKILL of both, fork, map"
    assert str(Cell("pin", "exception", "spawn", True, True, "iterable", TRANSPORTS[1])) == (
        "pin, exception, spawn, pin, persistent, iterable, arena"
    )
    assert str(Cell("pin", "exception", "thread", transport="thread", in_order=False)) == (
        "pin, exception, thread, in no order, map"
    )
