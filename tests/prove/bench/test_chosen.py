"""`minidl bench auto`: what a loader chooses, beside fixed numbers of workers."""

from __future__ import annotations

import pytest

from minidl.prove.bench import chosen, planned
from minidl.prove.bench.planned import Cost, Workload


@pytest.mark.live
def test_a_choice_is_compared_with_the_best_fixed_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "WORKLOADS", {"waiting": Workload(Cost(sleeps=6), batches=40)})
    monkeypatch.setattr(chosen, "WORKERS", (0, 2))
    row, least, good, of_none = chosen.bench_auto(quick=True)
    assert (row.group, row.against, len(row.values)) == ("waiting", "best fixed", 2)
    assert row.extra["best"] == 2
    assert row.extra["chosen"] > 2
    assert row.base[0] > row.extra["no workers"]
    assert of_none.values[0] > least.values[0] > 0
    assert good.values[0] in (0, 1)
