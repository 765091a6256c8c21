"""Reasons behind a verdict: spans that are written by hand, each with one thing wrong, and runs with nothing wrong."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minidl.speed.own_step import COPIES, OTHER
from minidl.speed.reasons import (
    Case,
    SlowReason,
    device_or_host,
    first_steps,
    reason,
    step_does,
    step_parts,
    warnings,
)
from minidl.speed.wall_clock import Bound, Cause, Waiting
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Rows
from minidl.tracefile.format import ROW
from minidl.tracefile.spans import SPAN
from minidl.tracefile.watched import Other, Sample, ThreadTime, Vitals, Watched

MS = 1_000_000
LOOP, WORKER = 0, 1
"""Positions of processes: worker n is process WORKER + n, with the pid 100 + n."""


def span(pair: tuple[int, int], took: float, worker: int = 0, task: int = 0, **more: int) -> dict[str, int]:
    """One span of `took` ms. Its begin is set by `rows`."""
    process = more.pop("process", WORKER + worker)
    return {"code": pair[0], "took": int(took * MS), "worker": worker, "task": task, "process": process,
            "pid": 99 + process, "tid": 99 + process, "loader": 1} | more  # fmt: skip


def rows(*spans: dict[str, int]) -> Rows:
    """They follow one another in each process."""
    out, clock = np.zeros(len(spans), SPAN), dict[int, int]()
    for row, one in zip(out, spans, strict=True):
        begin = one.get("begin", clock.get(one["process"], 1000))
        clock[one["process"]] = end = begin + one["took"]
        for name, value in ({"end": end, **one, "begin": begin}).items():
            if name in SPAN.names:
                row[name] = value
    return np.sort(out, order="begin")


def case(
    kind: Bound, cause: Cause | None, *spans: dict[str, int], workers: int = 2, cpus: float | None = 2.0,
    events: Rows | None = None, watched: Any = None, consumer: int = 0, **found: Any,
) -> Case:  # fmt: skip
    causes = dict.fromkeys(Cause, 0) | ({cause: 1000 * MS} if cause else {})
    watched = Watched() if watched is None else watched
    events = np.zeros(0, ROW) if events is None else events
    processes = [
        SimpleNamespace(pid=99 + number, actor=f"worker {number - 1}", role="worker") for number in range(1 + workers)
    ]
    params = found.pop("params", {})
    loaders = dict.fromkeys(range(1, 1 + found.pop("made", 1)), params)
    trace: Any = SimpleNamespace(
        events=events, watched=watched, processes=processes, loaders=loaders, whole_from=lambda loader: 0
    )
    table = rows(*spans)
    return Case(kind, cause, Waiting(causes, consumer * MS, 100, workers, 1, **found), params, cpus, trace, (1,), table)


JOINED: dict[str, int] = span(ev.JOIN, 900, 1, process=LOOP)
UNENDED: dict[str, int] = span(ev.SAMPLE, 1, 1, 3, by=7, end=-1)


def signals(count: int) -> Rows:
    """So many signals that end worker 1, and that in an earlier iterator another one was killed."""
    out = np.zeros(count + 1, ROW)
    out["code"], out["loader"], out["worker"] = ev.TERMINATE, 1, 1
    out["x"], out["y"] = [99 + WORKER + 1] * count + [99], [signal.SIGTERM, signal.SIGKILL][:count] + [signal.SIGKILL]
    return out


def samples(took: Callable[[int], float], count: int = 100) -> list[dict[str, int]]:
    """Sample i of task i, by two workers in turn."""
    return [span(ev.SAMPLE, took(number), number % 2, number, by=number) for number in range(count)]


def without_a_cpu() -> list[dict[str, int]]:
    """Samples that took long since their workers had no CPU."""
    slow = {17, 67}
    both = samples(lambda n: 100 if n in slow else 1)
    return both + [span(ev.FETCH, 100, n % 2, n, cpu_wait=90 * MS) for n in slow]


def steps(took: Callable[[int], float], count: int = 100) -> list[dict[str, int]]:
    return [span(ev.CONSUMER, took(number), -1, number, process=LOOP) for number in range(count)]


def validated(number: int) -> list[dict[str, int]]:
    """A step of 5 ms; in each twentieth, 95 ms more, of which another loader's loop and its model take most."""
    begin, more = 1000 + number * 1000 * MS, 95 * (number % 20 == 19)
    mine = {"process": LOOP, "task": number}
    return [
        span(ev.CONSUMER, 5 + more, -1, begin=begin, **mine),
        span(ev.FORWARD, 3, -1, begin=begin, **mine),
        *(
            span(pair, 40, -1, begin=begin + at * MS, **mine, loader=2)
            for pair, at in ((ev.NEXT, 5), (ev.EVALUATE, 50))
            if more
        ),
    ]


def fetches(took: Callable[[int], float], count: int = 100) -> list[dict[str, int]]:
    return [span(ev.FETCH, took(number), number % 2, number) for number in range(count)]


SUPPLY, LINE = (Bound.SUPPLY, Cause.SAMPLES), (Bound.HEAD_OF_LINE, Cause.HEAD_OF_LINE)
FINE = (Bound.NOT_INPUT, None)

FOUND: dict[str, tuple[Case, str, str]] = {
    "outliers": (
        case(*LINE, *samples(lambda n: 100 if n in (17, 67) else 1)), "slow samples",
        "2 of 100 samples take 67% of the time of all (17, 67)",
    ),
    "one outlier": (
        case(*SUPPLY, *samples(lambda n: 100 if n == 75 else 1)), "slow samples",
        "sample 75 (task 75 of worker 1) takes 50% of the time of all 100 samples",
    ),
    "slow steps": (
        case(*FINE, *steps(lambda n: 100 if n % 20 == 19 else 5), consumer=975), "slow steps",
        "one in 20 of 100 training steps takes long, 51% of the loop's time (after batches 19, 39, 59, 79, ...)",
    ),
    "slow steps that validate": (
        case(*FINE, *(one for n in range(100) for one in validated(n)), consumer=975), "slow steps",
        "one in 20 of 100 training steps takes long (validation), 51% of the loop's time "
        "(after batches 19, 39, 59, 79, ...)",
    ),
    "slow steps after a warm-up": (
        case(*FINE, *steps(lambda n: 9000 if n == 0 else 100 if n % 20 == 19 else 5), consumer=9970, warming=8995 * MS),
        "slow steps",
        "one in 20 of 99 training steps takes long, 51% of the loop's time (after batches 19, 39, 59, 79, ...)",
    ),
    "slow steps at no distance": (
        case(*FINE, *steps(lambda n: 100 if n in (10, 11, 12) else 1), consumer=400), "slow steps",
        "3 of 100 training steps take long, 75% of the loop's time (after batches 10, 11, 12)",
    ),
    "a slow worker": (
        case(*LINE, *samples(lambda n: 9 if n % 2 else 3)), "slow worker",
        "a sample takes worker 1 3.0 times as long as the other workers",
    ),
    "first batches": (
        case(*SUPPLY, *fetches(lambda n: 900 if n < 2 else 9), params={"dataset_kind": "iterable"}), "first samples",
        "the dataset's __iter__, up to a worker's first batch, takes 900 ms, later batches 9.00 ms",
    ),
    "first batches of a loader that is made again": (
        case(*SUPPLY, *fetches(lambda n: 900 if n < 2 else 9), params={"made_at": "train.py:27"}, made=5),
        "first samples",
        "a worker's first batch takes 900 ms each time that the loader is made (5 times), later batches 9.00 ms",
    ),
    "many tensors": (
        case(Bound.READING, Cause.REBUILD, tensors=480.0), "payload", "each batch has 480 tensors",
    ),
    "pickled objects": (
        case(Bound.SUPPLY, Cause.IPC, payload=3.0 * 2**20, tensors=1.0), "payload",
        "each batch pickles 3.0 MiB that are not in tensors",
    ),
    "large batches": (
        case(Bound.SUPPLY, Cause.COLLATE, shared=64.0 * 2**20), "payload", "each batch has 64.0 MiB in tensors",
    ),
    "one sample a batch": (
        case(Bound.READING, Cause.REBUILD, tensors=2.0, shared=48.0, params={"batch_size": 1}), "payload",
        "each batch is one sample, and costs as much as a large batch",
    ),
    "the first index": (
        case(Bound.SAMPLER, Cause.SAMPLER, *(
            span(ev.SAMPLER_NEXT, 900 if n == 0 else 0.01, process=LOOP) for n in range(50)
        ), params={"dataset_length": 12_000_000}), "first index",
        "the first index of an epoch takes 900 ms (the sampler orders 12,000,000 samples)",
    ),
    "worker_init_fn": (
        case(Bound.START_UP, Cause.START_UP, span(ev.WORKER_START, 1, process=LOOP), span(ev.WORKER_INIT, 900)),
        "slow init", "worker_init_fn takes 900 ms",
    ),
    "a worker's end": (
        case(Bound.START_UP, Cause.START_UP, JOINED), "slow end", "a worker takes 900 ms to end",
    ),
    "a sample at a worker's end": (
        case(Bound.START_UP, Cause.START_UP, JOINED, UNENDED, events=signals(1)), "slow end",
        "a worker takes 900 ms to end: worker 1 is still in sample 7 (task 3)",
    ),
    "a sample that SIGTERM does not end": (
        case(Bound.START_UP, Cause.START_UP, JOINED, UNENDED, events=signals(2)), "slow end",
        "a worker takes 900 ms to end: worker 1 is still in sample 7 (task 3) and does not end by SIGTERM",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_a_reason_is_found(name: str) -> None:
    given, kind, words = FOUND[name]
    found = reason(given)
    assert isinstance(found, SlowReason)
    assert (found.name, found.words) == (kind, words)


def looks(
    pid: int, count: int, wchan: str = "", state: str = "S", threads: int = 3, grows_mib: float = 0, cpu_ms: int = 0
) -> Watched:
    """A process, every 10 ms from 0 on."""
    seen = (
        Vitals(state, cpu_ms * at, 200 << 10, 0, 5, threads, wchan, int(grows_mib * 1024 * at), 0)
        for at in range(count)
    )
    return Watched(samples=[Sample(10 * MS * at, {pid: one}) for at, one in enumerate(seen)])


def test_what_workers_sleep_in_is_told_by_the_looks_at_them() -> None:
    """Worker 0 fetches from 1 µs to 500 ms."""
    for wchan, state, words in (
        ("hrtimer_nanosleep", "S", "workers sleep in their samples"),
        ("sk_wait_data", "S", "workers wait for the network in their samples"),
        ("", "D", "workers wait for a disk in their samples"),
        ("locks_lock_inode_wait", "S", "workers wait for a file lock in their samples"),
        ("futex_wait_queue", "S", "workers wait for another thread or a lock in their samples"),
    ):
        found = reason(case(*SUPPLY, *fetches(lambda n: 10), watched=looks(100, 100, wchan, state)))
        assert found.words == f"{words} (50 of 50 looks)"
    assert reason(case(*SUPPLY, *fetches(lambda n: 10), watched=looks(100, 100, "poll_schedule_timeout"))) is None
    assert reason(case(*SUPPLY, *fetches(lambda n: 10), watched=looks(100, 3, "hrtimer_nanosleep"))) is None


@pytest.mark.parametrize(
    ("faults", "swap_mib", "told"),
    [
        (30, 0, ("page faults", "15 page faults a sample read from disk")),
        (30, 300, ("swapping", "memory is swapped out (300.0 MiB), and 15 page faults a sample read from disk")),
        (0, 300, None),
    ],
)
def test_page_faults_and_swapping_are_told_if_they_read_from_disk(
    faults: int, swap_mib: int, told: tuple[str, str] | None
) -> None:
    """Worker 0 fetches 50 times, 500 ms long; the watchdog looks each 10 ms."""
    seen = [
        Vitals("S", 0, 1, 0, 5, 3, "", 0, swap_mib << 10, 9, faults * at)
        for at in range(100)
    ]  # fmt: skip
    watched = Watched(samples=[Sample(10 * MS * at, {100: one}) for at, one in enumerate(seen)])
    found = reason(case(*SUPPLY, *fetches(lambda n: 10, 101), watched=watched))
    assert (None if found is None else (found.name, found.words)) == told


LOOPS_PID, THREAD = 99, 7


def test_a_thread_that_keeps_the_gil_is_named() -> None:
    """Rebuilding takes 80 ms and computes 1 ms; another thread of the process computes all the time."""

    def told(cpu_ms: int, thread_ms: int, wait_ms: int = 0, own_ms: int = 0) -> SlowReason | None:
        rebuilt = [span(ev.RESULT_REBUILD, 80, -1, n, process=LOOP, cpu=cpu_ms * MS) for n in range(50)]
        threads = ThreadTime(THREAD, thread_ms, wait_ms), ThreadTime(LOOPS_PID, own_ms, 0)
        use = Vitals("S", 0, 1, 0, 5, 3, tasks=threads)
        seen = Watched(
            samples=[Sample(at * 1000 * MS, {LOOPS_PID: use}) for at in range(5)],
            names={(LOOPS_PID, THREAD): "counter"},
        )
        return reason(case(Bound.READING, Cause.REBUILD, *rebuilt, span(ev.NEXT, 1, process=LOOP), watched=seen))

    found = told(1, 900)
    assert found.words == "thread counter of the loop's process seems to keep the GIL (it uses 0.9 CPUs)"
    assert told(1, 150, wait_ms=600, own_ms=50) is not None, "the machine is busy"
    assert told(1, 100) is None, "it hardly computes"
    assert told(1, 100, wait_ms=800, own_ms=100) is None, "it computes as much as the loop, as a thread of OpenMP"
    assert told(70, 900) is None, "rebuilding computes itself"
    assert told(1, 0, own_ms=900) is None, "it is the loop's own thread"


def test_the_collectors_pauses_are_told_by_whom_they_stop() -> None:
    pauses = [span(ev.GC, 600, -1, process=LOOP), span(ev.GC, 300, -1, process=LOOP)]
    found = reason(case(*FINE, *steps(lambda n: 10), *pauses, span(ev.NEXT, 100, process=LOOP), consumer=1000))
    assert found.words == "the garbage collector stopped the loop's process 2 times, for 45% of its time (up to 600 ms)"
    theirs = [*(span(ev.GC, 200, 1, process=WORKER + 1) for _ in range(3)), span(ev.FETCH, 100, 1, 100)]
    found = reason(case(*SUPPLY, *fetches(lambda n: 10), *theirs, span(ev.NEXT, 1000, process=LOOP)))
    assert found.words.startswith("the garbage collector stopped the workers 3 times, for 25% of their time")
    assert found.next_step.startswith("call gc.freeze()")


def test_other_programs_are_named_if_the_run_lacks_cpus() -> None:
    def told(cpu_ms: int, others_ms: int, online: int = 2) -> list[str]:
        others = (Other(4711, "burner", others_ms),)
        seen = Watched(
            samples=[
                Sample(
                    at * 1000 * MS,
                    {LOOPS_PID: Vitals("S", 0, 1, 0, 5, 3)},
                    cpus=online,
                    busy_ms=at,
                    stolen_ms=0,
                    others_ms=1000,
                    others=others,
                )
                for at in range(5)
            ]
        )
        rebuilt = [span(ev.RESULT_REBUILD, 80, -1, n, process=LOOP, cpu=cpu_ms * MS) for n in range(50)]
        given = case(Bound.READING, Cause.REBUILD, *rebuilt, span(ev.NEXT, 1, process=LOOP), watched=seen)
        return [one.words for one in warnings(given)]

    assert told(10, 1500) == ["other programs use 1.5 of 2 CPUs, most of all burner (pid 4711)"]
    assert told(10, 200) == told(70, 1500) == []
    assert told(10, 1500, online=64) == [], "they may have other CPUs than those that the run may use"


def test_what_the_training_step_does() -> None:
    def does(cpu_ms: int, wchan: str = "") -> str:
        mine = [span(ev.CONSUMER, 10, -1, n, process=LOOP, cpu=cpu_ms * MS) for n in range(100)]
        return step_does(case(*FINE, *mine, watched=looks(LOOPS_PID, 90, wchan)))

    assert does(9) == "computes"
    assert does(1, "wait_woken") == "waits for the network"
    assert does(1, "hrtimer_nanosleep") == "sleeps"
    assert does(1) == ""


def test_what_the_first_steps_take_is_told() -> None:
    parts = [span(ev.FORWARD, 890, -1, 0, process=LOOP, begin=1000)]
    found = first_steps(case(*FINE, *steps(lambda n: 900 if n == 0 else 5), *parts, consumer=1400))
    assert found is not None
    assert found.brief == "the first training step takes 900 ms (forward)"
    assert found.words.startswith(f"{found.brief}, a later one 5.00 ms: that happens once")
    assert first_steps(case(*FINE, *steps(lambda n: 5), consumer=500)) is None


@pytest.mark.parametrize(
    ("behind", "most", "words", "step"),
    [
        (9, "forward", "the device is the limit", "make the device's work cheaper"),
        (0, "forward", "the device waits for the host", "give the device more work with each call"),
        (0, OTHER, "the device waits for the host", "make cheaper what the program does in the step beside the model"),
        (0, COPIES, "the device waits for the host", "let the loader pin its batches"),
    ],
)
def test_the_limit_of_a_step_and_its_remedy(behind: int, most: str, words: str, step: str) -> None:
    parts = [span(ev.DEVICE_PART, 9, -1, n, process=LOOP, begin=1000 + n * 10 * MS, ey=behind * MS) for n in range(9)]
    one = case(*FINE, *steps(lambda n: 10, 9), *parts, consumer=90)
    found = device_or_host(one, {most: 1})
    assert found is not None
    assert (found.brief, found.next_step[: len(step)]) == (words, step)
    assert device_or_host(case(*SUPPLY, *steps(lambda n: 10, 9), *parts), {}) is None


def test_the_parts_of_the_training_steps() -> None:
    """What lies in another thread, or outside of the steps, is none of theirs."""
    one = [*validated(19), span(ev.BACKWARD, 1, -1, begin=1000 + 19_003 * MS, process=LOOP, tid=7)]
    assert step_parts(case(*FINE, *one)) == {
        "another loader": 40 * MS, "evaluation": 40 * MS, "other code": 17 * MS, "forward": 3 * MS
    }  # fmt: skip
    late = span(ev.SAVE, 9, -1, begin=1000 + 99_000 * MS, process=LOOP)
    assert step_parts(case(*FINE, *validated(0), late)) == {"forward": 3 * MS, "other code": 2 * MS}
    assert step_parts(case(*FINE, *steps(lambda n: 5))) == step_parts(case(*FINE)) == {}


def test_a_sample_that_a_damaged_trace_has_twice_divides_by_nothing() -> None:
    twice = [Sample(5, {9: Vitals("S", 0, 1, 0, 5, 3, tasks=(ThreadTime(7, 10, 0),))}) for _ in range(2)]
    seen = Watched(samples=twice)
    assert [use.tid for use in seen.threads_of(9, 0, 10)] in ([], [7])
    assert seen.others(0, 10, 9) == []


def test_more_threads_than_cpus() -> None:
    found = reason(case(*SUPPLY, *fetches(lambda n: 10), watched=looks(100, 9, threads=19, cpu_ms=15)))
    assert (found.name, found.words) == ("threads", "each of 2 workers has up to 15 threads that compute, on 2 CPUs")
    assert reason(case(*SUPPLY, *fetches(lambda n: 10), watched=looks(100, 9, threads=4, cpu_ms=15))) is None
    assert reason(case(*SUPPLY, *fetches(lambda n: 10), watched=looks(100, 9, threads=19))) is None, "they are idle"


def test_what_grows_all_the_time_is_told() -> None:
    def told(*rows: dict[str, int], **vitals: float) -> list[str]:
        events = np.zeros(2, ROW)
        events["code"], events["loader"], events["pid"], events["time"] = ev.YIELD, 1, 100, (0, 1000 * MS)
        return [one.words for one in warnings(case(*SUPPLY, *rows, events=events, watched=looks(100, 100, **vitals)))]  # type: ignore[arg-type]

    assert told(grows_mib=2.0) == ["memory grows: worker 0 by 200 MiB/s (98 MiB in its last 0 s)"]
    assert told(grows_mib=1.0) == told() == []
    assert told(*steps(lambda n: 900 if n == 0 else 5), grows_mib=2.0) == [], "it grows in the warm-up"


NONE = {
    "even samples": case(*SUPPLY, *samples(lambda n: 20 + n % 3)),
    "short ones that waited for a CPU": case(*SUPPLY, *samples(lambda n: 15 if n % 25 == 0 else 0.1)),
    "outliers that had no CPU": case(*SUPPLY, *without_a_cpu()),
    "outliers, but collation is what takes long": case(
        Bound.SUPPLY, Cause.COLLATE, *samples(lambda n: 100 if n == 17 else 1)
    ),
    "too few samples": case(*SUPPLY, *samples(lambda n: 100 if n == 1 else 1, count=10)),
    "even steps": case(*FINE, *steps(lambda n: 10), consumer=1000),
    "slow steps in a short part of the run": case(*FINE, *steps(lambda n: 50 if n == 50 else 1), consumer=9000),
    "no events": case(*SUPPLY),
    "a first step that is long": case(*FINE, *steps(lambda n: 900 if n == 0 else 5), consumer=1400),
    "slow steps at the ends of epochs": case(*FINE, *steps(lambda n: 100 if n in (10, 11, 40) else 5), consumer=9000),
    "a slow index in the middle": case(
        Bound.SAMPLER,
        Cause.SAMPLER,
        *(span(ev.SAMPLER_NEXT, 900 if n == 20 else 0.01, task=n, process=LOOP) for n in range(50)),
    ),
    "few samples of each worker": case(*LINE, *samples(lambda n: 9 if n % 2 else 3, count=30)),
    "a small batch": case(Bound.READING, Cause.REBUILD, tensors=2.0, shared=4096.0, payload=300.0),
}


@pytest.mark.parametrize("name", NONE)
def test_none_is_invented(name: str) -> None:
    assert reason(NONE[name]) is None
