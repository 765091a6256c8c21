"""The benchmarks: what they measure, in which order, and what is made of it; never how long anything took."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import minidl
from minidl import cli
from minidl.check import examine
from minidl.loader import ports
from minidl.prove import bench
from minidl.prove.bench import child, events, files, loader, machine, samplers, states, transports
from minidl.prove.bench.child import Child, in_child, metered
from minidl.prove.bench.memory import held
from minidl.prove.bench.pairs import Row, Spread, number, table, take_turns
from minidl.record.ports import TracedPorts
from minidl.record.recorder import GROW_SLOTS
from minidl.tracefile.format import RECORD
from minidl.wire.queues import ReadyQueue


# --- Pairs ------------------------------------------------------------------------------------------------------------
def test_the_ratio_is_the_median_of_the_rounds_ratios() -> None:
    row = Row("g", "ours", "s", (2.0, 30.0, 4.0), "theirs", (1.0, 10.0, 8.0))
    assert row.ratios == (2.0, 3.0, 0.5)
    assert row.ratio.median == 2.0  # the ratio of the medians would be 0.5
    assert Row("g", "theirs", "s", (1.0,)).ratio is None


def test_a_spread_holds_the_middle_four_fifths() -> None:
    assert Spread.of(range(101)) == Spread(50, 10, 90)
    assert str(Spread.of([5.0])) == "5 [5..5]"


def test_every_other_round_goes_backwards_and_the_warming_one_does_not_count() -> None:
    calls: list[str] = []

    def turn(name: str) -> int:
        calls.append(name)
        return len(calls)

    found = take_turns({name: lambda name=name: turn(name) for name in "ABC"}, 2, "test")
    assert "".join(calls) == "CBA" + "ABC" + "CBA"
    assert found == {"A": [4, 9], "B": [5, 8], "C": [6, 7]}
    calls.clear()
    take_turns({name: lambda name=name: turn(name) for name in "AB"}, 1, "test", warm=False)
    assert calls == ["A", "B"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(12345.6, "12,346"), (45.67, "45.7"), (1.234, "1.23"), (0.1234, "0.123"), (0.01234, "0.0123"), (3.0, "3")],
)
def test_numbers_have_three_digits_and_no_exponent(value: float, text: str) -> None:
    assert number(value) == text


def test_the_table_has_a_block_for_each_group() -> None:
    rows = [
        Row("first", "theirs", "s", (1.0,), extra={"MiB": 7.5}),
        Row("first", "ours", "s", (2.0,), "theirs", (1.0,)),
        Row("second", "alone", "ns", (3.0,)),
    ]
    assert table(rows).splitlines() == [
        "first     s         ratio     to      MiB",
        "  theirs  1 [1..1]                    7.50",
        "  ours    2 [2..2]  2 [2..2]  theirs",
        "second   ns",
        "  alone  3 [3..3]",
    ]


# --- Processes to measure in ------------------------------------------------------------------------------------------
def answers(place: Path) -> Iterator[int]:
    try:
        yield os.getpid()
        yield 2
        raise ValueError("no third answer")
    finally:
        (place / "closed").touch()


@pytest.mark.live
def test_a_child_works_when_it_is_asked_and_says_what_failed(tmp_path: Path) -> None:
    with Child(answers, tmp_path) as one:
        assert one.ask() not in (os.getpid(), None)
        assert one.ask() == 2
        with pytest.raises(RuntimeError, match=r"a measurement failed:\n(?s:.*)ValueError: no third answer"):
            one.ask()
    assert one._process.exitcode == 0


@pytest.mark.live
def test_a_child_that_is_let_go_cleans_up_while_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that was forked later inherits the pipe of one that was forked before, and must not keep it open."""
    monkeypatch.setattr(child, "PATIENCE", 5.0)
    first = Child(answers, tmp_path)
    with Child(answers, tmp_path / "nowhere") as second:
        with first:
            first.ask()
        assert first._process.exitcode == 0
        assert (tmp_path / "closed").exists()
        assert second.ask()


@pytest.mark.live
def test_a_child_that_dies_is_missed() -> None:
    with pytest.raises(RuntimeError, match="ended with exit code 7"):
        in_child(os._exit, 7)


def grow(mib: int) -> float:
    with metered() as meter:
        block = bytearray(b"x") * (mib << 20)
    return meter.mib + 0 * len(block)


def grow_in_pieces(mib: int, last: list[bytearray]) -> float:
    """Pieces so small that the C library keeps their memory when they are freed, since the last one is kept."""
    with metered() as meter:
        pieces = [bytearray(b"x") * (1 << 16) for _ in range(16 * mib)]
    last.append(pieces[-1])
    return meter.mib


def grow_after_more() -> tuple[float, float]:
    last: list[bytearray] = []
    grow(200)
    grow_in_pieces(100, last)
    return grow(50), grow_in_pieces(50, last)


@pytest.mark.live
def test_the_meter_sees_the_blocks_own_growth() -> None:
    assert in_child(grow_after_more) == pytest.approx((50, 50), abs=5)
    with metered() as meter:
        deadline = time.perf_counter() + 0.01
        while time.perf_counter() < deadline:
            pass
    assert 0.01 <= meter.seconds < 60


# --- The machine ------------------------------------------------------------------------------------------------------
def burn(seconds: float) -> None:
    deadline = time.process_time() + seconds
    while time.process_time() < deadline:
        pass


@pytest.mark.live
def test_our_own_work_is_known_from_that_of_others() -> None:
    watch = machine.Watch()
    burn(0.2)
    in_child(burn, 0.2)
    _, all_before, us_before = watch._start
    ours = machine._used_by_us() - us_before
    assert ours >= 0.35  # ticks of 0.01 s
    assert machine._used_by_all() - all_before >= ours - 0.05
    load = watch.stop()
    assert load.others < load.cores


@pytest.mark.parametrize(("others", "busy"), [(0.3, False), (0.5, True)])
def test_a_machine_is_busy_where_others_work(others: float, busy: bool) -> None:
    load = machine.Load(before=0.5, after=2.0, others=others, cores=4)
    assert load.busy is busy
    assert ("trust the ratios only" in load.text()) is busy
    assert load.facts()["busy"] is busy


def test_the_machine_is_described() -> None:
    facts = machine.machine()
    assert facts["minidl"] == minidl.__version__
    assert all(facts.values())


# --- Events -----------------------------------------------------------------------------------------------------------
def sound(rows: list[Row], rounds: int, *, own_base: bool = False) -> None:
    """Every row has its values and those of the row of its group that it is compared with, unless it has its own."""
    for row in rows:
        assert len(row.values) == rounds
        assert all(value > 0 for value in row.values)
        if row.against:
            (base,) = (other for other in rows if (other.group, other.name) == (row.group, row.against))
            assert own_base or row.base == base.values
            assert row.ratio.median == statistics.median(a / b for a, b in zip(row.values, row.base, strict=True))


@pytest.mark.live
def test_bench_events() -> None:
    rows = events.bench_events(rounds=2, number=20)
    sound(rows, 2)
    assert [row.group for row in rows if not row.against] == list(dict.fromkeys(row.group for row in rows))
    assert {row.name for row in rows} == {case.name for case in events._CASES}


@pytest.mark.live
def test_viztracer_is_left_out_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events.importlib.util, "find_spec", lambda name: None)
    rows = events.bench_events(rounds=1, number=1)
    assert len(rows) == sum(not case.name.startswith("viztracer") for case in events._CASES)


OURS = [case for case in events._CASES if "emit" in case.statement or "queue" in case.statement]


@pytest.mark.parametrize("case", OURS, ids=lambda case: f"{case.group}, {case.name}")
@pytest.mark.live
def test_a_case_records_as_many_events_as_it_says(case: events._Case, tmp_path: Path) -> None:
    with case.setup(tmp_path) as names:
        for _ in range(5):
            exec(case.statement, names)
    numbers = minidl.read_trace(tmp_path).events["seq"].tolist() if any(tmp_path.iterdir()) else []
    recorded = max(numbers, default=0)  # not their count: a ring forgets
    assert recorded % GROW_SLOTS == 5 * case.records


@pytest.mark.live
def test_without_a_trace_the_queue_is_the_plain_one(tmp_path: Path) -> None:
    with events._queue(tmp_path) as plain, events._traced(events._queue, tmp_path) as traced:
        assert [type(names["queue"]) is ReadyQueue for names in (plain, traced)] == [True, False]


@pytest.mark.parametrize("case", [case for case in events._CASES if case.group == events._BATCH], ids=lambda c: c.name)
@pytest.mark.live
def test_the_loaders_own_thread_records_as_many_events_a_batch_as_the_case_says(
    case: events._Case, tmp_path: Path
) -> None:
    recorded = []
    for batches in (0, 5):
        directory = tmp_path / str(batches)
        with case.setup(directory) as names:
            for _ in range(batches):
                exec(case.statement, names)
        recorded.append(len(minidl.read_trace(directory)) if directory.exists() else 0)
    assert recorded[1] - recorded[0] == 5 * case.records


# --- The loader -------------------------------------------------------------------------------------------------------
@pytest.mark.live
@pytest.mark.parametrize(("kind", "workers"), [("empty", 0), ("record", 1)])
def test_bench_loader(kind: str, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "KINDS", {kind: loader.KINDS[kind]})
    rows = loader.bench_loader(rounds=2, length=0.1, workers=(workers,))
    sound(rows, 2)
    assert {row.group for row in rows} == {f"{kind} batch, {workers} worker{'' if workers == 1 else 's'}"}
    assert {row.name: row.against for row in rows} == loader.VARIANTS
    recorded = {row.name: row.extra["events"] for row in rows if "events" in row.extra}
    assert list(recorded) == [loader.BATCHES, loader.SAMPLES]
    per_sample = 2 * loader.KINDS[kind].batch_size  # begin and end
    assert recorded[loader.SAMPLES] - recorded[loader.BATCHES] == pytest.approx(per_sample, abs=2)
    for row in rows:
        assert row.extra["CPU µs, loader"] > 0
        assert (row.extra["CPU µs, workers"] > 0) is (workers > 0)
        assert ("CPU ratio" in row.extra) is bool(row.against)


@pytest.mark.live
def test_an_epochs_cpu_time_is_its_own(tmp_path: Path) -> None:
    with contextlib.closing(loader._epochs(loader.PLAIN, loader.KINDS["empty"], 2, 20, tmp_path)) as epochs:
        measured = [next(epochs) for _ in range(3)]
        total = loader._cpu_ns([worker.pid for worker in multiprocessing.active_children()])
    assert 0 < sum(epoch.extra["CPU µs, workers"] for epoch in measured) * 20 * 1000 < total
    assert 0 < sum(epoch.extra["CPU µs, loader"] for epoch in measured) * 20 * 1000 < time.process_time_ns()


@pytest.mark.heavy
@pytest.mark.parametrize("variant", [loader.TORCH, loader.PLAIN])
@pytest.mark.parametrize("kind", loader.KINDS)
def test_every_loader_serves_every_batch(variant: str, kind: str, tmp_path: Path) -> None:
    with loader._tracing(variant, tmp_path), loader._loader(variant, loader.KINDS[kind], 0, 3) as served:
        assert loader._count(served) == 3


@pytest.mark.live
@pytest.mark.parametrize(("variant", "detail", "recorded"), [
    (loader.ENDED, None, True), (loader.PLAIN, None, False), (loader.BATCHES, "batch", True),
    (loader.SAMPLES, "sample", True),
])  # fmt: skip
def test_a_loader_without_a_trace_has_plain_ports(
    variant: str, detail: str | None, recorded: bool, tmp_path: Path
) -> None:
    """Also after a trace has ended."""
    with loader._tracing(variant, tmp_path / "trace"):
        found = ports.new_ports()
        assert isinstance(found, TracedPorts) if detail else type(found) is ports.Ports
        assert detail is None or found.config.detail == detail
    assert (tmp_path / "trace").exists() is recorded
    assert variant != loader.ENDED or len(minidl.read_trace(tmp_path / "trace")) > 0


def test_pictures_need_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(loader, "_rows", lambda name, *args: [name])
    assert loader.bench_loader(rounds=1, workers=(0,)) == ["empty", "tiny", "record"]


@pytest.mark.live
def test_bench_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "PAUSE", 0.0)
    monkeypatch.setattr(transports, "EPOCHS", 2)
    few = {name: replace(kind, batches=12) for name, kind in transports.TRAVELLERS.items() if name != "record"}
    monkeypatch.setattr(transports, "TRAVELLERS", few)
    rows = transports.bench_transports(rounds=1, length=0.005, workers=(1,))
    kinds = transports.TRAVELLERS.values()
    assert [row.name for row in rows] == [name for kind in kinds for name in transports.variants_for(kind)]
    assert all(row.extra["CPU ratio"] > 0 for row in rows if row.name != transports.TORCH)
    assert all(row.extra["ms to first"] > 0 and row.extra["batches/s"] > 0 for row in rows)
    batch = 32 * 3 * 224 * 224 * 4 / (1 << 20)  # MiB, which a copy and two workers' batches need at least
    pictures = {row.name: row.extra["peak MiB"] for row in rows if row.group.startswith("32 x 3")}
    assert all(pictures[name] > batch for name in (transports.COPY, transports.TORCH, transports.ARENA))


def test_a_ring_of_shared_tensors_is_used_again() -> None:
    """Which is why a batch that is kept is overwritten, as people find out who write this by hand."""
    collate = transports.Ring(2)
    one, two, three = (collate([value, value + 1]) for value in (1, 3, 5))
    assert one.is_shared()
    assert two.tolist() == [3, 4]
    assert one.tolist() == three.tolist() == [5, 6]


# --- A loader's state -------------------------------------------------------------------------------------------------
@pytest.mark.live
def test_memory_that_processes_share_counts_once_also_while_it_is_only_a_descriptor() -> None:
    size, anonymous = 64 << 20, held([os.getpid()])
    segment = torch.UntypedStorage._new_shared(size)  # type: ignore[no-untyped-call]
    segment.fill_(1)
    both = multiprocessing.get_context("fork").Event()
    child = multiprocessing.get_context("fork").Process(target=both.wait, args=(60,))
    child.start()
    try:
        assert child.pid is not None
        assert size <= held([os.getpid(), child.pid]) - anonymous < 2 * size
    finally:
        both.set()
        child.join()
    fd = os.dup(segment._share_fd_cpu_()[0])
    del segment
    gc.collect()
    try:
        assert size <= held([os.getpid()]) - anonymous < 2 * size
    finally:
        os.close(fd)
    assert held([os.getpid()]) - anonymous < size


@pytest.mark.live
def test_memory_of_the_process_that_measures_is_no_memory_of_a_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each forked worker gets a share of it."""
    monkeypatch.setattr(transports, "PAUSE", 0.0)
    peaks, ballast = [], bytearray()
    for mib in (0, 256):
        ballast += b"1" * (mib << 20)
        peaks.append(in_child(transports._memory, transports.TORCH, loader.KINDS["tiny"], 2, 4)[0])
    assert abs(peaks[1] - peaks[0]) < 32


@pytest.mark.live
@pytest.mark.parametrize("workers", [0, 2])
def test_bench_states(workers: int) -> None:
    rows = states.bench_states(rounds=2, length=0.05, workers=(workers,))
    sound(rows, 2)
    assert {row.name: row.against for row in rows} == states.AGAINST
    assert all(row.extra["state_dict() µs"] > 0 for row in rows)


# --- Files ------------------------------------------------------------------------------------------------------------
@pytest.mark.live
def test_bench_files() -> None:
    rows = files.bench_files([4000], rounds=2)
    sound(rows, 2, own_base=True)
    assert [row.name for row in rows] == list(files._OPERATIONS)
    assert {row.against for row in rows[1:]} == {"read_trace"}
    assert {row.name for row in rows if "file MiB" in row.extra} == {"export", "pack"}
    count = int(rows[0].group.split()[0].replace(",", ""))
    assert count == pytest.approx(4000, rel=0.2)
    assert rows[0].extra["peak MiB"] > count * RECORD.itemsize / 2**20
    assert rows[0].extra["events/s"] == pytest.approx(count / statistics.median(rows[0].values))


@pytest.mark.live
def test_the_trace_for_the_files_is_sound(tmp_path: Path) -> None:
    path, count = in_child(files._record, tmp_path, 4000)
    trace = minidl.read_trace(path)
    assert len(trace) == count
    assert not trace.problems
    assert not examine(trace).violations


# --- Samplers ---------------------------------------------------------------------------------------------------------
@pytest.mark.live
def test_bench_samplers() -> None:
    rows = samplers.bench_samplers(1000, rounds=2)
    sound(rows, 2)
    assert [(row.name, row.against) for row in rows] == [("torch", ""), ("minidl", "torch")] * len(samplers._CASES)
    assert all(0 < row.extra["first index s"] < row.value.median for row in rows)


@pytest.mark.live
def test_a_ranks_share_takes_less_than_a_third_of_torchs_memory() -> None:
    theirs, ours = samplers._rows("DistributedSampler, one rank of 8", 3_000_000, 1)
    assert ours.extra["MiB"] < theirs.extra["MiB"] / 3
    assert 3_000_000 * 8 / 2**20 < theirs.extra["MiB"] < 400


# --- The command ------------------------------------------------------------------------------------------------------
@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Two benchmarks that measure nothing; whether each was asked to be quick."""
    asked: list[bool] = []

    def benchmark(quick: bool) -> list[Row]:
        asked.append(quick)
        return [Row("group", "torch", "s", (2.0, 2.0)), Row("group", "minidl", "s", (1.0, 3.0), "torch", (2.0, 2.0))]

    monkeypatch.setattr(bench, "_BENCHMARKS", {"one": ("about one", benchmark), "two": ("about two", benchmark)})
    monkeypatch.setattr("minidl.commands.BENCHMARKS", ("one", "two"))
    return asked


def run(*argv: str) -> int:
    return bench.run(cli.parser().parse_args(["bench", *argv]))


def test_a_table_of_each_benchmark_and_the_machine(measured: list[bool], capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    assert measured == [False, False]
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert f"torch {machine.machine()['torch']}" in first
    assert {"one: about one", "two: about two"} <= set(lines)
    assert "load average" in last


def test_the_file_holds_every_measurement(measured: list[bool], tmp_path: Path) -> None:
    assert run("two", "--quick", "--json", str(tmp_path / "b.json")) == 0
    assert measured == [True]
    found: dict[str, Any] = json.loads((tmp_path / "b.json").read_text())
    assert list(found["rows"]) == ["two"]
    ours = found["rows"]["two"][1]
    assert (ours["values"], ours["base"], ours["ratios"]) == ([1.0, 3.0], [2.0, 2.0], [0.5, 1.5])
    assert ours["ratio"]["median"] == 1.0
    assert found["machine"]["cpu"]
    assert isinstance(found["machine"]["busy"], bool)


def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured(
    measured: list[bool], tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError):
        run("--json", str(tmp_path / "nowhere" / "b.json"))
    assert measured == []


def test_an_unknown_benchmark_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["bench", "nonsense"])
    assert exit_.value.code == cli.USAGE
    said = capsys.readouterr().err
    names = "events, loader, transport, state, files, samplers, auto, plan"
    assert f"'nonsense' is not a benchmark: choose from {names}" in said
