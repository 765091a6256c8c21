"""The file format: what is written is read back, byte for byte, and what is no events file is told why."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidl.tracefile.format import (
    FORMAT_VERSION,
    HEADER_BYTES,
    MAGIC,
    PACK,
    RECORD,
    Header,
    events_file,
    header_problem,
    parts_of,
    records,
    side_line,
    stem_of,
)


def rows_of(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    rows = np.zeros(len(numbers), RECORD)
    rows["seq"], rows["time"] = numbers, 7
    return rows


def test_struct_and_numpy_agree_on_the_slot() -> None:
    assert np.frombuffer(PACK.pack(*range(1, 11)), RECORD).tolist() == [tuple(range(1, 11))]
    assert RECORD.names == ("time", "code", "loader", "tid", "task", "worker", "x", "y", "z", "seq")


def test_the_header_page_is_read_as_it_was_written() -> None:
    header = Header(71, 10**9, 10**18, ring=64, slots=3, lost_events=5, lost_lines=6, errno=28)
    page = header.page()
    assert (len(page), page[: len(MAGIC)], header_problem(page)) == (HEADER_BYTES, MAGIC, "")
    assert Header.read(page) == header
    assert header.version == FORMAT_VERSION


@given(st.sets(st.integers(1, 200)), st.sampled_from([0, 256]), st.integers(0, 63))
def test_each_event_is_in_its_slot(numbers: set[int], ring: int, cut: int) -> None:
    data = events_file(Header(1, 2, ring=ring), rows_of(*numbers))
    slots = records(data)
    assert len(slots) == max(numbers, default=0) == Header.read(data).slots
    assert {int(row["seq"]): at for at, row in enumerate(slots) if row["seq"]} == {n: n - 1 for n in numbers}
    assert len(records(data[: len(data) - cut])) == max(0, len(slots) - (cut > 0))


def test_a_ring_starts_again_at_its_first_slot() -> None:
    assert records(events_file(Header(1, 2, ring=4), rows_of(3, 4, 5, 6)))["seq"].tolist() == [5, 6, 3, 4]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (None, "is missing, with all its events"),
        (b"", "has no header: the process was stopped, or the disk was full, before its first event"),
        (bytes(2 * HEADER_BYTES), "has no header"),
        (b"GARBAGE!" + bytes(HEADER_BYTES), "starts with b'GARBAGE!': it is not an events file"),
        (Header(1, 2, version=9).page(), "has format 9, but this minidl reads format 1: read it with a later minidl"),
    ],
)
def test_what_is_no_events_file_is_told_why(data: bytes | None, problem: str) -> None:
    assert header_problem(data).startswith(problem)


def test_names_and_lines() -> None:
    assert parts_of(stem_of(71, 10**12)) == (71, 10**12)
    assert side_line("thread", tid=4, name="\u00e9") == b'{"kind": "thread", "tid": 4, "name": "\\u00e9"}\n'
