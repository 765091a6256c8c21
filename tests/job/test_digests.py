"""Digests: the same tables as from the events, made again when the trace changes, and never trusted."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_jobs import MadeJob, copied
from made_trace import HUNG, Run, write

from minidl.hang import life
from minidl.hang.life import FRESH
from minidl.job import digests
from minidl.job.digests import JobRecord, load, make, place_of, read_job, trace_of
from minidl.job.report import JobReport
from minidl.job.step_table import STEP, RankTable
from minidl.process_stat import boot_id
from minidl.tracefile.format import MANIFEST, TraceError
from minidl.tracefile.process import ProcessLife
from minidl.tracefile.reader import read_trace

TRACES = Path(__file__).parent.parent.parent / "traces"


def read(place: Path) -> JobRecord:
    found = read_job([place])
    assert found is not None
    return found


def same(one: RankTable, other: RankTable) -> bool:
    return one.facts == other.facts and bool(np.array_equal(one.steps, other.steps))


@pytest.mark.heavy
def test_a_digest_gives_what_the_events_give_and_is_read_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = copied(tmp_path / "job", "workers-4", "starved-gpu")
    first = read(place)
    assert [table.facts.rank for table in first.ranks] == [0, 1]
    monkeypatch.setattr(digests, "make", lambda path, *, always: "not to be read")
    again = read(place)
    assert all(map(same, first.ranks, again.ranks))


def test_a_trace_of_several_ranks_has_their_tables_in_one_digest(tmp_path: Path) -> None:
    path = copied(tmp_path, "ranks-4-one-gpu") / "rank-0.minidl"
    made, kept = make(path), load(path)
    assert kept is not None
    assert [table.facts.rank for table in kept.ranks] == [0, 1, 2, 3]
    assert all(map(same, made.ranks, kept.ranks))


@pytest.mark.heavy
def test_a_digest_that_is_older_than_its_trace_or_damaged_is_made_again(tmp_path: Path) -> None:
    path = copied(tmp_path, "workers-2") / "rank-0.minidl"
    made, kept = make(path), place_of(path)
    old = kept.read_bytes()
    os.utime(path, (1, 1))
    assert load(path) is None
    assert all(map(same, made.ranks, make(path).ranks))
    assert load(path) is not None
    assert kept.stat().st_mode & 0o777 == 0o600
    whole = kept.read_bytes()
    for at in range(0, len(whole), 97):  # each kind of damage is an error of another kind
        kept.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        load(path)
    for hurt in (whole[: len(whole) // 2], b"", b"x" * 100, whole.replace(b"about", b"abuot"), old):
        kept.write_bytes(hurt)
        assert load(path) is None
    kept.unlink()
    os.mkfifo(kept)
    assert load(path) is None, "it would wait for a writer"


@pytest.mark.parametrize("steps", [0, 1, 50])
def test_a_digest_keeps_any_number_of_steps(tmp_path: Path, steps: int) -> None:
    table = MadeJob(2, steps).record().ranks[1]
    digests._save(tmp_path, digests._written([], [table]))
    assert (kept := load(tmp_path)) is not None
    assert same(*kept.ranks, table)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "wrong",
    [None, {"rank": "1"}, {"last": [1, 2, True, 4]}, {"last": ["1", 2, True]}, {"ended": 1 << 63}]
    + [{"parts": {"forward": "long"}}, {"problem": 1}, {"other": 1}],
    ids=str,
)
def test_facts_of_other_kinds_are_not_taken(tmp_path: Path, wrong: dict[str, object] | None) -> None:
    path = copied(tmp_path, "workers-2") / "rank-0.minidl"
    make(path)
    arrays = dict(np.load(place_of(path)))
    about = json.loads(arrays["about"].tobytes())
    said = json.dumps(about | {"ranks": [] if wrong is None else [about["ranks"][0] | wrong]}).encode()
    np.savez(place_of(path), **arrays | {"about": np.frombuffer(said, np.uint8)})
    assert load(path) is None


def test_a_digest_that_is_larger_than_allowed_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = copied(tmp_path, "workers-2") / "rank-0.minidl"
    monkeypatch.setattr(digests, "LARGEST", 100)
    make(path)
    assert load(path) is None


def test_a_rank_without_an_end_is_kept_when_its_files_are_at_rest(tmp_path: Path) -> None:
    path = copied(tmp_path, "worker-sigkilled") / "rank-0.minidl"
    if not make(path).ranks[0].facts.over:
        assert load(path) is None
    os.utime(path, (1e9, 1e9))
    make(path)
    assert load(path) is not None


def says(place: Path, **facts: object) -> None:
    """Change what a rank's manifest says."""
    (place / MANIFEST).write_text(json.dumps(json.loads((place / MANIFEST).read_text()) | facts))


def test_a_digest_that_calls_a_dead_rank_running_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = write(tmp_path / "rank-0", Run(**HUNG))
    here = {"boot_id": boot_id(), "host": socket.gethostname()}
    says(place, **here, pid=os.getpid(), monotonic_ns=time.monotonic_ns())
    assert make(place, always=True).ranks[0].facts.running
    assert load(place) is not None
    monkeypatch.setattr(life, "life", lambda pid, moment: ProcessLife.GONE)
    assert load(place) is load(place, behind=150) is None
    assert not make(place, always=True).ranks[0].facts.running
    assert load(place) is not None
    for file, at in ((place / MANIFEST, 400), (place_of(place), 500)):
        os.utime(file, (time.time() - at,) * 2)
    assert load(place, behind=150) is None  # it is old


def test_a_rank_of_another_machine_runs_while_its_files_change(tmp_path: Path) -> None:
    place = write(tmp_path / "rank-0", Run(**HUNG))
    last = int(read_trace(place).events["time"][-1])
    says(place, clock={"realtime_minus_monotonic_ns": time.time_ns() - last - 1_000_000_000})
    for age, runs in ((0, True), (FRESH + 10, False)):
        for file in place.iterdir():
            os.utime(file, (time.time() - age,) * 2)
        assert make(place).ranks[0].facts.running == runs
        assert JobReport(read(tmp_path)).facts[0].running == runs
    says(place, host=socket.gethostname())  # of this machine before it was restarted
    assert not make(place).ranks[0].facts.running


def test_ranks_that_cannot_be_read_are_said_and_none_at_all_is_an_error(tmp_path: Path) -> None:
    place = copied(tmp_path / "job", "workers-2", "workers-4")
    (place / "rank-1.minidl").write_bytes(b"nothing")
    (place / "rank-2").mkdir()
    found = read(place)
    assert [table.facts.rank for table in found.ranks] == [0]
    assert len(found.problems) == 2
    (place / "rank-0.minidl").unlink()
    with pytest.raises(TraceError, match="none of its ranks can be read"):
        read(place)


@pytest.mark.heavy
def test_a_rank_of_a_job_and_of_a_joined_trace(tmp_path: Path) -> None:
    place = copied(tmp_path, "workers-2", "workers-4")
    assert trace_of([place], 1).path.name == "rank-1.minidl"
    with pytest.raises(TraceError, match="has no rank 2: it has 0, 1"):
        trace_of([place], 2)
    alone = trace_of([TRACES / "ranks-4-one-gpu.minidl"], 2)
    assert {params["rank"] for params in alone.loaders.values()} == {2}
    assert 0 < len(alone) < len(read_trace(TRACES / "ranks-4-one-gpu.minidl")) / 2


@pytest.mark.heavy
def test_a_rank_is_chosen_by_the_number_that_the_report_gives_it(tmp_path: Path) -> None:
    place = copied(tmp_path, "workers-2", "ranks-4-one-gpu")
    unnamed = [(place / f"rank-{at}.minidl").rename(place / f"{at}.minidl") for at in range(2)]
    assert [table.facts.rank for table in (read_job(unnamed) or read(place)).ranks] == [0, 1, 2, 3, 4]
    assert trace_of(unnamed, 4).path == unnamed[0]
    assert {params["rank"] for params in trace_of(unnamed, 0).loaders.values()} == {0}
    with pytest.raises(TraceError, match="does not name its rank"):
        trace_of(unnamed[:1], 0)
    assert trace_of(unnamed[:1], 0, or_alone=True).path == unnamed[0]


@pytest.mark.heavy
def test_of_a_long_job_the_same_steps_of_all_ranks_are_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = copied(tmp_path, *["workers-2"] * 4)
    whole = read(place)
    monkeypatch.setattr(digests, "MOST_CELLS", 40)
    found = read(place)
    assert (whole.kept, found.kept) == (1, 4)
    kept = [table.steps["number"].tolist() for table in found.ranks]
    assert kept == [[*range(8)]] * 4
    assert "of the steps, one in 4 was judged, evenly spread" in JobReport(found).lacks


@pytest.mark.live
def test_many_ranks_are_read_by_several_processes_which_do_not_run_the_program_again(tmp_path: Path) -> None:
    place = copied(tmp_path / "job", *["workers-2"] * 9)
    (place / "rank-4.minidl").write_bytes(b"nothing")
    (tmp_path / "program.py").write_text(
        "import pathlib, sys\nfrom minidl.job.digests import read_job\nprint('begins')\n"
        "found = read_job([pathlib.Path(sys.argv[1])])\n"
        "print([table.facts.rank for table in found.ranks], len(found.problems))\n"
    )
    command = [sys.executable, str(tmp_path / "program.py"), str(place)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "begins\n[0, 1, 2, 3, 5, 6, 7, 8] 1\n"
    assert not done.stderr


@pytest.mark.live
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv, by which root may not read everything")
def test_a_rank_that_this_user_may_not_read_is_said(tmp_path: Path) -> None:
    (copied(tmp_path, "workers-2") / "rank-1").mkdir(mode=0)
    capabilities = "-dac_override,-dac_read_search"
    limited = ["setpriv", f"--bounding-set={capabilities}", f"--inh-caps={capabilities}"] * (os.geteuid() == 0)
    command = [*limited, sys.executable, "-m", "minidl", "summary", str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    assert f"rank not read: {tmp_path}/rank-1: Permission denied" in said


def test_a_digest_has_at_most_ten_bytes_a_step_and_rounds_what_does_not_fit() -> None:
    dice = np.random.default_rng(7)
    steps = np.zeros(30_000, STEP)
    steps["number"] = np.arange(len(steps))
    for name in ("own", "fetch", "cpu", "slowest_took"):
        steps[name] = dice.lognormal(10, 0.3, len(steps))
    steps["waits"][:, 0] = dice.lognormal(9, 1, len(steps))
    steps["slowest"] = dice.integers(0, 1 << 20, len(steps))
    table = MadeJob(2, 1).record().ranks[1]
    data, (kept,) = digests._fitting([], [replace(table, steps=steps)])
    assert len(data) <= 10 * len(steps) + 60_000 < len(digests._written([], [replace(table, steps=steps)]))
    took = np.median(steps["own"] + steps["waits"][:, 0])
    assert np.abs(kept.steps["own"] - steps["own"].astype(float)).max() < took / 50
    assert kept.steps["slowest"][np.argmax(steps["fetch"])] == steps["slowest"][np.argmax(steps["fetch"])]
