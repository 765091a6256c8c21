"""What a watchdog writes is read again; a damaged or a foreign line takes nothing else along."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import made_trace

from minidl.tracefile import watched
from minidl.tracefile.attachments import Attachment
from minidl.tracefile.events import Call
from minidl.tracefile.files import Files
from minidl.tracefile.join import Clock, Member
from minidl.tracefile.reader import read_trace
from minidl.tracefile.watched import Ended, Sample, Stall, Vitals

ONE = Sample(5_000, {71: Vitals("S", 40, 2_000, 10, 8, 3, "pipe_read")}, 1 << 20, 2)
TWO = Sample(9_000, {71: Vitals("Z", 40, -1, -1, 0, 1)}, 1 << 20, 2)
STALL = Stall(3, Call.NEXT, 1_000, 70)
LINES = [
    watched.description("0.1", 70, 2.5),
    watched.sample(ONE),
    watched.look(STALL, 1, 6_000, {"version": 99}),
    watched.said("iterator 3 hangs"),
    watched.sample(TWO),
    watched.ended(Ended(71, 9_500, -9)),
    watched.over(41),
]


def read(data: bytes) -> watched.Watched:
    return watched.read([Attachment("watch-1.attachment.jsonl", data)])


def test_all_that_is_written_is_read() -> None:
    found = read(b"".join(LINES))
    assert (found.samples, found.ended, found.said) == ([ONE, TWO], [Ended(71, 9_500, -9)], ["iterator 3 hangs"])
    assert [(one.stall, one.number, one.at, one.evidence) for one in found.looks] == [
        (STALL, 1, 6_000, {"version": 99})
    ]
    assert (found.hang_after_s, found.complete, found.damaged, found.until) == (2.5, True, 0, 9_500)
    assert found.cpu_ms == 41
    assert found.seen_alive() == {71: 5_000}, "a zombie is not alive"


def test_a_damaged_line_is_left_out_alone() -> None:
    data = LINES[0] + LINES[1][:-30] + b"\n" + LINES[4] + b'{"sample": -4, "processes": {}}\n[1]\n' + LINES[5]
    found = read(data)
    assert (found.samples, found.ended, found.damaged, found.complete) == ([TWO], [Ended(71, 9_500, -9)], 3, False)


def test_a_number_that_no_array_holds_is_damage() -> None:
    line = json.loads(LINES[1])
    vitals = next(iter(line["processes"].values()))
    wrong = [line | {"shm_free": 2**70}, line | {"oom_kills": -(2**70)}]
    wrong += [line | {"processes": {"71": [*vitals[:n], 2**70, *vitals[n + 1 :]]}} for n in range(1, 6)]
    found = read(LINES[0] + b"".join(json.dumps(one).encode() + b"\n" for one in (*wrong, line)))
    assert (len(found.samples), found.damaged) == (1, len(wrong))


def test_no_bytes_raise() -> None:
    whole, dice = b"".join(LINES), random.Random(3)
    for _ in range(400):
        torn = bytearray(whole[: dice.randrange(len(whole))])
        for _ in range(dice.randrange(1, 6)):
            torn[dice.randrange(len(torn)) if torn else 0 : 1] = bytes([dice.randrange(256)])
        read(bytes(torn))


def test_a_trace_keeps_it_apart_from_other_attachments_and_packs_it(tmp_path: Path) -> None:
    made_trace.write(tmp_path / "trace", made_trace.Run(2))
    assert not read_trace(tmp_path / "trace").watched, "an older trace has none"
    (tmp_path / "trace" / "watch-70-1.attachment.jsonl").write_bytes(b"".join(LINES))
    trace = read_trace(tmp_path / "trace")
    assert (trace.attachments, trace.watched.samples) == ([], [ONE, TWO])
    again = read_trace(trace.pack(tmp_path / "packed"))
    assert (again.attachments, again.watched.samples, again.problems) == ([], [ONE, TWO], [])


def test_a_line_of_a_joined_trace_has_its_numbers_and_times() -> None:
    no_trace: Any = None
    rank = Member(Path(), Files(), no_trace, 1, Clock("", 0, offset=(100,)), {70: 71, 71: 72}, {3: 13})
    found = read(b"".join(json.dumps(rank.moved(json.loads(line))).encode() + b"\n" for line in LINES))
    assert [sample.at for sample in found.samples] == [5_100, 9_100]
    assert list(found.samples[0].processes) == [72]
    assert found.ended == [Ended(72, 9_600, -9)]
    assert (found.looks[0].stall, found.looks[0].at) == (Stall(13, Call.NEXT, 1_100, 71), 6_100)
