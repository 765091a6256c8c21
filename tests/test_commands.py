"""Every command that reads a trace, on damaged ones: it ends with a result, or with an error in words."""

from __future__ import annotations

import random
from pathlib import Path

import damages
import pytest
from sizes import slow

from minidl.explore.follow import MOST_FOLLOWED, follow
from minidl.hang.headline import headline
from minidl.tracefile import events as ev
from minidl.tracefile.reader import read_trace
from minidl.views.scene import window_of

pytest.importorskip("matplotlib")


@pytest.mark.heavy
@pytest.mark.parametrize("seed", [0, 1, 45, *slow(2, 3, 5, 19, 52)])
def test_a_damaged_trace_stops_no_command_without_words(tmp_path: Path, seed: int) -> None:
    path = damages.write(damages.damaged(seed), tmp_path, seed)
    commands = damages.commands(path, tmp_path, seed)
    for command in random.Random(seed).sample(commands, 6):
        assert not damages.said(command), command


def test_a_rank_that_a_damaged_side_file_does_not_tell(tmp_path: Path) -> None:
    """The DataLoader that was waited for longest is named, with its rank where that is known."""
    files = damages.members_of(damages.TRACES / "ranks-2-one-gpu.minidl")
    told = []
    for number, stem in enumerate(name for name in files if name.endswith(".meta.jsonl")):
        hurt = files | {stem: files[stem].replace(b'"rank": ', b'"rink": ')}
        place = tmp_path / str(number)
        place.mkdir()
        for name, data in hurt.items():
            (place / name).write_bytes(data)
        told.append(headline(read_trace(place)).title)
    assert all(sentence.startswith(("slow: ", "fine: ")) for sentence in told), told


@pytest.mark.parametrize("workers", [None, 0, MOST_FOLLOWED + 1])
def test_the_model_follows_no_run_without_its_workers(workers: int | None) -> None:
    trace = read_trace(damages.TRACES / "workers-2.minidl")
    begins = trace.events["code"] == ev.EPOCH[0]
    trace.events["y"][begins] = workers or 0
    if workers is None:
        trace.events = trace.events[~begins]
    with pytest.raises(ValueError, match=f"the model follows whole runs of at most {MOST_FOLLOWED} workers"):
        follow(trace)


def test_a_window_beyond_all_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"since=1e\+300 s: no part of the trace is in this window"):
        window_of(10**9, 1e300, None)
