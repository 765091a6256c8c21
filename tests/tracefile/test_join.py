"""Several ranks: their traces joined into one that every view reads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_trace
import numpy as np
import pytest
from made_trace import Run
from oracle_trace import rows_of, write_process

from minidl import cli
from minidl.check import examine
from minidl.tracefile import attachments, reader
from minidl.tracefile import events as ev
from minidl.tracefile.format import MANIFEST, SIDE_SUFFIX, TraceError
from minidl.tracefile.join import FIRST_NEW_PID, Clock, join
from minidl.tracefile.reader import Trace, read_trace
from minidl.views import page
from minidl.views.chrome import to_chrome
from minidl.views.export import Export
from minidl.views.scene import scene_of
from minidl.views.summary import summary
from minidl.views.text import render

pytestmark = pytest.mark.timeout(240)  # the first test runs all of rank_runs

HOUR = 3_600_000_000_000


def test_between_readings_the_offset_is_interpolated_and_outside_it_holds() -> None:
    clock = Clock("process group", 5, (1_000, 3_000), (HOUR, HOUR + 20))
    assert clock.shifted(np.array([0, 1_000, 1_100, 2_000, 3_000, 9_000])).tolist() == [
        HOUR, HOUR + 1_000, HOUR + 1_101, HOUR + 2_010, HOUR + 3_020, HOUR + 9_020,
    ]  # fmt: skip
    assert clock.drift_ppm == pytest.approx(10_000)
    assert Clock("process group", 5, (1_000,), (7,)).drift_ppm is None


def test_times_far_from_0_stay_exact_to_the_nanosecond() -> None:
    """A machine that has been up for ten years, and another one for as long less."""
    up = 10 * 365 * 24 * HOUR
    clock = Clock("process group", 0, (up, up + HOUR), (1 - up, 1 - up))
    assert clock.shifted(np.array([up, up + 1, up + 12_345_678_901])).tolist() == [1, 2, 12_345_678_902]


# --- Joining real traces ----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def joined(rank_traces: Path, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    path, lacks = join([rank_traces / "four ranks"], tmp_path_factory.mktemp("joined") / "trace")
    assert lacks == []
    return read_trace(path)


def members(rank_traces: Path) -> list[Trace]:
    return [read_trace(rank_traces / "four ranks" / f"rank{rank}") for rank in range(4)]


@pytest.mark.live
def test_a_joined_trace_has_every_event_at_its_time(rank_traces: Path, joined: Trace) -> None:
    """One machine: not a nanosecond is changed, and nothing but the loaders' numbers; no rank is changed."""
    apart = members(rank_traces)
    assert joined.problems == []
    assert len(joined) == sum(map(len, apart))
    kept = [name for name in joined.events.dtype.names or () if name not in ("loader", "process")]
    for rank, trace in enumerate(apart):
        assert (trace.problems, "ranks" in trace.manifest) == ([], False)
        mine = joined.events[of_rank(joined, rank)]
        for name in kept:
            assert (mine[name] == trace.events[name]).all(), name
        shift = mine["loader"].astype(int) - trace.events["loader"]
        assert set(shift[trace.events["loader"] > 0].tolist()) == {2 * rank}  # two epochs: two iterators a rank
    told = joined.manifest["ranks"]
    assert [one["rank"] for one in told] == [0, 1, 2, 3]
    assert {(one["clock"], one["offset_ns"], one["error_ns"]) for one in told} == {("same machine", 0, 0)}
    assert (joined.manifest["world_size"], "rank" in joined.manifest) == (4, False)
    assert {facts["rank"] for facts in joined.loaders.values()} == {0, 1, 2, 3}
    assert examine(joined).violations == []


@pytest.mark.live
def test_every_view_has_a_group_of_lanes_for_each_rank(joined: Trace) -> None:
    drawn, export = scene_of(joined), Export(joined)
    titles = [f"rank {rank} · iterators {2 * rank + 1}, {2 * rank + 2}" for rank in range(4)]
    assert [slot.title for slot in drawn.slots] == page.describe(drawn, "")["slots"] == titles
    assert [lane.slot for lane in drawn.lanes if lane.title == "worker 0"] == [0, 1, 2, 3]
    assert [(lane.name, export.rank(lane.process)) for lane in export.lanes if lane.role < 3] == [
        (what, rank)
        for rank in range(4)
        for what in ("consumer", "loader", *(f"worker 0 of iterator {2 * rank + number}" for number in (1, 2)))
    ]
    text, table = render(joined), summary(joined).text()
    for rank in range(4):
        assert f"rank {rank} · iterators" in text
        assert f"iterator {2 * rank + 1}, epoch 0 of rank {rank}:" in table
    assert {e["pid"] for e in to_chrome(joined)["traceEvents"]} == {process.pid for process in joined.processes}


@pytest.mark.live
def test_packed_or_not_it_is_the_same(rank_traces: Path, joined: Trace, tmp_path: Path) -> None:
    packed = [trace.pack(tmp_path / f"rank{rank}") for rank, trace in enumerate(members(rank_traces))]
    other = read_trace(join(packed, tmp_path / "joined.minidl")[0])
    assert other.path.is_file()
    assert (other.events == joined.events).all()
    assert [p.rank for p in other.processes] == [p.rank for p in joined.processes]


# --- Machines of their own --------------------------------------------------------------------------------------------
Maker = Callable[..., Path]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Maker:
    """Writes an imagined rank's trace, its clock `ahead` ns ahead of the truth. What is None is not in the manifest."""

    def make(number: int, ahead: int = 0, name: str = "", lines: tuple[dict[str, Any], ...] = (), **facts: Any) -> Path:
        start = made_trace.START
        with monkeypatch.context() as patch:
            patch.setattr(made_trace, "START", start + ahead)
            path = made_trace.write(tmp_path / (name or f"rank{number}"), Run(batches=4))
        manifest = json.loads((path / MANIFEST).read_text())
        own = {"rank": number, "world_size": 2, "host": f"host{number}", "boot_id": f"boot {number}"} | facts
        (path / MANIFEST).write_text(json.dumps(manifest | {k: v for k, v in own.items() if v is not None}))
        if lines:
            side = next(path.glob("1000-*" + SIDE_SUFFIX))
            side.write_text(side.read_text() + "".join(json.dumps(line) + "\n" for line in lines))
        return path

    return make


def read(offset: int, error: int = 1_000, rank: int = 1, at: tuple[int, ...] = (0, HOUR)) -> tuple[dict[str, Any], ...]:
    """Lines of a side file: readings at these ns of the rank's clock after the run's begin."""
    times = [made_trace.START - offset + ns for ns in at]
    facts = {"kind": "clock", "rank": rank, "offset_ns": offset, "error_ns": error, "reference": 0}
    return tuple(facts | {"at_ns": time} for time in times)


def of_rank(trace: Trace, rank: int) -> Any:
    """Which events are a rank's."""
    return np.isin(trace.events["process"], [n for n, process in enumerate(trace.processes) if process.rank == rank])


def times(trace: Trace, rank: int) -> list[int]:
    return trace.events["time"][of_rank(trace, rank)].tolist()


def test_a_skewed_machines_events_come_to_their_true_times(made: Maker, tmp_path: Path) -> None:
    """The same imagined run on two machines, one clock an hour ahead: joined, all happens at the same time."""
    one, other = made(0), made(1, ahead=HOUR, lines=read(-HOUR))
    path, lacks = join([one, other], tmp_path / "joined")
    trace = read_trace(path)
    assert (lacks, trace.problems) == ([], [])
    assert times(trace, 0) == times(trace, 1) == read_trace(one).events["time"].tolist()
    told = trace.manifest["ranks"][1]
    assert (told["clock"], told["offset_ns"], told["error_ns"], told["drift_ppm"]) == ("process group", -HOUR, 1_000, 0)


def test_a_clock_that_drifts_is_corrected_between_the_readings(made: Maker, tmp_path: Path) -> None:
    """100 us further ahead at the end of 10 ms than at their beginning."""
    start = made_trace.START
    lines = read(0, at=(0,)) + read(-100_000, at=(9_900_000,))
    trace = read_trace(join([made(0), made(1, lines=lines)], tmp_path / "joined")[0])
    true, was = np.array(times(trace, 1)), np.array(times(trace, 0))
    assert (true == was - np.clip(np.rint((was - start) / 100), 0, 100_000)).all()


def test_pids_that_both_machines_used_are_told_apart(made: Maker, tmp_path: Path) -> None:
    """Both have a loader 1000 and workers 1100 and 1101, and events that name them."""
    trace = read_trace(join([made(0), made(1, lines=read(0))], tmp_path / "joined")[0])
    pids = [sorted(process.pid for process in trace.processes if process.rank == rank) for rank in (0, 1)]
    assert pids == [[1000, 1100, 1101], [FIRST_NEW_PID + n for n in range(3)]]
    assert trace.manifest["ranks"][1]["pid"] == FIRST_NEW_PID
    for name, column in (("worker_start", "x"), ("worker_gone", "x"), ("worker_ready", "x"), ("worker_ready", "y")):
        rows = trace.select(name)
        named = [set(rows[column][np.isin(rows["pid"], pids[rank])].tolist()) - {0} for rank in (0, 1)]
        assert named[0]
        assert named[0] <= set(pids[0])
        assert named[1] <= set(pids[1])
    assert {p.ppid for p in trace.processes if p.rank == 1 and p.worker >= 0} == {FIRST_NEW_PID}
    assert [slot.title for slot in scene_of(trace).slots] == ["rank 0 · iterator 1", "rank 1 · iterator 2"]
    assert len(trace.threads) == 2 * len(read_trace(tmp_path / "rank0").threads)


def test_two_ranks_of_one_machine_share_the_better_reading(made: Maker, tmp_path: Path) -> None:
    """They have one clock; what they read of it differs by the error. Between them, nothing moves."""
    paths = [made(0, world_size=3)]
    for rank, offset, error in ((1, -HOUR + 900, 1_000), (2, -HOUR + 2, 10)):
        lines = read(offset, error, rank)
        paths.append(made(rank, ahead=HOUR, boot_id="the other", world_size=3, lines=lines))
    trace = read_trace(join(paths, tmp_path / "joined")[0])
    assert times(trace, 1) == times(trace, 2) == [time + 2 for time in times(trace, 0)]
    assert [one["error_ns"] for one in trace.manifest["ranks"]] == [0, 10, 10]


def test_rank_0_may_be_missing(made: Maker, tmp_path: Path) -> None:
    """Then the lowest rank's clock is the reference, and both errors add up."""
    clocks = {1: HOUR, 2: 3 * HOUR}
    paths = [made(rank, ahead=by, world_size=3, lines=read(-by, rank=rank)) for rank, by in clocks.items()]
    path, lacks = join(paths, tmp_path / "joined")
    trace = read_trace(path)
    assert lacks == trace.problems == ["missing ranks, of 3: 0"]
    assert times(trace, 1) == times(trace, 2)
    assert trace.manifest["ranks"][1]["error_ns"] == 2_000


def test_an_unaligned_clock_is_said(made: Maker, tmp_path: Path) -> None:
    """By the time of day where the traces tell it, else not at all; once read, its drift is not known."""
    one = made(0, clock={"realtime_minus_monotonic_ns": 10**18})
    other = made(1, ahead=HOUR, clock={"realtime_minus_monotonic_ns": 10**18 - HOUR})
    (said,) = join([one, other], tmp_path / "a")[1]
    assert "the clock of rank 1 (host1) was never compared with rank 0's: its times rely on the time of day" in said
    trace = read_trace(tmp_path / "a")
    assert (trace.problems, trace.manifest["ranks"][1]["error_ns"]) == ([said], None)
    assert times(trace, 0) == times(trace, 1)
    never = made(1, ahead=HOUR, name="rank1-b")
    once = made(1, ahead=HOUR, name="rank1-c", lines=read(-HOUR, at=(0,)))
    assert [join([one, other], tmp_path / name)[1] for name, other in (("b", never), ("c", once))] == [
        ["the clock of rank 1 (host1) cannot be compared with rank 0's: its times are not aligned"],
        ["the clock of rank 1 (host1) was compared only once: its drift is unknown"],
    ]


def test_moments_that_events_name_move_too(tmp_path: Path) -> None:
    """The device's mark is bracketed by the host's clock, whose time is in the event."""
    for rank in (0, 1):
        ahead, directory = rank * HOUR, tmp_path / "in" / f"rank{rank}"
        rows = rows_of("code time x y", (ev.CLOCK_CALIBRATION, 500 + ahead, 490 + ahead, 7))
        write_process(directory, rows, lines=read(-ahead, rank=rank, at=(0,)))
        (directory / MANIFEST).write_text(json.dumps({"format": 1, "rank": rank, "boot_id": str(rank)}))
    trace = read_trace(join([tmp_path / "in"], tmp_path / "joined")[0])
    assert trace.events[["time", "x", "y"]].tolist() == [(500, 490, 7)] * 2


def test_attachments_move_and_are_renamed(made: Maker, tmp_path: Path) -> None:
    start = made_trace.START
    paths = [made(0), made(1, ahead=HOUR, lines=read(-HOUR))]
    for path, ahead in zip(paths, (0, HOUR), strict=True):
        rows = np.array([(start + ahead + 5, start + ahead + 9, 0, 0)], attachments.SLICE)
        about = attachments.description("profiler", "p", "1", 1000, "c", 0, loader=1)
        slices = attachments.chunk([attachments.SliceTrack(1000, 1000, "main")], [attachments.Name("op")], rows)
        (path / "profiler-1.attachment.jsonl").write_bytes(about + slices + b"nonsense\n" + attachments.closing())
    trace = read_trace(join(paths, tmp_path / "joined")[0])
    assert [one.name for one in trace.attachments] == ["profiler-1.attachment.jsonl", "profiler-2.attachment.jsonl"]
    for one, pid, loader in zip(trace.attachments, (1000, FIRST_NEW_PID), (1, 2), strict=True):
        assert one.slices.rows[["begin", "end"]].tolist() == [(start + 5, start + 9)]
        assert (one.slices.tracks[0].pid, one.about["pid"], one.about["loader"]) == (pid, pid, loader)


def test_a_damaged_line_or_file_is_taken_along(made: Maker, tmp_path: Path) -> None:
    one, other = made(0), made(1, boot_id="boot 0")
    side = next(other.glob("1000-*" + SIDE_SUFFIX))
    side.write_bytes(side.read_bytes() + b"{nonsense\n")
    next(other.glob("1101-*.events")).write_bytes(b"not of ours" + bytes(5000))
    trace = read_trace(join([one, other], tmp_path / "joined")[0])
    said = " ".join(trace.problems)
    assert "1 line of" in said
    assert "is not an events file" in said


# --- What cannot be joined --------------------------------------------------------------------------------------------
def test_what_does_not_go_together_is_refused(made: Maker, tmp_path: Path) -> None:
    one, other = made(0, boot_id="b"), made(1, boot_id="b")
    out = tmp_path / "joined"
    cases = {
        "are both of rank 1": [one, other, made(1, name="rank1.2", boot_id="b")],
        "is a single trace: give the traces of all ranks": [one],
        "come from runs with different numbers of ranks: ": [one, made(1, name="four", boot_id="b", world_size=4)],
        "min before .*later begins: they come from diff": [one, made(1, name="later", boot_id="b", ahead=HOUR)],
        "does not name its rank": [one, made(1, name="nameless", boot_id="b", rank=None)],
    }
    for message, paths in cases.items():
        with pytest.raises(TraceError, match=message):
            join(paths, out)
        assert not out.exists()
    join([one, other], out)
    with pytest.raises(TraceError, match="is there already: give another place with -o"):
        join([one, other], out)
    with pytest.raises(TraceError, match="contains several ranks already"):
        join([out, one], tmp_path / "more")
    with pytest.raises(TraceError, match="nowhere: No such file or directory"):
        join([one, tmp_path / "nowhere"], tmp_path / "more")
    assert not list(tmp_path.glob(".*"))


def test_traces_of_different_formats_are_refused(made: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one format so far; a later reader reads two."""
    monkeypatch.setattr(reader, "FORMAT_VERSION", 2)
    with pytest.raises(TraceError, match="have different formats: record with one minidl"):
        join([made(0), made(1, format=2)], tmp_path / "joined")


def test_a_rank_that_began_when_another_had_ended_is_said(made: Maker, tmp_path: Path) -> None:
    _, (said,) = join([made(0, boot_id="b"), made(1, boot_id="b", ahead=10**9)], tmp_path / "joined")
    assert re.search(r"rank0 ends 996 ms before .*rank1 begins: they may come from different runs", said)


def test_a_rank_may_be_told_by_the_directory_or_the_process_group(made: Maker, tmp_path: Path) -> None:
    by_name = made(0, rank=None, boot_id="b")
    by_group = made(1, name="other", rank=None, boot_id="b", lines=read(0, at=(0,)))
    trace = read_trace(join([by_name, by_group], tmp_path / "j")[0])
    assert sorted(process.rank for process in trace.processes) == [0, 0, 0, 1, 1, 1]


def test_different_commands_are_said(made: Maker, tmp_path: Path) -> None:
    _, lacks = join([made(0, boot_id="b"), made(1, boot_id="b", command=["another.py"])], tmp_path / "joined")
    assert lacks == ["the ranks have different commands: they may come from different runs"]


@pytest.mark.live
def test_the_command(rank_traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, four = str(tmp_path / "joined"), rank_traces / "four ranks"
    assert cli.main(["merge", str(rank_traces / "correct"), "-o", out]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert cli.main(["merge", str(four / "rank0"), str(four / "rank2"), "-o", out + "2"]) == 0
    assert "missing ranks, of 4: 1, 3" in capsys.readouterr().err
    assert cli.main(["merge", str(rank_traces / "correct")]) == 2
    assert "say with -o where the joined trace of the ranks should go" in capsys.readouterr().err
    for command in ("summary", "ledger", "check", "timeline"):
        assert cli.main([command, out]) == 0
    assert cli.main(["diff", out, out]) == 0
    assert cli.main(["export", out, "-o", str(tmp_path / "x.json")]) == 0
