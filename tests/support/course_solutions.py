"""Other right solutions of the course's exercises: as readers write them, each in a way of its own.

`RIGHT`: (module of the course, exercise, solution), without those in notebooks/solutions.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from typing import Any

import numpy as np
import pandas as pd
import torch

import minidl
from minidl.loader.dispatcher import STORED, Dispatcher
from minidl.loader.driver import JoinPin, Simple
from minidl.tracefile.events import COMPUTE, CONSUMER, COPY, DEVICE_COMPUTE, FETCH, NEXT, SAMPLE


def of(trace: Any, code: Any) -> Any:
    spans = trace.spans()
    return spans[spans["code"] == code[0]]


# --- 00 ---------------------------------------------------------------------------------------------------------------
def cloned(samples: Any) -> Any:
    images, labels = minidl.default_collate(samples)
    return images.clone(), labels.clone()


def by_numpy(samples: Any) -> Any:
    images = torch.from_numpy(np.stack([image.numpy() for image, _ in samples]))
    return [images, torch.tensor([label for _, label in samples])]


def fetched_by(trace: Any, task: int) -> Any:
    fetches = of(trace, FETCH)
    return fetches["worker"][fetches["task"] == task][0]


def assigned_to(trace: Any, task: int) -> Any:
    return trace.to_pandas().query("name == 'task_assigned' and task == @task").worker.iloc[0]


def slowest_in_a_loop(trace: Any) -> int:
    best, longest = -1, -1
    for sample in of(trace, SAMPLE):
        if sample["end"] - sample["begin"] > longest:
            best, longest = int(sample["by"]), sample["end"] - sample["begin"]
    return best


def slowest_by_pandas(trace: Any) -> Any:
    frame = pd.DataFrame(of(trace, SAMPLE))
    return frame.by[(frame.end - frame.begin).idxmax()]


# --- 01 ---------------------------------------------------------------------------------------------------------------
class Listed(minidl.Dataset):  # type: ignore[type-arg]
    def __init__(self, series: Any, width: int) -> None:
        self.all = [series[i : i + width] for i in range(len(series) - width + 1)]

    def __len__(self) -> int:
        return len(self.all)

    def __getitem__(self, index: int) -> Any:
        return self.all[index]


class Sliding:
    def __init__(self, series: Any, width: int) -> None:
        self.views = np.lib.stride_tricks.sliding_window_view(np.array(series), width)

    def __len__(self) -> int:
        return len(self.views)

    def __getitem__(self, index: int) -> Any:
        return self.views[index]


def fetch_by_getattr(dataset: Any, indices: Any, collate: Any) -> Any:
    together = getattr(dataset, "__getitems__", None)
    return collate(together(indices) if together else [dataset[i] for i in indices])


def fetch_by_map(dataset: Any, indices: Any, collate: Any) -> Any:
    try:
        samples = dataset.__getitems__(indices)
    except AttributeError:
        samples = list(map(dataset.__getitem__, indices))
    return collate(samples)


class InBlocks(minidl.IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        info = minidl.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        each = math.ceil(self.size / workers)
        return iter(range(worker * each, min(self.size, (worker + 1) * each)))


class Skipping(InBlocks):
    def __iter__(self) -> Any:
        info = minidl.get_worker_info()
        for number in range(self.size):
            if info is None or number % info.num_workers == info.id:
                yield number


# --- 02, 03 -----------------------------------------------------------------------------------------------------------
class AllAtOnce:
    def __init__(self, data: Any, generator: Any) -> None:
        self.size, self.generator = len(data), generator

    def __iter__(self) -> Any:
        return iter(torch.rand(self.size, generator=self.generator).argsort().tolist())

    def __len__(self) -> int:
        return self.size


class FisherYates(AllAtOnce):
    def __iter__(self) -> Any:
        rest = list(range(self.size))
        while rest:
            yield rest.pop(int(torch.randint(len(rest), (1,), generator=self.generator)))


def buckets_by_numpy(lengths: Any, size: int) -> Any:
    order = np.argsort(lengths, kind="stable")
    return [order[n : n + size].tolist() for n in range(0, len(order), size)]


def longest_first(lengths: Any, size: int) -> Any:
    rest = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batches = []
    while rest:
        batches.append(tuple(rest[:size]))
        rest = rest[size:]
    return batches


def cycled(order: Any, rank: int, ranks: int) -> Any:
    total = -(-len(order) // ranks) * ranks
    return list(itertools.islice(itertools.cycle(order), total))[rank::ranks]


def resized(order: Any, rank: int, ranks: int) -> Any:
    return np.resize(order, math.ceil(len(order) / ranks) * ranks)[rank::ranks]


def by_counter(of_ranks: Any, size: int) -> Any:
    ranks = Counter(index for one in of_ranks for index in set(one))
    return [i for i in range(size) if i not in ranks], [i for i, times in ranks.items() if times > 1]


def by_pairs(of_ranks: Any, size: int) -> Any:
    lost = set(range(size)) - set(itertools.chain.from_iterable(of_ranks))
    shared: set[int] = set()
    for one, other in itertools.combinations(of_ranks, 2):
        shared |= set(one) & set(other)
    return lost, shared


# --- 04, 05 -----------------------------------------------------------------------------------------------------------
def put_or_none(self: Any) -> None:
    index = next(self._sampler_iter, None)
    if index is not None:
        worker = next(self._worker_queue_idx_cycle)
        self._task_info[self._send_idx] = (worker,)
        self._index_queues[worker].put((self._send_idx, index))
        self._send_idx += 1


def put_in_try(self: Any) -> None:
    try:
        task = self._send_idx, self._next_index()
    except StopIteration:
        pass
    else:
        self._send_idx += 1
        worker = next(self._worker_queue_idx_cycle)
        self._index_queues[worker].put(task)
        self._task_info[task[0]] = (worker,)


def until_the_sentinel(fetch: Any, index_queue: Any, data_queue: Any, done_event: Any) -> None:
    for idx, index in iter(index_queue.get, (None, None)):
        if done_event.is_set():
            continue
        try:
            data_queue.put((idx, fetch(index)))
        except Exception as error:
            data_queue.put((idx, error))


def one_get_ahead(fetch: Any, index_queue: Any, data_queue: Any, done_event: Any) -> None:
    task = index_queue.get()
    while task[0] is not None:
        if not done_event.is_set():
            try:
                result = fetch(task[1])
            except Exception as error:
                result = error
            data_queue.put((task[0], result))
        task = index_queue.get()


class Early(Dispatcher):
    def receive(self, idx: int, data: Any) -> Any:
        self.task_info[idx].data = data
        self.tasks_outstanding -= 1
        if idx != self.rcvd_idx:
            return STORED
        return self._deliver(idx)


class Upstream(Dispatcher):
    def receive(self, idx: int, data: Any) -> Any:
        return super().receive(idx, data)


def rotated(active: Any, held: Any, turn: int, capacity: int) -> Any:
    line = deque(range(len(active)))
    line.rotate(-turn)
    return next((w for w in line if active[w] and held[w] < capacity // sum(active)), None)


def nearest(active: Any, held: Any, turn: int, capacity: int) -> Any:
    share = capacity // list(active).count(True)
    can = [w for w in range(len(active)) if active[w] and held[w] < share]
    return min(can, key=lambda w: (w - turn) % len(active), default=None)


def deepest_or_0(trace: Any) -> Any:
    return max(trace.to_pandas().query("name == 'reorder_store'").depth, default=0)


def deepest_by_hand(trace: Any) -> int:
    deepest = now = 0
    for name in trace.to_pandas().name:
        now += (name == "reorder_store") - (name == "reorder_pop")
        deepest = max(deepest, now)
    return deepest


# --- 06, 07 -----------------------------------------------------------------------------------------------------------
def packed_by_numpy(samples: Any) -> Any:
    return torch.from_numpy(np.concatenate([s.numpy() for s in samples])), torch.tensor(list(map(len, samples)))


def filled(samples: Any) -> Any:
    lengths = torch.tensor([s.numel() for s in samples])
    values = samples[0].new_empty(int(lengths.sum()))
    for part, sample in zip(values.split(lengths.tolist()), samples, strict=True):
        part.copy_(sample)
    return [values, lengths]


def by_next(batches: Any, copy: Any) -> Any:
    batches = iter(batches)
    try:
        waiting = copy(next(batches))
    except StopIteration:
        return
    for batch in batches:
        handed, waiting = waiting, copy(batch)
        yield handed
    yield waiting


class Ahead:
    def __init__(self, batches: Any, copy: Any) -> None:
        self.batches, self.copy, self.flying = iter(batches), copy, deque[Any]()
        self.begun = False

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        for _ in range(1 if self.begun else 2):
            for batch in itertools.islice(self.batches, 1):
                self.flying.append(self.copy(batch))
        self.begun = True
        if not self.flying:
            raise StopIteration
        return self.flying.popleft()


def overlap_by_numpy(trace: Any) -> Any:
    copies, steps = of(trace, COPY), of(trace, DEVICE_COMPUTE)
    begins = np.maximum(copies["begin"][:, None], steps["begin"])
    return np.clip(np.minimum(copies["end"][:, None], steps["end"]) - begins, 0, None).sum()


def overlap_by_sweep(trace: Any) -> float:
    edges = [(t, kind, by) for kind, code in enumerate((COPY, DEVICE_COMPUTE)) for s in of(trace, code)
             for t, by in ((int(s["begin"]), 1), (int(s["end"]), -1))]  # fmt: skip
    under_way, before, both = [0, 0], 0, 0.0
    for time, kind, by in sorted(edges):
        both += (time - before) * bool(under_way[0] and under_way[1])
        under_way[kind] += by
        before = time
    return both


# --- 08, 09, 10 -------------------------------------------------------------------------------------------------------
def told_in_a_list(self: Any) -> Any:
    plan: list[Any] = [Simple.SET_WORKERS_DONE]
    for worker, _ in enumerate(self.told):
        plan += self._sentinel(worker)
    return plan


def told_by_a_generator(self: Any) -> Any:
    yield Simple.SET_WORKERS_DONE
    for worker in range(len(self.told)):
        yield from self._sentinel(worker)


def stopped_in_a_list(self: Any) -> Any:
    return [Simple.SET_PIN_DONE, Simple.WAKE_PIN, JoinPin(12.5), Simple.CLOSE_RESULT_QUEUE] if self.pin else []


def stopped_by_a_generator(self: Any) -> Any:
    if self.pin:
        yield from (Simple.SET_PIN_DONE, Simple.WAKE_PIN)
        yield JoinPin(10)
        yield Simple.CLOSE_RESULT_QUEUE


def total(spans: Any) -> int:
    return int((spans["end"] - spans["begin"]).sum())


def share_of_rest(trace: Any) -> float:
    return 1 - total(of(trace, CONSUMER)) / (total(of(trace, CONSUMER)) + total(of(trace, NEXT)))


def share_by_pandas(trace: Any) -> Any:
    frame = pd.DataFrame(trace.spans())
    times = (frame.end - frame.begin).groupby(frame.code).sum()
    return np.float64(times[NEXT[0]]) / times[[NEXT[0], CONSUMER[0]]].sum()


def rule_by_pop(causes: Any, consumer: int) -> str:
    for once in ("starting and ending workers", "the first batch"):
        causes.pop(once)
    waited = sum(causes.values())
    if waited / (waited + consumer) < 0.1:
        return "not input-bound"
    line = causes["one batch while later ones are ready"]
    supply = [causes[name] for name in ("samples", "collation", "pickling and sending")]
    return "supply-bound" if sum(supply) >= line else "head-of-line blocking"


def rule_in_ninths(causes: Any, consumer: int) -> str:
    steady = sum(ns for name, ns in causes.items() if not name.startswith(("starting", "the first")))
    if 9 * steady < consumer:
        return "not input-bound"
    blocked = causes["one batch while later ones are ready"]
    made = causes["samples"] + causes["collation"] + causes["pickling and sending"]
    return ("supply-bound", "head-of-line blocking")[blocked > made]


# --- 11, 12, 13 -------------------------------------------------------------------------------------------------------
def layout_by_ceil(sizes: Any, inline: int) -> Any:
    end = 0
    for size in sizes:
        if size <= inline:
            yield None
        else:
            yield end
            end = math.ceil((end + size) / 64) * 64


def layout_by_mask(sizes: Any, inline: int) -> Any:
    end, places = 0, []
    for size in sizes:
        begin = (end + 63) & ~63
        places.append(begin if size > inline else None)
        end = begin + size if size > inline else end
    return tuple(places)


def smallest(slabs: Any, size: int) -> Any:
    fit = [(has, n) for n, (state, seen, has) in enumerate(slabs) if (state, seen) == (0, False) and has >= size]
    return min(fit)[1] if fit else None


def last_one(slabs: Any, size: int) -> Any:
    fit = [n for n, (state, seen, has) in enumerate(slabs) if not state and not seen and has >= size]
    return np.array(fit)[-1] if fit else None


def lost_on_the_way(workers: int, prefetch: int, yielded: int, size: int) -> int:
    given = min(size // 4, yielded + workers * prefetch)
    return (given - yielded) * 4


def lost_in_a_loop(workers: int, prefetch: int, yielded: int, size: int) -> int:
    batches = iter(range(size // 4))
    sent = len(list(itertools.islice(batches, workers * prefetch)))
    sent += len(list(itertools.islice(batches, yielded)))
    return 4 * sent - 4 * yielded


def place_in_tuples(batches: int, workers: int) -> Any:
    each, rest = divmod(batches, workers)
    return tuple(each + (worker < rest) for worker in range(workers)), rest


def place_in_arrays(batches: int, workers: int) -> Any:
    return np.bincount(np.arange(batches) % workers, minlength=workers), np.int64(batches % workers)


def offset_in_floats(trips: Any) -> Any:
    before, answer, after = sorted(trips, key=lambda trip: trip[2] - trip[0])[0]
    return answer - (before + after) / 2, (after - before) / 2


def offset_in_an_array(trips: Any) -> Any:
    before, answer, after = np.array(trips).T
    best = (after - before).argmin()
    return np.array([answer - (before + after) // 2, (after - before) // 2])[:, best]


def begins(trace: Any) -> dict[int, Any]:
    spans = of(trace, COMPUTE)
    return {facts["rank"]: np.sort(spans["begin"][spans["loader"] == n]) for n, facts in trace.loaders.items()}


def last_by_max(trace: Any) -> Any:
    each = begins(trace)
    return [max(each, key=lambda rank, step=step: each[rank][step]) for step in range(len(each[0]))]  # type: ignore[misc]


def last_by_argmax(trace: Any) -> Any:
    each = begins(trace)
    return np.stack([each[rank] for rank in sorted(each)]).argmax(axis=0)


RIGHT: list[tuple[str, str, Any]] = [
    ("first_look", "wasteful", cloned), ("first_look", "wasteful", by_numpy),
    ("first_look", "worker_of", fetched_by), ("first_look", "worker_of", assigned_to),
    ("first_look", "slowest", slowest_in_a_loop), ("first_look", "slowest", slowest_by_pandas),
    ("datasets", "windows", Listed), ("datasets", "windows", Sliding),
    ("datasets", "fetch", fetch_by_getattr), ("datasets", "fetch", fetch_by_map),
    ("datasets", "stream", InBlocks), ("datasets", "stream", Skipping),
    ("samplers", "shuffled", AllAtOnce), ("samplers", "shuffled", FisherYates),
    ("samplers", "buckets", buckets_by_numpy), ("samplers", "buckets", longest_first),
    ("ranks", "share", cycled), ("ranks", "share", resized),
    ("ranks", "audit", by_counter), ("ranks", "audit", by_pairs),
    ("one_page", "try_put_index", put_or_none), ("one_page", "try_put_index", put_in_try),
    ("one_page", "worker_loop", until_the_sentinel), ("one_page", "worker_loop", one_get_ahead),
    ("many_workers", "reorder_buffer", Early), ("many_workers", "reorder_buffer", Upstream),
    ("many_workers", "room", rotated), ("many_workers", "room", nearest),
    ("many_workers", "blocked", deepest_or_0), ("many_workers", "blocked", deepest_by_hand),
    ("tensors", "packed", packed_by_numpy), ("tensors", "packed", filled),
    ("tensors", "small", lambda row: row + 0), ("tensors", "small", lambda row: torch.tensor(row.tolist())),
    ("device", "ahead", by_next), ("device", "ahead", Ahead),
    ("device", "overlap", overlap_by_numpy), ("device", "overlap", overlap_by_sweep),
    ("shutdown", "tell_workers", told_in_a_list), ("shutdown", "tell_workers", told_by_a_generator),
    ("shutdown", "stop_pin", stopped_in_a_list), ("shutdown", "stop_pin", stopped_by_a_generator),
    ("hang_lab", "stopped", lambda before, now: (before, now) == ("T", "T")),
    ("hang_lab", "stopped", lambda before, now: not {before, now} - {"T"}),
    ("hang_lab", "lost", lambda loop, workers: loop == "NEXT" and set(workers) == {"IDLE"}),
    ("hang_lab", "lost", lambda loop, workers: loop == "NEXT" and workers.count("IDLE") == len(workers)),
    ("bottleneck", "share_of_waiting", share_of_rest), ("bottleneck", "share_of_waiting", share_by_pandas),
    ("bottleneck", "rule", rule_by_pop), ("bottleneck", "rule", rule_in_ninths),
    ("transport", "layout", layout_by_ceil), ("transport", "layout", layout_by_mask),
    ("transport", "take", smallest), ("transport", "take", last_one),
    ("transport", "keep", lambda batch: batch["image"][0] * 1),
    ("transport", "keep", lambda batch: torch.tensor(batch["image"].numpy()[0])),
    ("checkpointing", "naive_loss", lost_on_the_way), ("checkpointing", "naive_loss", lost_in_a_loop),
    ("checkpointing", "place_of", place_in_tuples), ("checkpointing", "place_of", place_in_arrays),
    ("one_timeline", "clock_offset", offset_in_floats), ("one_timeline", "clock_offset", offset_in_an_array),
    ("one_timeline", "last_to_begin", last_by_max), ("one_timeline", "last_to_begin", last_by_argmax),
]  # fmt: skip
