"""The end of an events file: of files that grow, of rings, and of files that change while they are read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from oracle_trace import write_process

from minidl.tracefile import events as ev
from minidl.tracefile import tail as tailing
from minidl.tracefile.format import HEADER_BYTES, records
from minidl.tracefile.reader import read_trace
from minidl.tracefile.tail import tail


def sequence(data: bytes) -> list[int]:
    rows = records(data)
    return sorted(int(row["seq"]) for row in rows if row["seq"])


@example(count=400, ring=256, room=0, most=100, holes={257})  # the first slot has kept what was there before
@given(
    count=st.integers(0, 700),
    ring=st.sampled_from([0, 64, 128, 256]),
    room=st.integers(0, 300),
    most=st.sampled_from([1, 7, 64, 100, 1000]),
    holes=st.sets(st.integers(1, 700), max_size=20),
)
def test_the_tail_is_the_last_records(
    tmp_path_factory: pytest.TempPathFactory, count: int, ring: int, room: int, most: int, holes: set[int]
) -> None:
    """In a file that grows and in a ring, with room at the end, and with slots that were not written, or not again."""
    written = [n for n in range(1, count + 1) if n not in holes]
    place = tmp_path_factory.mktemp("tail")
    slots = ring or max(count + room, 1)
    path = write_process(place, [{"code": ev.YIELD, "seq": n, "time": n} for n in written], ring=ring, slots=slots)
    newest = max(written, default=0)
    expected = [n for n in written if n > newest - min(most, slots)]
    assert sequence(tail(path, most)) == expected
    path.write_bytes(tail(path, most))
    trace = read_trace(place)
    assert trace.events["seq"].tolist() == expected


def test_what_is_overwritten_while_it_is_read_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_process(tmp_path, [{"code": ev.YIELD, "seq": n, "time": n} for n in range(1, 101)], ring=64)
    monkeypatch.setattr(tailing, "_newest", lambda fd, slots: 90)  # ten more events came since
    assert sequence(tail(path, 1000)) == list(range(37, 91))


def test_the_tail_of_what_is_no_events_file(tmp_path: Path) -> None:
    assert tail(tmp_path / "none", 10) == b""
    for content in (b"", b"x" * HEADER_BYTES * 2):
        (tmp_path / "file").write_bytes(content)
        assert tail(tmp_path / "file", 10) == content[:HEADER_BYTES]


def test_a_record_that_changes_while_it_is_read_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_process(tmp_path, [{"code": ev.YIELD} for _ in range(10)], slots=64)
    plain, calls = os.pread, iter(range(10**6))

    def pread(fd: int, size: int, offset: int) -> bytes:
        data = bytearray(plain(fd, size, offset))
        if offset == HEADER_BYTES and size == 10 * 64 and next(calls) == 0:
            data[3 * 64] ^= 1  # the fourth record's time
        return bytes(data)

    monkeypatch.setattr(os, "pread", pread)
    assert sequence(tail(path, 100)) == [1, 2, 3, 5, 6, 7, 8, 9, 10]
