"""The parts of a loop's steps: of sampled ones, which stand for the others, and of what is recorded in each step."""

from __future__ import annotations

import numpy as np
import pytest

from minidl.speed.own_step import parts_of
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
