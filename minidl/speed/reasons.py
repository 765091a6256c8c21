"""Why a step is slow, if the step's name does not say it: outliers, first samples, workers, threads, payloads, starts.

Interface: `reason(case)` -> the first `SlowReason` of `REASONS` that holds for what bounds the loader, None = none;
`warnings(case)` is what is wrong whatever bounds it: memory that grows, other programs on the CPUs.

Rules of use: a reason has evidence of its own, and explains a large part of the time that is blamed. A share is of the
time of the steps that the words name.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from minidl.speed.advice import Situation
from minidl.speed.cpu_use import CpuLimit
from minidl.speed.ledger import HANDLE_BYTES, LARGE_PAYLOAD, MANY_TENSORS
from minidl.speed.own_step import (
    COPIES,
    EVALUATION,
    FAR_OUT,
    LOADER,
    NOTABLE,
    OTHER,
    VALIDATION,
    device_lag,
    parts_of,
    stands_out,
    warm_up,
)
from minidl.speed.wall_clock import NEVER, Bound, Cause
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Bools, Ints, Rows
from minidl.tracefile.spans import durations, total
from minidl.tracefile.words import counted, doing, duration, listed, percent, size

if TYPE_CHECKING:
    from minidl.tracefile.reader import Trace

LARGE: Final = 0.3
"""The share of the blamed time that a reason has to explain."""

FEW: Final = 0.1
"""Outliers are at most this share of all steps."""

FEWEST: Final = 20
"""The fewest steps among which there are outliers."""

UNEVEN: Final = 2.0
"""A worker is slower than the others if its samples take this many times as long."""

FIRST: Final = 10
"""The first step of a worker or an epoch stands out if it takes this many times the median of the later ones."""

COLD: Final = 2.5
"""The first epoch stands out if its samples take this many times as long as later ones."""

FEWEST_LOOKS, MOST_LOOKS = 3, 0.4
"""What workers wait for has to be seen so often, and in this part of all looks at workers that fetch."""

FEWEST_FAULTS: Final = 200
"""Page faults with a read from disk from which they are a reason; and at least one a sample."""

STEADY: Final = 0.8, 1.25
"""What a line through all looks at a process's memory says of its growth, by what the first and the last look say."""

FAST: Final = 1
"""MiB a second that a process has to gain: what grows slower may be a cache that fills."""

GROWS: Final = 64
"""MiB that a process has to gain in the second half of the time."""

KEEPS_GIL: Final = 0.5
"""The part of the time that another thread of the loop's process has to compute, or to wait for a CPU, to be the one
that keeps the GIL."""

MORE_THAN_THE_LOOP: Final = 1.5
"""By how much more than the loop's thread it has to compute: a thread of OpenMP does as much, and without the GIL."""

PAUSED: Final = 0.15
"""The share of a process's time from which the garbage collector is a reason."""

OWN_THREADS: Final = 4
"""Threads of a worker that do not compute: the main thread, a feeder, a library's helper, the one that samples."""

LARGE_BATCH: Final = 16 << 20
"""Bytes of a batch from which its size is a reason for what its transport costs."""

NAMED: Final = 4
"""The number of outliers that a sentence names."""


@dataclass(frozen=True, slots=True)
class SlowReason:
    """Why the blamed step is slow. words: follow the verdict's sentence and a colon; next_step: "" = the verdict's own.

    row: the span to look at, None = the verdict's own focus. brief: words for a sentence with little room, "" = the
    same ones. rows: the slow spans, None = all that the verdict blames.
    """

    name: str
    words: str
    next_step: str = ""
    row: np.void | None = None
    brief: str = ""
    rows: Rows | None = None

    def said(self, brief: bool) -> str:
        """The words, or the brief ones."""
        return (self.brief if brief else "") or self.words


@dataclass(frozen=True)
class Case(Situation):
    """What a reason depends on. loaders: the iterators that are judged as one."""

    trace: Trace
    loaders: tuple[int, ...]
    spans: Rows

    @cached_property
    def mine(self) -> Rows:
        """The closed spans of these iterators."""
        return self.spans[np.isin(self.spans["loader"], self.loaders) & (self.spans["end"] >= 0)]

    def rows(self, *pairs: tuple[int, int]) -> Rows:
        """Those of these kinds, by begin."""
        return self.mine[np.isin(self.mine["code"], [pair[0] for pair in pairs])]

    @cached_property
    def samples(self) -> Rows:
        """The samples, or the fetches if the trace has no samples."""
        found = self.rows(ev.SAMPLE)
        return found if len(found) else self.rows(ev.FETCH)

    @cached_property
    def warm_up(self) -> Rows:
        """The loop's first steps, if they take far longer than the others, once."""
        rows = self.rows(ev.CONSUMER)
        return np.concatenate([warm_up(self.trace, one, rows[rows["loader"] == one]) for one in self.loaders])

    @cached_property
    def steps(self) -> Rows:
        """The loop's own steps, without its warm-up."""
        rows = self.rows(ev.CONSUMER)
        return rows[~np.isin(rows["begin"], self.warm_up["begin"])]

    @cached_property
    def epochs(self) -> Ints:
        """The begins of the epochs of these iterators, in order."""
        events = self.trace.events
        return np.sort(events["time"][(events["code"] == ev.EPOCH[0]) & np.isin(events["loader"], self.loaders)])

    def epoch_of(self, rows: Rows) -> Ints:
        """The number of each row's epoch, from 1."""
        return np.searchsorted(self.epochs, rows["begin"], side="right")

    def first_in_epoch(self, rows: Rows, *columns: str) -> Bools:
        """Whether each row is its epoch's first one with its values of the columns."""
        keys = np.stack([self.epoch_of(rows), *(rows[name] for name in ("loader", *columns))])
        first = np.zeros(len(rows), bool)
        first[np.unique(keys, axis=1, return_index=True)[1]] = True
        return first

    @property
    def time(self) -> int:
        """The loop's time, waiting and its own steps, without what happens once in these, ns."""
        return max(1, self.found.total + self.found.step_time)

    @property
    def window(self) -> tuple[int, int]:
        """From the first to the last moment of these iterators, ns."""
        return int(self.mine["begin"].min(initial=NEVER)), int(self.mine["end"].max(initial=0))

    @cached_property
    def home(self) -> int:
        """The process of the loop: its position in the trace."""
        return int(self.rows(ev.NEXT)["process"][0]) if len(self.rows(ev.NEXT)) else -1

    @cached_property
    def pids(self) -> set[int]:
        """The ids of the workers' processes."""
        return set(self.rows(ev.FETCH)["pid"].tolist()) - set(self.rows(ev.NEXT)["pid"].tolist())

    @property
    def lacks_cpus(self) -> bool:
        """Whether fetching or rebuilding is mostly ready to run without a CPU, or may be."""
        rows = self.rows(ev.RESULT_REBUILD)
        rows = rows[rows["cpu"] > 0]
        waits = len(rows) > 0 and rows["cpu"].sum() < total(rows) / 2
        return self.limit is CpuLimit.SHORT or (waits and self.cause is Cause.REBUILD)


# --- Outliers ---------------------------------------------------------------------------------------------------------
def _outliers(rows: Rows) -> Rows:
    """The few steps that take a large part of all their time; none if they do not."""
    if len(rows) < FEWEST:
        return rows[:0]
    took = durations(rows)
    far = took >= max(FAR_OUT * float(np.median(took)), NOTABLE, int(took.max()) // FAR_OUT)
    few = np.count_nonzero(far) <= max(1, FEW * len(rows))
    return rows[far] if few and took[far].sum() >= LARGE * took.sum() else rows[:0]


def _slow_samples(case: Case) -> SlowReason | None:
    rows = case.samples
    far = _outliers(rows)
    if not len(far) or case.cause not in (Cause.SAMPLES, Cause.HEAD_OF_LINE):
        return None
    if _waited_for_a_cpu(case, far):
        return None
    worst = far[np.argmax(durations(far))]
    known = far[far["cpu"] > 0]
    waits = len(known) > 0 and known["cpu"].sum() < LARGE * total(known)
    waits = (" and mostly waits" if len(far) == 1 else " and mostly wait") * bool(waits)
    part = f"{percent(total(far) / total(rows))} of the time of all"
    single = rows["code"][0] == ev.SAMPLE[0]
    named = single and bool((far["by"] >= 0).all())
    whole = f"{len(rows)} {'samples' if single else 'batches'}"
    who = f" of worker {worst['worker']}" * bool(worst["worker"] >= 0)
    if len(far) == 1:
        what = f"sample {worst['by']} (task {worst['task']}{who})" if named else f"a step of task {worst['task']}{who}"
        words = f"{what} takes {part} {whole}{waits}"
    else:
        which = ("" if named else "tasks ") + listed(dict.fromkeys(far["by" if named else "task"].tolist()), NAMED)
        words = f"{len(far)} of {whole} take {part}{waits} ({which})"
    return SlowReason(
        "slow samples",
        words,
        "make these samples cheaper (look at their size, their format, where they are stored); if the order does not "
        "matter, in_order=False lets later batches pass a slow one",
        worst,
        rows=far,
    )


def _waited_for_a_cpu(case: Case, far: Rows) -> bool:
    """Whether the tasks with these samples had no CPU for as long as half of what the samples took."""
    rows = case.rows(ev.FETCH)
    keys = [np.stack([one["loader"], one["task"], case.epoch_of(one)]).T.tolist() for one in (rows, far)]
    outliers = set(map(tuple, keys[1]))
    theirs = np.array([tuple(key) in outliers for key in keys[0]], bool)
    return bool(2 * rows["cpu_wait"][theirs].sum() >= total(far))


def first_steps(case: Case) -> SlowReason | None:
    """What the loop's first steps take longer than the others, once."""
    rows = case.warm_up
    if not len(rows):
        return None
    which = "the first training step takes" if len(rows) == 1 else f"the first {len(rows)} training steps take"
    part = stands_out(case.spans, case.rows(ev.CONSUMER), rows)
    words = f"{which} {duration(total(rows))}{f' ({part})' if part else ''}"
    usual = duration(_median(durations(case.steps)))
    once = f"{words}, a later one {usual}: that happens once, often for kernels that are loaded, chosen or compiled"
    return SlowReason("first steps", once, brief=words)


def _slow_steps(case: Case) -> SlowReason | None:
    rows = case.steps
    far = _outliers(rows)
    if not len(far) or total(far) < LARGE * case.time:
        return None
    apart = np.unique(np.diff(np.flatnonzero(np.isin(rows["begin"], far["begin"]))))
    often = bool(len(far) > 2 and len(apart) == 1 and apart[0] > 1 and (len(far) + 1) * apart[0] >= len(rows))
    which = f"one in {apart[0]}" if often else f"{len(far)}"
    part = stands_out(case.spans, rows, far)
    words = f"{which} of {len(rows)} training steps take{'s' * often} long{f' ({part})' if part else ''}, "
    words += f"{percent(total(far) / case.time)} of the loop's time"
    return SlowReason(
        "slow steps",
        f"{words} (after batches {listed(dict.fromkeys(far['task'].tolist()), NAMED)})",
        _RARER.get(part) or _RARER[""],
        far[np.argmax(durations(far))],
        words,
        far,
    )


_RARER: Final = {
    "": "find out what the program does in these steps and not in the others: checkpoints, logging, validation",
    "torch.save": "write checkpoints less often, to faster storage, or in the background "
    "(torch.distributed.checkpoint.async_save)",
    VALIDATION: "validate less often, on fewer samples, or with more workers, which persistent_workers=True keeps",
    EVALUATION: "call the model without gradients less often, or on less data",
    LOADER: "make that loader once, and keep its workers (persistent_workers=True)",
    COPIES: "let the loader pin its batches (pin_memory=True) and copy with non_blocking=True, or copy beside the step "
    "(minidl.DeviceLoader); send fewer bytes (uint8)",
    "collectives": "find the rank that comes late to these calls: record all ranks, and look at their timelines",
}
"""What to do about steps that take their time for a part; "" = it is not known."""


def _first_samples(case: Case) -> SlowReason | None:
    """The first fetch of each worker in an epoch takes far longer: files are opened, an index is read."""
    rows = case.rows(ev.FETCH)
    first, took = case.first_in_epoch(rows, "worker"), durations(rows)
    if not case.found.workers or first.all() or not first.any() or took[first].sum() < LARGE * took.sum():
        return None
    early, later = float(np.median(took[first])), float(np.median(took[~first]))
    if early < FIRST * later or took[first].min() < LARGE * early:  # else a single one is slow
        return None
    streams = case.params.get("dataset_kind") == "iterable"
    what = "the dataset's __iter__, up to a worker's first batch," if streams else "a worker's first batch"
    place = case.params.get("made_at"), case.params.get("rank")
    alike = [one for one in case.trace.loaders.values() if place[0] and (one.get("made_at"), one.get("rank")) == place]
    made = f" each time that the loader is made ({len(alike)} times)" if len(alike) > len(case.loaders) else ""
    again = made or " in each epoch" * (len(case.epochs) > 1)
    return SlowReason(
        "first samples",
        f"{what} takes {duration(early)}{again}, later batches {duration(later)}",
        "do what precedes the first sample (at the begin of __iter__, or at the first __getitem__) once, before the "
        "workers start, or make it cheaper"
        + ("; make the loader once" if made else "")
        + "; persistent_workers=True keeps what a worker has opened" * (not streams),
        rows[first][np.argmax(took[first])],
        rows=rows[first],
    )


def _cold(case: Case) -> SlowReason | None:
    """Samples of the first epoch take longer than the same samples later."""
    rows, begins = case.samples, case.epochs
    if case.cause is not Cause.SAMPLES or case.limit is CpuLimit.COMPUTES or len(begins) < 2:
        return None
    took, first = durations(rows), case.epoch_of(rows) == 1
    if np.count_nonzero(first) < FEWEST or np.count_nonzero(~first) < FEWEST:
        return None
    early, later = float(took[first].mean()), float(max(1.0, took[~first].mean()))
    excess = (early - later) * np.count_nonzero(first)
    if early < COLD * later or excess < LARGE * took.sum():
        return None
    return SlowReason(
        "cold epoch",
        f"samples take {early / later:.1f} times as long in the first epoch as in later ones",
        "read the files once before the training (they are not in the page cache yet), or use more workers for the "
        "first epoch, or faster storage",
    )


# --- Workers ----------------------------------------------------------------------------------------------------------
def _uneven(case: Case) -> SlowReason | None:
    """A worker has run out of data, and others have most of it."""
    if case.found.share_of(case.found.uneven) < LARGE:
        return None
    yields = case.trace.events[np.isin(case.trace.events["loader"], case.loaders)]
    workers = yields["worker"][yields["code"] == ev.YIELD]
    if not len(workers) or case.found.out < 0:
        return None
    worker, count = max(Counter(workers.tolist()).items(), key=lambda one: one[1])
    words = f"worker {worker} has {percent(count / len(workers))} of the batches; worker {case.found.out} ran out first"
    return SlowReason("uneven shards", words)


def _slow_worker(case: Case) -> SlowReason | None:
    rows = case.samples
    numbers = np.unique(rows["worker"])
    if len(numbers) < 2 or len(rows) < FEWEST * len(numbers) or case.cause not in (Cause.SAMPLES, Cause.HEAD_OF_LINE):
        return None
    took = [float(np.median(durations(rows[rows["worker"] == number]))) for number in numbers]
    at = int(np.argmax(took))
    others = float(np.median(took[:at] + took[at + 1 :]))
    if took[at] < UNEVEN * max(1.0, others):
        return None
    mine = rows[rows["worker"] == numbers[at]]
    return SlowReason(
        "slow worker",
        f"a sample takes worker {numbers[at]} {took[at] / max(1.0, others):.1f} times as long as the other workers",
        f"find out what is different in worker {numbers[at]}: what the program does by the worker's number, or its "
        f"samples (batch n goes to worker n mod {len(numbers)}), which shuffling spreads over the workers",
        mine[np.argmax(durations(mine))],
        rows=mine,
    )


def _worker_threads(case: Case) -> SlowReason | None:
    """Workers compute in more threads than there are CPUs."""
    most = max((case.trace.watched.most_threads(pid) for pid in case.pids), default=0) - OWN_THREADS
    if case.cpus is None or most * case.found.workers <= 2 * case.cpus or case.limit is CpuLimit.WAITS:
        return None
    used = [case.trace.watched.cpu_of(pid, *case.window) or 0.0 for pid in case.pids]
    if case.limit is not CpuLimit.SHORT and max(used, default=0.0) < 1:
        return None  # they may be idle
    return SlowReason(
        "threads",
        f"each of {counted(case.found.workers, 'worker')} has up to {most} threads that compute, on {case.in_cpus}",
        "let each worker compute in one thread: call torch.set_num_threads(1) in worker_init_fn, cv2.setNumThreads(0) "
        "for OpenCV, and set OMP_NUM_THREADS=1 for other libraries",
    )


def _page_faults(case: Case) -> SlowReason | None:
    """Samples wait for pages that are not in memory: of mapped files, or swapped out."""
    if case.cause is not Cause.SAMPLES or case.limit is CpuLimit.COMPUTES:
        return None
    pids = case.pids or {case.trace.processes[case.home].pid}
    found = [seen for pid in pids if (seen := case.trace.watched.faults_of(pid, *case.window)) is not None]
    faults = sum(seen.major for seen in found)
    if faults < max(FEWEST_FAULTS, len(case.samples)):
        return None
    words = f"{faults / len(case.samples):.0f} page faults a sample read from disk"
    swapped = sum(case.trace.watched.swapped(pid, *case.window) for pid in pids)
    if swapped >= GROWS << 10:
        return SlowReason(
            "swapping",
            f"memory is swapped out ({size(swapped << 10)}), and {words}",
            "let the run use less memory (fewer workers, a smaller prefetch_factor, no copies), or give it more",
        )
    return SlowReason(
        "page faults",
        words,
        "read mapped files in larger blocks or in their order (a page fault reads one page), once before the training, "
        "or from faster storage",
    )


_SLEEPS: Final = (
    (
        "sleep",
        r"nanosleep",
        "use more workers, which sleep at the same time; or find the sleep (a rate limit, a retry)",
    ),
    (
        "wait for a file lock",
        r"lock_inode|flock|setlk",
        "find the lock that workers share: more workers wait for it, too",
    ),
    (
        "wait for another thread or a lock",
        r"futex|rwsem|mutex",
        "find what the samples' code waits for (py-spy dump of a worker): a pool of threads, a lock",
    ),
    (
        "wait for another process",
        r"unix_stream|pipe_read",
        "find the process that answers the workers (a manager, a server): it may be the limit",
    ),
    (
        "wait for the network",
        r"sk_wait|skb_wait|wait_woken|tcp_|inet_|nfs|rpc_",
        "use more workers, which wait together; or requests for several samples at once, or a local copy",
    ),
    (
        "wait for a disk",
        r"io_schedule|iomap|dio|folio|page|blk|submit_bio|ext4|xfs|btrfs|filemap",
        "read larger blocks, through the page cache, from faster storage; or use more workers, which wait together",
    ),
)
"""What a process does in one of the kernel's functions, these functions, and what helps a worker that does so."""


def _looks(case: Case, rows: Rows) -> tuple[tuple[str, str, str], str] | None:
    """What the watchdog found processes to do in these spans, mostly, and how often; None if that is not clear."""
    looks, (begin, end) = [], case.window
    for sample in (one for one in case.trace.watched.samples if begin <= one.at <= end):
        inside = set(rows["pid"][(rows["begin"] <= sample.at) & (sample.at <= rows["end"])].tolist())
        looks += [vitals for pid, vitals in sample.processes.items() if pid in inside]
    told = [next((one for one in _SLEEPS if re.search(one[1], vitals.wchan)), None) for vitals in looks]
    told = [one or (_SLEEPS[-1] if vitals.state == "D" else None) for one, vitals in zip(told, looks, strict=True)]
    kinds = Counter(one for one in told if one is not None).most_common(1)
    if not kinds or kinds[0][1] < max(FEWEST_LOOKS, MOST_LOOKS * len(looks)):
        return None
    return kinds[0][0], f"{kinds[0][1]} of {len(looks)} looks"


def _asleep(case: Case) -> SlowReason | None:
    """What workers wait for in their fetches."""
    if case.cause is not Cause.SAMPLES or case.limit is CpuLimit.COMPUTES or not case.found.workers:
        return None
    found = _looks(case, case.rows(ev.FETCH))
    if found is None:
        return None
    (does, _, step), often = found
    words = f"workers {does} in their samples"
    return SlowReason(does, f"{words} ({often})", step, brief=words)


def step_does(case: Case) -> str:
    """What the training step mostly does, as it follows "the training step"; "" = unknown."""
    rows = case.steps
    rows = rows[rows["tid"] == rows["pid"]]  # the watchdog looks at main threads
    measured = rows[rows["cpu"] > 0]
    if len(measured) and measured["cpu"].sum() > total(measured) / 2:
        return "computes"
    found = _looks(case, rows)
    if found is None:
        return ""
    verb, _, rest = found[0][0].partition(" ")
    return f"{verb}s {rest}".rstrip()


def step_parts(case: Case) -> dict[str, int]:
    """The ns of each part of the training steps; {} if none is recorded."""
    return parts_of(case.spans, case.steps)


def device_or_host(case: Case, parts: Mapping[str, int]) -> SlowReason | None:
    """Whether the device bounds the steps of a loop that the loader keeps up with, or the host. parts: the steps'."""
    lag = None if case.kind is not Bound.NOT_INPUT else device_lag(case.mine, case.steps)
    if lag is None or lag.limit is None:
        return None
    most = next(iter(parts), OTHER)
    limit = "device" if lag.limit else "program" if most == OTHER else "host"
    words, step = _LIMITS[limit]
    step = step if lag.limit else _RARER.get(most, step)
    return SlowReason(limit, lag.words(), step, brief=f"{lag.device} {words}")


_LIMITS: Final = {
    "device": (
        "is the limit",
        "make the device's work cheaper: mixed precision (torch.autocast), torch.compile, a smaller model",
    ),
    "host": (
        "waits for the host",
        "give the device more work with each call: larger batches, torch.compile, CUDA graphs, fused=True for the "
        "optimizer",
    ),
    "program": (
        "waits for the host",
        "make cheaper what the program does in the step beside the model (transforms, metrics, logging), or do it in "
        "the workers or on the device",
    ),
}
"""What bounds a step: what is said of the device, and what to do."""


# --- The loop's process -----------------------------------------------------------------------------------------------
def _kept_gil(case: Case) -> SlowReason | None:
    """Another thread of the loop's process computes, and the loop's thread waits for the interpreter's lock."""
    rows = case.rows(ev.RESULT_REBUILD)
    rows = rows[rows["cpu"] > 0]
    if (
        case.home < 0
        or not len(rows)
        or rows["cpu"].sum() > LARGE * total(rows)
        or total(rows) < LARGE * case.found.total
    ):
        return None
    own = set(case.rows(ev.NEXT, ev.RESULT_REBUILD, ev.PIN)["tid"].tolist())
    pid = case.trace.processes[case.home].pid
    threads = case.trace.watched.threads_of(pid, *case.window)
    loops = max((one.cpu for one in threads if one.tid in own), default=0.0)
    thread = next((one for one in threads if one.tid not in own), None)
    if thread is None or thread.cpu + thread.wait < KEEPS_GIL or thread.cpu < MORE_THAN_THE_LOOP * loops:
        return None
    who = f"thread {thread.name or thread.tid} of the loop's process"
    return SlowReason(
        "kept GIL",
        f"{who} seems to keep the GIL (it uses {thread.cpu:.1f} CPUs)",
        "move that thread's work to another process, or let it release the GIL; with larger batches the loop needs the "
        "GIL less often",
    )


def _collector(case: Case) -> SlowReason | None:
    """The garbage collector stops the process of the loop, or the workers."""
    rows = case.spans[(case.spans["code"] == ev.GC[0]) & (case.spans["end"] >= 0)]
    begin, end = case.window
    rows = rows[(rows["begin"] >= begin) & (rows["end"] <= end)]
    own, theirs = rows[rows["process"] == case.home], rows[np.isin(rows["pid"], list(case.pids))]
    sides = [(own, end - begin, "the loop's process", "its")]
    if case.kind in (Bound.SUPPLY, Bound.HEAD_OF_LINE) and total(theirs) >= PAUSED * case.time:
        sides.append((theirs, (end - begin) * len(case.pids), "the workers", "their"))
    for mine, whole, whom, whose in sides:
        longest = int(durations(mine).max(initial=0))  # one alone may have waited for a CPU
        if total(mine) - longest >= PAUSED * max(1, whole):
            return SlowReason(
                "collector",
                f"the garbage collector stopped {whom} {counted(len(mine), 'time')}, for "
                f"{percent(total(mine) / whole)} of {whose} time (up to {duration(longest)})",
                "call gc.freeze() when the large objects are made, or gc.disable() in the loop and gc.collect() "
                "between epochs; if the program calls gc.collect() in each step, call it less often",
                mine[np.argmax(durations(mine))],
                rows=mine[:0],
            )
    return None


def _payload(case: Case) -> SlowReason | None:
    """What a batch is made of."""
    found = case.found
    if case.cause is not Cause.COLLATE and found.payload > max(LARGE_PAYLOAD, (found.tensors + 1) * HANDLE_BYTES):
        words = f"each batch pickles {size(found.payload)} that are not in tensors"
    elif case.cause is not Cause.COLLATE and found.tensors > MANY_TENSORS:
        words = f"each batch has {found.tensors:.0f} tensors"
    elif found.shared > LARGE_BATCH:
        words = f"each batch has {size(found.shared)} in tensors"
    elif case.params.get("batch_size") == 1 and case.cause is not Cause.COLLATE:
        words = "each batch is one sample, and costs as much as a large batch"
    else:
        return None
    return SlowReason("payload", words)


# --- Starts -----------------------------------------------------------------------------------------------------------
_STARTS: Final = {
    "boot": (
        "a worker takes {took} to start",
        "import less in the main module and keep the dataset small when it is pickled, or use fewer workers; fork does "
        "neither import nor pickle",
    ),
    "init": ("worker_init_fn takes {took}", "do less in worker_init_fn, or do it once before the workers start"),
    "open": ("iter(dataset) takes {took} in a worker", "do less in the dataset's __iter__ before its first sample"),
    "end": ("a worker takes {took} to end", "find what delays it (py-spy dump while it is joined)"),
}
"""The steps of workers' starts and ends: what is said of one, and what to do."""


def _slow_start(case: Case) -> SlowReason | None:
    """The step that most of the start takes."""
    if case.found.once > 2 * case.found.causes[Cause.START_UP]:
        return None  # the wait for the first batch is longer
    events = case.trace.events[np.isin(case.trace.events["loader"], case.loaders)]
    ready = events[events["code"] == ev.WORKER_READY]
    init, opened, ends = (case.rows(pair) for pair in (ev.WORKER_INIT, ev.MAKE_FETCHER, ev.JOIN))
    starts = case.rows(ev.WORKER_START)
    begun = {(row["loader"], row["worker"]): int(row["begin"]) for row in starts}
    up = [int(row["time"]) - begun[key] for row in ready if (key := (row["loader"], row["worker"])) in begun]
    inside = _median(durations(init)) + _median(durations(opened))
    took = {
        "boot": _median(np.array(up, np.int64)) - inside,
        "init": _median(durations(init)),
        "open": _median(durations(opened)),
        "end": _median(durations(ends)) * len(ends) / max(1, len(case.loaders)),  # one after the other
    }
    step = max(took, key=lambda name: took[name])
    times = max(len(np.unique(starts["loader"])), case.found.alike)
    (words, remedy), row = _STARTS[step], None
    if took[step] * max(1, len(case.loaders)) < LARGE * case.found.causes[Cause.START_UP]:
        each = case.found.batches // max(1, case.found.together)
        if times == 1 or each > FEWEST:
            return None
        words, remedy = f"each iteration makes {counted(each, 'batch', 'batches')}", ""
    elif step == "end" and (row := _last_opened(case.spans, ev.SAMPLE, case.loaders)) is not None:
        sent = events["y"][(events["code"] == ev.TERMINATE) & (events["x"] == row["pid"])]
        ignores = bool((sent == signal.SIGKILL).any())  # it is sent where SIGTERM did not do
        words += f": worker {row['worker']} is still {doing(row)}" + " and does not end by SIGTERM" * ignores
        remedy = "bound by a timeout what the sample waits for" + ", and let SIGTERM end a worker" * ignores
    again = f", and each epoch starts workers again ({times} times)" * (times > 1)
    kept = case.params.get("persistent_workers") is True
    keep = "make the DataLoader once" if kept else "set persistent_workers=True, so that workers start once"
    keep = f"{keep}; " * (times > 1)
    said = words.format(took=duration(took[step])) + again
    return SlowReason(f"slow {step}", said, (keep + remedy).rstrip("; "), row)


def _last_opened(spans: Rows, pair: tuple[int, int], loaders: tuple[int, ...]) -> np.void | None:
    """The span of this kind that has begun last and not ended."""
    rows = spans[(spans["end"] < 0) & (spans["code"] == pair[0]) & np.isin(spans["loader"], loaders)]
    return rows[-1] if len(rows) else None


def _median(took: Ints) -> float:
    return float(np.median(took)) if len(took) else 0.0


def _first_index(case: Case) -> SlowReason | None:
    """The sampler makes an epoch's order before its first index."""
    rows = case.rows(ev.SAMPLER_NEXT)
    took = durations(rows)
    far = took >= FIRST * max(1.0, float(np.median(took))) if len(rows) else took > 0
    slow = far & case.first_in_epoch(rows)
    if not slow.any() or took[slow].sum() < max(LARGE * case.found.causes[Cause.SAMPLER], 0.9 * took[far].sum()):
        return None
    length = case.params.get("dataset_length")
    of = f" {length:,} samples" if type(length) is int and length > 0 else " all samples"
    words = f"the first index of an epoch takes {duration(float(took[slow].mean()))}"
    return SlowReason(
        "first index",
        f"{words} (the sampler orders{of})",
        "shuffle cheaper: a sampler that draws in blocks, or shards that are shuffled; or make the order once, before "
        "the epoch",
        rows[np.argmax(took)],
        words,
    )


# --- Whatever bounds it -----------------------------------------------------------------------------------------------
def _other_programs(case: Case) -> SlowReason | None:
    """Other programs use the CPUs that the run waits for."""
    if case.kind in (Bound.NOT_INPUT, Bound.TOO_FEW) or case.cpus is None or not case.lacks_cpus:
        return None
    pid = case.trace.processes[case.home].pid if case.home >= 0 else 0
    watched, window = case.trace.watched, case.window
    others, machine = watched.others(*window, pid), watched.machine_busy(*window, pid)
    if machine is not None and machine.cpus > case.cpus:
        return None  # the run may not use all CPUs: others may have their own
    own = [watched.cpu_of(one.pid, *window) or 0.0 for one in case.trace.processes]
    rest = machine.busy - sum(own) if machine is not None and any(own) else 0.0  # of many, none may be a busy one
    used = max(rest, sum(cpus for _, _, cpus in others))
    if used < max(0.5, LARGE * case.cpus):
        return None
    words = f"other programs use {used:.1f} of {case.in_cpus}"
    return SlowReason(
        "busy host",
        f"{words}, most of all {others[0][1]} (pid {others[0][0]})" if others else words,
        "give the run CPUs of its own, or run it while the machine is idle",
        brief=words,
    )


def _growth(case: Case) -> SlowReason | None:
    """A process grows all the time that these iterators run.

    What a process takes up to its first batch, and in the first half of the time after it, may be what it needs.
    """
    trace = case.trace
    steps = trace.events[np.isin(trace.events["loader"], case.loaders)]
    steps = steps[np.isin(steps["code"], [ev.FETCH[1], ev.YIELD])]
    pids, first = np.unique(steps["pid"], return_index=True)  # the events are by time
    last = int(steps["time"].max(initial=0))
    found = []
    warm = int(case.warm_up["end"].max(initial=0))
    for pid, begin in zip(pids.tolist(), np.maximum(steps["time"][first], warm).tolist(), strict=True):
        late = trace.watched.growth(pid, (begin + last) // 2, last)
        if (
            late is not None
            and late.kib >= GROWS << 10
            and late.kib_per_s >= FAST << 10
            and STEADY[0] <= late.kib_per_s * late.seconds / late.kib <= STEADY[1]
        ):
            found.append((late.kib_per_s / 1024, pid, late.kib >> 10, late.seconds))
    if not found:
        return None
    rate, pid, mib, seconds = max(found)
    workers = {process.pid: process.actor for process in trace.processes if process.role == "worker"}
    who = workers.get(pid, "the loop's process")
    others = f" ({len(found)} processes grow)" * (len(found) > 1)
    words = f"memory grows: {who} by {rate:.0f} MiB/s"
    return SlowReason(
        "growth",
        f"{words} ({mib} MiB in its last {seconds:.0f} s){others}",
        "find what the program keeps: a list or a cache that is never cleared (tracemalloc, memray)",
        brief=words,
    )


_Test = Callable[[Case], SlowReason | None]
_SUPPLYING: Final = (
    _uneven,
    _first_samples,
    _collector,
    _slow_samples,
    _slow_worker,
    _worker_threads,
    _cold,
    _page_faults,
    _asleep,
)

REASONS: Final[dict[Bound, tuple[_Test, ...]]] = {
    Bound.NOT_INPUT: (_collector, _slow_steps),
    Bound.SUPPLY: _SUPPLYING,
    Bound.HEAD_OF_LINE: _SUPPLYING,
    Bound.READING: (_collector, _kept_gil, _worker_threads),
    Bound.OVERHEAD: (_collector, _kept_gil),
    Bound.START_UP: (_slow_start, _first_samples),
    Bound.SAMPLER: (_collector, _first_index),
}
"""What is tried, in this order, by what bounds the loader."""


def warnings(case: Case) -> tuple[SlowReason, ...]:
    """What is wrong whatever bounds the loader."""
    return tuple(filter(None, (_growth(case), _other_programs(case))))


_BLAMED: Final[dict[Cause, tuple[tuple[int, int], ...]]] = {
    Cause.COLLATE: (ev.COLLATE,),
    Cause.SAMPLER: (ev.SAMPLER_NEXT,),
    Cause.OVERHEAD: (ev.NEXT,),
    Cause.START_UP: (ev.WORKER_INIT, ev.MAKE_FETCHER),
}
"""The spans to blame for a cause."""


def blamed(case: Case, because: SlowReason | None) -> Rows:
    """The spans that are to blame, in which the program's own code runs."""
    if because is not None and because.rows is not None:
        return because.rows
    if case.cause in (Cause.SAMPLES, Cause.HEAD_OF_LINE):
        return case.samples
    return case.steps if case.cause is None else case.rows(*_BLAMED.get(case.cause, ()))


def reason(case: Case) -> SlowReason | None:
    """The first reason that has evidence."""
    tests = REASONS.get(case.kind, ())
    tests += (_payload,) * (case.cause in (Cause.COLLATE, Cause.IPC, Cause.REBUILD, Cause.PIN))
    return next((found for test in tests if (found := test(case)) is not None), None)
