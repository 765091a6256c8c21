"""Two runs compared: on imagined runs, whose every nanosecond is known, and on live ones, for their bytes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_trace import LOADER_PID, NEVER, Run, write
from oracle_trace import write_process

import minidl
from minidl import cli
from minidl.speed.diff import Change, Comparison, Diff, IncomparableError, diff
from minidl.speed.intervals import FEWEST
from minidl.speed.ledger import BATCH, COPY, Ledger
from minidl.speed.side import Loop, Side
from minidl.speed.stages import Figures
from minidl.tracefile import events as ev
from minidl.tracefile.format import TraceError
from minidl.tracefile.reader import Trace, read_trace

MS = 1_000_000
PARAMS = {"dataset": "Photos", "dataset_kind": "map", "batch_size": 4, "num_workers": 2, "in_order": True}


def steady(task: int) -> int:
    return 4 * MS


def twice(task: int) -> int:
    return 8 * MS


def made(path: Path, cost: Callable[[int], int] = steady, *, params: dict[str, Any] | None = None, **run: Any) -> Trace:
    write(path, Run(**{"batches": 60, "cost": cost} | run))
    if params is not None:
        describe(path, LOADER_PID, 1, params)
    return read_trace(path)


def describe(path: Path, pid: int, loader: int, params: dict[str, Any]) -> None:
    (side,) = path.glob(f"{pid}-*.meta.jsonl")
    with side.open("a") as file:
        file.write(json.dumps({"kind": "loader", "loader": loader, **params}) + "\n")


# --- The story --------------------------------------------------------------------------------------------------------
SLOW = {"cost": twice}


@pytest.mark.parametrize(
    ("a", "b", "told"),
    [
        (
            {},
            SLOW,
            r"B is 1\.99 times as slow: 1,013 instead of 2,017 samples/s \(95% interval 1\.84 to 2\.15\)\n"
            r"waiting for samples: 2\.60 ms instead of 1\.13 ms a batch, 75% of the difference\n"
            r"among the stages, sample changed most: on average it takes 1\.50 ms instead of 749 µs, 2 times as long "
            r"\(240 and 240 measured, in 2 of 2 workers\)\n",
        ),
        (SLOW, {}, r"B is 1\.99 times as fast: 2,017 instead of 1,013 samples/s \(95% interval 1\.84 to 2\.15\)\n"),
        (SLOW, SLOW, r"no difference is certain: 1,013 instead of 1,013 samples/s \(95% interval: B is 0\.9.* to 1\."),
        (
            SLOW,
            SLOW | {"workers": 4},
            r"B is 2\.06 times as fast: .*\nwaiting for samples: 1\.09 ms instead of 2\.60 ms",
        ),
        (
            {"batch_size": 8, "cost": twice},
            SLOW,
            r"B is 2 times as slow: .*\nwaiting for samples: 651 µs instead of 326 µs a sample, 66% of .*\n"
            r"among the stages, sample changed most: on average it takes 1\.50 ms instead of 749 µs",
        ),
        ({"batch_size": 8, "cost": twice}, {}, r"no difference is certain: 2,017 instead of 2,026 samples/s"),
        (
            {"step": 15 * MS},
            {"step": 5 * MS},
            r"B is 2\.9\d times as fast: .*\nthe loop's own steps: 5\.0\d ms instead of 15\.0 ms a batch, all of .*\n"
            r"among the stages, consumer changed most: on average it takes 5\.00 ms instead of 15\.0 ms",
        ),
        ({"batches": 17}, SLOW | {"batches": 13}, r"B is 1\.\d+ times as slow: .* \(95% interval .*\nwaiting for sam"),
        (
            {"batches": 9},
            SLOW | {"batches": 4},
            r"B is .* times as slow: .* \(too few batches for an interval\).*\nwaiting ",
        ),
        (
            {"epochs": 3, "batches": 6},
            {"epochs": 3, "batches": 6, "cost": twice},
            r"B is .* as slow: .* \(95% interval ",
        ),
    ],
)
def test_the_first_lines_tell_the_story(tmp_path: Path, a: dict[str, Any], b: dict[str, Any], told: str) -> None:
    found = diff(made(tmp_path / "a", **a), made(tmp_path / "b", **b)).text()
    assert re.match(told, found), found[:600]


def test_ranks_are_added_up_and_the_one_that_changed_is_named(tmp_path: Path) -> None:
    """Rank 1 waits for samples, and rank 0 for rank 1, in its own steps."""
    slow = [Run(40, workers=1, step=16 * MS), Run(40, workers=1, cost=lambda task: 16 * MS, loader=2, first_pid=3000)]
    fast = [Run(40, workers=1, step=2 * MS), Run(40, workers=1, cost=lambda task: 2 * MS, loader=2, first_pid=3000)]
    for name, runs in (("a", slow), ("b", fast)):
        write(tmp_path / name, *runs)
        for rank, pid in enumerate((LOADER_PID, 3000)):
            own = {"rank": rank, "dataset_fingerprint": f"f{rank}", "dataset_length": 160 + rank}
            describe(tmp_path / name, pid, rank + 1, PARAMS | own)
    found = diff(*(read_trace(tmp_path / name) for name in "ab"))
    assert found.a.loaders == found.b.loaders == (1, 2)
    assert found.rates[1].by_s == pytest.approx(
        sum(4e9 / loop.steady(False)[1].mean() for loop in found.b.loops.values())
    )
    assert re.match(
        r"waiting for samples: \S+ ms instead of 11\.\d ms a batch in rank 1, \d+% of the diff", found.story()[0]
    )
    rows = found.text().splitlines()
    assert any(row.startswith("rank 0: the loop's own steps ") for row in rows)
    assert any(row.startswith("rank 1: waiting for samples ") for row in rows)


def test_the_worker_that_changed_is_named(tmp_path: Path) -> None:
    """Worker 1 alone is slower in B: tasks go round."""
    found = diff(made(tmp_path / "a"), made(tmp_path / "b", lambda task: 8 * MS if task % 2 else 4 * MS))
    fetch = {change.worker: change.verdict for change in found.workers if change.stage == "fetch"}
    assert fetch == {0: Comparison.SAME, 1: Comparison.SLOWER}
    assert found.story()[-1].endswith(", in worker 1 alone)")
    assert not {"consumer", "rebuild", "wait", "cycle"} & {change.stage for change in found.workers}


def test_starts_of_epochs_are_told_apart(tmp_path: Path) -> None:
    """Of equal batches, in one epoch or in twelve with new workers each."""
    runs = [Run(5, loader=n, first_pid=1000 * n) for n in range(1, 13)]
    a, b = (read_trace(write(tmp_path / name, *some)) for name, some in (("a", runs), ("b", [Run(60)])))
    found = diff(a, b)
    assert re.search(
        r"; 1\.\d+ times as fast with the starts and ends of epochs: \S+ instead of \S+ samp", found.headline
    )


def test_the_loops_time_adds_up(tmp_path: Path) -> None:
    found = diff(made(tmp_path / "a", epochs=2), made(tmp_path / "b", pin=True, workers=3))
    for parts, each in ((found.split(), found.a), (found.split(), found.b)):
        sums = sum(part.a if each is found.a else part.b for part in parts)
        assert sums == pytest.approx(each.loops[-1].steady(False)[1].mean())


def test_facts_are_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path / "a"), made(tmp_path / "b", twice)
    assert cli.main(["diff", "--json", str(tmp_path / "a"), str(tmp_path / "b")]) == cli.OK
    facts = json.loads(capsys.readouterr().out)
    low, high = facts["interval"]
    assert low < facts["factor"] < high < 1
    assert facts["runs"][1]["rate"] / facts["runs"][0]["rate"] == pytest.approx(facts["factor"])
    assert facts["explained"]["by"] == ["waiting for samples"]
    assert {"what": "waiting for samples", "rank": None, "per": "batch"}.items() <= facts["loop"][1].items()


def test_without_samples_the_fetch_is_named(tmp_path: Path) -> None:
    traces = made(tmp_path / "a"), made(tmp_path / "b", twice)
    for trace in traces:  # as recorded with detail "batch"
        samples = np.isin(trace.events["code"], [ev.SAMPLE[0], ev.SAMPLE[1], ev.COLLATE[0], ev.COLLATE[1]])
        trace.events = trace.events[~samples]
    assert "among the stages, fetch changed most: on average it takes" in diff(*traces).sentence()


def test_the_same_run_twice_has_not_changed(tmp_path: Path) -> None:
    found = diff(made(tmp_path / "a"), made(tmp_path / "b"))
    assert found.most() is found.explained is None
    assert {change.verdict for change in found.stages} == {Comparison.SAME, Comparison.FEW}
    assert found.story() == []


def test_a_change_within_the_spread_is_none(tmp_path: Path) -> None:
    """B's samples take 1.3 times as long on average, and both runs vary by more than that from part to part."""

    def uneven(scale: float) -> Callable[[int], int]:
        return lambda task: int(scale * MS * (1 + 9 * (task // 6 % 2)))

    found = diff(made(tmp_path / "a", uneven(1)), made(tmp_path / "b", uneven(1.3)))
    sample = found.stage("sample")
    assert sample.ratio.factor == pytest.approx(1.3, rel=0.01)
    assert sample.verdict is Comparison.SAME
    assert not found.is_certain
    assert found.most() is None


def test_what_one_recording_does_not_show_has_not_changed(tmp_path: Path) -> None:
    """An observed loader shows no sample, and one recorded with detail "batch" does not either."""
    for name, params, detail in (
        ("outside", {"observed": True, "unseen": ["sample"]}, "sample"),
        ("batch", {}, "batch"),
    ):
        a, b = made(tmp_path / f"{name}-a", params=PARAMS), made(tmp_path / f"{name}-b", params=PARAMS | params)
        b.events = b.events[~np.isin(b.events["code"], ev.SAMPLE)]
        b.manifest["detail"] = detail
        for found in (diff(a, b), diff(b, a)):
            assert found.stage("sample").verdict is Comparison.UNSEEN  # type: ignore[union-attr]
            assert found.most() is None
            assert "not recorded in one" in found.text()
            assert not found.story()
    assert diff(a, made(tmp_path / "c", params=PARAMS | {"observed": True})).differences == [
        """loader "minidl's" in A, "torch's, observed" in B"""
    ]


def test_a_run_that_hangs_is_said_to(tmp_path: Path) -> None:
    hung = made(tmp_path / "a", lambda task: NEVER if task == 55 else 4 * MS, polls=1500)
    assert hung.spans()["end"].min() < 0
    whole = made(tmp_path / "b")
    assert "; A ends in a wait of " in diff(hung, whole).sentence()
    assert "; B ends in a wait of " in diff(whole, hung).sentence()
    assert "in a wait" not in diff(whole, whole).sentence()
    killed = made(tmp_path / "c", lambda task: NEVER if task == 55 else 4 * MS, polls=3)
    assert "in a wait" not in diff(killed, whole).sentence()


def test_shares_of_the_work_that_changed_are_told_from_a_stage_that_did(tmp_path: Path) -> None:
    """Each worker takes as long as before; the slow one gets fewer of the batches."""
    changes = [stage("fetch", 5e6, 3e6), stage("fetch", 9e6, 9e6, worker=0), stage("fetch", 1e6, 1e6, worker=1)]
    cycles = stage("cycle", 5e6, 3e6)
    found = of(cycles, *changes, took=6 * MS)
    assert "not within any of the 2 workers: only their shares of the work changed" in found.sentence()


def stage(name: str, a: float | None, b: float | None, count: int = 100, worker: int = -1) -> Change:
    """A stage that always takes `a` and `b` ns."""

    def figures(each: float | None) -> Figures | None:
        return None if each is None else Figures.of(np.full(count, each, np.int64))

    return Change(name, worker, figures(a), figures(b))


def side(copied: int = 0, took: int = 10 * MS, starting: int = 0) -> Side:
    """A run of 100 batches, of one sample each, that take `took` ns; starting: ns of waiting for workers to start."""
    batches = np.zeros(1, BATCH)
    batches["copied"], batches["payload"], batches["outcome"] = copied, 1, -1
    account = Ledger(np.empty(0, COPY), batches)
    own = Loop(np.full(100, took), np.zeros(100, bool), np.ones(100, np.int64), {}, 100 * took + starting, starting)
    return Side("t", (1,), {}, {}, {-1: own}, 0, None, None, account, {})


def of(*changes: Change, copied: tuple[int, int] = (0, 0), took: int = 10 * MS) -> Diff:
    workers = [change for change in changes if change.worker >= 0]
    return Diff(side(copied[0]), side(copied[1], took), [c for c in changes if c.worker < 0], workers, [], [])


CYCLE = stage("cycle", 10 * MS, 10 * MS)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ([stage("pin", 1 * MS, 2 * MS), stage("fetch", 5 * MS, 8 * MS)], "fetch"),  # by time, not by factor
        ([stage("fetch", 5 * MS, 8 * MS), stage("sample", 4 * MS, 6 * MS), stage("collate", 1 * MS, 2 * MS)], "sample"),
        ([stage("fetch", 5 * MS, 8 * MS), stage("sample", 4 * MS, 5 * MS), stage("collate", 1 * MS, 2 * MS)], "fetch"),
        ([stage("pickle", 2 * MS, 4 * MS), stage("copy", None, 2 * MS)], "copy"),
        ([stage("wait", 1 * MS, 9 * MS), stage("idle", 1 * MS, 9 * MS), stage("next", 1 * MS, 9 * MS)], None),
        ([stage("sampling", 1000, 90_000)], None),  # clear, and less than a hundredth of the cycle
        ([stage("sampling", 1000, 110_000)], "sampling"),
        ([stage("write", 5 * MS, 5 * MS + MS // 3)], None),  # clear, and less than a tenth more
    ],
)
def test_what_is_named(changes: list[Change], named: str | None) -> None:
    most = of(CYCLE, *changes).most()
    assert (most and most.stage) == named


def test_the_story_in_words() -> None:
    new, gone = stage("copy", None, 2 * MS), stage("pin", 3 * MS, None)
    same = "no difference is certain: 100 instead of 100 samples/s (95% interval: B is 1 to 1 times as fast)"
    assert of(CYCLE, new, copied=(100, 300)).sentence() == (
        f"{same}; among the stages, copy changed most: it is new and takes 2.00 ms on average (100 measured); "
        "the bytes copied per batch changed from 100 B to 300 B"
    )
    assert of(CYCLE, gone).story() == [
        "among the stages, pin changed most: it is gone and took 3.00 ms on average (100 measured)"
    ]
    assert Diff(side(starting=3000 * MS), side(starting=1000 * MS), [], [], [], []).sentence() == (
        f"B is 2 times as fast with the starts and ends of epochs: 50 instead of 25 samples/s; between them, {same}; "
        "starting and ending workers: 1.00 s instead of 3.00 s in all"
    )
    slower = stage("cycle", 10 * MS, 20 * MS)
    assert of(slower, took=20 * MS).sentence() == (
        "B is 2 times as slow: 50 instead of 100 samples/s (95% interval 2 to 2)"
    )
    assert of(slower, stage("pin", 3 * MS, 1 * MS), took=20 * MS).story() == [], "a gain does not explain a loss"


# --- The figures ------------------------------------------------------------------------------------------------------
@given(st.lists(st.integers(0, 10**12), min_size=1) | st.lists(st.integers(0, 10**12), min_size=FEWEST, max_size=99))
def test_figures(durations: list[int]) -> None:
    figures = Figures.of(np.array(durations, np.int64))
    assert (figures.count, figures.total) == (len(durations), sum(durations))
    assert [figures.p50, figures.p95, figures.p99] == np.percentile(durations, [50, 95, 99]).tolist()
    assert math.exp(-figures.rate.log) == pytest.approx(max(1, sum(durations)) / len(durations))
    assert math.isnan(figures.rate.variance) == (len(durations) < FEWEST)


@given(
    st.lists(st.integers(1, 1000), min_size=FEWEST, max_size=90),
    st.lists(st.integers(1, 1000), min_size=FEWEST, max_size=90),
)
def test_slower_one_way_is_faster_the_other(one: list[int], two: list[int]) -> None:
    a, b = Figures.of(np.array(one)), Figures.of(np.array(two))
    mirror = {
        Comparison.SLOWER: Comparison.FASTER,
        Comparison.FASTER: Comparison.SLOWER,
        Comparison.SAME: Comparison.SAME,
    }
    assert Change("x", -1, b, a).verdict is mirror[Change("x", -1, a, b).verdict]


def test_equal_runs_are_seldom_told_apart() -> None:
    """Of 1,000 pairs of runs of one and the same distribution, heavy-tailed as real ones are, at most a few."""
    dice = np.random.default_rng(0)
    pairs = [[Figures.of((dice.lognormal(0, 1, 200) * 1e6).astype(np.int64)) for _ in "ab"] for _ in range(1000)]
    assert sum(Change("x", -1, *pair).is_clear for pair in pairs) <= 15


def test_a_first_batch_is_no_cycle_and_epochs_are_not_joined(tmp_path: Path) -> None:
    """Against a walk through the events."""
    found = diff(trace := made(tmp_path / "a", epochs=3, workers=3), made(tmp_path / "b", epochs=3))
    cycles, waits, wall, since, begun = [], [], 0, 0, 0
    for row in trace.events:
        if row["code"] == ev.EPOCH[0]:
            since = 0
        elif row["code"] == ev.NEXT[0]:
            begun = int(row["time"])
            since = since or begun
        elif row["code"] == ev.YIELD:
            took = int(row["time"]) - since
            wall += took
            since = int(row["time"])
            cycles += [] if row["y"] == 1 else [took]
        elif row["code"] == ev.NEXT[1]:
            waits += [] if row["x"] == 1 else [int(row["time"]) - begun]
    assert found.a.loops[-1].steady(False)[1].tolist() == cycles
    assert (found.a.stages["next", -1].count, found.a.stages["next", -1].total) == (len(waits), sum(waits))
    assert (found.a.batches, found.a.loops[-1].took.sum()) == (180, wall)
    assert found.a.whole(False) < 180 / wall * 1e9
    assert found.a.steady(False).by_s == pytest.approx(177 / sum(cycles) * 1e9)


def test_an_epoch_whose_begin_is_lost_counts_from_its_first_batch_on(tmp_path: Path) -> None:
    events = [{"code": ev.YIELD, "time": n * MS, "task": n, "worker": 0, "y": n + 1} for n in range(10, 80)]
    write_process(tmp_path / "t", events, pid=100, role="loader", loader=1)
    found = diff(read_trace(tmp_path / "t"), made(tmp_path / "b"))
    assert found.a.loops[-1].steady(False)[1].tolist() == [MS] * 69


def test_samples_are_those_of_yielded_batches(tmp_path: Path) -> None:
    found = diff(made(tmp_path / "a", epochs=2), made(tmp_path / "b", batch_size=4))
    assert (found.a.samples, found.b.samples) == (60 * 4 * 2, 60 * 4)
    assert found.b.whole(True) == pytest.approx(4 * found.b.whole(False))


def test_a_run_that_hung_can_be_compared_by_what_it_did(tmp_path: Path) -> None:
    found = diff(made(tmp_path / "a"), made(tmp_path / "b", lambda task: NEVER if task == 55 else 4 * MS))
    assert (found.b.batches, found.b.samples) == (55, 55 * 4)  # the other worker went on, for nobody
    assert found.b.stages["fetch", -1].count > 55
    assert found.headline.startswith("no difference is certain: ")


def test_start_up_and_the_first_wait(tmp_path: Path) -> None:
    found = diff(trace := made(tmp_path / "a", epochs=2), made(tmp_path / "b"))
    start, ready = trace.select("worker_start")["time"][0], trace.select("worker_ready")["time"][-1]
    assert found.a.start_up == ready - start
    nexts = [(b, e) for b, e in zip(*(trace.select("next", p) for p in (ev.Phase.BEGIN, ev.Phase.END)), strict=True)]
    assert found.a.first == np.mean([e["time"] - b["time"] for b, e in nexts if e["x"] == 1])


# --- What can be compared ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "value"), [("dataset", "Sounds"), ("dataset_kind", "iterable")])
def test_other_work_is_refused_and_named(tmp_path: Path, name: str, value: object) -> None:
    a, b = made(tmp_path / "a", params=PARAMS), made(tmp_path / "b", params=PARAMS | {name: value})
    with pytest.raises(IncomparableError) as raised:
        diff(a, b)
    assert f"{name} {PARAMS[name]!r} in A, {value!r} in B" in str(raised.value)
    assert "--force" in str(raised.value)
    assert isinstance(raised.value, TraceError)
    found = diff(a, b, force=True)
    assert found.differences == [f"{name} {PARAMS[name]!r} in A, {value!r} in B"]
    assert f"differs: {name} {PARAMS[name]!r} in A, {value!r} in B" in found.text()


def test_other_circumstances_are_named(tmp_path: Path) -> None:
    a = made(tmp_path / "a", params=PARAMS)
    b = made(tmp_path / "b", params=PARAMS | {"num_workers": 3, "batch_size": 8}, workers=3, prefetch_factor=4)
    b.manifest |= {"host": "elsewhere", "cpus": 8, "detail": "batch", "versions": {"minidl": "0", "torch": "2.11.0"}}
    assert diff(a, b).differences == [
        "batch_size 4 in A, 8 in B",
        "num_workers 2 in A, 3 in B",
        "prefetch_factor 2 in A, 4 in B",
        "host 'imaginary' in A, 'elsewhere' in B",
        "detail of the recording 'sample' in A, 'batch' in B",
        "torch '2.13.0' in A, '2.11.0' in B",
    ]


def test_the_iterators_of_one_loader_are_taken_together_and_other_loaders_told(tmp_path: Path) -> None:
    """Three epochs with new workers each, and a loader for validation after each."""
    for name, last in (("a", 6), ("b", 4)):  # each with a new DataLoader, made in the same line
        numbers = range(1, last + 1)
        cost = twice if name == "b" else steady
        runs = (
            Run(40, loader=n, first_pid=1000 * n, batch_size=4 * (2 - n % 2), cost=steady if n % 2 else cost)
            for n in numbers
        )
        write(tmp_path / name, *runs)
        for n in numbers:
            describe(tmp_path / name, 1000 * n, n, PARAMS | {"batch_size": 4 if n % 2 else 8, "dataloader": n})
    found = diff(read_trace(tmp_path / "a"), read_trace(tmp_path / "b"))
    assert (found.a.loaders, found.b.loaders) == ((1, 3, 5), (1, 3))
    assert (found.a.batches, found.b.batches) == (120, 80)
    assert (found.a.samples, found.b.samples) == (480, 320)
    assert found.stage("fetch").a.count == 120  # type: ignore[union-attr]
    assert found.a.ledger.batches["loader"].tolist() == [1] * 40 + [3] * 40 + [5] * 40
    assert [line[:31] for line in found.others] == ["Photos: B is 1.99 times as slow"]
    assert found.others[0] in found.story()
    assert len(found.notes) == 1


def test_the_loader_that_does_the_same_work_is_taken(tmp_path: Path) -> None:
    """Though another has yielded more."""
    a = made(tmp_path / "a", params=PARAMS)
    write(tmp_path / "b", Run(batches=99, loader=1), Run(batches=60, loader=2, first_pid=3000))
    describe(tmp_path / "b", LOADER_PID, 1, PARAMS | {"dataset": "Sounds"})
    describe(tmp_path / "b", 3000, 2, PARAMS)
    assert diff(a, read_trace(tmp_path / "b")).b.loaders == (2,)


def test_another_dataset_is_refused_though_a_second_loader_is_the_same(tmp_path: Path) -> None:
    for name, dataset in (("a", "Photos"), ("b", "Sounds")):
        write(tmp_path / name, Run(60), Run(20, loader=2, first_pid=3000))
        describe(tmp_path / name, LOADER_PID, 1, PARAMS | {"dataset": dataset})
        describe(tmp_path / name, 3000, 2, PARAMS | {"dataset": "Validation"})
    with pytest.raises(IncomparableError, match=r"dataset 'Photos' in A, '(Sounds|Validation)' in B"):
        diff(*(read_trace(tmp_path / name) for name in "ab"))


def test_unknown_parameters_are_said(tmp_path: Path) -> None:
    found = diff(made(tmp_path / "a"), made(tmp_path / "b", params=PARAMS))
    assert found.notes[0] == "A: the loader's parameters are not in the trace, so they could not be compared"
    assert not found.differences


def test_a_trace_without_batches(tmp_path: Path) -> None:
    write_process(tmp_path / "t", [{"code": ev.EPOCH[0]}], pid=100, role="loader", loader=1)
    with pytest.raises(TraceError, match="contains no yielded batch"):
        diff(read_trace(tmp_path / "t"), made(tmp_path / "b"))


# --- Live runs --------------------------------------------------------------------------------------------------------
class Vectors(minidl.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(250)


def stacked(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples)


@pytest.mark.live
def test_the_bytes_of_live_runs(tmp_path: Path) -> None:
    for name, collate_fn in (("a", None), ("b", stacked)):
        with minidl.trace(tmp_path / name):
            list(minidl.DataLoader(Vectors(), batch_size=2, num_workers=1, collate_fn=collate_fn))
    found = diff(read_trace(tmp_path / "a"), read_trace(tmp_path / "b"))
    assert found.differences == ["collate_fn 'default_collate' in A, 'stacked' in B"]
    assert found.b.copied is not None
    assert found.a.copied is not None
    assert found.b.copied - found.a.copied == pytest.approx(2000, abs=20)  # the pickles may differ by a few bytes
    copy = found.stage("copy")
    assert copy.a is None
    assert copy.b.count == 20
    assert copy.verdict is Comparison.ONLY_B
    assert "; the bytes copied per batch changed from" in found.sentence()
    assert found.a.samples == found.b.samples == 40


def test_a_run_without_a_second_batch_has_no_rate(tmp_path: Path) -> None:
    found = diff(made(tmp_path / "a"), made(tmp_path / "b", batches=1))
    assert found.headline == "too few batches to compare the rates: a run has none after the first of each epoch"
    assert found.story() == []
    assert re.search(r"^  after the first +[\d.]+ +\?$", found.text(), re.MULTILINE)
    facts = json.loads(json.dumps(found.facts(), allow_nan=False))
    assert facts["factor"] is facts["interval"] is facts["runs"][1]["rate"] is None


# --- The command ------------------------------------------------------------------------------------------------------
def test_the_text(tmp_path: Path) -> None:
    found = diff(made(tmp_path / "a", epochs=2), made(tmp_path / "b", twice))
    lines = found.text().splitlines()
    assert lines[:5] == [found.headline, *found.story(), f"A: {tmp_path / 'a'}", f"B: {tmp_path / 'b'}"]
    assert "batches                            120            60" in lines
    assert f"samples/s               {found.a.whole(True):>14.1f}{found.b.whole(True):>14.1f}" in lines
    assert f"waiting for batches     {found.a.waiting_share:>14.0%}{found.b.waiting_share:>14.0%}" in lines
    assert "stage, ms        n A     n B    p50 A    p50 B    p95 A    p95 B    p99 A    p99 B   B / A" in lines
    assert "sample           480     240    0.749    1.499    0.749    1.499    0.749    1.499    2.00  slower" in lines
    assert (
        "start              2       2    0.201    0.201        -        -        -        -    1.00  too few to say"
        in lines
    )
    assert lines[-1].startswith("The intervals are measured within each run")
    with_workers = found.text(workers=True).splitlines()
    row = "  worker 1       240     120    0.749    1.499    0.749    1.499    0.749    1.499    2.00  slower"
    assert row in with_workers
    assert row not in lines


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path / "a", params=PARAMS)
    packed = made(tmp_path / "b", params=PARAMS | {"dataset": "Sounds"}).pack(tmp_path / "b")
    assert cli.main(["diff", str(tmp_path / "a"), str(packed)]) == cli.USAGE
    assert "Record both with the same dataset, or compare them anyway with" in capsys.readouterr().err
    assert cli.main(["diff", "--force", "--workers", str(tmp_path / "a"), str(packed)]) == cli.OK
    assert "differs: dataset 'Photos' in A, 'Sounds' in B" in capsys.readouterr().out


def test_the_command_draws_both_timelines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    made(tmp_path / "a"), made(tmp_path / "b", twice)
    command = ["diff", str(tmp_path / "a"), str(tmp_path / "b"), "-o"]
    assert cli.main([*command, str(tmp_path / "both.svg")]) == cli.OK
    assert capsys.readouterr().out.startswith("B is ")
    assert "B is 1.99 times as slow" in (tmp_path / "both.svg").read_text()
    assert cli.main([*command, str(tmp_path / "both.html")]) == cli.OK
    assert '"sentence":"B is 1.99 times as slow' in (tmp_path / "both.html").read_text()
    assert cli.main([*command, str(tmp_path / "both")]) == cli.USAGE
    assert "the name has no suffix: add .png or .svg" in capsys.readouterr().err


# --- Transports -------------------------------------------------------------------------------------------------------
def test_two_transports_tell_what_they_did_to_each_batch(tmp_path: Path) -> None:
    a, b = made(tmp_path / "a"), made(tmp_path / "b", slabs=True)
    describe(tmp_path / "a", LOADER_PID, 1, {})
    facts = (
        "its batches were in 6 slabs, used 10 times each, instead of 60 new segments; the reader received and mapped "
        "memory 6 times instead of 60 times; the worker itself, without a feeder thread, wrote the messages; "
        "1.0 MiB per batch were copied once in both"
    )
    assert f"; arena instead of upstream: {facts}" in diff(a, b).sentence()
    back = diff(b, a).sentence()
    assert "; upstream instead of arena: its batches were in " in back
    assert "60 new segments, instead of 6 slabs, used 10 times each" in back
    assert "; a feeder thread wrote the messages; " in back
    assert diff(a, a).story() == [], "of one transport, as ever"


def test_the_recordings_of_both_transports_tell_their_story() -> None:
    traces = Path(__file__).parents[2] / "traces"
    a, b = (read_trace(traces / f"transport-{name}.minidl") for name in ("upstream", "arena"))
    found = diff(a, b)
    assert re.match(
        r"B is 4\.\d+ times as fast: .*; arena instead of upstream: its batches were in \d slabs, used \S+ times each, "
        r"instead of 200 new segments; ",
        found.sentence(),
    )
    assert found.differences == ["transport 'upstream' in A, 'arena' in B"]
