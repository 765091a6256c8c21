"""Reasons behind a verdict: spans that are written by hand, each with one thing wrong, and runs with nothing wrong."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from made_waits import waited

from minidl.speed.own_step import COPIES, OTHER
from minidl.speed.reasons import Case, device_or_host, first_steps, reason, step_does, step_parts, warnings
from minidl.speed.wall_clock import Bound, Cause
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Rows
from minidl.tracefile.format import ROW
from minidl.tracefile.spans import SPAN
from minidl.tracefile.watched import Other, Sample, ThreadTime, Vitals, Watched

MS = 1_000_000
LOOP, WORKER = 0, 1
"""Positions of processes: worker n is process WORKER + n, with the pid 100 + n."""
LOOPS_PID, THREAD = 99, 7

Spans = list[dict[str, int]]
Took = Callable[[int], float]


def span(pair: tuple[int, int], took: float, worker: int = 0, task: int = 0, **more: int) -> dict[str, int]:
    """One span of `took` ms. Its begin is set by `rows`."""
    process = more.pop("process", WORKER + worker)
    return {"code": pair[0], "took": int(took * MS), "worker": worker, "task": task, "process": process,
            "pid": 99 + process, "tid": 99 + process, "loader": 1} | more  # fmt: skip


def mine(pair: tuple[int, int], took: float, task: int = 0, **more: int) -> dict[str, int]:
    """A span of the loop's process."""
    return span(pair, took, -1, task, process=LOOP, **more)


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
    kind: tuple[Bound, Cause | None], *spans: dict[str, int], events: Rows | None = None,
    watched: Watched | None = None, consumer: int = 0, params: Any = None, made: int = 1, **found: Any,
) -> Case:  # fmt: skip
    """What is asked of 2 workers on 2 CPUs; consumer: ms. made: how often the loader was made."""
    causes = {kind[1].name.lower(): 1000 * MS} if kind[1] else {}
    processes = [SimpleNamespace(pid=99 + number, actor=f"worker {number - 1}", role="worker") for number in range(3)]
    trace: Any = SimpleNamespace(
        events=np.zeros(0, ROW) if events is None else events, watched=watched or Watched(), processes=processes,
        loaders=dict.fromkeys(range(1, 1 + made), params or {}), whole_from=lambda loader: 0,
    )  # fmt: skip
    waits = waited(consumer * MS, **causes, **found)
    return Case(*kind, waits, params or {}, 2.0, trace, (1,), rows(*spans))


def samples(took: Took, count: int = 100) -> Spans:
    """Sample i of task i, by two workers in turn."""
    return [span(ev.SAMPLE, took(number), number % 2, number, by=number) for number in range(count)]


def steps(took: Took, count: int = 100, **more: int) -> Spans:
    return [mine(ev.CONSUMER, took(number), number, **more) for number in range(count)]


def fetches(took: Took, count: int = 100) -> Spans:
    return [span(ev.FETCH, took(number), number % 2, number) for number in range(count)]


def rebuilt(cpu_ms: int) -> Spans:
    return [*(mine(ev.RESULT_REBUILD, 80, n, cpu=cpu_ms * MS) for n in range(50)), mine(ev.NEXT, 1)]


def validated(number: int) -> Spans:
    """A step of 5 ms; in each twentieth, 95 ms more, of which another loader's loop and its model take most."""
    begin, more = 1000 + number * 1000 * MS, 95 * (number % 20 == 19)
    own = [mine(ev.CONSUMER, 5 + more, number, begin=begin), mine(ev.FORWARD, 3, number, begin=begin)]
    parts = ((ev.NEXT, 5), (ev.EVALUATE, 50)) if more else ()
    return own + [mine(pair, 40, number, begin=begin + at * MS, loader=2) for pair, at in parts]


def signals(*numbers: int) -> Rows:
    """Signals that end worker 1; in an earlier iterator another one was killed."""
    out = np.zeros(len(numbers) + 1, ROW)
    out["code"], out["loader"], out["worker"] = ev.TERMINATE, 1, 1
    out["x"], out["y"] = [99 + WORKER + 1] * len(numbers) + [99], [*numbers, signal.SIGKILL]
    return out


QUIET = Vitals("S", 0, 200 << 10, 0, 5, 3)


def looks(pid: int, count: int = 100, every: int = 10, each: Any = None, machine: Any = None, **vitals: Any) -> Watched:
    """Looks at a process, every so many ms from 0 on. each: what is this much more at each look."""
    grown = [{name: value * at for name, value in (each or {}).items()} for at in range(count)]
    processes = [{pid: QUIET._replace(**vitals, **more)} for more in grown]
    seen = [Sample(every * MS * at, look, **(machine or {})) for at, look in enumerate(processes)]
    return Watched(samples=seen, names={(LOOPS_PID, THREAD): "counter"})


def sleeping(wchan: str, state: str = "S", count: int = 100) -> Case:
    """Worker 0 fetches from 1 µs to 500 ms."""
    return case(SUPPLY, *fetches(lambda n: 10), watched=looks(100, count, wchan=wchan, state=state))


def faulting(faults: int, swap_mib: int) -> Case:
    """Worker 0 fetches 50 times, 500 ms long; each of the looks finds so many more page faults."""
    seen = looks(100, each={"major_faults": faults}, swap_kib=swap_mib << 10, minor_faults=9)
    return case(SUPPLY, *fetches(lambda n: 10, 101), watched=seen)


def beside_a_thread(cpu_ms: int, thread_ms: int, wait_ms: int = 0, own_ms: int = 0) -> Case:
    """Rebuilding takes 80 ms, and another thread of the process runs, too."""
    tasks = ThreadTime(THREAD, thread_ms, wait_ms), ThreadTime(LOOPS_PID, own_ms, 0)
    return case(READ, *rebuilt(cpu_ms), watched=looks(LOOPS_PID, 5, 1000, tasks=tasks))


def threaded(**vitals: Any) -> Case:
    return case(SUPPLY, *fetches(lambda n: 10), watched=looks(100, 9, **vitals))


READ, START = (Bound.READING, Cause.REBUILD), (Bound.START_UP, Cause.START_UP)
SUPPLY, LINE = (Bound.SUPPLY, Cause.SAMPLES), (Bound.HEAD_OF_LINE, Cause.HEAD_OF_LINE)
COLLATE, IPC = (Bound.SUPPLY, Cause.COLLATE), (Bound.SUPPLY, Cause.IPC)
DRAW, FINE = (Bound.SAMPLER, Cause.SAMPLER), (Bound.NOT_INPUT, None)
JOINED, UNENDED = span(ev.JOIN, 900, 1, process=LOOP), span(ev.SAMPLE, 1, 1, 3, by=7, end=-1)
STREAM, TWICE_MADE = {"dataset_kind": "iterable"}, {"made_at": "train.py:27"}
PAUSES = [mine(ev.GC, 600), mine(ev.GC, 300), mine(ev.NEXT, 100)]
PAUSED_WORKERS = [*(span(ev.GC, 200, 1) for _ in range(3)), span(ev.FETCH, 100, 1, 100), mine(ev.NEXT, 1000)]

FOUND: dict[str, tuple[Case, str, str]] = {
    "outliers": (
        case(LINE, *samples(lambda n: 100 if n in (17, 67) else 1)), "slow samples",
        "2 of 100 samples take 67% of the time of all (17, 67)",
    ),
    "one outlier": (
        case(SUPPLY, *samples(lambda n: 100 if n == 75 else 1)), "slow samples",
        "sample 75 (task 75 of worker 1) takes 50% of the time of all 100 samples",
    ),
    "slow steps": (
        case(FINE, *steps(lambda n: 100 if n % 20 == 19 else 5), consumer=975), "slow steps",
        "one in 20 of 100 training steps takes long, 51% of the loop's time (after batches 19, 39, 59, 79, ...)",
    ),
    "slow steps that validate": (
        case(FINE, *(one for n in range(100) for one in validated(n)), consumer=975), "slow steps",
        "one in 20 of 100 training steps takes long (validation), 51% of the loop's time "
        "(after batches 19, 39, 59, 79, ...)",
    ),
    "slow steps after a warm-up": (
        case(FINE, *steps(lambda n: 9000 if n == 0 else 100 if n % 20 == 19 else 5), consumer=9970, warming=8995 * MS),
        "slow steps",
        "one in 20 of 99 training steps takes long, 51% of the loop's time (after batches 19, 39, 59, 79, ...)",
    ),
    "slow steps at no distance": (
        case(FINE, *steps(lambda n: 100 if n in (10, 11, 12) else 1), consumer=400), "slow steps",
        "3 of 100 training steps take long, 75% of the loop's time (after batches 10, 11, 12)",
    ),
    "a slow worker": (
        case(LINE, *samples(lambda n: 9 if n % 2 else 3)), "slow worker",
        "a sample takes worker 1 3.0 times as long as the other workers",
    ),
    "first batches": (
        case(SUPPLY, *fetches(lambda n: 900 if n < 2 else 9), params=STREAM), "first samples",
        "the dataset's __iter__, up to a worker's first batch, takes 900 ms, later batches 9.00 ms",
    ),
    "first batches of a loader that is made again": (
        case(SUPPLY, *fetches(lambda n: 900 if n < 2 else 9), params=TWICE_MADE, made=5), "first samples",
        "a worker's first batch takes 900 ms each time that the loader is made (5 times), later batches 9.00 ms",
    ),
    "many tensors": (case(READ, tensors=480.0), "payload", "each batch has 480 tensors"),
    "pickled objects": (
        case(IPC, payload=3.0 * 2**20, tensors=1.0), "payload", "each batch pickles 3.0 MiB that are not in tensors",
    ),
    "large batches": (case(COLLATE, shared=64.0 * 2**20), "payload", "each batch has 64.0 MiB in tensors"),
    "one sample a batch": (
        case(READ, tensors=2.0, shared=48.0, params={"batch_size": 1}), "payload",
        "each batch is one sample, and costs as much as a large batch",
    ),
    "the first index": (
        case(DRAW, *(mine(ev.SAMPLER_NEXT, 900 if n == 0 else 0.01) for n in range(50)),
             params={"dataset_length": 12_000_000}),
        "first index", "the first index of an epoch takes 900 ms (the sampler orders 12,000,000 samples)",
    ),
    "worker_init_fn": (
        case(START, mine(ev.WORKER_START, 1), span(ev.WORKER_INIT, 900)), "slow init", "worker_init_fn takes 900 ms",
    ),
    "a worker's end": (case(START, JOINED), "slow end", "a worker takes 900 ms to end"),
    "a sample at a worker's end": (
        case(START, JOINED, UNENDED, events=signals(signal.SIGTERM)), "slow end",
        "a worker takes 900 ms to end: worker 1 is still in sample 7 (task 3)",
    ),
    "a sample that SIGTERM does not end": (
        case(START, JOINED, UNENDED, events=signals(signal.SIGTERM, signal.SIGKILL)), "slow end",
        "a worker takes 900 ms to end: worker 1 is still in sample 7 (task 3) and does not end by SIGTERM",
    ),
    "page faults": (faulting(30, 0), "page faults", "15 page faults a sample read from disk"),
    "swapping": (
        faulting(30, 300), "swapping", "memory is swapped out (300.0 MiB), and 15 page faults a sample read from disk"
    ),
    "a thread that keeps the GIL": (
        beside_a_thread(1, 900), "kept GIL",
        "thread counter of the loop's process seems to keep the GIL (it uses 0.9 CPUs)",
    ),
    "a thread that keeps the GIL of a busy machine": (
        beside_a_thread(1, 150, wait_ms=600, own_ms=50), "kept GIL",
        "thread counter of the loop's process seems to keep the GIL (it uses 0.1 CPUs)",
    ),
    "the collector stops the loop": (
        case(FINE, *steps(lambda n: 10), *PAUSES, consumer=1000), "collector",
        "the garbage collector stopped the loop's process 2 times, for 45% of its time (up to 600 ms)",
    ),
    "the collector stops the workers": (
        case(SUPPLY, *fetches(lambda n: 10), *PAUSED_WORKERS), "collector",
        "the garbage collector stopped the workers 3 times, for 25% of their time (up to 200 ms)",
    ),
    "more threads than CPUs": (
        threaded(each={"cpu_ms": 15}, threads=19), "threads",
        "each of 2 workers has up to 15 threads that compute, on 2 CPUs",
    ),
}  # fmt: skip
SLEEPS = {
    "sleep": sleeping("hrtimer_nanosleep"),
    "wait for the network": sleeping("sk_wait_data"),
    "wait for a disk": sleeping("", "D"),
    "wait for a file lock": sleeping("locks_lock_inode_wait"),
    "wait for another thread or a lock": sleeping("futex_wait_queue"),
}
FOUND |= {name: (given, name, f"workers {name} in their samples (50 of 50 looks)") for name, given in SLEEPS.items()}


@pytest.mark.parametrize("name", FOUND)
def test_a_reason_is_found(name: str) -> None:
    given, kind, words = FOUND[name]
    found = reason(given)
    assert found is not None
    assert (found.name, found.words) == (kind, words)
    assert kind != "collector" or found.next_step.startswith("call gc.freeze()")


SLOW = (17, 67)
WITHOUT_A_CPU = samples(lambda n: 100 if n in SLOW else 1) + [
    span(ev.FETCH, 100, n % 2, n, cpu_wait=90 * MS) for n in SLOW
]

NONE = {
    "even samples": case(SUPPLY, *samples(lambda n: 20 + n % 3)),
    "short ones that waited for a CPU": case(SUPPLY, *samples(lambda n: 15 if n % 25 == 0 else 0.1)),
    "outliers that had no CPU": case(SUPPLY, *WITHOUT_A_CPU),
    "outliers, but collation is what takes long": case(COLLATE, *samples(lambda n: 100 if n == 17 else 1)),
    "too few samples": case(SUPPLY, *samples(lambda n: 100 if n == 1 else 1, count=10)),
    "even steps": case(FINE, *steps(lambda n: 10), consumer=1000),
    "slow steps in a short part of the run": case(FINE, *steps(lambda n: 50 if n == 50 else 1), consumer=9000),
    "no events": case(SUPPLY),
    "a first step that is long": case(FINE, *steps(lambda n: 900 if n == 0 else 5), consumer=1400),
    "slow steps at the ends of epochs": case(FINE, *steps(lambda n: 100 if n in (10, 11, 40) else 5), consumer=9000),
    "a slow index in the middle": case(DRAW, *(mine(ev.SAMPLER_NEXT, 900 if n == 20 else 0.01, n) for n in range(50))),
    "few samples of each worker": case(LINE, *samples(lambda n: 9 if n % 2 else 3, count=30)),
    "a small batch": case(READ, tensors=2.0, shared=4096.0, payload=300.0),
    "workers that wait for work": sleeping("poll_schedule_timeout"),
    "few looks at workers that sleep": sleeping("hrtimer_nanosleep", count=3),
    "swapped memory that is not read": faulting(0, 300),
    "a thread that hardly computes": beside_a_thread(1, 100),
    "a thread that computes as much as the loop": beside_a_thread(1, 100, wait_ms=800, own_ms=100),  # as OpenMP's
    "rebuilding that computes itself": beside_a_thread(70, 900),
    "the loop's own thread": beside_a_thread(1, 0, own_ms=900),
    "few threads": threaded(each={"cpu_ms": 15}, threads=4),
    "idle threads": threaded(threads=19),
}


@pytest.mark.parametrize("name", NONE)
def test_none_is_invented(name: str) -> None:
    assert reason(NONE[name]) is None


# --- What is wrong beside that ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("cpu_ms", "others_ms", "online", "told"),
    [
        (10, 1500, 2, ["other programs use 1.5 of 2 CPUs, most of all burner (pid 4711)"]),
        (10, 200, 2, []),
        (70, 1500, 2, []),
        (10, 1500, 64, []),
    ],
    ids=["busy", "idle", "the run does not lack CPUs", "they may have other CPUs than the run"],
)
def test_other_programs_are_named_if_the_run_lacks_cpus(
    cpu_ms: int, others_ms: int, online: int, told: list[str]
) -> None:
    machine = {"cpus": online, "busy_ms": 0, "stolen_ms": 0, "others_ms": 1000}
    machine["others"] = (Other(4711, "burner", others_ms),)  # type: ignore[assignment]
    given = case(READ, *rebuilt(cpu_ms), watched=looks(LOOPS_PID, 5, 1000, machine=machine))
    assert [one.words for one in warnings(given)] == told


WARM_UP = steps(lambda n: 900 if n == 0 else 5)


@pytest.mark.parametrize(
    ("spans", "mib", "told"),
    [
        ([], 2, ["memory grows: worker 0 by 200 MiB/s (98 MiB in its last 0 s)"]),
        ([], 1, []),
        ([], 0, []),
        (WARM_UP, 2, []),
    ],
    ids=["fast", "slowly", "not", "in the warm-up"],
)
def test_what_grows_all_the_time_is_told(spans: Spans, mib: int, told: list[str]) -> None:
    events = np.zeros(2, ROW)
    events["code"], events["loader"], events["pid"], events["time"] = ev.YIELD, 1, 100, (0, 1000 * MS)
    seen = looks(100, each={"anon_kib": mib << 10}, swap_kib=0)
    assert [one.words for one in warnings(case(SUPPLY, *spans, events=events, watched=seen))] == told


# --- The training step ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("cpu_ms", "wchan", "does"),
    [(9, "", "computes"), (1, "wait_woken", "waits for the network"), (1, "hrtimer_nanosleep", "sleeps"), (1, "", "")],
)
def test_what_the_training_step_does(cpu_ms: int, wchan: str, does: str) -> None:
    given = case(FINE, *steps(lambda n: 10, cpu=cpu_ms * MS), watched=looks(LOOPS_PID, 90, wchan=wchan))
    assert step_does(given) == does


def test_what_the_first_steps_take_is_told() -> None:
    found = first_steps(case(FINE, *WARM_UP, mine(ev.FORWARD, 890, begin=1000), consumer=1400))
    assert found is not None
    assert found.brief == "the first training step takes 900 ms (forward)"
    assert found.words.startswith(f"{found.brief}, a later one 5.00 ms: that happens once")
    assert first_steps(case(FINE, *steps(lambda n: 5), consumer=500)) is None


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
    parts = [mine(ev.DEVICE_PART, 9, n, begin=1000 + n * 10 * MS, ey=behind * MS) for n in range(9)]
    found = device_or_host(case(FINE, *steps(lambda n: 10, 9), *parts, consumer=90), {most: 1})
    assert found is not None
    assert (found.brief, found.next_step[: len(step)]) == (words, step)
    assert device_or_host(case(SUPPLY, *steps(lambda n: 10, 9), *parts), {}) is None


def test_the_parts_of_the_training_steps() -> None:
    """What lies in another thread, or outside of the steps, is none of theirs."""
    elsewhere = mine(ev.BACKWARD, 1, begin=1000 + 19_003 * MS, tid=7)
    assert step_parts(case(FINE, *validated(19), elsewhere)) == {
        "another loader": 40 * MS, "evaluation": 40 * MS, "other code": 17 * MS, "forward": 3 * MS
    }  # fmt: skip
    late = mine(ev.SAVE, 9, begin=1000 + 99_000 * MS)
    assert step_parts(case(FINE, *validated(0), late)) == {"forward": 3 * MS, "other code": 2 * MS}
    assert step_parts(case(FINE, *steps(lambda n: 5))) == step_parts(case(FINE)) == {}


def test_a_sample_that_a_damaged_trace_has_twice_divides_by_nothing() -> None:
    seen = Watched(samples=[Sample(5, {9: QUIET._replace(tasks=(ThreadTime(7, 10, 0),))}) for _ in range(2)])
    assert [use.tid for use in seen.threads_of(9, 0, 10)] in ([], [7])
    assert seen.others(0, 10, 9) == []
