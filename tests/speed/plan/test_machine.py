"""The simulated machine: shared CPUs, waits and mailboxes, to the nanosecond."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from minidl.speed.plan.machine import Mailbox, SimulatedMachine, Work

MS = 1e6


def ends(machine: SimulatedMachine, *steps: Any) -> list[float]:
    """When each of some actors, which begin together and take one step, has ended, in ms."""
    done: dict[int, float] = {}

    def actor(number: int, step: Any) -> Generator[Any, Any, None]:
        yield step
        done[number] = machine.now / MS

    def last() -> Generator[Any, Any, None]:
        for number, step in enumerate(steps):
            machine.start(actor(number, step))
        yield Work(0, 1000 * MS)

    machine.run(last())
    return [pytest.approx(done[number]) for number in range(len(steps))]


COMPUTES, WAITS = Work(10 * MS), Work(0, 10 * MS)


@pytest.mark.parametrize(
    ("machine", "steps", "ended"),
    [
        ({"cpus": 2}, [COMPUTES, COMPUTES], [10, 10]),
        ({"cpus": 2}, [COMPUTES] * 4, [20] * 4),
        ({"cpus": 1.5}, [COMPUTES] * 3, [20] * 3),
        ({"cpus": 1}, [Work(5 * MS), Work(10 * MS)], [10, 15]),
        ({"cpus": 1, "others": 1}, [COMPUTES], [20]),
        ({"cpus": 1}, [WAITS] * 9, [10] * 9),
        ({"cpus": 1}, [Work(5 * MS, 7 * MS), Work(5 * MS)], [17, 10]),
        ({"cpus": 4, "held": 1.0}, [COMPUTES, COMPUTES, WAITS], [20, 20, 10]),
        ({"cpus": 4, "held": 0.5}, [COMPUTES] * 4, [20] * 4),
        ({"cpus": 4, "held": 0.5}, [COMPUTES, COMPUTES], [10, 10]),
        ({"cpus": 1, "others": 1, "held": 1.0}, [COMPUTES, COMPUTES], [40, 40]),
    ],
)
def test_cpus_and_a_lock_are_shared_and_waits_are_not(
    machine: dict[str, float], steps: list[Any], ended: list[float]
) -> None:
    assert ends(SimulatedMachine(**machine), *steps) == ended


def test_a_message_that_is_sent_back_is_used_by_one_at_a_time() -> None:
    machine, disk, ended = SimulatedMachine(2), Mailbox(), []

    def actor(took: float) -> Generator[Any, Any, None]:
        yield disk
        yield Work(0, took * MS)
        machine.send(disk, None)
        ended.append(machine.now / MS)

    machine.send(disk, None)
    for took in (4, 3):
        machine.start(actor(took))
    machine.run(actor(5))
    assert ended == [4, 7, 12]


def test_cpu_time_is_counted() -> None:
    machine = SimulatedMachine(2)
    ends(machine, *[COMPUTES] * 3)
    assert machine.used == pytest.approx(30 * MS)


def test_messages_come_in_order_after_their_delay() -> None:
    machine, mailbox, came = SimulatedMachine(1), Mailbox(), []

    def reader() -> Generator[Any, Any, None]:
        for _ in range(3):
            came.append(((yield mailbox), machine.now / MS))

    machine.send(mailbox, "late", after=2 * MS)
    machine.send(mailbox, "first")
    machine.send(mailbox, "second", after=1 * MS)
    machine.run(reader())
    assert came == [("first", 0), ("second", 1), ("late", 2)]


def test_actors_that_all_wait_are_an_error() -> None:
    def reader() -> Generator[Any, Any, None]:
        yield Mailbox()

    with pytest.raises(RuntimeError, match="wait for each other"):
        SimulatedMachine(1).run(reader())
