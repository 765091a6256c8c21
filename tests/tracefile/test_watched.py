"""What a watchdog writes is read again; a damaged or a foreign line takes nothing else along."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import made_trace
import pytest

from minidl.tracefile import watched
from minidl.tracefile.attachments import Attachment
from minidl.tracefile.events import Call
from minidl.tracefile.files import Files
from minidl.tracefile.join import Clock, Member
from minidl.tracefile.reader import read_trace
from minidl.tracefile.watched import Ended, Faults, Other, Sample, Stall, ThreadTime, Vitals

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
    (look,) = found.looks
    assert (look.stall, look.number, look.at, look.evidence) == (STALL, 1, 6_000, {"version": 99})
    assert (found.hang_after_s, found.complete, found.damaged, found.until) == (2.5, True, 0, 9_500)
    assert found.cpu_ms == 41
    assert found.seen_alive() == {71: 5_000}, "a zombie is not alive"


def test_what_older_traces_lack_is_unknown() -> None:
    old = json.loads(LINES[1])
    del old["machine"], old["others"]
    old["processes"] = {"71": old["processes"]["71"][:7]}
    found = read(LINES[0] + json.dumps(old).encode() + b"\n")
    assert (found.samples, found.damaged) == ([ONE], 0)
    assert (found.machine_busy(0, 9_000), found.faults_of(71, 0, 9_000), found.growth(71)) == (None, None, None)
    assert (found.cpu_of(71, 0, 9_000), found.threads_of(71, 0, 9_000), found.others(0, 9_000)) == (None, [], [])


S = 10**9
MANY = [
    Sample(
        n * S, {71: Vitals("R", 500 * n, 0, 0, 0, 0, "", 900 + 100 * n, 0 if n else -1, 10 * n, n,
                           (ThreadTime(8, 400, 100), ThreadTime(9, 100, 0)) if n else ())},
        5, 0, 6, 4, 1000 + 3000 * n, 100 * n, 2000 * (n % 2 == 0 and n > 0), (Other(5, "sshd", 1000),) * (n == 4),
    )
    for n in range(5)
]  # fmt: skip
"""A sample a second: half a CPU, three of four are busy; every other time processes beside the run are looked at."""


def test_readers_ask_for_a_time_as_far_as_samples_lie_around_it() -> None:
    about = [LINES[0], *map(watched.sample, MANY)]
    found = watched.read([Attachment("watch-1.attachment.jsonl", b"".join(about))], {(71, 8): "reader"})
    assert found.samples == MANY
    for begin, end in ((0, 4 * S), (S // 2, 3 * S), (-S, 9 * S)):
        assert found.cpu_of(71, begin, end) == pytest.approx(0.5)
        assert found.machine_busy(begin, end) == pytest.approx((3.0, 0.1, 4))
    threads = found.threads_of(71, S + 1, 3 * S)
    assert [use[:2] for use in threads] == [(8, "reader"), (9, "")]
    assert [use[2:] for use in threads] == [pytest.approx((0.4, 0.1)), pytest.approx((0.1, 0.0))]
    assert found.faults_of(71, S, 3 * S) == Faults(20, 2)
    assert found.growth(71) == pytest.approx((100.0, 400, 4.0))
    assert found.growth(71, S, 2 * S) is None, "two samples say nothing of a slope"
    assert found.others(0, 4 * S) == [(5, "sshd", pytest.approx(0.25))]
    assert found.others(0, S) == [], "they were looked at, and none was busy"
    for begin, end in ((9 * S, 10 * S), (2 * S, 2 * S)):
        assert (found.cpu_of(71, begin, end), found.machine_busy(begin, end)) == (None, None)
        assert (found.threads_of(71, begin, end), found.others(begin, end)) == ([], [])
    assert found.cpu_of(70, 0, 4 * S) is None


def test_machines_are_not_mixed() -> None:
    other = [replace(one, processes={1071: one.processes[71]}, busy_ms=one.busy_ms // 3, watch=1) for one in MANY]
    files = [LINES[0] + b"".join(map(watched.sample, samples)) for samples in (MANY, other)]
    found = watched.read(Attachment(f"watch-{n}.attachment.jsonl", data) for n, data in enumerate(files))
    assert found.machine_busy(0, 4 * S) == found.machine_busy(0, 4 * S, 71) == pytest.approx((3.0, 0.1, 4))
    assert found.machine_busy(0, 4 * S, 1071) == pytest.approx((1.0, 0.1, 4), abs=0.01)


def test_a_damaged_line_is_left_out_alone() -> None:
    found = read(LINES[0] + LINES[1][:-30] + b"\n" + LINES[4] + b'{"sample": -4, "processes": {}}\n[1]\n' + LINES[5])
    assert (found.samples, found.ended, found.damaged, found.complete) == ([TWO], [Ended(71, 9_500, -9)], 3, False)


def test_a_number_that_no_array_holds_is_damage() -> None:
    line, far = json.loads(LINES[1]), 2**70
    (vitals,) = line["processes"].values()
    numbers = [n for n, value in enumerate(vitals) if isinstance(value, int)]
    processes = [[*vitals[:n], far, *vitals[n + 1 :]] for n in numbers] + [[*vitals[:11], [[far, 1, 1]]]]
    changes: list[dict[str, Any]] = [{"processes": {"71": one}} for one in processes]
    changes += [{"shm_free": far}, {"oom_kills": -far}, {"machine": [far, 1, 1, 1, 1]}, {"machine": [1]}]
    changes += [{"others": [[1, "name", far]]}, {"others": [[1]]}]
    found = read(LINES[0] + b"".join(json.dumps(line | change).encode() + b"\n" for change in [*changes, {}]))
    assert (len(found.samples), found.damaged) == (1, len(changes))


def test_no_bytes_raise() -> None:
    whole, dice = b"".join(LINES), random.Random(3)
    for _ in range(400):
        torn = bytearray(whole[: dice.randrange(len(whole))])
        for _ in range(dice.randrange(1, 6)):
            torn[dice.randrange(len(torn)) if torn else 0 : 1] = bytes([dice.randrange(256)])
        read(bytes(torn))


def test_a_trace_keeps_it_apart_from_other_attachments_and_packs_it(tmp_path: Path) -> None:
    assert not made_trace.made(tmp_path / "trace", batches=2).watched, "an older trace has none"
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
