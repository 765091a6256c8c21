"""A simulated loader, whose every cost is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidl.speed.plan.loading import STEPS, Costs, Loading, load
from minidl.speed.plan.machine import Work
from minidl.speed.plan.settings import LoaderSetting

MS = 1e6


def costs(fetch: list[Work], step: Work, **more: Any) -> Costs:
    nothing, works = [Work(0)], {"fetch": fetch, "step": [step], **more}
    given = {name: np.array(works.get(name, nothing * len(fetch))).T for name in STEPS}
    return Costs(draw=np.zeros(len(fetch)), sizes=np.full(len(fetch), 100), **given, exclusive=more.get("exclusive", 0))


def loaded(fetch: Work | list[Work], step: Work, batches: int = 400, *, more: Any = None, **setting: Any) -> Loading:
    fetch = fetch if isinstance(fetch, list) else [fetch]
    order = np.arange(batches) % len(fetch)
    return load(costs(fetch, step, **more or {}), LoaderSetting(**{"cpus": 4.0} | setting), order)


WAITS, COMPUTES = Work(0, 10 * MS), Work(10 * MS)


@pytest.mark.parametrize(
    ("fetch", "step", "setting", "rate"),
    [
        (WAITS, Work(0, 10 * MS), {"num_workers": 0}, 50),
        (WAITS, Work(0, 1 * MS), {"num_workers": 1}, 100),
        (WAITS, Work(0, 1 * MS), {"num_workers": 4}, 400),
        (WAITS, Work(0, 5 * MS), {"num_workers": 4}, 200),
        (COMPUTES, Work(0, 1 * MS), {"num_workers": 4, "cpus": 2.0}, 200),
        (COMPUTES, Work(5 * MS), {"num_workers": 4, "cpus": 1.0}, 1000 / 15),
        (WAITS, Work(0, 1 * MS), {"num_workers": 4, "transport": "arena"}, 400),
        (WAITS, Work(0, 1 * MS), {"num_workers": 4, "pin_memory": True}, 400),
    ],
)
def test_the_rate_is_that_of_what_limits(fetch: Work, step: Work, setting: dict[str, Any], rate: float) -> None:
    assert loaded(fetch, step, **setting).by_s == pytest.approx(rate, rel=0.02)


def test_one_slow_batch_holds_up_the_others_only_in_order() -> None:
    fetch = [Work(0, 10 * MS)] * 19 + [Work(0, 200 * MS)]
    in_order, not_in_order = (
        loaded(fetch, Work(0, 1 * MS), 200, num_workers=4, in_order=ordered) for ordered in (True, False)
    )
    assert not_in_order.by_s > 1.15 * in_order.by_s
    assert in_order.blocked > 0
    assert not_in_order.blocked == 0


def test_what_workers_use_one_at_a_time_bounds_all_of_them() -> None:
    found = loaded(Work(0, 6 * MS), Work(0, 1 * MS), num_workers=4, more={"exclusive": 4 * MS})
    assert found.by_s == pytest.approx(250, rel=0.02)


def test_a_step_that_costs_more_is_done_by_the_thread_that_does_it() -> None:
    """A feeder thread sends while its worker fetches; with slabs the worker sends."""
    more = {"send": [Work(0, 10 * MS)]}
    fed = loaded(WAITS, Work(0, 1 * MS), num_workers=1, more=more)
    sent = loaded(WAITS, Work(0, 1 * MS), num_workers=1, transport="arena", more=more)
    assert fed.by_s == pytest.approx(100, rel=0.03)
    assert sent.by_s == pytest.approx(50, rel=0.03)


@given(
    fetch=st.lists(st.builds(Work, st.floats(0, 5 * MS), st.floats(0, 5 * MS)), min_size=1, max_size=12),
    batches=st.integers(1, 40),
    workers=st.integers(0, 5),
    prefetch=st.integers(1, 3),
    in_order=st.booleans(),
    pin=st.booleans(),
)
def test_each_batch_is_yielded_once_and_no_more_are_ahead_than_may_be(
    fetch: list[Work], batches: int, workers: int, prefetch: int, in_order: bool, pin: bool
) -> None:
    setting = {
        "num_workers": workers,
        "prefetch_factor": prefetch,
        "in_order": in_order,
        "pin_memory": pin and workers > 0,
    }
    found = loaded(fetch, Work(1 * MS, 1 * MS), batches, **setting)
    assert len(found.yields) == len(found.waits) == batches
    assert (np.diff(found.yields) >= 2 * MS - 1).all()
    most, size = found.peak
    assert 1 <= most <= max(1, workers * prefetch + 1)
    assert size == 100 * most
    assert 0 <= found.blocked <= found.starved <= sum(found.waits) + 1
