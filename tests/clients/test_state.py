"""Lightning saves and loads the state of `minidl.DataLoader`, as of any loader that has one."""

from __future__ import annotations

from pathlib import Path

import client_runs
import pytest
from client_runs import Client

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]

LIGHTNING = Client("Lightning", "lightning", "lightning", "lightning_resume.py", modes=("direct",))


def test_lightning_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """It takes one batch ahead of a stream without a length, and has the loader count it."""
    client_runs.require(LIGHTNING)
    done = client_runs.run(LIGHTNING, "direct", tmp_path)
    assert done.code == 0, done.output[-3000:]
    resumed = done.ranks[0]["facts"]["resumed"]
    for name in ("map", "sized stream"):
        left, seen = resumed[name]
        assert seen == left, name
        assert len(left) == 20 - 7 + 20
    left, seen = resumed["stream"]
    assert seen[:12] == left[1:13]
