"""The verdict: runs whose bottleneck is known by construction, and imagined ones whose waiting is known to the ns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import made_trace
import numpy as np
import pytest
import torch
from oracle_trace import write_process

import minidl
from minidl.playback.state import MOST_WORKERS
from minidl.speed.hot_spots import HotSpot
from minidl.speed.reasons import SlowReason
from minidl.speed.side import side
from minidl.speed.verdict import Reasons, Verdict, judge, verdict
from minidl.speed.wall_clock import FEW_BATCHES, Bound, Cause, Waiting, WallClock, waiting
from minidl.tracefile import events as ev
from minidl.tracefile.reader import Trace, read_trace
from minidl.tracefile.spans import SPAN
from minidl.tracefile.stack_samples import CodeLine

TRACES = Path(__file__).parents[2] / "traces"

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

LONG = 0.06


class Sleepy(minidl.Dataset[torch.Tensor]):
    """Sample i is tensor(i); it sleeps `each` seconds, sample 0 `first` seconds more."""

    def __init__(self, size: int = 12, each: float = 0.0, first: float = 0.0) -> None:
        self.size, self.each, self.first = size, each, first

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.each + (0 if index else self.first))
        return torch.tensor(index)


class SleepySampler:
    """Indices 0 to 11, each after a sleep."""

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        for index in range(12):
            time.sleep(LONG)
            yield index


def sleepy_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    time.sleep(LONG)
    return torch.stack(samples)


def record(directory: Path, dataset: Any = None, epochs: int = 1, **options: Any) -> Trace:
    """Several epochs of a consumer that does nothing."""
    with minidl.trace(directory), minidl.DataLoader(dataset or Sleepy(), **options) as loader:
        for _ in range(epochs):
            assert len(list(loader)) == len(loader)
    return read_trace(directory)


def number_in(trace: Trace) -> int:
    """The number of the trace's only loader: a process that traces again counts on."""
    (number,) = set(trace.events["loader"].tolist()) - {0}
    return number


def only(trace: Trace) -> Verdict:
    return verdict(trace, number_in(trace))


# --- Live runs --------------------------------------------------------------------------------------------------------
@pytest.mark.live
def test_head_of_line_names_the_sample_that_holds_the_others_back(tmp_path: Path) -> None:
    trace = record(tmp_path / "trace", Sleepy(first=2.0), num_workers=2)
    told = only(trace)
    assert (told.kind, told.cause) == (Bound.HEAD_OF_LINE, Cause.HEAD_OF_LINE)
    assert "task 0 of worker 0, sample 0" in told.sentence
    assert "in_order=False" in told.next_step


@pytest.mark.live
def test_out_of_order_the_same_run_has_no_line_to_block(tmp_path: Path) -> None:
    trace = record(tmp_path / "trace", Sleepy(first=0.3), num_workers=2, in_order=False)
    found = waiting(trace, number_in(trace))
    assert found.causes[Cause.HEAD_OF_LINE] == 0
    assert (found.task, found.sample) == (-1, -1)


SUPPLIED = {
    Cause.SAMPLES: (Sleepy(each=LONG), {}),
    Cause.COLLATE: (Sleepy(), {"collate_fn": sleepy_collate}),
}


@pytest.mark.live
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("cause", SUPPLIED, ids=lambda cause: cause.name.lower())
def test_supply_is_split_by_stage(tmp_path: Path, cause: Cause, workers: int) -> None:
    dataset, options = SUPPLIED[cause]
    # Twice as many batches for two workers, so that the loop waits as long; and more, where a busy machine takes longer
    # to start the workers than they then work.
    for attempt in range(4):
        sized = Sleepy(12 * max(1, workers) << attempt, dataset.each)
        trace = record(tmp_path / str(attempt), sized, num_workers=workers, **options)
        found = waiting(trace, number_in(trace))
        if found.share(Cause.START_UP) < 0.4:
            break
    told = only(trace)
    assert (told.kind, told.cause) == (Bound.SUPPLY, cause)
    assert ("num_workers=1" in told.next_step) is (workers == 0)


@pytest.mark.live
def test_a_slow_sampler_is_named_though_workers_idle(tmp_path: Path) -> None:
    told = only(record(tmp_path / "trace", sampler=SleepySampler(), num_workers=2))
    assert (told.kind, told.cause) == (Bound.SAMPLER, Cause.SAMPLER)


@pytest.mark.live
def test_short_epochs_that_start_workers_anew(tmp_path: Path) -> None:
    trace = record(tmp_path / "trace", Sleepy(2), epochs=3, num_workers=2)
    told = [verdict(trace, number) for number in trace.loaders]
    assert [v.kind for v in told] == [Bound.START_UP] * 3
    assert "persistent_workers=True" in told[0].next_step
    assert any("one of 3 iterators" in text for text in told[0].evidence)


@pytest.mark.live
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_slow_consumer_is_not_input_bound(tmp_path: Path, workers: int) -> None:
    """Each training step takes twice as long as all waiting before it, however busy the machine is."""
    waited = 0
    with minidl.trace(tmp_path / "trace"), minidl.DataLoader(Sleepy(FEW_BATCHES), num_workers=workers) as loader:
        begin = time.monotonic_ns()
        for _ in loader:
            waited += time.monotonic_ns() - begin
            time.sleep(2 * waited / 1e9)
            begin = time.monotonic_ns()
    told = only(read_trace(tmp_path / "trace"))
    assert (told.kind, told.cause) == (Bound.NOT_INPUT, None)


class Shards(minidl.IterableDataset[int]):
    """Of worker 0 two batches, of worker 1 twenty-four, each after a sleep."""

    def __iter__(self) -> Iterator[int]:
        info = minidl.get_worker_info()
        for number in range(24 if info.id else 2):
            time.sleep(0.02)
            yield number


@pytest.mark.live
def test_uneven_shards_are_found(tmp_path: Path) -> None:
    with minidl.trace(tmp_path / "trace"):
        assert len(list(minidl.DataLoader(Shards(), 1, num_workers=2))) == 26
    trace = read_trace(tmp_path / "trace")
    found = waiting(trace, number_in(trace))
    assert found.out == 0
    assert found.uneven > 0.5 * found.causes[Cause.SAMPLES]


class Even(Shards):
    def __iter__(self) -> Iterator[int]:
        yield from range(12)


@pytest.mark.live
def test_even_shards_are_not_uneven(tmp_path: Path) -> None:
    with minidl.trace(tmp_path / "trace"):
        assert len(list(minidl.DataLoader(Even(), 1, num_workers=3))) == 36
    trace = read_trace(tmp_path / "trace")
    found = waiting(trace, number_in(trace))
    assert (found.uneven, found.out) == (0, -1)


def test_a_worker_that_is_always_slow_holds_the_line(tmp_path: Path) -> None:
    found = waiting(imagined(tmp_path / "a", batches=60, step=10_000, cost=lambda t: 10_000_000 >> 4 * (t % 2)), 1)
    assert (found.worker, found.lasting) == (0, 1.0)
    options, _ = IMAGINED["one batch that takes as long as a hundred"]
    assert waiting(imagined(tmp_path / "b", **options), 1).lasting < 0.5


@pytest.mark.live
def test_short_epochs_are_judged_together(tmp_path: Path) -> None:
    """Each epoch of a loader that does not keep its workers is an iterator of its own, here of three batches."""
    with minidl.trace(tmp_path / "trace"), minidl.DataLoader(Sleepy(3, each=LONG), batch_size=1) as loader:
        for _ in range(3):
            assert len(list(loader)) == 3
    trace = read_trace(tmp_path / "trace")
    for number in trace.loaders:
        told = verdict(trace, number)
        assert (told.kind, told.cause) == (Bound.SUPPLY, Cause.SAMPLES)
        assert "2 of 3 iterators with the same parameters, taken together" in told.evidence


def test_first_batches_count_from_the_second_epoch_on(tmp_path: Path) -> None:
    assert waiting(imagined(tmp_path / "a", batches=10, step=20_000_000), 1).first == 0
    found = waiting(imagined(tmp_path / "b", batches=10, step=20_000_000, epochs=3), 1)
    assert 0.5 * found.total < found.first <= found.total


# --- Imagined runs ----------------------------------------------------------------------------------------------------
def imagined(directory: Path, **options: Any) -> Trace:
    return read_trace(made_trace.write(directory, made_trace.Run(**options)))


IMAGINED = {
    "steps that take longer than batches": ({"batches": 200, "step": 20_000_000}, Bound.NOT_INPUT),
    "steps that take no time": ({"batches": 200, "step": 10_000}, Bound.SUPPLY),
    "a run of two batches": ({"batches": 2, "step": 100_000}, Bound.TOO_FEW),
    "one batch that takes as long as a hundred": (
        {"batches": 60, "step": 10_000, "cost": lambda task: 100_000_000 if task == 20 else 1_000_000},
        Bound.HEAD_OF_LINE,
    ),
    "the same with a pin thread": (
        {"batches": 60, "step": 10_000, "cost": lambda task: 100_000_000 if task == 20 else 1_000_000, "pin": True},
        Bound.HEAD_OF_LINE,
    ),
    "a sample that hangs": (made_trace.HUNG | {"polls": 60}, Bound.HEAD_OF_LINE),
}


@pytest.mark.parametrize("run", IMAGINED)
def test_imagined_runs(tmp_path: Path, run: str) -> None:
    options, kind = IMAGINED[run]
    assert only(imagined(tmp_path / "trace", **options)).kind is kind


@pytest.mark.parametrize("run", IMAGINED)
def test_every_nanosecond_has_one_cause(tmp_path: Path, run: str) -> None:
    """The causes add up to the time in iter, in next and in the shutdown, which never overlap in an imagined run."""
    trace = imagined(tmp_path / "trace", **IMAGINED[run][0])
    found = waiting(trace, 1)
    assert all(ns >= 0 for ns in found.causes.values())
    begin, end = (trace.events["time"][place] for place in (0, -1))
    nexts = [row for row in trace.spans() if row["code"] in (ev.NEXT[0], ev.SHUTDOWN[0])]
    inside = sum((row["end"] if row["end"] >= 0 else end) - row["begin"] for row in nexts)
    assert found.total == inside + nexts[0]["begin"] - begin


def test_the_line_is_blocked_by_the_worker_of_the_slow_task(tmp_path: Path) -> None:
    found = waiting(imagined(tmp_path / "trace", **IMAGINED["one batch that takes as long as a hundred"][0]), 1)
    assert (found.task, found.worker) == (20, 0)
    assert found.sample in range(80, 84)


def test_pinning_is_waited_for_while_the_pin_thread_pins(tmp_path: Path) -> None:
    """The imagined loader waits for each batch while it is rebuilt and pinned."""
    trace = imagined(tmp_path / "trace", batches=20, pin=True, step=10_000)
    spans, causes = trace.spans(), waiting(trace, 1).causes
    for cause, code in ((Cause.PIN, ev.PIN[0]), (Cause.REBUILD, ev.RESULT_REBUILD[0])):
        rows = spans[spans["code"] == code]
        assert causes[cause] == (rows["end"] - rows["begin"]).sum() > 0


LOADER = [
    (0, ev.WORKER_START[0], -1, 0), (40, ev.WORKER_START[1], -1, 0), (100, ev.EPOCH[0], -1, -1, 0, 2, 2),
    (110, ev.SAMPLER_NEXT[0], 0), (130, ev.SAMPLER_NEXT[1], 0), (150, ev.CONSUMER[0]), (200, ev.CONSUMER[1]),
    (200, ev.NEXT[0], 0), (200, ev.RESULT_GET[0], 0, 0), (330, ev.RESULT_REBUILD[0], 1, 1),
    (350, ev.RESULT_REBUILD[1], 1, 1), (350, ev.RESULT_GET[1], 1, 1), (350, ev.REORDER_STORE, 1, 1, 0, 1),
    (350, ev.RESULT_GET[0], 0, 0), (440, ev.RESULT_REBUILD[0], 0, 0), (450, ev.RESULT_REBUILD[1], 0, 0),
    (450, ev.RESULT_GET[1], 0, 0), (460, ev.YIELD, 0, 0), (460, ev.NEXT[1], 0), (460, ev.CONSUMER[0], 0),
    (500, ev.CONSUMER[1], 0), (500, ev.SHUTDOWN[0]), (530, ev.SHUTDOWN[1]),
]  # fmt: skip
"""(time, code, task, worker, x, y, z). The loader waits for task 0, and task 1 comes first."""

WORKERS = [
    [
        (260, ev.FETCH[0], 0, 0), (340, ev.COLLATE[0], 0, 0), (400, ev.COLLATE[1], 0, 0), (400, ev.FETCH[1], 0, 0),
        (400, ev.RESULT_PICKLE[0], 0, 0), (400, ev.FETCH[0], 2, 0), (420, ev.RESULT_PICKLE[1], 0, 0),
        (420, ev.RESULT_WRITE[0], 0, 0), (430, ev.RESULT_WRITE[1], 0, 0), (500, ev.FETCH[1], 2, 0),
    ],
    [
        (250, ev.FETCH[0], 1, 1), (300, ev.FETCH[1], 1, 1), (300, ev.RESULT_PICKLE[0], 1, 1),
        (300, ev.INDEX_GET[0], -1, 1), (310, ev.RESULT_PICKLE[1], 1, 1), (310, ev.RESULT_WRITE[0], 1, 1),
        (320, ev.RESULT_WRITE[1], 1, 1), (380, ev.INDEX_GET[1], 3, 1), (380, ev.FETCH[0], 3, 1),
        (500, ev.FETCH[1], 3, 1),
    ],
]  # fmt: skip
"""Worker 0 makes task 0; worker 1 has sent task 1 at 320 and has nothing to do until 380."""


SPLIT = {
    Cause.START_UP: 130 + 60 + 30,  # iter but for the sampler; until task 0 is begun (260); the shutdown
    Cause.SAMPLER: 20,
    Cause.SAMPLES: 40 + 10 + 10 + 10 + 20 + 10,  # 260-300, half of 300-320, 320-330, half of 380-400, 400-440
    Cause.IPC: 10 + 10,  # half of 300-320, a third of 400-430
    Cause.REBUILD: 20 + 10,
    Cause.HEAD_OF_LINE: 30,  # 350-380: task 1 lies ready, worker 1 is idle
    Cause.COLLATE: 10,  # half of 380-400: task 1 lies ready, and no worker is idle
    Cause.PIN: 0,
    Cause.OVERHEAD: 10,  # from the result to the end of next
}


@pytest.mark.parametrize("before", [[], [(-900, ev.GC[0]), (-100, ev.GC[1])]], ids=["alone", "after a pause"])
def test_a_timeline_written_by_hand_is_split_to_the_nanosecond(tmp_path: Path, before: list[tuple[int, int]]) -> None:
    """before: while the program imports, the collector stops it; the first loader records that."""
    names = ("time", "code", "task", "worker", "x", "y", "z")
    for pid, rows in enumerate([[*before, *LOADER], *WORKERS], 100):
        events = [dict(zip(names, row, strict=False)) for row in rows]
        events = [event | {"time": event["time"] + 1000} for event in events]  # 0 is no time
        write_process(tmp_path / "trace", events, pid=pid, role="worker" if pid > 100 else "loader", loader=1)
    found = waiting(read_trace(tmp_path / "trace"), 1)
    assert found.causes == SPLIT
    assert (found.total, found.ending) == (150 + 260 + 30, 30)
    assert (found.consumer, found.task, found.worker) == (50 + 40, 0, 0)
    assert found.busy == (140 + 50 + 50 + 70) / (250 * 2)  # fetching while the loader waits, 200-450


def test_a_wait_that_is_hidden_in_part_is_not_blamed_on_the_last_step(tmp_path: Path) -> None:
    """Samples take three times as long as collation; what the training step leaves of the wait is in collation."""
    trace = imagined(tmp_path / "trace", batches=200)
    found, told = waiting(trace, 1), verdict(trace, 1)
    assert found.causes[Cause.COLLATE] > found.causes[Cause.SAMPLES]
    assert (told.kind, told.cause) == (Bound.SUPPLY, Cause.SAMPLES)


# --- The judgement alone ----------------------------------------------------------------------------------------------
def made(consumer: int = 0, batches: int = 100, workers: int = 2, alike: int = 1, **causes: int) -> Waiting:
    return Waiting({c: causes.get(c.name.lower(), 0) for c in Cause}, consumer, batches, workers, alike)


JUDGED = [
    (made(samples=50, collate=20, head_of_line=60), Bound.SUPPLY, Cause.SAMPLES),
    (made(ipc=50, collate=20, head_of_line=60), Bound.SUPPLY, Cause.IPC),
    (made(pin=30, rebuild=20, samples=40), Bound.READING, Cause.PIN),
    (made(overhead=30, samples=20), Bound.OVERHEAD, Cause.OVERHEAD),
    (made(consumer=901, samples=99), Bound.NOT_INPUT, None),
    (made(consumer=899, samples=101), Bound.SUPPLY, Cause.SAMPLES),
    # So is what the first steps take longer.
    (made(consumer=1800, samples=150), Bound.NOT_INPUT, None),
    (replace(made(consumer=1800, samples=150), warming=900), Bound.SUPPLY, Cause.SAMPLES),
    # Start-up that was paid once is spread by a longer run, unless there is little else; paid again it is not.
    (made(consumer=800, start_up=200, samples=50), Bound.NOT_INPUT, None),
    (made(consumer=800, start_up=200, samples=50, alike=5), Bound.START_UP, Cause.START_UP),
    (made(consumer=100, start_up=200, samples=50), Bound.START_UP, Cause.START_UP),
    (made(consumer=100, start_up=200, samples=250, alike=5), Bound.SUPPLY, Cause.SAMPLES),
    (made(batches=FEW_BATCHES - 1, samples=50), Bound.TOO_FEW, None),
    (made(batches=FEW_BATCHES, samples=50), Bound.SUPPLY, Cause.SAMPLES),
    (made(batches=1, start_up=100, samples=50, alike=2), Bound.START_UP, Cause.START_UP),
    (made(batches=1, samples=50, alike=2), Bound.TOO_FEW, None),
]


@pytest.mark.parametrize(("found", "kind", "cause"), JUDGED)
def test_the_kind_follows_from_the_shares(found: Waiting, kind: Bound, cause: Cause | None) -> None:
    told = judge(found)
    assert (told.kind, told.cause) == (kind, cause)


@pytest.mark.parametrize(("took", "kind"), [(300, Bound.PROGRAM), (100, Bound.SUPPLY)])
def test_a_few_long_steps_outweigh_a_smaller_waiting(took: int, kind: Bound) -> None:
    """The loop waits for 200 of 1,200; its few long steps take more, or less."""
    long = np.zeros(1, SPAN)
    long["end"] = took

    def why(of: Bound, cause: Cause | None) -> Reasons:
        slow = SlowReason("slow steps", "one of 9 steps takes long", rows=long)
        return Reasons(slow if of is Bound.NOT_INPUT else None)

    told = judge(made(consumer=1000, samples=200), why=why)
    assert told.kind is kind
    expected = "program-bound: one of 9 steps takes long; the loop waited 17% of its time"
    assert told.sentence == expected or kind is Bound.SUPPLY
    assert told.sentence.startswith(kind.value)


def test_a_start_that_costs_more_than_the_verdict_is_told_apart() -> None:
    told = judge(made(consumer=443, start_up=92, samples=39, rebuild=31))
    assert told.kind is Bound.SUPPLY
    assert told.apart.startswith("starting and ending workers took 92 ns more, which does not count here")
    assert told.apart in " ".join(told.lines())
    assert judge(made(consumer=443, start_up=39, samples=39, rebuild=31)).apart == ""
    assert judge(made(consumer=100, start_up=200, samples=50)).apart == ""


def test_what_the_first_batch_cost_is_no_steady_waiting() -> None:
    """It is waited for once, while the pipeline fills."""
    steady = replace(made(consumer=700, samples=200), opening={Cause.SAMPLES: 190})
    assert judge(steady).sentence == (
        "not input-bound: the loader keeps up, the training step takes 99% of the loop's time "
        "(78% with start-up and shutdown)"
    )
    short = replace(made(consumer=300, start_up=100, samples=300, pin=100), opening={Cause.SAMPLES: 290, Cause.PIN: 90})
    assert judge(short).sentence == (
        "start-up-bound: the loop waited 62% of its time, 12% for starting and ending workers, 48% for the first batch"
    )
    again = steady + steady
    assert judge(again).kind is Bound.SUPPLY, "each of two iterators has a first batch"


@pytest.mark.parametrize(
    ("name", "waited"), [("healthy-8-pinned", True), ("workers-0", False), ("persistent", False), ("respawn", False)]
)
def test_a_first_batch_that_comes_once_is_told_from_others(name: str, waited: bool) -> None:
    """Without workers it costs what each batch costs; each epoch, or iterator, has one of its own."""
    trace = read_trace(TRACES / f"{name}.minidl")
    found = waiting(trace, next(iter(trace.loaders)))
    assert (sum(found.opening.values()) > 0.2 * found.total) is waited
    assert found.once <= found.total


SENTENCES = [
    (made(samples=95, overhead=5), "100% of its time for workers that fetch samples"),
    (made(samples=60, overhead=30), "100% of its time, 67% for workers that fetch samples"),
    (made(consumer=100, samples=60, overhead=40), "50% of its time, 30% for workers that fetch samples, and 20% for "
     "messages in transit and bookkeeping"),
    (made(consumer=100, start_up=100, ipc=100, sampler=10, workers=2), "52% of its time for workers that pickle and "
     "send batches"),
    (made(collate=90, workers=0), "100% of its time for collation, without workers"),
    (made(sampler=90), "100% of its time for the sampler"),
    (made(consumer=10, start_up=60, samples=30), "90% of its time, 60% for starting and ending workers"),
]  # fmt: skip
"""All shares are of the loop's time; a second kind is named if it is nearly as large; the start is not in it."""


@pytest.mark.parametrize(("found", "words"), SENTENCES, ids=lambda one: one if isinstance(one, str) else "")
def test_shares_are_of_the_loops_time_and_add_up(found: Waiting, words: str) -> None:
    told = judge(found)
    name = "start-up-bound" if "starting" in words else told.kind.value
    assert told.sentence == f"{name}: the loop waited {words}"


@pytest.mark.parametrize(
    ("causes", "params", "words"),
    [
        ({"samples": 95}, {"dataset": "Clips"}, "workers that fetch samples (Clips)"),
        ({"collate": 95}, {"dataset": "Clips", "collate_fn": "pad"}, "workers that collate batches (pad)"),
        ({"collate": 95}, {"collate_fn": "default_collate"}, "workers that collate batches"),
        ({"ipc": 95}, {"dataset": "Clips"}, "workers that pickle and send batches"),
        ({"samples": 95}, {"dataset": "A" * 40}, "workers that fetch samples"),
    ],
)
def test_the_programs_own_names_are_in_the_sentence(causes: dict[str, int], params: dict[str, str], words: str) -> None:
    assert judge(made(**causes), params).sentence.endswith(f"100% of its time for {words}")


def test_a_reason_follows_the_sentence_and_brings_its_advice() -> None:
    def why(kind: Bound, cause: Cause | None) -> Reasons:
        return Reasons(SlowReason("planted", f"because of {cause.value if cause else kind.value}", "mend it"))

    told = judge(made(consumer=50, samples=95, overhead=5), why=why)
    assert (
        told.sentence
        == "supply-bound: the loop waited 67% of its time for workers that fetch samples: because of samples"
    )
    assert told.next_step == "mend it"
    fine = judge(made(consumer=950, samples=50), why=why)
    assert (fine.kind, fine.next_step) == (Bound.PROGRAM, "mend it")
    assert fine.sentence == "program-bound: because of not input-bound; the loader keeps up"


def test_a_loader_that_keeps_up_tells_what_the_step_does() -> None:
    told = judge(made(consumer=950, samples=50), why=lambda kind, cause: Reasons(step="waits for the network"))
    takes = "the training step takes 95% of the loop's time and mostly waits for the network"
    assert told.sentence == f"not input-bound: the loader keeps up, {takes}"


def test_the_parts_of_the_training_step_are_named() -> None:
    def told(**parts: int) -> Verdict:
        reasons = Reasons(step="computes", parts={name.replace("_", " "): ns for name, ns in parts.items()})
        return judge(made(consumer=950, samples=50), why=lambda kind, cause: reasons)

    one = told(backward=600, forward=250, optimizer=60, evaluation=20, other_code=20)
    assert one.sentence == (
        "not input-bound: the loader keeps up, the training step takes 95% of the loop's time: backward 60%, "
        "forward 25%, optimizer 6%"
    )
    words = "backward 600 ns, forward 250 ns, optimizer 60 ns, evaluation 20 ns, other code 20 ns"
    assert f"the training step, by the host's time: {words}" in one.evidence
    other = told(other_code=600, forward=350)
    assert other.sentence.endswith("the training step takes 95% of the loop's time and mostly computes")
    assert "the training step, by the host's time: other code 600 ns, forward 350 ns" in other.evidence


def test_what_else_is_wrong_follows_or_leads_if_nothing_bounds_the_loader() -> None:
    also = (SlowReason("growth", "memory grows", "find what is kept"),)
    told = judge(made(samples=95), why=lambda kind, cause: Reasons(warnings=also))
    assert (
        told.sentence == "supply-bound: the loop waited 100% of its time for workers that fetch samples; memory grows"
    )
    assert told.next_step.startswith("find what is kept; use more workers")
    fine = judge(made(consumer=950, samples=50), why=lambda kind, cause: Reasons(warnings=also))
    assert (fine.kind, fine.sentence) == (Bound.PROGRAM, "program-bound: memory grows; the loader keeps up")


def test_a_reader_is_no_bottleneck_while_the_workers_are_all_at_work() -> None:
    """More workers than CPUs: rebuilding takes long for the same reason as samples do, and a faster one would wait."""
    reading = made(rebuild=60, samples=30)
    assert judge(reading).kind is Bound.READING  # its workers idle
    told = judge(replace(reading, spare=0.1, work={Cause.SAMPLES: 90, Cause.COLLATE: 5, Cause.IPC: 5}))
    assert (told.kind, told.cause) == (Bound.SUPPLY, Cause.SAMPLES)
    assert told.sentence.endswith("100% of its time, and meanwhile its workers were busy, mostly with samples")
    assert "rebuilding messages 60 ns" in told.evidence[0]


def test_a_start_that_is_hardly_longer_than_the_waits_between_is_not_named_alone() -> None:
    slow = SlowReason("slow samples", "2 of 100 samples take 67% of the time of all (17, 67)", "make them cheaper")

    def told(samples: int) -> Verdict:
        why = lambda kind, cause: Reasons(slow if kind is Bound.SUPPLY else None)  # noqa: E731
        return judge(made(start_up=400, samples=samples, consumer=300, alike=2), why=why)

    both = told(300)
    assert both.kind is Bound.START_UP
    assert both.sentence.endswith(f"40% for starting and ending workers; {slow.words}")
    assert both.next_step.startswith("make them cheaper; ")
    assert told(100).sentence.endswith("for starting and ending workers")


def test_uneven_shards_are_evidence() -> None:
    uneven = judge(replace(made(samples=50), uneven=40, out=1))
    assert "40 ns of that came after worker 1 had run out of data" in uneven.evidence
    assert not any("run out of data" in line for line in judge(replace(made(samples=50), uneven=10, out=1)).evidence)


@pytest.mark.parametrize("worker", [-(2**63), 2**40, 2**63 - 1])
def test_a_damaged_workers_number_is_judged_too(worker: int, tmp_path: Path) -> None:
    """It takes no memory for all the workers that there would be."""
    told = [(ev.EPOCH[0], -1), (ev.NEXT[0], -1), (ev.RESULT_GET[0], worker), (ev.RESULT_GET[1], 0), (ev.NEXT[1], -1)]
    events = [{"time": 10 * n, "code": c, "worker": w, "y": 2, "loader": 1} for n, (c, w) in enumerate(told, 1)]
    write_process(tmp_path, events, role="loader", loader=1)
    assert waiting(read_trace(tmp_path), 1).workers <= MOST_WORKERS


def test_a_loader_whose_waits_are_not_seen_is_not_judged() -> None:
    """Observed with pinned memory: torch's thread takes the batches, and nothing shows when the loop waits."""
    found = Waiting(dict.fromkeys(Cause, 0) | {Cause.START_UP: 460}, 0, 100, 4, 1)
    assert judge(found).kind is Bound.START_UP
    blind = judge(found, {"unseen": ["consumer", "next"]})
    assert blind.kind is Bound.UNSEEN
    assert blind.sentence.startswith("unknown what bounds the loader: an older minidl")
    assert judge(found, {"unseen": "next"}).kind is Bound.START_UP, "a trace may hold anything"


@pytest.mark.parametrize(("ending", "name"), [(90, "start-up-bound"), (110, "shutdown-bound")])
def test_starting_workers_is_told_from_ending_them(ending: int, name: str) -> None:
    told = judge(replace(made(consumer=100, start_up=200, samples=50, alike=5), ending=ending))
    assert told.kind is Bound.START_UP
    assert told.sentence.startswith(f"{name}: ")


SLOW = CodeLine(
    "/home/me/tiles.py", 31, "Tiles.__getitem__", "return gzip.open(self.paths[index], 'rb').read()  # it is"
)
BUSY = SlowReason(
    "busy host", "other programs use 1.6 of 2 CPUs, most of all sh (pid 9)", brief="other programs use 1.6 of 2 CPUs"
)
WAITS = SlowReason("waits", "workers wait for a file lock (35 of 48 looks)", brief="workers wait for a file lock")
TEXT = "return gzip.open(self.paths[index], 'rb').read()"


@pytest.mark.parametrize(
    ("reason", "warnings", "room", "words"),
    [
        (None, (), 150, f" for samples (87% at tiles.py:31 `{TEXT}`)"),
        (None, (), 120, f" for samples (87% at tiles.py:31 `{TEXT[:21]}...`)"),
        (None, (BUSY,), 150, f" for samples (87% at tiles.py:31 `{TEXT[:21]}...`); other programs use 1.6 of 2 CPUs"),
        (WAITS, (), 150, f": workers wait for a file lock (87% at tiles.py:31 `{TEXT[:37]}...`)"),
        (WAITS, (), 100, ": workers wait for a file lock (87% at tiles.py:31)"),
        (None, (BUSY,), 90, " for samples (87% at tiles.py:31)"),
        (None, (BUSY,), 72, " for workers that fetch samples"),
    ],
)
def test_a_sentence_names_the_line_as_far_as_it_has_room(
    reason: SlowReason | None, warnings: tuple[SlowReason, ...], room: int, words: str
) -> None:
    spot = HotSpot(SLOW, True, "GzipFile.read", 0.87, 100, 0.9)
    causes = dict.fromkeys(Cause, 0) | {Cause.SAMPLES: 600}
    work = {Cause.SAMPLES: 600, Cause.COLLATE: 0, Cause.IPC: 0}
    found = Waiting(causes, 400, 100, 2, 1, work=work)
    told = judge(found, why=lambda kind, cause: Reasons(reason, warnings, "", spot), room=room)
    assert told.sentence == f"supply-bound: the loop waited 60% of its time{words}"
    assert spot.words() in told.evidence
    assert all(one.words in (*told.evidence, told.sentence) for one in [*warnings, *filter(None, [reason])])


def test_a_warm_up_dilutes_no_share_and_is_told_if_it_is_half_of_the_run() -> None:
    words = "the first step takes long"
    first = Reasons(first=SlowReason("first steps", f"{words}, once", brief=words))
    found = made(consumer=1500, samples=500)
    assert judge(found).sentence.startswith("supply-bound: the loop waited 25% of its time")
    for warming, share in ((0, "25%"), (900, "45%"), (1000, "50%")):
        told = judge(replace(found, warming=warming), why=lambda kind, cause: first)
        assert told.sentence.startswith(f"supply-bound: the loop waited {share} of its time")
        assert (f"; {words}" in told.sentence) == (warming == 1000)
        assert f"{words}, once" in told.evidence


def test_who_waits_device_or_host_is_told_with_its_next_step() -> None:
    limit = Reasons(limit=SlowReason("device", "it is late", "make it cheaper", brief="the device is the limit"))
    told = judge(made(consumer=950, samples=50), why=lambda kind, cause: limit)
    assert told.sentence.endswith("the training step takes 95% of the loop's time; the device is the limit")
    assert (told.next_step, told.evidence[0]) == ("make it cheaper", "it is late")


def test_the_first_steps_of_a_recording_are_apart_in_each_view() -> None:
    trace = read_trace(TRACES / "healthy-8-pinned.minidl")
    number, spans = number_in(trace), trace.spans()
    clock = WallClock(trace, number, spans)
    warm = (clock.at >= clock.warm_up["begin"][0]) & (clock.at < clock.warm_up["end"][-1])
    assert len(clock.warm_up) == 2
    assert clock.took(warm & clock.between_batches()) < 0.1 * clock.took(warm)
    usual = 23_000_000
    took = int((clock.warm_up["end"] - clock.warm_up["begin"]).sum())
    assert took - 2 * usual <= waiting(trace, number, spans).warming < took - usual
    _, cycles = side(trace, (number,), trace.loaders[number]).loops[-1].steady(False)
    assert cycles.max() < took / 2
