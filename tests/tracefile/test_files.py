"""A trace's files: links, members of one name, and packed files whose contents would fill a memory."""

from __future__ import annotations

import gzip
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from oracle_trace import trace_of, write_process

from minidl.tracefile import events as ev
from minidl.tracefile import packs
from minidl.tracefile.format import HEADER_BYTES, MANIFEST, RECORD, Header, TraceError, events_file
from minidl.tracefile.packs import write_packed
from minidl.tracefile.profile import profile
from minidl.tracefile.reader import read_trace


def packed(path: Path, *members: tuple[str, bytes]) -> Path:
    return write_packed(path, [(MANIFEST, b'{"format": 1}'), *members])


def test_a_link_is_not_followed_out_of_a_trace(tmp_path: Path) -> None:
    """What is packed is given away: no other file of the machine may come with it."""
    secret = tmp_path / "secret"
    secret.write_text('{"attachment": 1, "kind": "functions", "key": "hunter2"}\n')
    write_process(tmp_path / "t", [{"code": ev.YIELD}])
    for name in ("functions-1.attachment.jsonl", "7-1.events", "7-1.meta.jsonl"):
        os.symlink(secret, tmp_path / "t" / name)
    os.mkfifo(tmp_path / "t" / "8-1.events")
    os.symlink(tmp_path / "t", tmp_path / "link")
    trace = read_trace(tmp_path / "link")
    assert [process.file for process in trace.processes] == ["100-1"], "a linked directory is a trace"
    assert [problem.partition(" ")[0] for problem in trace.problems if "is a link, a dir" in problem] == [
        "7-1.events", "7-1.meta.jsonl", "8-1.events", "functions-1.attachment.jsonl",
    ]  # fmt: skip
    assert b"hunter2" not in gzip.decompress(trace.pack(tmp_path / "out").read_bytes())


def test_of_two_members_with_one_name_the_first_counts(tmp_path: Path) -> None:
    side = [json.dumps({"kind": "thread", "tid": 5, "name": name}).encode() for name in ("first", "second")]
    trace = read_trace(packed(tmp_path / "t", *(("5-1.meta.jsonl", line) for line in side)))
    assert trace.threads == {(5, 5): "first"}
    assert "t.minidl: a member named '5-1.meta.jsonl' occurs twice and was left out" in trace.problems


# --- Contents beyond a limit ------------------------------------------------------------------------------------------
@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "ALWAYS_FITS", 1 << 16)


@pytest.mark.usefixtures("small_limit")
def test_contents_beyond_the_limit_are_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = packed(tmp_path / "bomb.minidl", ("5-1.events", bytes(40 << 20)))
    taken, read, zipped = [], packs.Unzipped.read, path.stat().st_size
    monkeypatch.setattr(packs.Unzipped, "read", lambda self, size: taken.append(size) or read(self, size))
    with pytest.raises(TraceError) as error:
        read_trace(path)
    assert max(taken) < 1 << 16, "the size that the archive announces is looked at before"
    assert str(error.value) == (
        f"{path} has {zipped} bytes and unpacks to {(40 << 20) + 3 * 512} or more: the limit is {100 * zipped}. "
        "It is damaged, or made to fill a memory; if you trust it, unpack it by tar -xzf"
    )


@pytest.mark.heavy
@pytest.mark.usefixtures("small_limit")
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE])
def test_what_no_size_announces_is_limited_while_it_is_unpacked(tmp_path: Path, kind: bytes) -> None:
    """Behind the archive's end, and in members that are left out."""
    member = tarfile.TarInfo("x")
    member.type = kind
    path = tmp_path / "bomb.minidl"
    path.write_bytes(gzip.compress(member.tobuf(tarfile.USTAR_FORMAT) + bytes(40 << 20)))
    with pytest.raises(TraceError, match="unpacks to"):
        read_trace(path)


@pytest.mark.usefixtures("small_limit")
def test_a_profile_beyond_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "profile.json.gz"
    path.write_bytes(gzip.compress(b" " * (40 << 20)))
    with pytest.raises(TraceError, match="unpacks to"):
        profile(path, trace_of(tmp_path / "t", [{"code": ev.YIELD}]))


@pytest.mark.usefixtures("small_limit")
def test_the_densest_events_are_far_from_the_limit(tmp_path: Path) -> None:
    rows = np.zeros(20_000, RECORD)
    rows["seq"] = np.arange(1, len(rows) + 1)
    rows["time"], rows["code"], rows["tid"] = 1000 * rows["seq"], ev.YIELD, 5
    data = events_file(Header(5, 1), rows)
    path = packed(tmp_path / "t", ("5-1.events", data))
    assert len(data) > 1 << 16
    assert len(data) / path.stat().st_size < packs.MOST_ZIPPED / 5
    assert len(read_trace(path)) == len(rows) == (len(data) - HEADER_BYTES) // RECORD.itemsize
