"""The parts of a loop's steps, of which sampled ones stand for others; its warm-up; how far the device is behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minidl.speed.own_step import DeviceLag, device_lag, parts_of, warm_up
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Rows
from minidl.tracefile.spans import SPAN


def rows(code: int, *times: tuple[int, int], sampled: tuple[int, ...] = (), loader: int = 1) -> Rows:
    """Spans from begin to end. sampled: of steps, 1 = the parts are recorded."""
    out = np.zeros(len(times), SPAN)
    out["code"], out["loader"], out["task"] = code, loader, range(len(times))
    out["begin"], out["end"] = np.array(times).T
    out["by"][: len(sampled)] = sampled
    return out


FOUR = (0, 100), (100, 200), (200, 300), (300, 400)
LONG = (0, 1000), (1000, 1010), (1010, 1020), (1020, 1030)


@pytest.mark.parametrize(
    ("times", "sampled", "inner", "known"),
    [
        (FOUR, (1, 1, 1, 1), [rows(ev.FORWARD[0], (10, 30), (210, 240))], {"other code": 350, "forward": 50}),
        (FOUR, (1,), [rows(ev.FORWARD[0], (10, 30)), rows(ev.BACKWARD[0], (30, 80))],
         {"backward": 200, "other code": 120, "forward": 80}),
        (FOUR, (1,), [rows(ev.FORWARD[0], (10, 60)), rows(ev.EVALUATE[0], (110, 190))],
         {"forward": 200, "other code": 120, "evaluation": 80}),
        (LONG, (1,), [rows(ev.FORWARD[0], (0, 600)), rows(ev.BACKWARD[0], (600, 900))],
         {"forward": 687, "backward": 343, "other code": 0}),
        (LONG, (1,), [rows(ev.NEXT[0], (0, 990), loader=2), rows(ev.BACKWARD[0], (990, 1000))],
         {"another loader": 990, "backward": 40, "other code": 0}),
        (FOUR, (1,), [rows(ev.NEXT[0], (120, 150), loader=2), rows(ev.EVALUATE[0], (150, 180), loader=2),
                      rows(ev.VALIDATION[0], (110, 190)), rows(ev.SAVE[0], (20, 40), (190, 195))],
         {"other code": 295, "validation": 80, "torch.save": 25}),
        (FOUR, (1, 1, 1, 1), [rows(ev.FORWARD[0], (10, 30), (310, 330)), rows(ev.VALIDATION[0], (250, 1000))],
         {"other code": 360, "forward": 40}),
        (FOUR, (1,), [rows(ev.NEXT[0], (0, 90), loader=2)], {}),
        (FOUR, (), [], {}),
    ],
    ids=[
        "each step", "one in four", "what few steps have", "no more than there is", "a loader", "a validation",
        "one around them", "it alone", "none",
    ],
)  # fmt: skip
def test_the_parts_of_all_steps(
    times: tuple[tuple[int, int], ...], sampled: tuple[int, ...], inner: list[Rows], known: dict[str, int]
) -> None:
    steps = rows(ev.CONSUMER[0], *times, sampled=sampled)
    found = parts_of(np.concatenate([steps, *inner]), steps)
    assert found == known
    assert sum(found.values()) in (0, times[-1][1])


MS = 1_000_000
LOADERS = {1: {"made_at": "train.py:7"}, 2: {"made_at": "train.py:7"}, 3: {"made_at": "train.py:9"}}


def following(*took: float, loader: int = 1) -> Rows:
    """Steps one after the other, each of so many ms."""
    ends = [round(sum(took[: number + 1]) * MS) for number in range(len(took))]
    return rows(ev.CONSUMER[0], *zip([0, *ends], ends, strict=False), loader=loader)


@pytest.mark.parametrize(
    ("took", "loader", "count"),
    [
        ((900, *[10] * 9), 1, 1),
        ((2, 900, 60, *[10] * 9), 1, 3),
        ((900, *[10] * 9), 3, 1),
        ((900, *[10] * 9), 2, 0),
        ((15, *[1] * 9), 1, 0),
        ((40, *[10] * 9), 1, 0),
        ((900, 10, 10, 10, 800, 10, 10, 10, 800, 10), 1, 0),
        ((900, 10, 10, 10, 800, 10, 10, 10, 10, 10), 1, 1),
        ((900, 10, 10), 1, 0),
    ],
    ids=[
        "the first", "up to the third", "another loader's", "the loader is made again", "too short to note",
        "not far longer", "as long ones come again", "one more long one", "too few steps",
    ],
)  # fmt: skip
def test_a_warm_up_is_what_takes_far_longer_once(took: tuple[float, ...], loader: int, count: int) -> None:
    trace: Any = SimpleNamespace(loaders=LOADERS, whole_from=lambda loader: 0)
    steps = following(*took, loader=loader)
    assert warm_up(trace, loader, steps)["begin"].tolist() == steps["begin"][:count].tolist()


@pytest.mark.parametrize(("whole_from", "first"), [(0, 521), (17, 1)])
def test_the_first_steps_that_a_ring_has_kept_are_no_warm_up(whole_from: int, first: int) -> None:
    trace: Any = SimpleNamespace(loaders=LOADERS, whole_from=lambda loader: whole_from)
    steps = following(900, *[10] * 9)
    steps["bx"] = range(first, first + 10)
    assert not len(warm_up(trace, 1, steps))


def on_device(*parts: tuple[float, float, float]) -> Rows:
    """Parts on the device: begin, end, and how far the host is ahead at the end, ms."""
    out = rows(ev.DEVICE_PART[0], *((round(begin * MS), round(end * MS)) for begin, end, _ in parts))
    out["ey"] = [round(behind * MS) for *_, behind in parts]
    return out


ASYNC = [(10 * n + 30, 10 * n + 40, 38) for n in range(9)]
SYNCED = [(10 * n + 1, 10 * n + 9.5, 8) for n in range(9)]
STARVED = [(10 * n + 7, 10 * n + 9, 1.5) for n in range(9)]
LAUNCHED = [(10 * n + 1, 10 * n + 9.5, 0.01) for n in range(9)]
MIXED = [(10 * n + 1, 10 * n + 9, 3) for n in range(9)]


@pytest.mark.parametrize(
    ("parts", "limit", "behind", "idle"),
    [
        (ASYNC, True, 38, 0.0),
        (SYNCED, True, 8, 0.15),
        (STARVED, None, 1.5, 0.8),
        (LAUNCHED, False, 0.01, 0.15),
        (MIXED, None, 3, 0.2),
        (SYNCED[::2], None, 8, None),
    ],
    ids=["runs ahead", "waits each step", "other work, or none", "launch-bound", "neither", "no two in a row"],
)
def test_what_a_device_s_lag_says(
    parts: list[tuple[float, float, float]], limit: bool | None, behind: float, idle: float | None
) -> None:
    lag = device_lag(on_device(*parts), following(*[10] * 9))
    assert lag is not None
    assert (lag.limit, lag.behind / MS, lag.step / MS, lag.steps) == (limit, behind, 10, len(parts))
    assert lag.idle == (None if idle is None else pytest.approx(idle))


def test_a_lag_needs_three_steps_of_the_loop_itself() -> None:
    steps = following(*[10] * 9)
    assert device_lag(on_device(*SYNCED[:2]), steps) is None
    for name in ("process", "loader"):
        other = on_device(*SYNCED)
        other[name] = 7
        assert device_lag(other, steps) is None
    assert device_lag(steps[:0], steps) is None


def test_a_simulated_device_is_called_so() -> None:
    parts = on_device(*SYNCED)
    parts["ez"] = 1
    lag = device_lag(parts, following(*[10] * 9))
    assert lag is not None
    assert lag.words() == (
        "the device (simulated) ends a part of a step up to 8.00 ms after the host, in steps of 10.0 ms, and computes "
        "no part for 15% of the time (medians of 9 steps)"
    )
    assert DeviceLag(5, None, 10, 3).words() == (
        "the device ends a part of a step up to 5 ns after the host, in steps of 10 ns (medians of 3 steps)"
    )
