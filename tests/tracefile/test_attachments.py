"""Files of other recorders: what is written is read, and whatever is broken is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import made_trace
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minidl.tracefile import attachments
from minidl.tracefile.attachments import SLICE, Attachment, Name, SliceTrack, arrows, chunk, closing, description, note
from minidl.tracefile.reader import read_trace

FIRST = description("functions", "viztracer", "1.1.1", 71, "its own", 300, worker=2, loader=1, begun_ns=10**9)
TRACKS = [SliceTrack(71, 71, "MainThread"), SliceTrack(71, 99, "Feeder \u202e")]
NAMES = [Name("</script>", "a.py:3"), Name("g")]
NAME = "functions-71-5.attachment.jsonl"


ROWS = np.array([(2 * 10**9, 3 * 10**9, 0, 0), (2 * 10**9 + 1, 2 * 10**9 + 1, 1, 1), (10**9, 3 * 10**9, 0, 1)], SLICE)
WHOLE = FIRST + chunk(TRACKS, NAMES, ROWS, {1: {"why": "\ud800"}}) + closing()


def test_what_is_written_is_read() -> None:
    stream = SliceTrack(0, 7, "stream 7", "GPU 0")
    more = chunk([TRACKS[1], stream], [Name("h"), NAMES[0]], np.array([(5, 6, 1, 0), (7, 8, 0, 1)], SLICE))
    first = chunk(TRACKS, NAMES, ROWS, {1: {"n": 1}})
    one = Attachment(NAME, FIRST + first + more + arrows([(0, 3), (9, 0)]) + closing())
    assert one.slices.tracks == [*TRACKS, stream]
    assert one.slices.names == [*NAMES, Name("h")]
    assert one.slices.rows.tolist() == [*ROWS.tolist(), (5, 6, 2, 2), (7, 8, 1, 0)]
    assert one.slices.args == {1: {"n": 1}}
    assert one.slices.arrows == [(0, 3)], "an arrow to a slice that is not there is left out"
    assert one.problems == []
    assert one.line == "functions of worker 2 (pid 71) (viztracer 1.1.1): 5 slices"
    assert repr(one) == f"<Attachment {NAME}: functions of worker 2 (pid 71)>"


def test_notes_are_problems() -> None:
    one = Attachment(NAME, FIRST + note("some are lost\x1b[2J") + closing())
    assert one.problems == [f"functions of worker 2 (pid 71) ({NAME}): some are lost\\x1b[2J"]
    assert one.line.endswith("0 slices; some are lost\\x1b[2J")


@given(st.integers(0, len(WHOLE)))
@example(len(WHOLE) - len(closing()))
def test_a_file_that_is_cut_short_is_read_as_far_as_it_goes(length: int) -> None:
    one = Attachment(NAME, WHOLE[:length])
    there = length >= len(WHOLE) - len(closing()) - 1
    assert len(one.slices.rows) == (3 if there and one.about else 0)
    assert (one.problems == []) == (length >= len(WHOLE) - 1)
    assert one.line


SENSELESS: list[dict[str, Any]] = [
    {"since": -1}, {"since": 1 << 62}, {"since": True}, {"begin": [1, 2]}, {"begin": [0, 0, -1]}, {"begin": "012"},
    {"begin": [0, 0, 0.5]}, {"begin": [0, 0, 1 << 70]}, {"begin": [[0], [0], [0]]}, {"duration": [0, 0, -1]},
    {"track": [0, 1, 2]}, {"name": [0, 0, "x"]}, {"tracks": [[1, 2, "three"], [0, 0, "", ""]]}, {"tracks": []},
    {"names": [["a", "b", "c"], ["d", "e"]]}, {"args": {"3": {}}}, {"args": {"-1": {}}}, {"args": {"0": 5}},
    {"args": []},
]  # fmt: skip
"""Changes of a line of slices."""

NO_SLICES = [b"\xff\xfe", b"[]", b'{"end": false, "begin": []}', b'{"what": 1}', b'{"arrows": [[1]]}', b"[" * 100_000]


@pytest.mark.parametrize("line", [*NO_SLICES, *SENSELESS], ids=lambda line: str(line)[:60])
def test_a_line_that_makes_no_sense_ends_the_reading(line: bytes | dict[str, Any]) -> None:
    good = chunk(TRACKS, NAMES, ROWS)
    wrong = line if isinstance(line, bytes) else json.dumps(json.loads(good) | line).encode()
    one = Attachment(NAME, FIRST + good + wrong + b"\n" + good + closing())
    assert len(one.slices.rows) == 3
    assert f"functions of worker 2 (pid 71) ({NAME}): line 3 is damaged or cut: the rest was not read" in one.problems


@pytest.mark.parametrize(
    ("first", "problem"),
    [
        (b"", "has no description in its first line"),
        (b"x" * 100_000, "has no description in its first line"),
        (b"[]\n", "has no description in its first line"),
        (b'{"attachment": "1"}\n', "has no description in its first line"),
        (b'{"attachment": 2}\n', "has format 2, but this minidl reads 1"),
    ],
)
def test_what_has_no_description_is_left_out(first: bytes, problem: str) -> None:
    one = Attachment(NAME, first + chunk(TRACKS, NAMES, ROWS) + closing())
    assert len(one.slices.rows) == 0
    assert problem in one.problems[0]
    assert problem in one.line


def test_args_stay_valid_json_whatever_they_are() -> None:
    odd = b'{"a":NaN,"b":-Infinity,"c":1e999,"d":' + b"[" * 500 + b"]" * 500 + b',"e":{"f":1},"g":0.5,"h":null}'
    first = FIRST.replace(b'"begun_ns"', b'"odd":[NaN],"begun_ns"')
    slices = chunk(TRACKS, NAMES, ROWS).replace(b'"args":{}', b'"args":{"0":' + odd + b"}")
    one = Attachment(NAME, first + slices + closing())
    assert one.slices.args[0] == {
        "a": "NaN", "b": "-Infinity", "c": "1e999", "d": "[" * 500 + "]" * 500, "e": '{"f": 1}', "g": 0.5, "h": None,
    }  # fmt: skip
    assert (one.about["odd"], one.problems) == ('["NaN"]', [])


def made(path: Path, **files: bytes) -> Path:
    made_trace.write(path, made_trace.Run(**made_trace.HEALTHY))
    for name, data in files.items():
        (path / f"{name.replace('_', '-')}{attachments.SUFFIX}").write_bytes(data)
    return path


def test_a_trace_carries_its_attachments_also_when_it_is_packed(tmp_path: Path) -> None:
    path = made(tmp_path / "trace", functions_71_5=WHOLE, profiler_1=WHOLE[:-5], no_name=WHOLE)
    trace = read_trace(path)
    assert [one.name for one in trace.attachments] == [NAME, "profiler-1.attachment.jsonl"]
    again = read_trace(trace.pack(tmp_path / "packed"))
    assert [(one.name, one.data()) for one in again.attachments] == [(o.name, o.data()) for o in trace.attachments]
    assert again.problems == trace.problems == []
    assert again.attachments[0].slices.rows.tolist() == ROWS.tolist()
    assert again.pack(tmp_path / "twice").read_bytes() == trace.pack(tmp_path / "packed").read_bytes()


def test_of_too_many_bytes_a_packed_trace_keeps_the_small_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachments, "MOST_PACKED", len(WHOLE) + 10)
    path = made(tmp_path / "trace", functions_1=WHOLE + WHOLE, functions_2=WHOLE, functions_3=WHOLE)
    first, second, third = read_trace(read_trace(path).pack(tmp_path / "packed")).attachments
    assert (len(first.slices.rows), len(second.slices.rows), len(third.slices.rows)) == (0, 3, 0)
    assert first.about == second.about
    assert "left out when the trace was packed: it has " in first.problems[0]
    assert len(first.problems) == len(third.problems) == 1


def test_attachments_make_no_trace_and_break_none(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(WHOLE)
    assert read_trace(tmp_path).problems[0].startswith("there is no manifest.json")
    trace = read_trace(made(tmp_path / "trace", functions_71_5=WHOLE))
    (tmp_path / "trace" / NAME).unlink()
    (problem,) = trace.attachments[0].problems
    assert problem == f"functions of worker 2 (pid 71) ({NAME}): cannot be read: No such file or directory"
    assert read_trace(trace.pack(tmp_path / "packed")).attachments == []
