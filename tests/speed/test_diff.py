"""Two runs compared: imagined ones, whose every nanosecond is known, and recorded ones, for their bytes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_trace import LOADER_PID, NEVER, Run, describe, write
from oracle_trace import write_process

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
TRACES = Path(__file__).parents[2] / "traces"


def each(ms: float) -> Callable[[int], int]:
    return lambda task: int(ms * MS)


def hangs(task: int) -> int:
    return NEVER if task == 55 else 4 * MS


def made(path: Path, *, params: dict[str, Any] | None = None, **run: Any) -> Trace:
    write(path, Run(**{"batches": 60, "cost": each(4)} | run))
    if params is not None:
        describe(path, **params)
    return read_trace(path)


def pair(place: Path, a: dict[str, Any], b: dict[str, Any]) -> tuple[Trace, Trace]:
    return made(place / "a", **a), made(place / "b", **b)


# --- The story --------------------------------------------------------------------------------------------------------
SLOW = {"cost": each(8)}
SIX = {"epochs": 3, "batches": 6}
LARGE = SLOW | {"batch_size": 8}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("a", "b", "told"),
    [
        ({}, SLOW, r"B is 1\.99 times as slow: 1,013 instead of 2,017 samples/s \(95% interval 1\.84 to 2\.15\)\n"
         r"waiting for samples: 2\.60 ms instead of 1\.13 ms a batch, 75% of the difference\n"
         r"among the stages, sample changed most: on average it takes 1\.50 ms instead of 749 µs, 2 times as long "
         r"\(240 and 240 measured, in 2 of 2 workers\)\n"),
        (SLOW, {}, r"B is 1\.99 times as fast: 2,017 instead of 1,013 samples/s \(95% interval 1\.84 to 2\.15\)\n"),
        (SLOW, SLOW, r"no difference is certain: 1,013 instead of 1,013 samples/s \(95% interval: B is 0\.9.* to 1\."),
        (SLOW, SLOW | {"workers": 4},
         r"B is 2\.06 times as fast: .*\nwaiting for samples: 1\.09 ms instead of 2\.60 ms"),
        (LARGE, SLOW, r"B is 2 times as slow: .*\nwaiting for samples: 651 µs instead of 326 µs a sample, 66% of .*\n"
         r"among the stages, sample changed most: on average it takes 1\.50 ms instead of 749 µs"),
        (LARGE, {}, r"no difference is certain: 2,017 instead of 2,026 samples/s"),
        ({"step": 15 * MS}, {"step": 5 * MS},
         r"B is 2\.9\d times as fast: .*\nthe loop's own steps: 5\.0\d ms instead of 15\.0 ms a batch, all of .*\n"
         r"among the stages, consumer changed most: on average it takes 5\.00 ms instead of 15\.0 ms"),
        ({"batches": 17}, SLOW | {"batches": 13}, r"B is 1\.\d+ times as slow: .* \(95% interval .*\nwaiting for sam"),
        ({"batches": 9}, SLOW | {"batches": 4}, r"B is .* as slow: .* \(too few batches for an interval\).*\nwaiting "),
        (SIX, SIX | SLOW, r"B is .* as slow: .* \(95% interval "),
    ],
)  # fmt: skip
def test_the_first_lines_tell_the_story(tmp_path: Path, a: dict[str, Any], b: dict[str, Any], told: str) -> None:
    found = diff(*pair(tmp_path, a, b)).text()
    assert re.match(told, found), found[:600]


def test_ranks_are_added_up_and_the_one_that_changed_is_named(tmp_path: Path) -> None:
    """Rank 1 waits for samples, and rank 0 for rank 1, in its own steps."""
    for name, ms in (("a", 16), ("b", 2)):
        second = Run(40, workers=1, cost=each(ms), loader=2, first_pid=3000)
        write(tmp_path / name, Run(40, workers=1, step=ms * MS), second)
        for rank, pid in enumerate((LOADER_PID, 3000)):
            own = {"rank": rank, "dataset_fingerprint": f"f{rank}", "dataset_length": 160 + rank}
            describe(tmp_path / name, pid, rank + 1, **PARAMS | own)
    found = diff(*(read_trace(tmp_path / name) for name in "ab"))
    assert found.a.loaders == found.b.loaders == (1, 2)
    rates = [4e9 / loop.steady(False)[1].mean() for loop in found.b.loops.values()]
    assert found.rates[1].by_s == pytest.approx(sum(rates))
    waits = r"waiting for samples: \S+ ms instead of 11\.\d ms a batch in rank 1, \d+% of the diff"
    assert re.match(waits, found.story()[0])
    rows = found.text()
    assert "\nrank 0: the loop's own steps " in rows
    assert "\nrank 1: waiting for samples " in rows


def test_the_worker_that_changed_is_named(tmp_path: Path) -> None:
    """Worker 1 alone is slower in B: tasks go round."""
    found = diff(*pair(tmp_path, {}, {"cost": lambda task: (8 if task % 2 else 4) * MS}))
    fetch = {change.worker: change.verdict for change in found.workers if change.stage == "fetch"}
    assert fetch == {0: Comparison.SAME, 1: Comparison.SLOWER}
    assert found.story()[-1].endswith(", in worker 1 alone)")
    assert not {"consumer", "rebuild", "wait", "cycle"} & {change.stage for change in found.workers}


def test_starts_of_epochs_are_told_apart(tmp_path: Path) -> None:
    """Of equal batches, in one epoch or in twelve with new workers each."""
    a = read_trace(write(tmp_path / "a", *(Run(5, loader=n, first_pid=1000 * n) for n in range(1, 13))))
    b = read_trace(write(tmp_path / "b", Run(60)))
    assert re.search(r"; 1\.\d+ times as fast with the starts and ends of epochs: \S+ instead of \S+ samp",
                     diff(a, b).headline)  # fmt: skip


def test_the_loops_time_adds_up(tmp_path: Path) -> None:
    found = diff(*pair(tmp_path, {"epochs": 2}, {"pin": True, "workers": 3}))
    for one, sums in ((found.a, sum(part.a for part in found.split())), (found.b, sum(p.b for p in found.split()))):
        assert sums == pytest.approx(one.loops[-1].steady(False)[1].mean())


def test_without_samples_the_fetch_is_named(tmp_path: Path) -> None:
    traces = pair(tmp_path, {}, SLOW)
    for trace in traces:  # as recorded with detail "batch"
        trace.events = trace.events[~np.isin(trace.events["code"], [*ev.SAMPLE, *ev.COLLATE])]
    assert "among the stages, fetch changed most: on average it takes" in diff(*traces).sentence()


def uneven(scale: float) -> Callable[[int], int]:
    return lambda task: int(scale * MS * (1 + 9 * (task // 6 % 2)))


@pytest.mark.parametrize(("scale", "factor"), [(1, 1), (1.3, pytest.approx(1.3, rel=0.01))])
def test_a_change_within_the_spread_is_none(tmp_path: Path, scale: float, factor: float) -> None:
    """Both runs vary by more than that from part to part."""
    found = diff(*pair(tmp_path, {"cost": uneven(1)}, {"cost": uneven(scale)}))
    sample = found.stage("sample")
    assert sample is not None
    assert (sample.ratio.factor, sample.verdict) == (factor, Comparison.SAME)
    assert (found.most(), found.is_certain) == (None, False)
    if scale == 1:
        assert (found.explained, found.story()) == (None, [])
        assert {change.verdict for change in found.stages} == {Comparison.SAME, Comparison.FEW}


@pytest.mark.parametrize(
    ("params", "detail"), [({"observed": True, "unseen": ["sample"]}, "sample"), ({}, "batch")], ids=str
)
def test_what_one_recording_does_not_show_has_not_changed(tmp_path: Path, params: dict[str, Any], detail: str) -> None:
    """An observed loader shows no sample, and one recorded with detail "batch" does not either."""
    a, b = pair(tmp_path, {"params": PARAMS}, {"params": PARAMS | params})
    b.events = b.events[~np.isin(b.events["code"], ev.SAMPLE)]
    b.manifest["detail"] = detail
    for found in (diff(a, b), diff(b, a)):
        assert [change.verdict for change in found.stages if change.stage == "sample"] == [Comparison.UNSEEN]
        assert (found.most(), found.story()) == (None, [])
        assert "not recorded in one" in found.text()


def test_a_run_that_hangs_is_said_to_and_compared_by_what_it_did(tmp_path: Path) -> None:
    hung, whole = pair(tmp_path, {"cost": hangs, "polls": 1500}, {})
    killed = made(tmp_path / "c", cost=hangs, polls=3)
    assert "; A ends in a wait of " in diff(hung, whole).sentence()
    assert "; B ends in a wait of " in diff(whole, hung).sentence()
    assert "in a wait" not in diff(whole, whole).sentence() + diff(killed, whole).sentence()
    found = diff(whole, made(tmp_path / "d", cost=hangs))
    assert (found.b.batches, found.b.samples) == (55, 55 * 4)  # the other worker went on, for nobody
    assert found.b.stages["fetch", -1].count > 55
    assert found.headline.startswith("no difference is certain: ")


def stage(name: str, a: float | None, b: float | None, count: int = 100, worker: int = -1) -> Change:
    """A stage that always takes `a` and `b` ms."""
    both = (ms and Figures.of(np.full(count, ms * MS, np.int64)) for ms in (a, b))
    return Change(name, worker, *both)  # type: ignore[arg-type]


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


CYCLE, FETCH, SLOWER = stage("cycle", 10, 10), stage("fetch", 5, 8), stage("cycle", 10, 20)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ([stage("pin", 1, 2), FETCH], "fetch"),  # by time, not by factor
        ([FETCH, stage("sample", 4, 6), stage("collate", 1, 2)], "sample"),
        ([FETCH, stage("sample", 4, 5), stage("collate", 1, 2)], "fetch"),
        ([stage("pickle", 2, 4), stage("copy", None, 2)], "copy"),
        ([stage("wait", 1, 9), stage("idle", 1, 9), stage("next", 1, 9)], None),
        ([stage("sampling", 0.001, 0.09)], None),  # clear, and less than a hundredth of the cycle
        ([stage("sampling", 0.001, 0.11)], "sampling"),
        ([stage("write", 5, 5.33)], None),  # clear, and less than a tenth more
    ],
)
def test_what_is_named(changes: list[Change], named: str | None) -> None:
    most = of(CYCLE, *changes).most()
    assert (most and most.stage) == named


SAME = "no difference is certain: 100 instead of 100 samples/s (95% interval: B is 1 to 1 times as fast)"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (of(CYCLE, stage("copy", None, 2), copied=(100, 300)),
         f"{SAME}; among the stages, copy changed most: it is new and takes 2.00 ms on average (100 measured); "
         "the bytes copied per batch changed from 100 B to 300 B"),
        (of(CYCLE, stage("pin", 3, None)),
         f"{SAME}; among the stages, pin changed most: it is gone and took 3.00 ms on average (100 measured)"),
        (Diff(side(starting=3000 * MS), side(starting=1000 * MS), [], [], [], []),
         "B is 2 times as fast with the starts and ends of epochs: 50 instead of 25 samples/s; between them, "
         f"{SAME}; starting and ending workers: 1.00 s instead of 3.00 s in all"),
        (of(SLOWER, took=20 * MS), "B is 2 times as slow: 50 instead of 100 samples/s (95% interval 2 to 2)"),
        # A gain does not explain a loss.
        (of(SLOWER, stage("pin", 3, 1), took=20 * MS),
         "B is 2 times as slow: 50 instead of 100 samples/s (95% interval 2 to 2)"),
        (of(stage("cycle", 5, 3), stage("fetch", 5, 3), stage("fetch", 9, 9, worker=0), stage("fetch", 1, 1, worker=1),
            took=6 * MS), "; among the stages, fetch changed most: on average it takes 3.00 ms instead of 5.00 ms, "
         "1.67 times as fast (100 and 100 measured, not within any of the 2 workers: only their shares of the work "
         "changed)"),
    ],
    ids=["a new stage", "a stage that is gone", "starts", "slower", "slower, with a gain", "shares of the work"],
)  # fmt: skip
def test_the_story_in_words(found: Diff, said: str) -> None:
    assert found.sentence().endswith(said)


# --- The figures ------------------------------------------------------------------------------------------------------
@given(st.lists(st.integers(0, 10**12), min_size=1) | st.lists(st.integers(0, 10**12), min_size=FEWEST, max_size=99))
def test_figures(durations: list[int]) -> None:
    figures = Figures.of(np.array(durations, np.int64))
    assert (figures.count, figures.total) == (len(durations), sum(durations))
    assert [figures.p50, figures.p95, figures.p99] == np.percentile(durations, [50, 95, 99]).tolist()
    assert math.exp(-figures.rate.log) == pytest.approx(max(1, sum(durations)) / len(durations))
    assert math.isnan(figures.rate.variance) == (len(durations) < FEWEST)


MEASURED = st.lists(st.integers(1, 1000), min_size=FEWEST, max_size=90)


@given(MEASURED, MEASURED)
def test_slower_one_way_is_faster_the_other(one: list[int], two: list[int]) -> None:
    a, b = Figures.of(np.array(one)), Figures.of(np.array(two))
    mirror = {Comparison.SLOWER: Comparison.FASTER, Comparison.FASTER: Comparison.SLOWER}
    verdict = Change("x", -1, a, b).verdict
    assert Change("x", -1, b, a).verdict is mirror.get(verdict, Comparison.SAME)


def test_equal_runs_are_seldom_told_apart() -> None:
    """Of 1,000 pairs of runs of one and the same distribution, heavy-tailed as real ones are, at most a few."""
    dice = np.random.default_rng(0)
    pairs = [[Figures.of((dice.lognormal(0, 1, 200) * 1e6).astype(np.int64)) for _ in "ab"] for _ in range(1000)]
    assert sum(Change("x", -1, *pair).is_clear for pair in pairs) <= 15


def test_a_first_batch_is_no_cycle_and_epochs_are_not_joined(tmp_path: Path) -> None:
    """Against a walk through the events."""
    trace = made(tmp_path / "a", epochs=3, workers=3)
    found = diff(trace, made(tmp_path / "b", epochs=3)).a
    cycles, waits, first, wall, since, begun = [], [], [], 0, 0, 0
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
            (first if row["x"] == 1 else waits).append(int(row["time"]) - begun)
    assert found.loops[-1].steady(False)[1].tolist() == cycles
    assert (found.stages["next", -1].count, found.stages["next", -1].total) == (len(waits), sum(waits))
    assert found.first == np.mean(first)
    assert (found.batches, found.samples, found.loops[-1].took.sum()) == (180, 180 * 4, wall)
    assert found.whole(True) == pytest.approx(4 * found.whole(False))
    assert found.whole(False) < 180 / wall * 1e9
    assert found.steady(False).by_s == pytest.approx(177 / sum(cycles) * 1e9)
    assert found.start_up == trace.select("worker_ready")["time"][-1] - trace.select("worker_start")["time"][0]


def test_an_epoch_whose_begin_is_lost_counts_from_its_first_batch_on(tmp_path: Path) -> None:
    events = [{"code": ev.YIELD, "time": n * MS, "task": n, "worker": 0, "y": n + 1} for n in range(10, 80)]
    write_process(tmp_path / "t", events, pid=100, role="loader", loader=1)
    found = diff(read_trace(tmp_path / "t"), made(tmp_path / "b"))
    assert found.a.loops[-1].steady(False)[1].tolist() == [MS] * 69


# --- What can be compared ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "value"), [("dataset", "Sounds"), ("dataset_kind", "iterable")])
def test_other_work_is_refused_and_named(tmp_path: Path, name: str, value: object) -> None:
    a, b = pair(tmp_path, {"params": PARAMS}, {"params": PARAMS | {name: value}})
    said = f"{name} {PARAMS[name]!r} in A, {value!r} in B"
    with pytest.raises(IncomparableError, match=rf"{said}.*--force"):
        diff(a, b)
    assert issubclass(IncomparableError, TraceError)
    found = diff(a, b, force=True)
    assert found.differences == [said]
    assert f"differs: {said}" in found.text()


def test_other_circumstances_are_named(tmp_path: Path) -> None:
    other = PARAMS | {"num_workers": 3, "batch_size": 8, "observed": True}
    a, b = pair(tmp_path, {"params": PARAMS}, {"params": other, "workers": 3, "prefetch_factor": 4})
    b.manifest |= {"host": "elsewhere", "cpus": 8, "detail": "batch", "versions": {"minidl": "0", "torch": "2.11.0"}}
    assert diff(a, b).differences == [
        "batch_size 4 in A, 8 in B",
        "num_workers 2 in A, 3 in B",
        "prefetch_factor 2 in A, 4 in B",
        """loader "minidl's" in A, "torch's, observed" in B""",
        "host 'imaginary' in A, 'elsewhere' in B",
        "detail of the recording 'sample' in A, 'batch' in B",
        "torch '2.13.0' in A, '2.11.0' in B",
    ]


def test_the_iterators_of_one_loader_are_taken_together_and_other_loaders_told(tmp_path: Path) -> None:
    """Three epochs with new workers each, and a loader for validation after each."""
    for name, numbers, validation in (("a", range(1, 7), 4), ("b", range(1, 5), 8)):
        runs = [(4, each(4)) if n % 2 else (8, each(validation)) for n in numbers]
        write(tmp_path / name, *(Run(40, loader=n, first_pid=1000 * n, batch_size=size, cost=cost)
                                 for n, (size, cost) in zip(numbers, runs, strict=True)))  # fmt: skip
        for n, (size, _) in zip(numbers, runs, strict=True):
            describe(tmp_path / name, 1000 * n, n, **PARAMS | {"batch_size": size, "dataloader": n})
    found = diff(read_trace(tmp_path / "a"), read_trace(tmp_path / "b"))
    assert (found.a.loaders, found.b.loaders) == ((1, 3, 5), (1, 3))
    assert (found.a.batches, found.b.batches, found.a.samples, found.b.samples) == (120, 80, 480, 320)
    assert [change.a.count for change in found.stages if change.stage == "fetch" and change.a] == [120]
    assert found.a.ledger.batches["loader"].tolist() == [1] * 40 + [3] * 40 + [5] * 40
    assert [line[:31] for line in found.others] == ["Photos: B is 1.99 times as slow"]
    assert found.others[0] in found.story()
    assert len(found.notes) == 1


def two(place: Path, first: tuple[int, str], second: tuple[int, str]) -> Trace:
    """A trace of two loaders, each of so many batches of a dataset."""
    write(place, Run(first[0]), Run(second[0], loader=2, first_pid=3000))
    describe(place, LOADER_PID, 1, **PARAMS | {"dataset": first[1]})
    describe(place, 3000, 2, **PARAMS | {"dataset": second[1]})
    return read_trace(place)


def test_the_loader_that_does_the_same_work_is_taken(tmp_path: Path) -> None:
    """Though another has yielded more; and another dataset is refused though a second loader is the same."""
    b = two(tmp_path / "b", (99, "Sounds"), (60, "Photos"))
    assert diff(made(tmp_path / "a", params=PARAMS), b).b.loaders == (2,)
    both = (two(tmp_path / data, (60, data), (20, "Validation")) for data in ("Photos", "Sounds"))
    with pytest.raises(IncomparableError, match=r"dataset 'Photos' in A, '(Sounds|Validation)' in B"):
        diff(*both)


def test_unknown_parameters_are_said(tmp_path: Path) -> None:
    found = diff(*pair(tmp_path, {}, {"params": PARAMS}))
    assert found.notes[0] == "A: the loader's parameters are not in the trace, so they could not be compared"
    assert not found.differences


def test_a_run_without_batches_or_without_a_second_one(tmp_path: Path) -> None:
    write_process(tmp_path / "t", [{"code": ev.EPOCH[0]}], pid=100, role="loader", loader=1)
    a, b = pair(tmp_path, {}, {"batches": 1})
    with pytest.raises(TraceError, match="contains no yielded batch"):
        diff(read_trace(tmp_path / "t"), b)
    found = diff(a, b)
    assert found.headline == "too few batches to compare the rates: a run has none after the first of each epoch"
    assert found.story() == []
    assert re.search(r"^  after the first +[\d.]+ +\?$", found.text(), re.MULTILINE)
    facts = json.loads(json.dumps(found.facts(), allow_nan=False))
    assert facts["factor"] is facts["interval"] is facts["runs"][1]["rate"] is None


def recorded(a: str, b: str) -> Diff:
    return diff(*(read_trace(TRACES / f"{name}.minidl") for name in (a, b)))


def test_the_bytes_of_recorded_runs() -> None:
    found = recorded("collate-shortcut", "collate-extra-copy")
    assert found.differences == ["collate_fn 'default_collate' in A, 'collate_in_private_memory' in B"]
    assert (found.b.copied or 0) - (found.a.copied or 0) == pytest.approx(12 << 20, abs=20)  # pickles differ a little
    assert found.sentence().endswith("; the bytes copied per batch changed from 24.0 MiB to 36.0 MiB")


# --- The command ------------------------------------------------------------------------------------------------------
def test_the_text(tmp_path: Path) -> None:
    found = diff(*pair(tmp_path, {"epochs": 2}, SLOW))
    lines = found.text().splitlines()
    assert lines[:5] == [found.headline, *found.story(), f"A: {tmp_path / 'a'}", f"B: {tmp_path / 'b'}"]
    rows = [
        "batches                            120            60",
        f"samples/s               {found.a.whole(True):>14.1f}{found.b.whole(True):>14.1f}",
        f"waiting for batches     {found.a.waiting_share:>14.0%}{found.b.waiting_share:>14.0%}",
        "stage, ms        n A     n B    p50 A    p50 B    p95 A    p95 B    p99 A    p99 B   B / A",
        "sample           480     240    0.749    1.499    0.749    1.499    0.749    1.499    2.00  slower",
        "start              2       2    0.201    0.201        -        -        -        -    1.00  too few to say",
    ]
    assert [row for row in rows if row not in lines] == []
    assert lines[-1].startswith("The intervals are measured within each run")
    of_worker = "  worker 1       240     120    0.749    1.499    0.749    1.499    0.749    1.499    2.00  slower"
    assert of_worker not in lines
    assert of_worker in found.text(workers=True).splitlines()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path / "a", params=PARAMS)
    packed = made(tmp_path / "b", params=PARAMS | {"dataset": "Sounds"}, **SLOW).pack(tmp_path / "b")
    command = ["diff", str(tmp_path / "a"), str(packed)]
    assert cli.main(command) == cli.USAGE
    assert "Record both with the same dataset, or compare them anyway with" in capsys.readouterr().err
    assert cli.main([*command, "--force", "--workers"]) == cli.OK
    assert "differs: dataset 'Photos' in A, 'Sounds' in B" in capsys.readouterr().out
    assert cli.main([*command, "--force", "--json"]) == cli.OK
    facts = json.loads(capsys.readouterr().out)
    low, high = facts["interval"]
    assert low < facts["factor"] < high < 1
    assert facts["runs"][1]["rate"] / facts["runs"][0]["rate"] == pytest.approx(facts["factor"])
    assert facts["explained"]["by"] == ["waiting for samples"]
    assert {"what": "waiting for samples", "rank": None, "per": "batch"}.items() <= facts["loop"][1].items()


@pytest.mark.heavy
def test_the_command_draws_both_timelines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    pair(tmp_path, {}, SLOW)
    for name, words in (("both.svg", "B is 1.99 times as slow"), ("both.html", '"sentence":"B is 1.99 times as slow')):
        assert cli.main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(tmp_path / name)]) == cli.OK
        assert capsys.readouterr().out.startswith("B is ")
        assert words in (tmp_path / name).read_text()
    assert cli.main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(tmp_path / "both")]) == cli.USAGE
    assert "the name has no suffix: add .png or .svg" in capsys.readouterr().err


# --- Transports -------------------------------------------------------------------------------------------------------
def test_two_transports_tell_what_they_did_to_each_batch(tmp_path: Path) -> None:
    a, b = pair(tmp_path, {"params": {}}, {"slabs": True})
    facts = (
        "its batches were in 6 slabs, used 10 times each, instead of 60 new segments; the reader received and mapped "
        "memory 6 times instead of 60 times; the worker itself, without a feeder thread, wrote the messages; "
        "1.0 MiB per batch were copied once in both"
    )
    assert f"; arena instead of upstream: {facts}" in diff(a, b).sentence()
    back = diff(b, a).sentence()
    assert re.search(
        "; upstream instead of arena: its batches were in 60 new segments, instead of 6 slabs, used 10 times each.*"
        "; a feeder thread wrote the messages; ", back
    )  # fmt: skip
    assert diff(a, a).story() == [], "of one transport, as ever"


def test_the_recordings_of_both_transports_tell_their_story() -> None:
    found = recorded("transport-upstream", "transport-arena")
    told = (
        r"B is 4\.\d+ times as fast: .*; arena instead of upstream: its batches were in \d slabs, used \S+ times each, "
        r"instead of 200 new segments; "
    )
    assert re.match(told, found.sentence())
    assert found.differences == ["transport 'upstream' in A, 'arena' in B"]
