"""Questions and checks of 11_transport, its dataset, and transports that have only some ideas of the arena."""

from __future__ import annotations

import ast
import inspect
import itertools
import queue
import random
import resource
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch

import minidl
from course import record
from course.asking import Asked, Choice, Count, question, rows
from course.checking import Wrong, exercise, whole
from course.data import Sized
from minidl.arena import arena_queue
from minidl.arena.arena import BUDGET, FREE, INLINE, KEPT, TAKEN, Arena
from minidl.arena.arena_queue import ArenaWriter
from minidl.speed.ledger import ledger

SIZE = 8
"""Samples in a batch."""

TIMES = 3
"""Runs of which the least figure is taken."""

BEGUN = 8
"""Batches after which a run has made what it uses again."""


class Scenes(Sized):
    """Samples without work: an image of 3 * side * side floats, a mask of side * side, a box of 4, and a label."""

    def __init__(self, size: int, side: int = 128) -> None:
        self.size = size
        self.image = torch.arange(3.0 * side * side).reshape(3, side, side)
        self.mask, self.box = torch.zeros(side, side), torch.zeros(4)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self.image, "mask": self.mask, "box": self.box, "label": index}


def loader(batches: int, side: int = 128, **options: Any) -> minidl.DataLoader[Any]:
    """A loader of so many batches of scenes, with one worker."""
    options = {"num_workers": 1, "multiprocessing_context": "fork"} | options
    return minidl.DataLoader(Scenes(SIZE * batches, side), batch_size=SIZE, **options)


def run(
    batches: int, keep: Callable[[Any], Any] = lambda batch: None, side: int = 128, **options: Any
) -> tuple[list[Any], minidl.Trace]:  # fmt: skip
    """Record an epoch of scenes; what `keep` has kept of each batch, and the trace."""
    options |= {"num_workers": 1, "batch_size": SIZE, "keep": keep}
    return record(options.get("transport", "upstream"), Scenes(SIZE * batches, side), **options)


def few(trace: minidl.Trace, seconds: float = 0) -> dict[str, float]:
    """For `timeline`: from the tenth batch on, until the fourteenth, or for so many seconds."""
    times = trace.to_pandas().time_ns
    at = [(int(times[row]) - int(times.iloc[0])) / 1e9 for row in rows(trace, "yield")]
    return {"since": at[9], "until": at[9] + seconds if seconds else at[13]}


def statements(module: ModuleType) -> int:
    """Lines of a module without comments, docstrings and blank lines."""
    tree = ast.parse(inspect.getsource(module))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return len([line for line in ast.unparse(tree).splitlines() if line.strip()])


# --- An arena with some of its ideas ----------------------------------------------------------------------------------
IDEAS = ("inline leaves", "one slab a batch", "recycling", "no feeder thread")


class SomeIdeas(Arena):
    """A worker's slabs, with only some of the ideas."""

    ideas: Sequence[str] = IDEAS
    made: torch.Tensor
    """How many memory files the worker has made: one number, in shared memory."""

    def __init__(self, states: memoryview, *options: Any) -> None:
        self._mine = threading.local()  # the feeder thread sends one batch while the next one is collated
        self._lock = threading.Lock()
        super().__init__(states if "recycling" in self.ideas else states[:0], *options)
        if "inline leaves" not in self.ideas:
            self.inline = -1

    @property
    def _open(self) -> list[Any]:  # type: ignore[override]
        return self._mine.__dict__.setdefault("slabs", [])

    @_open.setter
    def _open(self, slabs: list[Any]) -> None:
        self._mine.slabs = slabs

    def _room(self, size: int) -> tuple[int, int]:
        if "one slab a batch" in self.ideas:
            return super()._room(size)
        others, self._open, self._expected = self._open, [], 0
        super()._room(size)  # takes a slab for these bytes
        self._open = [*others, *self._open]
        return len(others), 0

    def _take(self, size: int) -> Any:
        with self._lock:
            slab = super()._take(size)
        self.made[0] += not slab.announced
        return slab


class SomeIdeasWriter(ArenaWriter):
    """A worker's end of the result queue; without "no feeder thread", another thread pickles and writes."""

    arena: type[SomeIdeas]

    def enter_worker(self, *_: Any) -> None:
        super().enter_worker(self.arena)
        if "no feeder thread" not in self.arena.ideas:
            self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
            threading.Thread(target=self._feed, daemon=True).start()

    def put(self, message: Any) -> None:
        if "no feeder thread" in self.arena.ideas:
            super().put(message)
        else:
            opened, self._arena._open = self._arena._open, []
            self._waiting.put((message, opened))

    def _feed(self) -> None:
        while True:
            message, self._arena._open = self._waiting.get()
            super().put(message)


@dataclass(frozen=True)
class Measured:
    """A run of one transport. Of one of its `batches`: memory files; page faults and CPU ms of worker and loop."""

    name: str
    batches: int
    made: float
    faults: float
    cpu: float


def measured(*ideas: str, side: int = 128, batches: int = 120) -> Measured:
    """Run a loader whose transport has these ideas of the arena."""
    made = torch.zeros(1, dtype=torch.int64).share_memory_()
    kind = type("Part", (SomeIdeas,), {"ideas": tuple(ideas), "made": made})
    writer = type("Writer", (SomeIdeasWriter,), {"arena": kind})
    with mock.patch.object(arena_queue, "ArenaWriter", writer), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of slabs that are used once, as is asked for here
        long = _least(batches, side, transport="arena")
        files = int(made[0]) / (TIMES * batches)
        begun = _least(BEGUN, side, transport="arena")
    name = f"+ {ideas[-1] if ideas else 'descriptors in the message'}"
    return Measured(name, batches, files, *_of_a_batch(batches, long, begun))


def upstream(side: int = 128, batches: int = 120) -> Measured:
    """The same with the faithful transport."""
    _, trace = run(BEGUN, side=side)
    spent = _of_a_batch(batches, _least(batches, side), _least(BEGUN, side))
    return Measured("as upstream", batches, tensors(trace), *spent)


def tensors(trace: minidl.Trace) -> int:
    """How many memory segments a batch's message names, in a trace of the faithful transport."""
    return int(trace.to_pandas().tensors[rows(trace, "result_rebuild", "E")[0]])


def _least(batches: int, side: int, **options: Any) -> list[float]:
    """Page faults and CPU ms of an epoch: the least of some runs, for the machine may be busy."""
    return [min(runs) for runs in zip(*(_epoch(batches, side, **options) for _ in range(TIMES)), strict=True)]


def _of_a_batch(batches: int, long: list[float], begun: list[float]) -> list[float]:
    """What a batch has used in a long run, without what its first `BEGUN` batches have."""
    return [max(0, a - b) / (batches - BEGUN) for a, b in zip(long, begun, strict=True)]


def _epoch(batches: int, side: int, **options: Any) -> tuple[float, float]:
    """Page faults and CPU ms of an epoch."""
    faults, cpu = _used()
    with loader(batches, side, **options) as of:
        for _ in of:
            pass
    faults_after, cpu_after = _used()
    return faults_after - faults, cpu_after - cpu


def _used() -> tuple[int, float]:
    """Page faults and CPU ms of this process, and of its children that have ended."""
    each = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_minflt for one in each), sum(one.ru_utime + one.ru_stime for one in each) * 1e3


# --- Questions --------------------------------------------------------------------------------------------------------
@question
def segments(faithful: minidl.Trace) -> Asked:
    """One for each tensor."""
    number = tensors(faithful)
    return Asked(
        "The faithful transport. A batch is a dict of images, masks, boxes and labels. How many segments of shared memory does the worker make for it?",
        Count(number),
        "Each tensor of the batch has a storage of its own. See 06, section 2.",
        f"One for each tensor, also for the {SIZE} labels of 8 bytes. For each: a file in memory, its size, its pages one by one, a descriptor that "
        "the loader asks for through a socket, a mapping, and in the end the way back.",
        rows(faithful, "result_rebuild", "E")[0],
        {1: "Nobody has put the four tensors into one memory.", SIZE: "`default_collate` has stacked the samples: count tensors, not samples."},
    )  # fmt: skip


@question
def writer(trace: minidl.Trace) -> Asked:
    """Without a feeder thread."""
    events = trace.to_pandas()
    (row, *_) = rows(trace, "result_write", "B")
    (fetch, *_) = rows(trace, "fetch", "B")
    main = events.tid[row] == events.tid[fetch]
    return Asked(
        'With `transport="arena"`: which thread writes the message?',
        Choice("the worker's main thread" if main else "a feeder thread", {
            "the worker's main thread": ("Then a `put` of the faithful transport would wait for a slow reader.", "main", "the main thread"),
            "a feeder thread": ("In the picture of this run, the worker has no lane of a feeder.", "feeder", "the feeder thread"),
            "the loader's main thread": ("The loader reads. What it reads, somebody in another process has written.", "loader", "loop"),
        }),
        "The message is short: it names a slab. Can writing it take long?",
        "The one that fetches. A feeder thread is for a `put` that must not wait for a slow reader. This message has a few hundred bytes, "
        "and the socket takes it at once; so nothing is handed from thread to thread, and nobody is woken for it. Only if the socket is full does the worker wait: "
        "then the loop has more finished batches than it may have.",
        row,
    )  # fmt: skip


@question
def copies(faithful: minidl.Trace, slabs: minidl.Trace) -> Asked:
    """Copies are not what is saved."""
    a, b = (ledger(trace).copies_per_byte for trace in (faithful, slabs))
    return Asked(
        "How many copies fewer does each byte of a batch go through, between the collation and the loop, with slabs? (To the nearest whole number.)",
        Count(round(a - b)),
        "Where does `default_collate` stack images in a worker, with either transport?",
        f"The ledger counts {a:.2f} copies of each byte after collation here, and {b:.2f} there. With either, the worker stacks straight into memory that the loop's "
        "process sees. What differs is what it costs to get such memory.",
        rows(faithful, "shm_alloc")[-1],
        {1: "`default_collate` stacks into shared memory with either."},
    )  # fmt: skip


@question
def files(step: Measured) -> Asked:
    """What inline leaves, and one slab for a batch, save."""
    number, together = round(step.made), step.name.endswith("a batch")
    return Asked(
        "Add: all leaves of a batch go into one slab. How many memory files does the worker make for a batch now?" if together else
        f"Add: a leaf of at most {INLINE} bytes travels in the message itself. How many memory files does the worker still make for a batch?",
        Count(number),
        "What is left to be put together?" if together else
        f"{SIZE} images of 3 * 128 * 128 floats, {SIZE} masks of 128 * 128, {SIZE} boxes of 4 floats, {SIZE} labels. Which of the four tensors is small?",
        "Images and masks lie in the same file, one behind the other." if together else
        f"For images and masks. The boxes ({SIZE * 16} bytes) and the labels ({SIZE * 8}) are part of the message: a copy of a few bytes is cheaper than "
        "a file, a descriptor and a mapping.",
    )  # fmt: skip


@question
def made(step: Measured) -> Asked:
    """What recycling saves."""
    few = step.made < 0.5
    return Asked(
        "Add: a slab is used again. The loop lets go of each batch before it takes the next one. How many files does the worker make in an epoch of "
        f"{step.batches} batches?",
        Choice("a few" if few else "one for each batch", {
            "none": ("Before the first batch is let go of, there is nothing that could be used again.", "no", "0"),
            "a few": ("A slab is free only when its batch is gone. Is none of them gone here?", "few", "some", "hardly any", "3", "4", "5", "6"),
            "one for each batch": ("So it was, before this idea. The loop lets go of a batch: what becomes of its slab?", "one for each", "one each", step.batches),
        }),
        "How many batches can be outstanding, and how many does the loop hold?",
        f"{step.made * step.batches:.0f} here. At most `prefetch_factor` batches are outstanding, and the loop holds one or two: a worker needs about so many slabs. "
        "The files of the first batches serve the whole epoch.",
    )  # fmt: skip


@question
def saver(*steps: Measured) -> Asked:
    """Which idea saves the page faults."""
    saved = {after.name.removeprefix("+ "): before.faults - after.faults for before, after in itertools.pairwise(steps)}
    most = max(saved, key=lambda name: saved[name])
    first, last = steps[0].faults, steps[-1].faults
    return Asked(
        "When a process touches a page of new memory for the first time, the kernel stops it, finds a page, clears it, and maps it: a page fault. A page has 4,096 bytes. "
        f"A batch here costs {first:.0f} page faults at the beginning, and {last:.0f} with all ideas. Which idea saves most of them?",
        Choice(most, {
            "inline leaves": ("It saves two files, of 160 bytes together: one page each.", "inline"),
            "one slab a batch": ("One file of 300 pages has as many pages as two of 225 and 75.", "one slab", "one segment a batch"),
            "recycling": ("Memory that was touched before costs no fault.", "recycled", "recycled slabs", "slabs that are used again"),
            "no feeder thread": ("A thread costs switches, and a stack of its own, once. It does not touch the images' pages.", "no feeder", "feeder"),
        }),
        "Images are 75 % of a batch's bytes. Which idea gives them memory that was touched before?",
        f"{saved['recycling']:.0f} of {first - last:.0f}. The slab's pages have been found, cleared and mapped for an earlier batch. Putting the "
        "leaves together saves files, not pages.",
    )  # fmt: skip


@question
def held(trace: minidl.Trace, batches: int, kept: str) -> Asked:
    """A slab is in use as long as anything of its batch is."""
    fresh = new_slabs(trace)
    each = fresh >= batches
    return Asked(
        f"The loop goes through {batches} batches, and keeps {kept} of each in a list. How many slabs does the worker make?",
        Choice("one for each batch" if each else "a few", {
            "none": ("The first batches need memory, whatever is kept.", "no", "0"),
            "a few": ("A slab may be written again only if nothing of its batch is left. What is left here?", "few", "some"),
            "one for each batch": ("What is kept has memory of its own. What else could keep the slab?", "one for each", "one each", batches, "all"),
        }),
        "What does a view keep alive: its own numbers, or its storage? (06, section 4.)" if each else "Does a copy have anything to do with the slab?",
        f"{fresh} here. A row is a view: it has the storage of the batch's images, and that keeps the slab. No slab is free, so each "
        "batch gets a new one. Nothing is overwritten, but the run is as slow as without recycling: a kept row keeps a whole batch's memory."
        if each else f"{fresh} here. A clone has memory of its own; when the batch is gone, so is all that keeps the slab.",
        rows(trace, "slab_take")[-1],
    )  # fmt: skip


def new_slabs(trace: minidl.Trace) -> int:
    """How many slabs were made in the run."""
    events = trace.to_pandas()
    return int((events.source[rows(trace, "slab_take")] != "RECYCLED").sum())


# --- Exercises --------------------------------------------------------------------------------------------------------
@exercise
def layout(function: Callable[[Sequence[int], int], Sequence[int | None]]) -> str:
    """Where leaves of these sizes lie, held against the package's arena."""
    large = INLINE + 1
    for sizes in (
        [large],
        [100, large],
        [large, 100, 9 * large],
        [INLINE, large, large + 75, 64, 3 * large],
        [2 * INLINE] * 3,
    ):
        part = Arena(memoryview(bytearray(8)), BUDGET, locked=False)
        leaves = [torch.zeros(size, dtype=torch.uint8).untyped_storage() for size in sizes]
        for _ in range(2):  # the second batch finds a slab that has room for all of it
            wanted = [None if place < 0 else begin for _, (place, begin, _) in map(part.reduce, leaves)]
            part.seal()
        given = list(function(list(sizes), INLINE))
        if given == wanted:
            continue
        place = next((n for n, (a, b) in enumerate(zip(given, wanted, strict=False)) if a != b), -1)
        before = zip(given[:place], sizes, strict=False)
        if len(given) != len(wanted):
            step = "The step `reduce`: an answer for each leaf, in their order."
        elif (given[place] is None) != (wanted[place] is None):
            step = f"The step `reduce`, leaf {place}: a leaf of at most {INLINE} bytes travels in the message, and takes no room in the slab."
        elif any(given[place] < at + size for at, size in before if at is not None):
            step = f"The step `room`, leaf {place}: it lies in the bytes of a leaf before it, and would overwrite them."
        else:
            step = f"The step `room`, leaf {place}: it begins at the first multiple of 64 behind the last leaf. A tensor's numbers must be aligned, and a cache line is 64 bytes."
        raise Wrong(f"Leaves of {sizes} bytes lie at {wanted}; yours at {given}.", step)
    return "The same places as in the package's `Arena.reduce`: small leaves in the message, the others one behind the other, aligned."


STATES = {FREE: "FREE", TAKEN: "TAKEN", KEPT: "KEPT"}


@exercise
def take(function: Callable[[Sequence[tuple[int, bool, int]], int], int | None]) -> str:
    """Which slab may be written, in random states."""
    for seed in range(300):
        dice = random.Random(seed)
        slabs = [
            (dice.choice([FREE, FREE, TAKEN, KEPT]), dice.random() < 0.4, dice.choice([1, 2, 4]) << 16)
            for _ in range(dice.randint(0, 4))
        ]
        size = dice.choice([1, 2, 4]) << 16
        given = function(tuple(slabs), size)
        if given is not None:
            given = whole(
                given,
                f"A batch of {size} bytes",
                "The step `slab_take`: a slab's place in the list, or None for a new one.",
            )
        free = [n for n, (state, visible, has) in enumerate(slabs) if state == FREE and not visible and has >= size]
        told = "\n".join(
            f"slab {n}: {STATES[state]}, {has} bytes{', visible in the worker' if visible else ''}"
            for n, (state, visible, has) in enumerate(slabs)
        )
        about = f"A batch of {size} bytes, {len(slabs)} slabs: you take {'a new one' if given is None else f'slab {given}'}."
        if given in free or (given is None and not free):
            continue
        if given is None:
            about_it = f"The step `slab_take`: slab {free[0]} is free, large enough, and visible to nobody. A new one would cost its page faults again."
        elif not 0 <= given < len(slabs):
            about_it = "The step `slab_take`: there is no such slab."
        else:
            state, visible, _ = slabs[given]
            seen = "The worker's own process still sees the last batch in it: a `collate_fn` may keep one, too."
            step = {
                TAKEN: "The loader has a batch in it, or a message about it is on its way: the batch would change under the loop's hands.",
                KEPT: "A forked process may see a batch in it, and nobody would ever tell when that has gone.",
            }.get(state, seen if visible else "The batch has no room in it.")
            about_it = f"The step `slab_take`: {step}"
        raise Wrong(about, about_it, evidence=told)
    return (
        "In 300 random states it never takes a slab that somebody may see, and always one that is free. `Arena._take` asks this, too, and more: it begins with what was sent last, wants "
        "room for all of an expected batch, and drops slabs that are too small, or far too large."
    )


@exercise
def keep(function: Callable[[Any], Any]) -> str:
    """Keep something of a batch, and let its slab go."""
    image = Scenes(1).image
    function(minidl.default_collate([Scenes(1)[0]]))  # an error of it is seen here, outside of a loop
    kept, trace = run(20, keep=function, transport="arena")
    if not all(isinstance(one, torch.Tensor) and one.shape == image.shape and torch.equal(one, image) for one in kept):
        raise Wrong(
            "Keep the first image of each batch: a tensor of 3 * 128 * 128 floats.",
            "The step `consumer`: what the loop does with a batch.",
            trace,
        )
    fresh = new_slabs(trace)
    if fresh >= 20:
        raise Wrong(
            f"You have kept 20 images, and the worker has made {fresh} slabs: with each image, the whole batch is kept.",
            "The step `slab_release`: a slab is free when nothing refers to its batch any more. A slice, a view, an array of NumPy, and what `contiguous` returns of a tensor "
            "that is contiguous already, all have the storage of the batch.", trace, batches=[0],
        )  # fmt: skip
    return f"20 images are kept, and {fresh} slabs were enough for 20 batches."
