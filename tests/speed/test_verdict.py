"""The verdict: runs whose bottleneck is known by construction, and imagined ones whose waiting is known to the ns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import made_trace
import numpy as np
import pytest
import torch
import workloads as wl
from made_waits import waited
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


class Sleepy(wl.Numbers):
    """Each sample takes a while."""

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(LONG)
        return torch.tensor(index)


class SleepySampler:
    """Indices 0 to 11, each after a sleep."""

    def __iter__(self) -> Iterator[int]:
        for index in range(12):
            time.sleep(LONG)
            yield index

    def __len__(self) -> int:
        return 12


def sleepy_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    time.sleep(LONG)
    return torch.stack(samples)


def record(directory: Path, dataset: Any = None, epochs: int = 1, **options: Any) -> Trace:
    """Several epochs of a consumer that does nothing."""
    with minidl.trace(directory), minidl.DataLoader(dataset or wl.Tensors(12), **options) as loader:
        for _ in range(epochs):
            assert len(list(loader)) == len(loader)
    return read_trace(directory)


def only(trace: Trace) -> int:
    """The number of the trace's only loader: a process that traces again counts on."""
    (number,) = set(trace.events["loader"].tolist()) - {0}
    return number


# --- Live runs --------------------------------------------------------------------------------------------------------
@pytest.mark.live
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("cause", "dataset", "options"),
    [(Cause.SAMPLES, Sleepy, {}), (Cause.COLLATE, wl.Tensors, {"collate_fn": sleepy_collate})],
    ids=["samples", "collate"],
)
def test_supply_is_split_by_stage(
    tmp_path: Path, cause: Cause, dataset: Any, options: dict[str, Any], workers: int
) -> None:
    # Twice as many batches for two workers, so that the loop waits as long; and more, where a busy machine takes longer
    # to start the workers than they then work.
    for attempt in range(4):
        sized = dataset(12 * max(1, workers) << attempt)
        trace = record(tmp_path / str(attempt), sized, num_workers=workers, **options)
        if waiting(trace, only(trace)).share(Cause.START_UP) < 0.4:
            break
    told = verdict(trace, only(trace))
    assert (told.kind, told.cause) == (Bound.SUPPLY, cause)
    assert ("num_workers=1" in told.next_step) is (workers == 0)


@pytest.mark.live
def test_a_slow_sampler_is_named_though_workers_idle(tmp_path: Path) -> None:
    trace = record(tmp_path / "trace", sampler=SleepySampler(), num_workers=2)
    assert verdict(trace, only(trace)).cause is Cause.SAMPLER


@pytest.mark.live
def test_short_epochs_that_start_workers_anew(tmp_path: Path) -> None:
    trace = record(tmp_path / "trace", wl.Tensors(2), epochs=3, num_workers=2)
    told = [verdict(trace, number) for number in trace.loaders]
    assert [v.kind for v in told] == [Bound.START_UP] * 3
    assert "persistent_workers=True" in told[0].next_step
    assert any("one of 3 iterators" in text for text in told[0].evidence)


def test_short_epochs_are_judged_together(tmp_path: Path) -> None:
    """Each epoch of a loader that does not keep its workers is an iterator of its own, here of three batches."""
    trace = record(tmp_path / "trace", Sleepy(3), epochs=3, batch_size=1)
    for told in (verdict(trace, number) for number in trace.loaders):
        assert (told.kind, told.cause) == (Bound.SUPPLY, Cause.SAMPLES)
        assert "2 of 3 iterators with the same parameters, taken together" in told.evidence


# --- Imagined runs ----------------------------------------------------------------------------------------------------
SLOW_BATCH = {"batches": 60, "step": 10_000, "cost": lambda task: 100_000_000 if task == 20 else 1_000_000}
IMAGINED: dict[str, tuple[dict[str, Any], Bound]] = {
    "steps that take longer than batches": ({"batches": 200, "step": 20_000_000}, Bound.NOT_INPUT),
    "steps that take no time": ({"batches": 200, "step": 10_000}, Bound.SUPPLY),
    "a run of two batches": ({"batches": 2, "step": 100_000}, Bound.TOO_FEW),
    "one batch that takes as long as a hundred": (SLOW_BATCH, Bound.HEAD_OF_LINE),
    "the same with a pin thread": (SLOW_BATCH | {"pin": True}, Bound.HEAD_OF_LINE),
    "a sample that hangs": (made_trace.HUNG | {"polls": 60}, Bound.HEAD_OF_LINE),
}


@pytest.mark.parametrize("run", IMAGINED)
def test_of_imagined_runs_every_nanosecond_has_one_cause(tmp_path: Path, run: str) -> None:
    """The causes add up to the time in iter, in next and in the shutdown, which never overlap in an imagined run."""
    options, kind = IMAGINED[run]
    trace = made_trace.made(tmp_path / "trace", **options)
    found = waiting(trace, 1)
    assert verdict(trace, 1).kind is kind
    assert min(found.causes.values()) >= 0
    begin, end = (trace.events["time"][place] for place in (0, -1))
    nexts = [row for row in trace.spans() if row["code"] in (ev.NEXT[0], ev.SHUTDOWN[0])]
    inside = sum((row["end"] if row["end"] >= 0 else end) - row["begin"] for row in nexts)
    assert found.total == inside + nexts[0]["begin"] - begin


def test_the_line_is_blocked_by_the_worker_of_the_slow_task(tmp_path: Path) -> None:
    once = waiting(made_trace.made(tmp_path / "once", **SLOW_BATCH), 1)
    assert (once.task, once.worker, once.sample in range(80, 84)) == (20, 0, True)
    assert once.lasting < 0.5
    every_second = {"batches": 60, "step": 10_000, "cost": lambda task: 10_000_000 >> 4 * (task % 2)}
    always = waiting(made_trace.made(tmp_path / "always", **every_second), 1)
    assert (always.worker, always.lasting) == (0, 1.0)


def test_first_batches_count_from_the_second_epoch_on(tmp_path: Path) -> None:
    assert waiting(made_trace.made(tmp_path / "a", batches=10, step=20_000_000), 1).first == 0
    found = waiting(made_trace.made(tmp_path / "b", batches=10, step=20_000_000, epochs=3), 1)
    assert 0.5 * found.total < found.first <= found.total


def test_pinning_is_waited_for_while_the_pin_thread_pins(tmp_path: Path) -> None:
    """The imagined loader waits for each batch while it is rebuilt and pinned."""
    trace = made_trace.made(tmp_path / "trace", batches=20, pin=True, step=10_000)
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
    names = ("code", "task", "worker", "x", "y", "z")
    for pid, rows in enumerate([[*before, *LOADER], *WORKERS], 100):
        events = [{"time": 1000 + at, **dict(zip(names, row, strict=False))} for at, *row in rows]  # 0 is no time
        write_process(tmp_path / "trace", events, pid=pid, role="worker" if pid > 100 else "loader", loader=1)
    found = waiting(read_trace(tmp_path / "trace"), 1)
    assert found.causes == SPLIT
    assert (found.total, found.ending) == (150 + 260 + 30, 30)
    assert (found.consumer, found.task, found.worker) == (50 + 40, 0, 0)
    assert found.busy == (140 + 50 + 50 + 70) / (250 * 2)  # fetching while the loader waits, 200-450


def test_a_wait_that_is_hidden_in_part_is_not_blamed_on_the_last_step(tmp_path: Path) -> None:
    """Samples take three times as long as collation; what the training step leaves of the wait is in collation."""
    trace = made_trace.made(tmp_path / "trace", batches=200)
    found, told = waiting(trace, 1), verdict(trace, 1)
    assert found.causes[Cause.COLLATE] > found.causes[Cause.SAMPLES]
    assert (told.kind, told.cause) == (Bound.SUPPLY, Cause.SAMPLES)


@pytest.mark.parametrize("worker", [-(2**63), 2**40, 2**63 - 1])
def test_a_damaged_workers_number_is_judged_too(worker: int, tmp_path: Path) -> None:
    """It takes no memory for all the workers that there would be."""
    told = [(ev.EPOCH[0], -1), (ev.NEXT[0], -1), (ev.RESULT_GET[0], worker), (ev.RESULT_GET[1], 0), (ev.NEXT[1], -1)]
    events = [{"time": 10 * n, "code": c, "worker": w, "y": 2, "loader": 1} for n, (c, w) in enumerate(told, 1)]
    write_process(tmp_path, events, role="loader", loader=1)
    assert waiting(read_trace(tmp_path), 1).workers <= MOST_WORKERS


# --- Recorded runs ----------------------------------------------------------------------------------------------------
def recorded(name: str) -> tuple[Waiting, Verdict]:
    trace = read_trace(TRACES / f"{name}.minidl")
    number = next(iter(trace.loaders))
    return waiting(trace, number), verdict(trace, number)


def test_head_of_line_names_the_sample_that_holds_the_others_back() -> None:
    """Out of order, the same run has no line to block."""
    found, told = recorded("head-of-line-in-order")
    assert (told.kind, told.cause, found.sample) == (Bound.HEAD_OF_LINE, Cause.HEAD_OF_LINE, 579)
    assert "task 9 of worker 1, sample 579" in told.sentence
    assert "in_order=False" in told.next_step
    found, told = recorded("head-of-line-out-of-order")
    assert (found.causes[Cause.HEAD_OF_LINE], found.task, found.sample) == (0, -1, -1)
    assert (told.kind, told.cause) == (Bound.NOT_INPUT, None)


def test_uneven_shards_are_found() -> None:
    found, _ = recorded("iterable-uneven-shards")
    assert (found.out, found.uneven // 1_000_000, found.total // 1_000_000) == (0, 1090, 1349)


def test_even_shards_are_not_uneven() -> None:
    """Soon after a worker has run out, the run ends: of even shards, each other one has a batch left at most."""
    trace = read_trace(TRACES / "iterable-uneven-shards.minidl")
    codes, times = trace.events["code"], trace.events["time"]
    after = times[codes == ev.YIELD] > times[codes == ev.WORKER_EXHAUSTED][0]
    found = waiting(trace.cut(times <= times[codes == ev.YIELD][after][2]), 1)
    assert (found.uneven, found.out) == (0, -1)


@pytest.mark.parametrize(
    ("name", "opens"), [("healthy-8-pinned", True), ("workers-0", False), ("persistent", False), ("respawn", False)]
)
def test_a_first_batch_that_comes_once_is_told_from_others(name: str, opens: bool) -> None:
    """Without workers it costs what each batch costs; each epoch, or iterator, has one of its own."""
    found, _ = recorded(name)
    assert (sum(found.opening.values()) > 0.2 * found.total) is opens
    assert found.once <= found.total


def test_the_first_steps_of_a_recording_are_apart_in_each_view() -> None:
    trace = read_trace(TRACES / "healthy-8-pinned.minidl")
    number, spans = only(trace), trace.spans()
    clock = WallClock(trace, number, spans)
    warm = (clock.at >= clock.warm_up["begin"][0]) & (clock.at < clock.warm_up["end"][-1])
    assert len(clock.warm_up) == 2
    assert clock.took(warm & clock.between_batches()) < 0.1 * clock.took(warm)
    usual, took = 23_000_000, int((clock.warm_up["end"] - clock.warm_up["begin"]).sum())
    assert took - 2 * usual <= waiting(trace, number, spans).warming < took - usual
    _, cycles = side(trace, (number,), trace.loaders[number]).loops[-1].steady(False)
    assert cycles.max() < took / 2


# --- The judgement alone ----------------------------------------------------------------------------------------------
READING = waited(rebuild=60, samples=30)  # its workers idle
BUSY_WORKERS = {"spare": 0.1, "work": {Cause.SAMPLES: 90, Cause.COLLATE: 5, Cause.IPC: 5}}

JUDGED = [
    (waited(samples=50, collate=20, head_of_line=60), Bound.SUPPLY, Cause.SAMPLES),
    (waited(ipc=50, collate=20, head_of_line=60), Bound.SUPPLY, Cause.IPC),
    (waited(pin=30, rebuild=20, samples=40), Bound.READING, Cause.PIN),
    (waited(overhead=30, samples=20), Bound.OVERHEAD, Cause.OVERHEAD),
    (waited(consumer=901, samples=99), Bound.NOT_INPUT, None),
    (waited(consumer=899, samples=101), Bound.SUPPLY, Cause.SAMPLES),
    # So is what the first steps take longer.
    (waited(consumer=1800, samples=150), Bound.NOT_INPUT, None),
    (waited(consumer=1800, samples=150, warming=900), Bound.SUPPLY, Cause.SAMPLES),
    # Start-up that was paid once is spread by a longer run, unless there is little else; paid again it is not.
    (waited(consumer=800, start_up=200, samples=50), Bound.NOT_INPUT, None),
    (waited(consumer=800, start_up=200, samples=50, alike=5), Bound.START_UP, Cause.START_UP),
    (waited(consumer=100, start_up=200, samples=50), Bound.START_UP, Cause.START_UP),
    (waited(consumer=100, start_up=200, samples=250, alike=5), Bound.SUPPLY, Cause.SAMPLES),
    (waited(batches=FEW_BATCHES - 1, samples=50), Bound.TOO_FEW, None),
    (waited(batches=FEW_BATCHES, samples=50), Bound.SUPPLY, Cause.SAMPLES),
    (waited(batches=1, start_up=100, samples=50, alike=2), Bound.START_UP, Cause.START_UP),
    (waited(batches=1, samples=50, alike=2), Bound.TOO_FEW, None),
    # What the first batch cost is waited for once, while the pipeline fills; each of two iterators has one.
    (waited(consumer=700, samples=200, opening={Cause.SAMPLES: 190}), Bound.NOT_INPUT, None),
    (waited(700, samples=200, opening={Cause.SAMPLES: 190}) + waited(700, samples=200), Bound.SUPPLY, Cause.SAMPLES),
    (READING, Bound.READING, Cause.REBUILD),
]


@pytest.mark.parametrize(("found", "kind", "cause"), JUDGED)
def test_the_kind_follows_from_the_shares(found: Waiting, kind: Bound, cause: Cause | None) -> None:
    told = judge(found)
    assert (told.kind, told.cause) == (kind, cause)


KEEPS_UP = "not input-bound: the loader keeps up, the training step takes"
SUPPLY, START = "supply-bound: the loop waited", "start-up-bound: the loop waited"
CLIPS = {"dataset": "Clips"}


@pytest.mark.parametrize(
    ("found", "params", "sentence"),
    [
        (waited(samples=95, overhead=5), {}, f"{SUPPLY} 100% of its time for workers that fetch samples"),
        (waited(samples=60, overhead=30), {}, f"{SUPPLY} 100% of its time, 67% for workers that fetch samples"),
        (waited(consumer=100, samples=60, overhead=40), {}, f"{SUPPLY} 50% of its time, 30% for workers that fetch "
         "samples, and 20% for messages in transit and bookkeeping"),
        (waited(consumer=100, start_up=100, ipc=100, sampler=10), {},
         f"{SUPPLY} 52% of its time for workers that pickle and send batches"),
        (waited(collate=90, workers=0), {}, f"{SUPPLY} 100% of its time for collation, without workers"),
        (waited(sampler=90), {}, "sampler-bound: the loop waited 100% of its time for the sampler"),
        (waited(consumer=10, start_up=60, samples=30), {},
         f"{START} 90% of its time, 60% for starting and ending workers"),
        (waited(consumer=300, start_up=100, samples=300, pin=100, opening={Cause.SAMPLES: 290, Cause.PIN: 90}), {},
         f"{START} 62% of its time, 12% for starting and ending workers, 48% for the first batch"),
        (waited(consumer=700, samples=200, opening={Cause.SAMPLES: 190}), {},
         f"{KEEPS_UP} 99% of the loop's time (78% with start-up and shutdown)"),
        # The program's own names, unless they are long.
        (waited(samples=95), CLIPS, f"{SUPPLY} 100% of its time for workers that fetch samples (Clips)"),
        (waited(collate=95), CLIPS | {"collate_fn": "pad"},
         f"{SUPPLY} 100% of its time for workers that collate batches (pad)"),
        (waited(collate=95), {"collate_fn": "default_collate"},
         f"{SUPPLY} 100% of its time for workers that collate batches"),
        (waited(ipc=95), CLIPS, f"{SUPPLY} 100% of its time for workers that pickle and send batches"),
        (waited(samples=95), {"dataset": "A" * 40}, f"{SUPPLY} 100% of its time for workers that fetch samples"),
    ],
)  # fmt: skip
def test_shares_are_of_the_loops_time_and_add_up(found: Waiting, params: dict[str, str], sentence: str) -> None:
    """A second kind is named if it is nearly as large; the start is not in it."""
    assert judge(found, params).sentence == sentence


def test_a_start_that_costs_more_than_the_verdict_is_told_apart() -> None:
    told = judge(waited(consumer=443, start_up=92, samples=39, rebuild=31))
    assert told.kind is Bound.SUPPLY
    assert told.apart.startswith("starting and ending workers took 92 ns more, which does not count here")
    assert told.apart in " ".join(told.lines())
    assert judge(waited(consumer=443, start_up=39, samples=39, rebuild=31)).apart == ""
    assert judge(waited(consumer=100, start_up=200, samples=50)).apart == ""


@pytest.mark.parametrize(("ending", "name"), [(90, "start-up-bound"), (110, "shutdown-bound")])
def test_starting_workers_is_told_from_ending_them(ending: int, name: str) -> None:
    told = judge(waited(consumer=100, start_up=200, samples=50, alike=5, ending=ending))
    assert (told.kind, told.sentence.partition(": ")[0]) == (Bound.START_UP, name)


def test_a_reader_is_no_bottleneck_while_the_workers_are_all_at_work() -> None:
    """More workers than CPUs: rebuilding takes long for the same reason as samples do, and a faster one would wait."""
    told = judge(waited(rebuild=60, samples=30, **BUSY_WORKERS))
    assert (told.kind, told.cause) == (Bound.SUPPLY, Cause.SAMPLES)
    assert told.sentence.endswith("100% of its time, and meanwhile its workers were busy, mostly with samples")
    assert "rebuilding messages 60 ns" in told.evidence[0]


@pytest.mark.parametrize(
    ("uneven", "said"), [(40, ["40 ns of that came after worker 1 had run out of data"]), (10, [])]
)
def test_uneven_shards_are_evidence(uneven: int, said: list[str]) -> None:
    told = judge(waited(samples=50, uneven=uneven, out=1))
    assert [line for line in told.evidence if "run out of data" in line] == said


def test_a_loader_whose_waits_are_not_seen_is_not_judged() -> None:
    """Observed with pinned memory: torch's thread takes the batches, and nothing shows when the loop waits."""
    found = waited(start_up=460, workers=4)
    blind = judge(found, {"unseen": ["consumer", "next"]})
    assert blind.kind is Bound.UNSEEN
    assert blind.sentence.startswith("unknown what bounds the loader: an older minidl")
    assert judge(found, {"unseen": "next"}).kind is Bound.START_UP, "a trace may hold anything"


# --- With reasons -----------------------------------------------------------------------------------------------------
SUPPLIED, FINE = waited(consumer=50, samples=95, overhead=5), waited(consumer=950, samples=50)


def because(found: Waiting, **reasons: Any) -> Verdict:
    return judge(found, why=lambda kind, cause: Reasons(**reasons))


def test_a_reason_follows_the_sentence_and_brings_its_advice() -> None:
    def why(kind: Bound, cause: Cause | None) -> Reasons:
        return Reasons(SlowReason("planted", f"because of {cause.value if cause else kind.value}", "mend it"))

    told, fine = judge(SUPPLIED, why=why), judge(FINE, why=why)
    assert told.sentence == f"{SUPPLY} 67% of its time for workers that fetch samples: because of samples"
    assert fine.sentence == "program-bound: because of not input-bound; the loader keeps up"
    assert (told.next_step, fine.next_step, fine.kind) == ("mend it", "mend it", Bound.PROGRAM)


def test_a_few_long_steps_outweigh_a_smaller_waiting() -> None:
    """The loop waits for 200 of 1,200; its few long steps take more, or less."""
    for took, sentence in (
        (300, "program-bound: one of 9 steps takes long; the loop waited 17% of its time"),
        (100, f"{SUPPLY} 17% of its time for workers that fetch samples"),
    ):
        long = np.zeros(1, SPAN)
        long["end"] = took
        slow = SlowReason("slow steps", "one of 9 steps takes long", rows=long)
        told = judge(
            waited(1000, samples=200), why=lambda of, _, slow=slow: Reasons(slow if of is Bound.NOT_INPUT else None)
        )
        assert (told.sentence, told.sentence.partition(":")[0]) == (sentence, told.kind.value)


def test_what_the_step_does_is_told_of_a_loader_that_keeps_up() -> None:
    assert because(FINE, step="waits for the network").sentence == (
        f"{KEEPS_UP} 95% of the loop's time and mostly waits for the network"
    )
    one = {"backward": 600, "forward": 250, "optimizer": 60, "evaluation": 20, "other code": 20}
    told, other = (because(FINE, step="computes", parts=parts) for parts in (one, {"other code": 600, "forward": 350}))
    assert told.sentence == f"{KEEPS_UP} 95% of the loop's time: backward 60%, forward 25%, optimizer 6%"
    assert told.evidence[-1] == (
        "the training step, by the host's time: backward 600 ns, forward 250 ns, optimizer 60 ns, evaluation 20 ns, "
        "other code 20 ns"
    )
    assert other.sentence.endswith("the training step takes 95% of the loop's time and mostly computes")
    assert "the training step, by the host's time: other code 600 ns, forward 350 ns" in other.evidence


def test_what_else_is_wrong_follows_or_leads_if_nothing_bounds_the_loader() -> None:
    also = (SlowReason("growth", "memory grows", "find what is kept"),)
    told, fine = because(waited(samples=95), warnings=also), because(FINE, warnings=also)
    assert told.sentence == f"{SUPPLY} 100% of its time for workers that fetch samples; memory grows"
    assert told.next_step.startswith("find what is kept; use more workers")
    assert (fine.kind, fine.sentence) == (Bound.PROGRAM, "program-bound: memory grows; the loader keeps up")


@pytest.mark.parametrize(
    ("samples", "end", "step"),
    [(300, "40% for starting and ending workers; 2 of 100 samples take 67% of the time of all (17, 67)", "make them "),
     (100, "for starting and ending workers", "")],
)  # fmt: skip
def test_a_start_that_is_hardly_longer_than_the_waits_between_is_not_named_alone(
    samples: int, end: str, step: str
) -> None:
    slow = SlowReason("slow samples", "2 of 100 samples take 67% of the time of all (17, 67)", "make them cheaper")
    told = judge(
        waited(start_up=400, samples=samples, consumer=300, alike=2),
        why=lambda kind, cause: Reasons(slow if kind is Bound.SUPPLY else None),
    )
    assert (told.kind, told.sentence.endswith(end)) == (Bound.START_UP, True)
    assert told.next_step.startswith(step)


LINE = CodeLine(
    "/home/me/tiles.py", 31, "Tiles.__getitem__", "return gzip.open(self.paths[index], 'rb').read()  # it is"
)
BUSY = SlowReason(
    "busy host", "other programs use 1.6 of 2 CPUs, most of all sh (pid 9)", brief="other programs use 1.6 of 2 CPUs"
)
LOCK = SlowReason("waits", "workers wait for a file lock (35 of 48 looks)", brief="workers wait for a file lock")
TEXT = "return gzip.open(self.paths[index], 'rb').read()"


@pytest.mark.parametrize(
    ("reason", "warnings", "room", "words"),
    [
        (None, (), 150, f" for samples (87% at tiles.py:31 `{TEXT}`)"),
        (None, (), 120, f" for samples (87% at tiles.py:31 `{TEXT[:21]}...`)"),
        (None, (BUSY,), 150, f" for samples (87% at tiles.py:31 `{TEXT[:21]}...`); other programs use 1.6 of 2 CPUs"),
        (LOCK, (), 150, f": workers wait for a file lock (87% at tiles.py:31 `{TEXT[:37]}...`)"),
        (LOCK, (), 100, ": workers wait for a file lock (87% at tiles.py:31)"),
        (None, (BUSY,), 90, " for samples (87% at tiles.py:31)"),
        (None, (BUSY,), 72, " for workers that fetch samples"),
    ],
)
def test_a_sentence_names_the_line_as_far_as_it_has_room(
    reason: SlowReason | None, warnings: tuple[SlowReason, ...], room: int, words: str
) -> None:
    spot = HotSpot(LINE, True, "GzipFile.read", 0.87, 100, 0.9)
    found = waited(400, samples=600, work={Cause.SAMPLES: 600, Cause.COLLATE: 0, Cause.IPC: 0})
    told = judge(found, why=lambda kind, cause: Reasons(reason, warnings, "", spot), room=room)
    assert told.sentence == f"{SUPPLY} 60% of its time{words}"
    said = {told.sentence, *told.evidence}
    assert {spot.words(), *(one.words for one in (*warnings, *filter(None, [reason])))} - said == set()


@pytest.mark.parametrize(("warming", "share"), [(0, "25%"), (900, "45%"), (1000, "50%")])
def test_a_warm_up_dilutes_no_share_and_is_told_if_it_is_half_of_the_run(warming: int, share: str) -> None:
    words = "the first step takes long"
    first = SlowReason("first steps", f"{words}, once", brief=words)
    told = because(waited(consumer=1500, samples=500, warming=warming), first=first)
    assert told.sentence.startswith(f"{SUPPLY} {share} of its time")
    assert (f"; {words}" in told.sentence) == (warming == 1000)
    assert f"{words}, once" in told.evidence


def test_who_waits_device_or_host_is_told_with_its_next_step() -> None:
    told = because(FINE, limit=SlowReason("device", "it is late", "make it cheaper", brief="the device is the limit"))
    assert told.sentence.endswith(": the training step takes 95% of the loop's time; the device is the limit")
    assert (told.next_step, told.evidence[0]) == ("make it cheaper", "it is late")
