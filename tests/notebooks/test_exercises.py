"""Each exercise's check: it names the step of typical wrong solutions, and accepts right ones of other ways.

That the course's own solutions pass is tested where the notebooks run.
"""

from __future__ import annotations

import ast
import functools
import importlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from course_solutions import RIGHT, by_next, cloned, layout_by_mask
from torch.nn.utils.rnn import pad_sequence

import minidl
from course import (
    bottleneck,
    checking,
    checkpointing,
    datasets,
    device,
    first_look,
    hang_lab,
    many_workers,
    one_page,
    one_timeline,
    ranks,
    samplers,
    shutdown,
    tensors,
    transport,
)
from minidl import mini
from minidl.loader.dispatcher import STORED, Dispatcher
from minidl.loader.driver import JoinPin, Simple
from minidl.speed.wall_clock import Cause
from minidl.tracefile.events import COMPUTE, CONSUMER, COPY, DEVICE_COMPUTE, FETCH, H2D, NEXT, SAMPLE

nbformat = pytest.importorskip("nbformat", reason="the notebooks need Jupyter: pip install -e '.[notebooks]'")
pytest.importorskip("pandas", reason="the notebooks need pandas: pip install -e '.[notebooks]'")

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
SOLUTIONS = sorted((NOTEBOOKS / "solutions").glob("*.py"))

Case = tuple[Callable[..., Any], Any, str]
"""A check, a wrong object, and what has to be said."""


def received(write: Callable[[Any, int, Any], Any]) -> type[Dispatcher]:
    return type("Mine", (Dispatcher,), {"receive": write})


def at_once(self: Any, idx: int, data: Any) -> Any:
    self.tasks_outstanding -= 1
    self.task_info[idx].data = data
    return self._deliver(idx)


def uncounted(self: Any, idx: int, data: Any) -> Any:
    self.task_info[idx].data = data
    return self._deliver(idx) if idx == self.rcvd_idx else STORED


def dropped(self: Any, idx: int, data: Any) -> Any:
    self.tasks_outstanding -= 1
    return self._deliver(idx) if idx == self.rcvd_idx else STORED


def forgotten(self: Any, idx: int, data: Any) -> Any:
    self.tasks_outstanding -= 1
    if idx == self.rcvd_idx:
        return self._deliver(idx)  # of which data is not there yet
    self.task_info[idx].data = data
    return STORED


def longest(trace: minidl.Trace, code: int, column: str) -> int:
    spans = trace.spans()
    spans = spans[spans["code"] == code]
    return int(spans[column][(spans["end"] - spans["begin"]).argmax()])


def of_first(trace: minidl.Trace, task: int, column: str) -> int:
    events = trace.to_pandas()
    return int(events[column][events.task == task].iloc[0])


def unlike(samples: Any) -> Any:
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.stack(labels)


def in_turn(active: Any, held: Any, turn: int, capacity: int) -> int:
    return turn


def least_loaded(active: Any, held: Any, turn: int, capacity: int) -> int:
    return min(range(len(held)), key=lambda worker: held[worker])


def share_of_all(active: Any, held: Any, turn: int, capacity: int) -> int | None:
    around = [(turn + step) % len(active) for step in range(len(active))]
    return next((w for w in around if active[w] and held[w] < capacity // len(active)), None)


def stored(trace: minidl.Trace) -> int:
    return int((trace.to_pandas().name == "reorder_store").sum())


def deepest_of_none(trace: minidl.Trace) -> Any:
    return trace.to_pandas().query("name == 'reorder_store'").depth.max()


def in_order() -> Any:
    """The notebook's loader to which the reader's method belongs: what the cells of it and of its bases define."""
    defined: dict[str, Any] = {"ask": one_page}
    for cell in nbformat.read(NOTEBOOKS / "04_one_page.ipynb", as_version=4).cells:
        if re.search(r"^class (AllAtOnce|Bounded|InOrder)\(", cell.source, re.MULTILINE):
            exec(cell.source, defined)
    return defined["InOrder"]


def sent(write: Callable[[Any, Any, int], None], times: int = 1) -> Callable[[Any], Any]:
    """A check of a `_try_put_index` that sends an index in this way, if there is one, or so many of them."""

    def method(self: Any) -> None:
        for index in itertools.islice(self._sampler_iter, times):
            write(self, index, next(self._worker_queue_idx_cycle))

    return lambda check: check(in_order(), method)


def unnumbered(self: Any, index: Any, worker: int) -> None:
    self._task_info[self._send_idx] = (worker,)
    self._index_queues[worker].put((self._send_idx, index))


def always_first(self: Any, index: Any, worker: int) -> None:
    always_right(self, index, 0)


def late(self: Any, index: Any, worker: int) -> None:
    self._send_idx += 1
    self._index_queues[worker].put((self._send_idx, index))


def unremembered(self: Any, index: Any, worker: int) -> None:
    always_right(self, index, worker)
    self._task_info[self._send_idx - 1] = "banana"


def endless(check: Callable[..., Any]) -> Any:
    def method(self: Any) -> None:
        always_right(self, self._next_index(), next(self._worker_queue_idx_cycle))

    return check(in_order(), method)


def packed_tight(sizes: Any, inline: int) -> list[int | None]:
    places = itertools.accumulate(sizes, lambda end, size: end + size * (size > inline), initial=0)
    return [place if size > inline else None for place, size in zip(places, sizes, strict=False)]


def all_in_the_slab(sizes: Any, inline: int) -> list[int]:
    return [64 * sum(-(-size // 64) for size in sizes[:place]) for place in range(len(sizes))]


def one_upon_another(sizes: Any, inline: int) -> list[int | None]:
    return [0 if size > inline else None for size in sizes]


def taken(*asked: str) -> Callable[[Any, int], int | None]:
    """Take the first slab of which this is true, whatever else is."""

    def choose(slabs: Any, size: int) -> int | None:
        for number, (state, visible, has) in enumerate(slabs):
            true = {"free": state == 0, "not taken": state != 1, "unseen": not visible, "large": has >= size}
            if all(true[word] for word in asked):
                return number
        return None

    return choose


def always_right(self: Any, index: Any, worker: int) -> None:
    self._task_info[self._send_idx] = (worker,)
    self._index_queues[worker].put((self._send_idx, index))
    self._send_idx += 1


def tasks_of(index_queue: Any) -> Any:
    """Tasks up to the sentinel."""
    return itertools.takewhile(lambda task: task[0] is not None, iter(index_queue.get, ...))


def dies(fetch: Any, index_queue: Any, data_queue: Any, done_event: Any) -> None:
    for idx, index in tasks_of(index_queue):
        data_queue.put((idx, fetch(index)))


def stays(fetch: Any, index_queue: Any, data_queue: Any, done_event: Any) -> None:
    for idx, index in iter(index_queue.get, ...):
        if idx is not None:
            data_queue.put((idx, answer(fetch, index)))


def goes_on(fetch: Any, index_queue: Any, data_queue: Any, done_event: Any) -> None:
    while not index_queue.empty():
        idx, index = index_queue.get()
        if idx is not None:
            data_queue.put((idx, answer(fetch, index)))


def nameless(fetch: Any, index_queue: Any, data_queue: Any, done_event: Any) -> None:
    for _, index in tasks_of(index_queue):
        data_queue.put(answer(fetch, index))


def unasked(fetch: Any, index_queue: Any, data_queue: Any, done_event: Any) -> None:
    for idx, index in tasks_of(index_queue):
        data_queue.put((idx, answer(fetch, index)))


def answer(fetch: Any, index: Any) -> Any:
    try:
        return fetch(index)
    except Exception as error:
        return error


def sentinels(driver: Any) -> tuple[Any, ...]:
    return tuple(step for worker in range(len(driver.told)) for step in driver._sentinel(worker))


def alternating(batches: Any, copy: Any) -> Any:
    yield from map(copy, batches)


def last_lost(batches: Any, copy: Any) -> Any:
    yield from (one for one, _ in itertools.pairwise(map(copy, batches)))


def overlapped(trace: minidl.Trace, other: int) -> int:
    spans = trace.spans()
    copies, others = (spans[spans["code"] == code] for code in (COPY[0], other))
    begins, ends = copies["begin"][:, None], copies["end"][:, None]
    both = np.minimum(ends, others["end"]) - np.maximum(begins, others["begin"])
    return int(np.maximum(both, 0).sum())


def inside_one_step(trace: minidl.Trace) -> int:
    spans = trace.spans()
    copies, steps = (spans[spans["code"] == code[0]] for code in (COPY, DEVICE_COMPUTE))
    begun = (steps["begin"] <= copies["begin"][:, None]) & (copies["end"][:, None] <= steps["end"])
    return int((begun.any(1) * (copies["end"] - copies["begin"])).sum())


def neighbours(of_ranks: Any, size: int) -> Any:
    lost, _ = counted(of_ranks, size)
    return lost, {index for one, other in itertools.pairwise(of_ranks) for index in set(one) & set(other)}


def forever(batches: Any, copy: Any) -> Any:
    yield from by_next(batches, copy)
    yield from itertools.repeat("batch 2 on the device")


def too_many(info: Any, size: int) -> Any:
    each = size if info is None else -(-size // info.num_workers)
    return range(each) if info is None else range(info.id * each, (info.id + 1) * each)


TELL_PIN = Simple.SET_PIN_DONE, Simple.WAKE_PIN


def pin_steps(*steps: Any) -> Callable[[Any], tuple[Any, ...]]:
    return lambda driver: steps if driver.pin else ()


class Once:
    def __init__(self, data: Any, generator: torch.Generator) -> None:
        self.order = torch.randperm(len(data), generator=generator).tolist()

    def __iter__(self) -> Any:
        return iter(self.order)


def drawing(draw: Callable[[int, torch.Generator], torch.Tensor]) -> type:
    def begin(self: Any) -> Any:
        return iter(draw(len(self.data), self.generator).tolist())

    def keep(self: Any, data: Any, generator: torch.Generator) -> None:
        self.data, self.generator = data, generator

    return type("Mine", (), {"__init__": keep, "__iter__": begin})


def in_pieces(order: Any, size: int) -> list[list[int]]:
    return [list(order[n : n + size]) for n in range(0, len(order), size)]


def by_length(lengths: Any) -> list[int]:
    return sorted(range(len(lengths)), key=lengths.__getitem__)


def wrapped_last(order: Any, rank: int, ranks: int) -> list[int]:
    padded = list(order) + [order[-1]] * (-len(order) % ranks)
    return padded[rank::ranks]


def in_blocks(order: Any, rank: int, ranks: int) -> list[int]:
    each = -(-len(order) // ranks)
    return [order[(rank * each + step) % len(order)] for step in range(each)]


def counted(of_ranks: Any, size: int) -> tuple[set[int], set[int]]:
    seen = [index for one in of_ranks for index in one]
    return set(range(size)) - set(seen), {index for index in seen if seen.count(index) > 1}


def windows(length: Callable[[int, int], int], begin: Callable[[int, int], int]) -> type:
    """A dataset of windows with this length, whose window i begins there, and which knows no end."""

    def keep(self: Any, series: Any, width: int) -> None:
        self.series, self.width = series, width

    def window(self: Any, index: int) -> Any:
        return self.series[begin(index, self.width) :][: self.width]

    def size(self: Any) -> int:
        return length(len(self.series), self.width)

    return type("Mine", (), {"__init__": keep, "__getitem__": window, "__len__": size})


def whole_windows(size: int, width: int) -> int:
    return size - width + 1


def uncollated(dataset: Any, indices: Any, collate_fn: Any) -> Any:
    whole = hasattr(dataset, "__getitems__")
    return dataset.__getitems__(indices) if whole else [dataset[index] for index in indices]


def numbers(share: Callable[[Any, int], Any]) -> type[minidl.IterableDataset[int]]:
    """A stream of the numbers below a size, of which each worker gives this share."""

    def keep(self: Any, size: int) -> None:
        self.size = size

    def begin(self: Any) -> Any:
        return iter(share(minidl.get_worker_info(), self.size))

    return type("Mine", (minidl.IterableDataset,), {"__init__": keep, "__iter__": begin})


def rounded_down(info: Any, size: int) -> Any:
    each = size if info is None else size // info.num_workers
    return range(each) if info is None else range(info.id * each, (info.id + 1) * each)


def took(trace: minidl.Trace, code: int) -> int:
    spans = trace.spans()
    spans = spans[spans["code"] == code]
    return int((spans["end"] - spans["begin"]).sum())


def ratio(trace: minidl.Trace, code: int, other: int) -> float:
    return took(trace, code) / took(trace, other)


def of_whole_run(trace: minidl.Trace) -> float:
    return 1 - took(trace, CONSUMER[0]) / int(np.ptp(trace.events["time"]))


def judging(left_out: tuple[str, ...], least: float, blocking: str) -> Callable[[Any, int], str]:
    """A rule for verdicts without these causes, that calls waiting below this share harmless."""

    def rule(causes: Any, consumer: int) -> str:
        steady = sum(ns for cause, ns in causes.items() if cause not in left_out)
        if steady < least * (steady + consumer):
            return "not input-bound"
        return "head-of-line blocking" if causes.get(blocking, 0) > causes["samples"] else "supply-bound"

    return rule


def first_trip(trips: Any) -> tuple[int, int]:
    before, answer, after = trips[0]
    return answer - (before + after) // 2, (after - before) // 2


def shortest(part: float, error: float) -> Callable[[Any], tuple[float, float]]:
    """An offset by the shortest round trip, at this part of its time, and its error as that part."""

    def offset(trips: Any) -> tuple[float, float]:
        before, answer, after = min(trips, key=lambda trip: trip[2] - trip[0])
        return answer - before - int(part * (after - before)), error * (after - before)

    return offset


def by_number(trace: minidl.Trace) -> list[int]:
    """The iterator, and not the rank, that begins each step last."""
    spans = trace.spans()
    spans = spans[spans["code"] == COMPUTE[0]]
    begins = [np.sort(spans["begin"][spans["loader"] == number]) for number in sorted(trace.loaders)]
    return [int(place) + 1 for place in np.argmax(begins, axis=0)]


LINE, START = Cause.HEAD_OF_LINE.value, Cause.START_UP.value
ONCE = START, bottleneck.FIRST

PURE: list[Case] = [
    (one_timeline.clock_offset, first_trip, "of all round trips the shortest"),
    (one_timeline.clock_offset, shortest(0, 0.5), "halfway is the best guess"),
    (one_timeline.clock_offset, shortest(0.5, 1), "can be wrong by 150 ns"),
    (one_timeline.last_to_begin, by_number, "is not its rank"),
    (one_timeline.last_to_begin, lambda trace: one_timeline.steps(trace, "begin").argmin(axis=0), "begins last"),
    (one_timeline.last_to_begin, lambda trace: [0] * len(trace.loaders), "has 48 steps"),
    (bottleneck.share_of_waiting, lambda trace: ratio(trace, NEXT[0], CONSUMER[0]), "'workers-0', the loop"),
    (bottleneck.share_of_waiting, of_whole_run, "'workers-"),
    (bottleneck.share_of_waiting, lambda trace: ratio(trace, FETCH[0], NEXT[0]), "your function says"),
    (bottleneck.rule, judging((), 0.1, LINE), "'workers-8' is not input-bound"),
    (bottleneck.rule, judging((START,), 0.1, LINE), "'workers-8' is not input-bound"),
    (bottleneck.rule, judging(ONCE, 0, LINE), "'workers-8' is not input-bound"),
    (bottleneck.rule, judging(ONCE, 0.1, ""), "is head-of-line blocking; your rule says 'supply"),
    (datasets.windows, windows(lambda size, width: size - width, lambda index, width: index), "your len says"),
    (datasets.windows, windows(whole_windows, lambda index, width: index * width), "sample 1 is"),
    (datasets.windows, windows(whole_windows, lambda index, width: index), "is an IndexError"),
    (datasets.fetch, lambda dataset, indices, collate: collate([dataset[i] for i in indices]), "[[5, 0, 3, 3]]"),
    (datasets.fetch, lambda dataset, indices, collate: collate([dataset[i] for i in sorted(indices)]), "[0, 3, 3, 5]"),
    (datasets.fetch, uncollated, "go to collate_fn"),
    (ranks.share, lambda order, rank, ranks: list(order[rank::ranks]), "yours gets 2"),
    (ranks.share, in_blocks, "positions rank, rank + ranks"),
    (ranks.share, wrapped_last, "padded from its own beginning"),
    (ranks.audit, counted, "one rank sees a sample twice"),
    (ranks.audit, lambda of_ranks, size: (set(), counted(of_ranks, size)[1]), "cut: no rank saw [8, 9]"),
    (ranks.audit, lambda of_ranks, size: (counted(of_ranks, size)[0], set()), "padding: several ranks saw [0, 1]"),
    (samplers.shuffled, Once, "Two epochs have the same order"),
    (samplers.shuffled, drawing(lambda n, generator: torch.randint(n, (n,), generator=generator)), "more than once"),
    (samplers.shuffled, drawing(lambda n, generator: torch.randperm(n)), "the same seed give different orders"),
    (samplers.buckets, lambda lengths, size: in_pieces(range(len(lengths)), size), "numbers of padding"),
    (samplers.buckets, lambda lengths, size: in_pieces(by_length(lengths)[:40], size), "lost"),
    (samplers.buckets, lambda lengths, size: in_pieces(by_length(lengths), 1), "are 10 batches"),
    (device.ahead, alternating, "Step 1 should be: copy of batch 1 begins"),
    (device.ahead, last_lost, "batch 2 on the device is handed over"),
    (device.overlap, lambda trace: overlapped(trace, COPY[0]), "That is the time of all copies"),
    (device.overlap, lambda trace: overlapped(trace, COMPUTE[0]), "during"),
    (device.overlap, lambda trace: overlapped(trace, H2D[0]), "during"),
    (device.overlap, inside_one_step, "In 'healthy-8-pinned' with its copies at the ends of steps"),
    (shutdown.tell_workers, lambda driver: (Simple.SET_WORKERS_DONE,), "its sentinel is sent"),
    (shutdown.tell_workers, sentinels, "the workers' done event is set"),
    (shutdown.tell_workers, lambda driver: (Simple.SET_WORKERS_DONE, *driver._sentinel(0)), "its sentinel is sent"),
    (shutdown.stop_pin, pin_steps(Simple.SET_PIN_DONE, JoinPin(10.0)), "the pin thread's sentinel is sent"),
    (shutdown.stop_pin, pin_steps(Simple.WAKE_PIN, JoinPin(10.0)), "the pin thread's done event is set"),
    (shutdown.stop_pin, pin_steps(Simple.SET_PIN_DONE, Simple.WAKE_PIN), "leaves the pin thread behind"),
    (hang_lab.stopped, lambda before, now: now == "S", "On mystery one your rule says True"),
    (hang_lab.stopped, lambda before, now: False, "On mystery two your rule says False"),
    (hang_lab.stopped, lambda before, now: True, "stopped (T) waits for SIGCONT"),
    (hang_lab.lost, lambda loop, workers: loop == "NEXT", "On mystery one your rule says True"),
    (hang_lab.lost, lambda loop, workers: "IDLE" in workers, "On mystery one your rule says True"),
    (hang_lab.lost, lambda loop, workers: len(workers) == 0, "On mystery three your rule says False"),
    (one_page.worker_loop, dies, "KeyError"),
    (one_page.worker_loop, goes_on, "a task behind the sentinel"),
    (one_page.worker_loop, nameless, "the results should be"),
    (one_page.worker_loop, stays, "has not left its loop"),
    (one_page.worker_loop, unasked, "the done event is set"),
    (one_page.try_put_index, sent(unnumbered), "task 1 should be the number 1"),
    (one_page.try_put_index, sent(always_first), "task 1 should be the number 1, for worker 1"),
    (one_page.try_put_index, sent(late), "KeyError"),
    (one_page.try_put_index, sent(unremembered), "task_info is {0: 'banana'"),
    (one_page.try_put_index, sent(always_right, times=2), "4 tasks were sent at the beginning"),
    (one_page.try_put_index, endless, "with it the batch in hand"),
    (first_look.slowest, lambda trace: longest(trace, SAMPLE[0], "task"), "its task"),
    (first_look.slowest, lambda trace: longest(trace, SAMPLE[0], "bx"), "its place in the batch"),
    (first_look.slowest, lambda trace: longest(trace, FETCH[0], "worker"), "sample 579 took longest"),
    (many_workers.reorder_buffer, received(at_once), "task 0 is yielded after task 1"),
    (many_workers.reorder_buffer, received(uncounted), "tasks are outstanding, the capacity is"),
    (many_workers.reorder_buffer, received(dropped), "rule reorder"),
    (many_workers.reorder_buffer, received(forgotten), "Batches 1 and 0 came, with data"),
    (many_workers.room, in_turn, "each may hold"),
    (many_workers.room, least_loaded, "From the one whose turn it is"),
    (many_workers.room, share_of_all, "among"),
    (many_workers.blocked, stored, "at most 14 batches"),
    (many_workers.blocked, lambda trace: int(trace.to_pandas().depth.max()), "at most 0 batches"),
    (many_workers.blocked, lambda trace: 14, "at most 7 batches"),
    (many_workers.blocked, deepest_of_none, "returns <NA>"),
    (checkpointing.place_of, lambda batches, workers: ([batches // workers] * workers, 0), "the loader says"),
    (checkpointing.place_of, lambda batches, workers: ([batches] * workers, batches % workers), "the loader says"),
    (transport.layout, packed_tight, "begins at the first multiple of 64"),
    (transport.layout, all_in_the_slab, "travels in the message"),
    (transport.layout, one_upon_another, "would overwrite them"),
    (transport.take, taken("free", "large"), "still sees the last batch in it"),
    (transport.take, taken("not taken", "unseen", "large"), "A forked process may see"),
    (transport.take, taken("free", "unseen"), "has no room in it"),
    (transport.take, lambda slabs, size: None, "A new one would cost its page faults again"),
    (checkpointing.place_of, lambda batches, workers: ([0] * workers, batches % workers), "the loader says"),
    (checkpointing.place_of, lambda batches, workers: batches % workers, "no pair of a sequence and a number"),
    (first_look.slowest, lambda trace: longest(trace, SAMPLE[0], "end"), "took longest"),
    (datasets.windows, windows(lambda size, width: size // width, lambda index, width: index * width), "your len says"),
    (datasets.fetch, lambda dataset, indices, collate: collate([dataset[i] for i in set(indices)]), "[0, 3, 5]"),
    (samplers.shuffled, drawing(lambda n, generator: torch.arange(n)), "in their own order"),
    (samplers.buckets, lambda lengths, size: in_pieces(by_length(lengths), 6), "are 10 batches"),
    (ranks.share, lambda order, rank, ranks: order[rank::ranks][: len(order) // ranks], "yours gets 2"),
    (ranks.audit, neighbours, "padding: several ranks saw [0, 1]"),
    (many_workers.room, lambda active, held, turn, capacity: np.array([0, 1]), "not one finite number"),
    (device.ahead, forever, "Step 6 should be: none"),
    (device.ahead, lambda batches, copy: by_next(list(batches), copy), "3 had been taken from the loader"),
    (device.ahead, lambda batches, copy: batches, "Step 0 should be: copy of batch 0 begins"),
    (shutdown.tell_workers, lambda driver: (*sentinels(driver), Simple.SET_WORKERS_DONE), "done event is set"),
    (shutdown.tell_workers, lambda driver: Simple.SET_WORKERS_DONE, "return a tuple or a list"),
    (shutdown.stop_pin, pin_steps(*TELL_PIN, Simple.CLOSE_RESULT_QUEUE, JoinPin(10.0)), "closes the result queue befo"),
    (shutdown.stop_pin, pin_steps(*TELL_PIN, JoinPin(10.0)), "the loader joins its feeders"),
    (shutdown.stop_pin, lambda driver: (*TELL_PIN, JoinPin(10.0), Simple.CLOSE_RESULT_QUEUE), "there is nothing to do"),
    (shutdown.stop_pin, pin_steps(*TELL_PIN, JoinPin(math.inf), Simple.CLOSE_RESULT_QUEUE), "the wait has a timeout"),
    (shutdown.stop_pin, pin_steps(*TELL_PIN, JoinPin(0.0), Simple.CLOSE_RESULT_QUEUE), "Your join has no time"),
    (hang_lab.stopped, lambda before, now: "S" not in (before, now), "On a made case"),
    (hang_lab.stopped, lambda before, now: now in "ZTX", "On a made case your rule says True: it was given S, T"),
    (hang_lab.stopped, lambda before, now: before == "T", "On a made case your rule says True: it was given T, S"),
    (hang_lab.lost, lambda loop, workers: all(step == "IDLE" for step in workers), "it was given CONSUMER"),
    (hang_lab.lost, lambda loop, workers: (loop, workers) == ("NEXT", ["IDLE"] * 2), "['IDLE', 'IDLE', 'IDLE']"),
    (bottleneck.share_of_waiting, lambda trace: math.nan, "not one finite number"),
    (bottleneck.rule, judging(ONCE, 0.1, LINE), "'a made run' is supply-bound"),
    (bottleneck.rule, judging(ONCE, 0.095, LINE), "'a made run' is not input-bound"),
    (transport.layout, lambda sizes, inline: layout_by_mask(sizes, inline - 1), "travels in the message"),
    (one_timeline.clock_offset, lambda trips: (math.nan, math.inf), "not one finite number"),
    (one_timeline.last_to_begin, lambda trace: one_timeline.steps(trace, "end").argmax(axis=0), "begins last"),
]  # fmt: skip

LIVE: list[Case] = [
    (datasets.stream, numbers(lambda info, size: range(size)), "numbers come 3 times"),
    (datasets.stream, numbers(rounded_down), "[9] are lost"),
    (datasets.stream, numbers(lambda info, size: range(info.id, size, info.num_workers)), "With 0 workers"),
    (tensors.packed, list, "each tensor of a batch gets a segment"),
    (tensors.packed, lambda samples: (pad_sequence(samples), torch.tensor([len(s) for s in samples])), "Padding"),
    (tensors.packed, lambda samples: (torch.cat(samples), torch.arange(len(samples))), "the lengths are"),
    (tensors.small, tensors.unchanged, "640,000 bytes of shared memory"),
    (tensors.small, torch.Tensor.contiguous, "contiguous already"),
    (tensors.small, lambda row: row[:10].clone(), "other numbers"),
    (transport.keep, lambda batch: batch["image"][0], "the worker has made 2"),
    (transport.keep, lambda batch: batch["image"][0].contiguous(), "the whole batch is kept"),
    (transport.keep, lambda batch: torch.from_numpy(batch["image"].numpy()[0]), "the whole batch is kept"),
    (first_look.wasteful, minidl.default_collate, "The shortcut is still taken"),
    (first_look.wasteful, lambda samples: torch.stack([image for image, _ in samples]), "(images, labels)"),
    (first_look.wasteful, unlike, "Your code has raised TypeError"),
    (first_look.worker_of, lambda trace, task: task % 3, "does not say whose it is"),
    (first_look.worker_of, lambda trace, task: of_first(trace, task, "pid"), "your function says"),
    (first_look.worker_of, lambda trace, task: trace.to_pandas().query("task == @task").worker, "not one finite"),
    (first_look.worker_of, lambda trace, task: of_first(trace, task, "worker"), "says -1"),
    (checkpointing.naive_loss, lambda workers, prefetch, yielded, size: 4 * workers * prefetch, "28 samples are lost"),
    (checkpointing.naive_loss, lambda workers, prefetch, yielded, size: size - 4 * yielded, "8 samples are lost"),
    (checkpointing.naive_loss, lambda workers, prefetch, yielded, size: 0, "8 samples are lost"),
    (checkpointing.naive_loss, lambda workers, prefetch, yielded, size: workers * prefetch, "8 samples are lost"),
    (datasets.stream, numbers(too_many), "[10, 11] do not belong"),
    (tensors.packed, lambda samples: (torch.cat(samples), [len(one) for one in samples]), "two tensors"),
    (tensors.small, torch.Tensor.detach, "contiguous already"),
    (transport.keep, lambda batch: batch["image"][:1].clone(), "Keep the first image"),
    (first_look.wasteful, lambda samples: [part.share_memory_() for part in cloned(samples)], "The feeder copied 0"),
]  # fmt: skip


def tried(check: Any, given: Any) -> Any:
    """What a check says, in this process."""
    here = functools.partial(checking.judged, check.__wrapped__)
    return given(here) if check is one_page.try_put_index else here(given)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "case", [*PURE, *(pytest.param(case, marks=pytest.mark.live) for case in LIVE)], ids=lambda case: case[0].__name__
)
def test_a_wrong_solution_is_told_its_step(case: Case) -> None:
    check, wrong, said = case
    outcome = tried(check, wrong)
    assert outcome.passed is False
    assert said in repr(outcome)
    assert outcome.step


@pytest.mark.live
def test_a_loader_that_waits_for_ever_is_told_so_and_leaves_no_worker() -> None:
    loader = in_order()(mini.DataLoader({0: "zero"}, num_workers=2, sampler=[0, 1], collate_fn=list))
    with pytest.raises(one_page.WaitsForever, match=r"workers \[1\] are dead"):
        one_page.train(loader)
    assert [worker.exitcode for worker in loader._workers] == [-9, 1]


RUNS = {f"{check.__module__}.{check.__name__}" for check, _, _ in LIVE}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("module", "name", "right"),
    [pytest.param(*case, marks=pytest.mark.live if f"course.{case[0]}.{case[1]}" in RUNS else (), id=f"{case[1]}-{at}")
     for at, case in enumerate(RIGHT)],
)  # fmt: skip
def test_a_right_solution_is_accepted(module: str, name: str, right: Any) -> None:
    check = getattr(importlib.import_module(f"course.{module}"), name)
    outcome = tried(check, (lambda of: of(in_order(), right)) if check is one_page.try_put_index else right)
    assert outcome.passed, repr(outcome)


def test_the_hang_lab_shows_what_the_rule_stopped_is_given() -> None:
    assert set(hang_lab.threads(hang_lab.mystery("two")).data["state at two looks"]) == {"S S", "T T"}


def test_each_exercise_has_four_wrong_solutions_and_three_right_ones() -> None:
    """The third right one is that in notebooks/solutions, which runs with the notebook."""
    counted = Counter(f"{check.__module__}.{check.__name__}" for check, _, _ in PURE + LIVE)
    right = Counter(f"course.{module}.{name}" for module, name, _ in RIGHT)
    known = {
        f"course.{path.stem}.{name}"
        for path in SOLUTIONS
        for name, one in vars(importlib.import_module(f"course.{path.stem}")).items()
        if getattr(one, "is_exercise", False)
    }
    assert counted.keys() == right.keys() == known
    assert min(counted.values()) >= 4
    assert min(right.values()) >= 2


@pytest.mark.parametrize("path", SOLUTIONS, ids=lambda path: path.stem)
def test_each_module_of_solutions_says_what_it_solves(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))
