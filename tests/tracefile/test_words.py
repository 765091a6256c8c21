"""Times, sizes, counts and steps in words."""

from __future__ import annotations

import numpy as np
import pytest

from minidl.tracefile import events as ev
from minidl.tracefile.spans import SPAN
from minidl.tracefile.words import (
    counted,
    doing,
    duration,
    lacking,
    listed,
    name_of,
    percent,
    plain,
    size,
    unit_of,
    value_of,
)


@pytest.mark.parametrize(
    ("ns", "words"),
    [
        (0, "0 ns"), (999, "999 ns"), (1000, "1.00 µs"), (12_345, "12.3 µs"), (999_499, "999 µs"), (999_500, "1.00 ms"),
        (9_996_000, "10.0 ms"), (1_500_000, "1.50 ms"), (123_456_789, "123 ms"), (45.6e9, "45.6 s"), (599e9, "599 s"),
        (1200e9, "20.0 min"), (-1500, "-1.50 µs"),
    ],
)  # fmt: skip
def test_durations(ns: float, words: str) -> None:
    assert duration(ns) == words


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 << 20, "5.0 MiB"), (3 << 40, "3072.0 GiB")],
)
def test_sizes(number: int, words: str) -> None:
    assert size(number) == words


def test_shares() -> None:
    shares = (0, 0.00001, 0.0099, 0.01, 0.65, 1)
    assert [percent(share) for share in shares] == ["0%", "<1%", "<1%", "1%", "65%", "100%"]


def test_counts_and_lists() -> None:
    assert [counted(n, "batch", "batches") for n in (0, 1, 2)] == ["0 batches", "1 batch", "2 batches"]
    assert counted(2, "event") == "2 events"
    assert (listed(range(3)), listed(range(9), most=2)) == ("0, 1, 2", "0, 1, ...")


def test_control_characters_are_escaped() -> None:
    assert plain("a\x1b[31mé\n") == "a\\x1b[31mé\\n"
    assert lacking(["\x1b[2J"]) == ["missing from the trace: \\x1b[2J"]


def test_a_duration_that_is_too_long_for_the_units_of_a_picture_is_told_in_a_longer_one() -> None:
    """A watchdog may have seen a process for long after its last event."""
    us = unit_of(46_000)
    assert (us.of(12_300), us.at(12_300)) == ("12.3 µs", "12.3 µs")
    assert (us.of(9_187_276_000), us.at(9_187_276_000)) == ("9.19 s", "9.19 s")


def test_names_and_values() -> None:
    names = ["fetch begin", "fetch end", "yield", "event 9999"]
    assert [name_of(code) for code in (*ev.FETCH, ev.YIELD, 9999)] == names
    ending = ev.EVENTS[ev.EPOCH[1]].fields[2]
    assert [value_of(ending, value) for value in (0, 99)] == ["exhausted", 99]


@pytest.mark.parametrize(
    ("code", "values", "words"),
    [
        (ev.SAMPLE[0], {"task": 3, "by": 65}, "in sample 65 (task 3)"),
        (ev.SAMPLE[0], {"task": 3, "by": -1, "bx": 2}, "in the sample at position 2 (task 3)"),
        (ev.SAMPLE[0], {"task": 3, "by": -1, "bx": -1}, "in the samples (task 3)"),
        (ev.RESULT_GET[0], {"task": 7, "worker": 1}, "waiting for task 7 of worker 1"),
        (ev.READY_GET[0], {"task": -1}, "waiting for a result"),
        (ev.INDEX_GET[0], {"task": -1}, "waiting for a task"),
        (ev.CONSUMER[0], {"task": 4}, "in the consumer's code, after task 4"),
        (ev.FETCH[0], {"task": 3}, "fetching task 3"),
        (ev.WORKER_START[0], {"worker": 2}, "starting worker 2"),
        (ev.WORKER_INIT[0], {"task": -1, "worker": 2}, "in worker_init_fn"),
        (ev.MAKE_FETCHER[0], {"task": -1, "worker": 2}, "making its fetcher (an iterable dataset's __iter__)"),
        (ev.EPOCH[0], {"task": -1}, "in epoch"),
        (ev.INDEX_WRITE[0], {"task": 3}, "in index_write (task 3)"),
    ],
)
def test_what_a_thread_is_doing(code: int, values: dict[str, int], words: str) -> None:
    span = np.zeros(1, SPAN)[0]
    span["code"] = code
    for name, value in values.items():
        span[name] = value
    assert doing(span) == words
