"""Moments of recorded runs are found by event and fields; what is not there is said."""

from __future__ import annotations

import shlex

import pytest
from pages import Parsed

from minidl import cli
from minidl.companion import pictures
from minidl.companion.moments import MomentError, find
from minidl.tracefile import events as ev


def test_a_moment_is_the_event_that_is_named() -> None:
    moment = find("head-of-line-in-order reorder_store task=12 ms=100")
    row = moment.trace.events[moment.row]
    assert (row["code"], row["task"], moment.window) == (ev.REORDER_STORE, 12, 100_000_000)
    assert find("head-of-line-in-order fetch.end task=9").trace is moment.trace
    assert cli.parser().parse_args(shlex.split(moment.command)[1:]).act is cli.COMMANDS["replay"].act
    happened, changed, state = moment.state()
    assert "12" in happened
    assert any(change.startswith("reorder_buffer: ") for change in changed)
    assert any(line.name == "reorder buffer" for line in state)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no-such-run fetch", "no recorded run 'no-such-run'; there are collate-extra-copy"),
        ("persistent fetched", "no event 'fetched'"),
        ("persistent fetch colour=3", "fetch has no field 'colour'; it has task, worker, loader, count"),
        ("persistent fetch task=999", "the run has 0 such events"),
    ],
)
def test_what_is_not_there_is_said(text: str, message: str) -> None:
    with pytest.raises(MomentError, match=message):
        find(text)


def test_its_picture_marks_the_moment_on_its_lane() -> None:
    moment = find("shutdown-closed sentinel_put worker=0")
    svg = pictures.picture(moment)
    tags = Parsed(svg).tags
    parts = svg.split('<div class="wide">')  # on a phone, the names stay where they are
    assert [">worker 0<" in part for part in parts] == [True, False]
    (now,) = [a for tag, a in tags if a.get("class") == "now"]
    (dot,) = [a for tag, a in tags if tag == "circle"]
    assert now["d"].startswith(f"M{float(str(dot['cx'])):.1f} 0V")  # type: ignore[union-attr]
    assert not [a for _, a in tags if "style" in a]
    assert len(svg) < 40_000
