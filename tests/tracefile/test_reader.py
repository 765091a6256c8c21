"""The reader: what can be read is read, the rest is said, and no file makes it fail in any other way."""

from __future__ import annotations

import functools
import gzip
import io
import json
import os
import shutil
import signal
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_trace import recorded, rows_of, trace_of, write_process

from minidl.record.recorder import Recorder, TraceConfig, create
from minidl.tracefile import events as ev
from minidl.tracefile.batches import Batches
from minidl.tracefile.format import HEADER_BYTES, MANIFEST, PACK, ROW, STATE_AT, Header, TraceError
from minidl.tracefile.reader import Trace, read_trace
from minidl.tracefile.words import duration


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A trace of two processes: a loader with three events, a worker with two; one text."""
    loader = rows_of(
        "code time task x y",
        (ev.WORKER_START[0], 10, -1, 0, 0), (ev.WORKER_START[1], 30, -1, 7, 0), (ev.YIELD, 90, 0, 1, 1), worker=0,
    )  # fmt: skip
    worker = rows_of("code time x y z", (ev.FETCH[0], 50, 4, 0, 0), (ev.TASK_ERROR, 60, 2, 5, 1), task=0, worker=0)
    name = {"kind": "thread", "tid": 5, "name": "MainThread"}
    text = {"kind": "string", "id": 1, "text": "KeyError: 'x'"}
    facts = {"kind": "loader", "loader": 1, "batch_size": 4}
    place = tmp_path / "small"
    write_process(place, loader, pid=5, start_ns=1, role="loader", ppid=1, lines=[name])
    write_process(place, worker, pid=7, start_ns=2, role="worker", worker=0, loader=1, ppid=5, lines=[text, facts])
    return place


def words(trace: Trace) -> str:
    return "\n".join(trace.problems)


def assert_same(a: Trace, b: Trace) -> None:
    """Two traces say the same, wherever they were read from."""
    np.testing.assert_array_equal(a.events, b.events)
    for name in ("processes", "manifest", "threads", "strings", "loaders", "problems"):
        assert getattr(a, name) == getattr(b, name), name


# --- What a trace says ------------------------------------------------------------------------------------------------
def test_a_small_trace(small: Path) -> None:
    trace = read_trace(small)
    assert (trace.problems, trace.events.dtype) == ([], ROW)
    assert trace.events[["time", "pid", "process"]].tolist() == [
        (10, 5, 0), (30, 5, 0), (50, 7, 1), (60, 7, 1), (90, 5, 0),
    ]  # fmt: skip
    assert [p.name for p in trace.processes] == ["loader (pid 5)", "worker 0 (pid 7)"]
    assert [(p.ppid, p.events, p.lost, p.file) for p in trace.processes] == [(1, 3, 0, "5-1"), (5, 2, 0, "7-2")]
    assert trace.threads == {(5, 5): "MainThread"}
    assert trace.loaders == {1: {"batch_size": 4}}
    assert repr(trace) == f"<Trace {small}: 1 loader, 1 worker; 5 events in {duration(80)}>"


def test_reprs(small: Path) -> None:
    trace = read_trace(small)
    assert repr(trace.processes[1]) == "<Process worker 0 (pid 7): 2 events>"
    trace.processes[1].note = "the oldest 3 events overwritten"
    assert repr(trace.processes[1]).endswith("; the oldest 3 events overwritten>")
    assert repr(trace.order).startswith("<Order of 5 events in 2 processes: ")
    assert repr(Batches(trace.events)) == "<Batches: 0 sent, 0 yielded>"
    assert repr(ev.EVENTS[ev.FETCH[1]]) == "<Event 23 fetch end: outcome:Outcome cpu:ns cpu_wait:ns>"
    assert repr(ev.EVENTS[ev.SHUTDOWN[0]]) == "<Event 90 shutdown begin>"
    assert repr(ev.EVENTS[ev.TASK_ERROR]) == "<Event 84 task_error instant: position index text:string>"


def test_text_of_an_event(small: Path) -> None:
    trace = read_trace(small)
    failed, yielded = trace.select("task_error")[0], trace.select("yield")[0]
    assert (trace.text(failed), trace.text(yielded)) == ("KeyError: 'x'", "")
    trace.strings.clear()
    assert trace.text(failed) == ""


def test_select(small: Path) -> None:
    trace = read_trace(small)
    assert trace.select("worker_start")["code"].tolist() == list(ev.WORKER_START)
    assert trace.select("worker_start", ev.Phase.END)["x"].tolist() == [7]
    assert len(trace.select("fetch", ev.Phase.END)) == 0
    with pytest.raises(KeyError, match="no event is called 'fetsch'"):
        trace.select("fetsch")
    with pytest.raises(KeyError, match=r"no event is called 'yield' with phase Phase\.BEGIN"):
        trace.select("yield", ev.Phase.BEGIN)


def test_equal_times_keep_the_order_of_emission(tmp_path: Path) -> None:
    for pid in (3, 2):
        write_process(tmp_path, [{"code": ev.YIELD, "time": n % 3 + 1} for n in range(3000)], pid=pid, start_ns=pid)
    events = read_trace(tmp_path).events
    assert events[["time", "process", "seq"]].tolist() == sorted(events[["time", "process", "seq"]].tolist())
    assert events["pid"].tolist() == ([2] * 1000 + [3] * 1000) * 3


@pytest.mark.parametrize(
    ("codes", "left"),
    [
        ([*ev.GC, *ev.GC, *ev.NEXT, *ev.GC], [*ev.NEXT, *ev.GC]),
        ([*ev.GC, ev.GC[0], *ev.NEXT, ev.GC[1]], [ev.GC[0], *ev.NEXT, ev.GC[1]]),
        ([*ev.GC, ev.GC[0], *ev.GC, ev.GC[1], *ev.NEXT], [*ev.NEXT]),
        ([*ev.NEXT, *ev.GC], [*ev.NEXT, *ev.GC]),
        ([*ev.GC], [*ev.GC]),
    ],
    ids=["before", "one that lasts", "within another", "after", "alone"],
)
def test_the_pauses_of_imports_are_left_out(tmp_path: Path, codes: list[int], left: list[int]) -> None:
    trace = trace_of(tmp_path / "t", [{"code": code} for code in codes])
    assert trace.events["code"].tolist() == left
    assert trace.start == len(codes) - len(left) + 1


def test_each_process_imports_for_itself(tmp_path: Path) -> None:
    """As ranks whose traces are joined do; a worker's first pause is its own."""
    write_process(tmp_path, [{"code": code} for code in ev.NEXT], pid=2, start_ns=1)
    for pid, role in ((3, "loader"), (4, "worker")):
        rows = [{"code": code, "time": 9 + n} for n, code in enumerate((*ev.GC, ev.YIELD))]
        write_process(tmp_path, rows, pid=pid, start_ns=pid, lines=[{"kind": "process", "role": role}])
    events = read_trace(tmp_path).events
    assert sorted(events[["pid", "code"]].tolist()) == [
        *((2, code) for code in ev.NEXT), (3, ev.YIELD), (4, ev.YIELD), *((4, code) for code in ev.GC)
    ]  # fmt: skip


def test_to_pandas(small: Path) -> None:
    frame = read_trace(small).to_pandas()
    assert list(frame.columns) == [
        "name", "phase", "track", "time_ns", "pid", "tid", "process", "role", "task", "worker", "loader",
        "count", "outcome", "yielded", "event_pid", "position", "index", "text",
    ]  # fmt: skip
    start, failed, yielded = frame.iloc[1], frame.iloc[3], frame.iloc[4]
    assert (start["name"], start["phase"], start["track"], start["role"]) == ("worker_start", "E", "loader", "loader")
    assert (start["pid"], start["event_pid"]) == (5, 7)
    assert (failed["position"], failed["index"], failed["text"]) == (2, 5, "KeyError: 'x'")
    assert (yielded["outcome"], yielded["yielded"], yielded["time_ns"], yielded["task"]) == ("ERROR", 1, 90, 0)
    assert frame["event_pid"].isna().tolist() == [True, False, True, True, True]
    assert frame["text"].isna().tolist() == [True, True, True, False, True]
    assert frame.groupby("name", observed=True).size()["worker_start"] == 2


def test_to_pandas_without_pandas(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="to_pandas needs pandas: pip install pandas"):
        read_trace(small).to_pandas()


@pytest.mark.live
@settings(max_examples=5)
@given(st.lists(st.text(), max_size=50))
def test_texts_come_back(texts: list[str]) -> None:
    """What no encoding can write is escaped."""
    with tempfile.TemporaryDirectory() as directory:
        pen = Recorder(TraceConfig(str(create(Path(directory) / "t"))))
        numbers = [pen.string(text) for text in [*texts, "lone \ud800 surrogate"]]
        pen.close()
        strings = read_trace(Path(directory) / "t").strings
    assert [strings[0, n] for n in numbers] == [*texts, r"lone \ud800 surrogate"]


def test_names_of_processes_and_threads_are_escaped(tmp_path: Path) -> None:
    """They stand in every message and picture."""
    thread = {"kind": "thread", "tid": 7, "name": "copies\x1b[2J"}
    trace = trace_of(tmp_path, [{"code": ev.PIN_START}], role="loader\x1b[2J", lines=[thread])
    assert trace.processes[0].name == "loader\\x1b[2J (pid 100)"
    assert trace.threads[100, 7] == "copies\\x1b[2J"


# --- Packing ----------------------------------------------------------------------------------------------------------
def test_packed_and_read_again(small: Path, tmp_path: Path) -> None:
    trace = read_trace(small)
    path = trace.pack(tmp_path / "out")
    assert path == tmp_path / "out.minidl"
    assert path.read_bytes()[4:8] == bytes(4)  # gzip's time stamp
    assert_same(read_trace(path), trace)
    assert trace.pack(tmp_path / "again.minidl").read_bytes() == path.read_bytes()
    assert read_trace(path).pack(tmp_path / "third").read_bytes() == path.read_bytes()
    with tarfile.open(path) as tar:
        assert tar.getnames() == [MANIFEST, "5-1.meta.jsonl", "7-2.meta.jsonl", "5-1.events", "7-2.events"]
        assert tar.getmember("5-1.events").size == HEADER_BYTES + 3 * 64
        tar.extractall(tmp_path / "unpacked", filter="data")
    assert_same(read_trace(tmp_path / "unpacked"), trace)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"again.minidl", "out.minidl", "small", "third.minidl", "unpacked"}


@pytest.mark.live
def test_packing_keeps_a_ring_and_unknown_codes(tmp_path: Path) -> None:
    events = [(ev.YIELD, 1, n) for n in range(3000)] + [(999, 1, 0)]
    trace = recorded(tmp_path / "t", events, ring_bytes=1024 * 64)
    assert (len(trace), trace.processes[0].lost) == (1023, 3001 - 1024)
    assert words(trace).endswith("1 event with code 999, which this minidl does not know, left out")
    assert_same(read_trace(trace.pack(tmp_path / "t.minidl")), trace)


def test_packing_that_fails_leaves_what_was_there(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out.minidl").write_text("older")
    monkeypatch.setattr(Trace, "_rows_of", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        read_trace(small).pack(tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.minidl", "small"]
    assert (tmp_path / "out.minidl").read_text() == "older"


WRONG_NAMES = [
    "../5-1.events", "/tmp/5-1.events", "a/5-1.meta.jsonl", "..", "5-1.events.py", "x\n5-1.events",
    "99999999999-1.events",
]  # fmt: skip


def test_names_in_a_packed_file_are_never_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = [(tarfile.TarInfo(name), b"evil") for name in WRONG_NAMES]
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.XHDTYPE):
        member = tarfile.TarInfo("9-9.events")
        member.type, member.linkname = kind, "/etc/passwd"
        members.append((member, b""))
    path = tmp_path / "evil.minidl"
    with tarfile.open(path, "w:gz", format=tarfile.USTAR_FORMAT) as tar:
        for member, data in [(tarfile.TarInfo(MANIFEST), b'{"format": 1}'), *members]:
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    monkeypatch.chdir(tmp_path)
    trace = read_trace(path)
    assert (len(trace), trace.processes) == (0, [])
    assert len(trace.problems) == len(members) + 1  # and that no process is left
    assert [problem for problem in trace.problems if "was left out" not in problem] == trace.problems[-1:]
    assert os.listdir(tmp_path) == ["evil.minidl"]


def test_a_size_that_leads_backwards_is_no_endless_loop(tmp_path: Path) -> None:
    block = bytearray(tarfile.TarInfo(MANIFEST).tobuf(tarfile.USTAR_FORMAT))
    block[124:136] = b"\xff" * 10 + b"\xfe\x00"  # base-256: -512
    block[148:156] = b"%06o\0 " % (256 + sum(block[:148]) + sum(block[156:]))
    path = tmp_path / "loop.minidl"
    path.write_bytes(gzip.compress(bytes(block) * 2))
    assert "cannot be read" in words(read_trace(path))


# --- What is missing or damaged ---------------------------------------------------------------------------------------
@given(data=st.data())
def test_events_file_cut_anywhere(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = write_process(Path(directory), [{"code": ev.YIELD, "x": n} for n in range(1, 21)], slots=32)
        edges = [0, 1, 8, STATE_AT, HEADER_BYTES, HEADER_BYTES + 20 * 64, HEADER_BYTES + 32 * 64]
        size = data.draw(st.sampled_from(edges) | st.integers(0, edges[-1]))
        os.truncate(path, size)
        trace = read_trace(directory)
    slots = (size - HEADER_BYTES) // 64
    assert trace.events["x"].tolist() == list(range(1, min(20, max(0, slots)) + 1))
    assert bool(trace.problems) == (size < edges[-1])
    if HEADER_BYTES <= size < edges[-1]:
        assert words(trace) == f"other (pid 100): its events file is truncated: {slots} of 32 slots are there"


@pytest.mark.parametrize("ring", [0, 512])
def test_a_torn_record_is_no_record(tmp_path: Path, ring: int) -> None:
    """A record of which only some bytes arrived before a kill; the slot had been emptied first."""
    last = 0x0303 if ring else 0x0203  # more than one byte of the number is not zero
    events = [{"code": ev.YIELD, "x": n, "seq": n} for n in range(max(1, last + 1 - (ring or last)), last + 1)]
    path = write_process(tmp_path, events, ring=ring)
    whole = path.read_bytes()
    at = HEADER_BYTES + (last - 1) % (ring or last) * 64
    for written in range(64):
        path.write_bytes(whole[: at + written] + bytes(64 - written) + whole[at + 64 :])
        found = read_trace(tmp_path).events["x"].tolist()
        assert found == [e["x"] for e in events[: len(found)]]
        assert len(found) == len(events) - (written < 58), written  # from byte 58 on, this record is zero anyway
    for emptied in (16, 32, 48):  # the record was there, and its slot was being emptied for the ring's next
        path.write_bytes(whole[:at] + bytes(emptied) + whole[at + emptied :])
        trace = read_trace(tmp_path)
        assert len(trace) == len(events) - 1
        assert "code 0" not in words(trace)


@functools.cache
def noise() -> tuple[bytes, npt.NDArray[np.int64], int]:
    """A packed trace that hardly compresses, so that a cut falls among its events; their x; where they start."""
    with tempfile.TemporaryDirectory() as directory:
        values = np.random.default_rng(0).integers(0, 1 << 62, 500)
        trace = trace_of(Path(directory) / "t", [{"code": ev.YIELD, "x": x} for x in values.tolist()])
        path = trace.pack(Path(directory) / "t")
        with tarfile.open(path) as tar:
            return path.read_bytes(), values, tar.getmember("100-1.events").offset_data + HEADER_BYTES


@given(data=st.data())
def test_packed_file_cut_anywhere(data: st.DataObject) -> None:
    whole, values, start = noise()
    size = data.draw(st.integers(0, len(whole) - 1))
    unzipped = len(zlib.decompressobj(wbits=31).decompress(whole[:size]))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "cut.minidl"
        path.write_bytes(whole[:size])
        if unzipped < tarfile.BLOCKSIZE:
            with pytest.raises(TraceError):
                read_trace(path)
            return
        trace = read_trace(path)
    assert trace.events["x"].tolist() == values[: max(0, unzipped - start) // 64].tolist()
    manifest = {"format": 1, "versions": {"minidl": "test"}}
    assert trace.manifest == (manifest if unzipped >= tarfile.BLOCKSIZE + len(json.dumps(manifest)) else {})
    assert trace.problems[0] == "cut.minidl: truncated: what is there was read"


@pytest.mark.live
def test_packed_file_with_flipped_bits(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    trace = recorded(tmp_path / "t", [(ev.YIELD, 1, n, 0, int(rng.integers(1 << 60))) for n in range(2000)])
    path = trace.pack(tmp_path / "t")
    content = bytearray(path.read_bytes())
    content[-4000] ^= 0xFF
    path.write_bytes(content)
    damaged = read_trace(path)
    assert "damaged" in words(damaged)
    assert damaged.manifest == trace.manifest


@given(data=st.data())
def test_no_damage_fails_in_another_way(data: st.DataObject) -> None:
    """Any bytes anywhere: a trace, perhaps with problems, or a TraceError."""
    lines = [{"kind": "string", "id": 1, "text": "a"}, {"kind": "thread", "tid": 3, "name": "n"}]
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "t"
        write_process(target, [{"code": code, "x": 100} for code in ev.EVENTS], lines=lines, role="loader", ring=128)
        packed = data.draw(st.booleans())
        if packed:
            victim = target = read_trace(target).pack(target)
        else:
            victim = data.draw(st.sampled_from(sorted(target.iterdir())))
        content = bytearray(gzip.decompress(victim.read_bytes()) if packed else victim.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, min(len(content) - 1, 5000)))
            piece = data.draw(st.binary(min_size=1, max_size=9))
            content[at : at + len(piece)] = piece
        victim.write_bytes(gzip.compress(content) if packed else content)
        try:
            trace = read_trace(target)
        except TraceError:
            return
        trace.spans()
        trace.to_pandas()
        repr(trace)
        again = read_trace(trace.pack(Path(directory) / "again"))
        assert np.array_equal(again.events, trace.events)


HOSTILE_LINES = [
    b"{", b"[]", b"null", b"3", b'"kind"', b"{}", b'{"kind": []}', b'{"kind": {}, "a": 1}', b'{"kind": "thread"}',
    b'{"kind": "thread", "tid": [], "name": 1}', b'{"kind": "string", "id": Infinity, "text": 1}',
    b'{"kind": "string", "id": NaN, "text": 1}', b'{"kind": "process", "worker": "two"}', b'{"kind": "loader"}',
    b'{"kind": "process", "pid": 1e999, "ppid": 1e999}', b'{"kind": "refused"}', b"\xff\xfe", b"[" * 100_000,
    b'{"kind": "string", "id": ' + b"9" * 5000 + b', "text": "a"}',
]  # fmt: skip


@pytest.mark.parametrize("line", HOSTILE_LINES, ids=lambda line: line[:50].decode("latin-1"))
def test_a_side_file_may_hold_anything(small: Path, line: bytes) -> None:
    with (small / "5-1.meta.jsonl").open("ab") as side:
        side.write(line + b'\n{"kind": "thread", "tid": 6, "name": "still read"}\n{"cut off')
    trace = read_trace(small)
    assert (len(trace), trace.threads[5, 6]) == (5, "still read")
    assert words(trace) == "pid 5: 2 lines of 5-1.meta.jsonl cannot be read"


def test_unknown_kinds_of_lines_are_kept(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [], lines=[{"kind": "weather", "sun": True, "process": "mine"}])
    assert trace.described("weather") == [{"kind": "weather", "sun": True, "process": 0}]
    assert trace.problems == []


def test_unknown_codes_are_left_out_and_said(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [{"code": code} for code in (ev.YIELD, 9999, 9998, 9999, ev.YIELD)])
    assert trace.events["time"].tolist() == [1, 5]
    assert trace.problems == [
        "1 event with code 9998, which this minidl does not know, left out",
        "2 events with code 9999, which this minidl does not know, left out",
    ]
    assert repr(trace).endswith("2 events in 4 ns, 2 problems>")


@pytest.mark.live
def test_a_trace_of_no_process(tmp_path: Path) -> None:
    trace = read_trace(create(tmp_path / "t"))
    assert (len(trace), len(trace.spans()), trace.problems) == (0, 0, ["no process has recorded anything"])
    assert len(trace.to_pandas()) == 0
    assert repr(trace) == f"<Trace {tmp_path / 't'}: no processes; 0 events in 0 ns, 1 problem>"


def test_a_worker_that_left_nothing_is_missed(small: Path) -> None:
    for path in small.glob("7-2.*"):
        path.unlink()
    assert words(read_trace(small)) == "the worker with pid 7 was started and has recorded nothing"


def test_a_worker_that_could_not_be_started_is_not_missed(tmp_path: Path) -> None:
    """Its start ended without a process: the pid in the event is 0."""
    trace = trace_of(tmp_path, [{"code": code, "worker": 0} for code in ev.WORKER_START])
    assert "was started" not in words(trace)


@pytest.mark.parametrize(
    ("missing", "problem"),
    [
        (MANIFEST, "there is no manifest.json: the run's versions, machine and command are unknown"),
        ("5-1.events", "pid 5: 5-1.events is missing, with all its events"),
        ("5-1.meta.jsonl", "pid 5: 5-1.meta.jsonl is missing: role, thread names and texts are unknown"),
    ],
)
def test_each_missing_file_is_named(small: Path, missing: str, problem: str) -> None:
    (small / missing).unlink()
    trace = read_trace(small)
    assert (trace.problems, len(trace.processes)) == ([problem], 2)
    assert trace.events["pid"].tolist().count(7) == 2


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "[" * 100_000], ids=lambda text: text[:5])
def test_a_broken_manifest_is_said(small: Path, content: str) -> None:
    (small / MANIFEST).write_text(content)
    trace = read_trace(small)
    assert (len(trace), trace.manifest) == (5, {})
    assert trace.problems == ["manifest.json cannot be read: the run's versions, machine and command are unknown"]


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        ({"format": 2, "versions": {"minidl": "7.1\x1b"}}, r"7\.1\\x1b, format 2; .* reads up to format 1: read it"),
        ({"format": "new", "versions": 3}, r"\?, format 'new';"),
    ],
)
def test_a_later_format_is_refused_with_a_remedy(small: Path, manifest: dict[str, object], said: str) -> None:
    (small / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(TraceError, match=f"written by minidl {said}"):
        read_trace(small)


def test_one_file_of_a_later_format_is_left_out(small: Path) -> None:
    path = small / "5-1.events"
    path.write_bytes(Header(5, 1, 1, version=2).page() + path.read_bytes()[HEADER_BYTES:])
    trace = read_trace(small)
    assert words(trace) == "pid 5: 5-1.events has format 2, but this minidl reads format 1: read it with a later minidl"
    assert trace.events["pid"].tolist() == [7, 7]


def test_lost_events_and_their_reason(small: Path) -> None:
    path = small / "5-1.events"
    content = path.read_bytes()
    header = Header.read(content)._replace(slots=3, lost_events=12, lost_lines=1, errno=1 << 40)
    path.write_bytes(header.page() + content[HEADER_BYTES:])
    trace = read_trace(small)
    assert trace.problems == [
        "loader (pid 5): 12 events could not be recorded: reason unknown",
        "loader (pid 5): 1 description could not be recorded: reason unknown",
    ]
    assert (trace.processes[0].lost, trace.processes[0].note.count(";")) == (12, 1)


def test_a_hole_is_said(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [{"code": ev.YIELD, "seq": n} for n in (1, 2, 4, 7)], role="other")
    assert trace.events["seq"].tolist() == [1, 2, 4, 7]
    assert words(trace) == (
        "other (pid 100): 3 events missing: begun and never completed, damaged, or changed while being read"
    )


def test_what_is_left_of_an_older_round_of_the_ring_does_not_count(tmp_path: Path) -> None:
    """A thread that was stopped between its number and its record leaves the slot's former record in place."""
    rows = [{"code": ev.YIELD, "seq": n} for n in (*range(513, 1025), 2) if n != 514]
    trace = trace_of(tmp_path, rows, ring=512)
    assert trace.events["seq"].tolist() == [513, *range(515, 1025)]
    assert "1 event missing: begun and never completed" in words(trace)


# --- What is no trace -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere", "nowhere: No such file or directory: give the directory or the packed file"),
        ("empty", "empty is an empty directory, without a trace: record one with minidl run --trace .*empty"),
        ("other", "other is not a trace: it has no manifest.json, only photo.jpg"),
        ("ranks", r"ranks is not a trace but holds 3: give one of them: rank0, rank1, kept\.minidl"),
    ],
)
def test_paths_that_are_no_trace(tmp_path: Path, small: Path, name: str, said: str) -> None:
    for directory in ("empty", "other"):
        (tmp_path / directory).mkdir()
    (tmp_path / "other" / "photo.jpg").touch()
    for rank in ("rank0", "rank1"):
        shutil.copytree(small, tmp_path / "ranks" / rank)
    read_trace(small).pack(tmp_path / "ranks" / "kept")
    with pytest.raises(TraceError, match=said):
        read_trace(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "an empty file"),
        (b'{"traceEvents": []}', r"a file that starts with b'\{\"traceEvents\": "),
        (b"\x80\x04\x95", "a file that starts with b'"),
        (b"\x1f", "a file that starts with"),
        (b"\x1f\x8b", "is a gzip file without a minidl trace"),
        (gzip.compress(b"hello" * 1000, mtime=0), "is a gzip file without a minidl trace"),
        (gzip.compress(b"\0" * 5000, mtime=0), "is a gzip file without a minidl trace"),
        (b"\x1f\x8bgarbage that is no gzip", "is a gzip file without a minidl trace"),
    ],
)
def test_foreign_files(tmp_path: Path, content: bytes, found: str) -> None:
    path = tmp_path / "thing.minidl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=found):
        read_trace(path)


@pytest.mark.parametrize("name", ["5-1.events", "5-1.meta.jsonl", MANIFEST])
def test_one_file_of_a_trace_points_to_its_directory(small: Path, name: str) -> None:
    with pytest.raises(TraceError, match=f"{name} is one file of a trace: give its directory, {small}$"):
        read_trace(small / name)


# --- While it is written ----------------------------------------------------------------------------------------------
WRITTEN = 150_000


@pytest.fixture(params=[None, 2048 * 64], ids=["full", "ring"])
def writer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A trace that a child process is writing WRITTEN events to, as fast as it can."""
    place = create(tmp_path / "live")
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            pen = Recorder(TraceConfig(str(place), ring_bytes=request.param))
            for n in range(WRITTEN):
                pen.emit(ev.YIELD, n % 60_000, n, n % 1000, n * 7, n, n)
                if n == 10:
                    os.write(tell, b"!")
        finally:
            signal.pause()
    os.read(ready, 1)
    yield place
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(ready)
    os.close(tell)


@pytest.mark.live
def test_reading_while_a_process_writes(writer: Path) -> None:
    newest = 0
    while newest < WRITTEN:
        trace = read_trace(writer)
        n = trace.events["seq"].astype(np.int64) - 1
        written = {"loader": n % 60_000, "task": n, "worker": n % 1000, "x": n * 7, "y": n, "z": n}
        for column, value in written.items():
            assert (trace.events[column] == value).all(), column
        assert (np.diff(trace.events["time"]) >= 0).all()
        assert "truncated" not in words(trace)
        seen = int(trace.events["seq"].max(initial=newest))  # a whole ring may be rewritten between two readings
        assert seen >= newest
        newest = seen


def test_a_slot_that_is_rewritten_while_it_is_read_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read first may be half the old record and half the new; a second reading tells."""
    path = write_process(tmp_path, [{"code": ev.YIELD, "seq": n, "x": n} for n in range(1, 9)], ring=8)
    real = Path.read_bytes

    def read_while_it_is_written(self: Path) -> bytes:
        data = real(self)
        if self == path:
            with path.open("r+b") as file:
                file.seek(HEADER_BYTES + 2 * 64)
                file.write(PACK.pack(9, ev.YIELD, 1, 100, -1, -1, 11, 0, 0, 11))
        return data

    monkeypatch.setattr(Path, "read_bytes", read_while_it_is_written)
    trace = read_trace(tmp_path)
    assert trace.events["x"].tolist() == [1, 2, 4, 5, 6, 7, 8]
    assert words(trace).endswith("1 event missing: begun and never completed, damaged, or changed while being read")
    assert read_trace(tmp_path).events["x"].tolist() == [4, 5, 6, 7, 8, 11]


def test_a_file_that_grows_or_shrinks_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_process(tmp_path, [{"code": ev.YIELD, "x": n} for n in range(1, 9)])
    whole, real = path.read_bytes(), Path.read_bytes
    five, eight = HEADER_BYTES + 64 * 5, HEADER_BYTES + 64 * 8
    sizes = iter([five, eight, eight, five, 9000, 0, 0, 9000])
    monkeypatch.setattr(Path, "read_bytes", lambda self: whole[: next(sizes)] if self == path else real(self))
    assert [len(read_trace(tmp_path)) for _ in range(4)] == [5, 5, 8, 0]
