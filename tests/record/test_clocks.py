"""The clocks of several ranks, compared through a real process group."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

import minidl
from minidl.record import clocks
from minidl.tracefile.join import rank_of
from minidl.tracefile.reader import read_trace

pytestmark = pytest.mark.timeout(240)  # the first test runs all of rank_runs


@pytest.fixture(scope="module")
def place(rank_traces: Path) -> Path:
    return rank_traces


@pytest.mark.live
def test_skewed_clocks_are_recovered_within_the_stated_error(place: Path) -> None:
    """Three ranks, one 7 s ahead, one 3.5 s behind, and further apart at the second reading."""
    for rank in range(3):
        for offset, error, skew in json.loads((place / "skewed" / f"rank{rank}.json").read_text()):
            assert abs(offset + skew) <= error
            assert (error == 0) == (rank == 0)
            assert error < 1_000_000_000  # less than any of the skews


@pytest.mark.live
def test_a_rank_that_does_not_take_part_costs_a_timeout_and_nothing_else(place: Path) -> None:
    """No reading, no exception, and the training's own group still adds up."""
    assert [json.loads((place / "alone" / f"rank{rank}.json").read_text()) for rank in (0, 1)] == [[True, 2.0]] * 2


@pytest.mark.live
def test_an_untouched_scripts_clocks_are_aligned_where_that_is_asked_for(place: Path) -> None:
    """When it makes its process group, and when it destroys it."""
    for rank in (0, 1):
        trace = read_trace(place / "untouched" / f"rank-{rank}")
        first, last = trace.described("clock")
        assert first["at_ns"] < last["at_ns"]
        assert rank_of(trace) == first["rank"] == rank


def test_what_aligning_replaces_is_put_back() -> None:
    before = dist.init_process_group, dist.destroy_process_group
    with clocks.aligning():
        assert dist.init_process_group is not before[0]
    assert (dist.init_process_group, dist.destroy_process_group) == before


def test_without_a_process_group_there_is_nothing_to_align() -> None:
    assert minidl.align_clocks() is None


@pytest.mark.live
def test_each_rank_writes_what_it_read_at_the_start_and_at_the_end(place: Path) -> None:
    for rank in range(4):
        trace = read_trace(place / "four ranks" / f"rank{rank}")
        first, last = trace.described("clock")
        assert first["at_ns"] < trace.select("yield")["time"][0] < trace.select("yield")["time"][-1] < last["at_ns"]
        for line in (first, last):
            assert (line["rank"], line["world_size"], line["reference"]) == (rank, 4, 0)
            assert abs(line["offset_ns"]) <= line["error_ns"]  # one machine, one clock: the truth is 0
