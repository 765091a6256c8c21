"""Questions and checks of 00_first_look."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable
from typing import Any

import torch

import minidl
from course import data, record
from course.asking import Asked, Choice, Count, Share, Worker, question, rows
from course.checking import Wrong, exercise, runs, whole
from minidl.tracefile.events import SAMPLE

TASK = 4
"""The task that the notebook follows."""


@question
def processes(trace: minidl.Trace) -> Asked:
    """Who wrote the files."""
    workers = sum(process.role == "worker" for process in trace.processes)
    return Asked(
        f"Each process has written a file of its own. The loader had {workers} workers. How many processes took part in the run?",
        Count(len(trace.processes)),
        "`num_workers` counts the processes that the loader starts. Which process starts them?",
        f"The process of your loop is the loader's. It has started {workers} workers: the last of them at this moment.",
        rows(trace, "worker_start", "E")[-1],
        {workers: "You have counted the workers. Somebody has started them, and runs your loop."},
    )  # fmt: skip


@question
def decoder(trace: minidl.Trace) -> Asked:
    """Who calls `dataset[i]`."""
    (first, *_) = rows(trace, "sample", "B")
    return Asked(
        "Which process opens a sample's file and decodes it?",
        Choice("a worker", {
            "the loop's own": ("So it is with `num_workers=0`. Then no sample is fetched while your loop trains.", "loop", "loader", "main", "main process", "parent"),
            "a worker": ("", "worker", "workers", "child"),
            "both in turn": ("The loop's process does not help out: while it waits in `next`, it only reads results.", "both"),
        }),
        "Which role has the process that writes the events `sample`? `events[events.name == \"sample\"].role.unique()` says it.",
        "With workers, only workers call `dataset[i]`: `_worker_loop` calls the fetcher's `fetch`, which asks for each index.",
        first,
    )  # fmt: skip


@question
def owner(trace: minidl.Trace, task: int = TASK) -> Asked:
    """Round robin, for the first time."""
    events = trace.to_pandas()
    (row,) = rows(trace, "task_assigned", task=task)
    worker, workers = int(events.worker[row]), sum(process.role == "worker" for process in trace.processes)
    return Asked(
        f"Tasks are numbered from 0, and workers from 0 to {workers - 1}. Which worker was given task {task}?",
        Worker(worker),
        "Tasks are dealt like cards: worker 0 gets task 0, worker 1 gets task 1, ... and then?",
        f"`Dispatcher.assign` deals tasks out in turn (round robin): {task} % {workers} = {worker}. "
        "At this moment, the worker's number is written into `task_info`.",
        row,
        {task: f"There is no worker {task}: after the last worker comes worker 0 again."},
    )  # fmt: skip


@question
def pickler(trace: minidl.Trace, task: int = TASK) -> Asked:
    """What `put` does, and what it leaves to the feeder."""
    (row,) = rows(trace, "result_pickle", "B", task=task)
    return Asked(
        f"The worker has collated batch {task} and calls `put` on the result queue. Which thread then pickles the batch?",
        Choice("the worker's feeder thread", {
            "the worker's main thread": ("So `put` looks in the code. But then the worker could not fetch while a large batch is pickled.", "worker", "worker main"),
            "the worker's feeder thread": ("", "feeder", "the feeder thread", "worker's feeder", "feeder of the worker"),
            "the loader's main thread": ("The loader only reads bytes. Objects do not cross a pipe: they are bytes before it.", "loader", "loop", "main process"),
        }),
        "`put` returns at once, and the worker takes its next task. Compare the `tid` of `result_put` and of `result_pickle`.",
        "`put` only appends the batch to a buffer in the worker's memory. The feeder thread takes it from there, pickles it and "
        "writes it to the pipe, while the main thread already fetches the next task.",
        row,
    )  # fmt: skip


@question
def piped(trace: minidl.Trace, task: int = TASK) -> Asked:
    """Tensors stay where they are."""
    events = trace.to_pandas()
    (row,) = rows(trace, "result_write", "B", task=task)
    written = int(events.bytes[row])
    batch = int(events.shared[rows(trace, "result_rebuild", "E", task=task)[0]])
    return Asked(
        f"Batch {task} has {batch:,} bytes of tensors. They are made in the worker's process, and your loop reads them in "
        'another one. How much of them went through the pipe between the two: "nearly all", "about half" or "hardly any"?',
        Share(written, batch),
        "The events have a field `bytes`. Compare those of task 4: `one[[\"step\", \"bytes\"]].dropna()`.",
        f"{written:,} bytes were written. The message says where the tensors are; the tensors lie in shared memory, and stay there.",
        row,
        {"nearly all": "So it is for a list of numbers, which is pickled whole. A tensor has a reducer of its own.",
         "about half": "Two copies of a batch would be needed for that: one in the pipe, and one elsewhere."},
    )  # fmt: skip


@question
def copied(trace: minidl.Trace, task: int = TASK) -> Asked:
    """What the shortcut of `default_collate` does not cover."""
    events = trace.to_pandas()
    (row,) = rows(trace, "shm_copy", "B", task=task)
    return Asked(
        "A batch is a pair: a tensor of images, and a tensor of labels. A sample's image is a tensor, its label a Python number. What does the "
        "feeder thread have to copy into shared memory?",
        Choice("the labels", {
            "the images": ("`default_collate` knows that it runs in a worker. It stacks tensors straight into shared memory.", "images", "image"),
            "the labels": ("", "labels", "label"),
            "both": ("Then each byte of an image would be written twice in the worker. Section 6 shows the line that saves this.", "images and labels"),
            "neither": ("The shortcut stacks tensors. What does `torch.tensor` make of twelve Python numbers, and where?", "none", "nothing"),
        }),
        "What is in shared memory already need not be copied into it. Which of the two is not?",
        "`default_collate` stacks tensors straight into shared memory. Of numbers it makes a tensor in the worker's own memory. "
        f"`result_pickle` copies every tensor that is not yet in shared memory: here {int(events.bytes[row])} bytes, "
        "twelve labels of eight bytes.",
        row,
    )  # fmt: skip


# --- Exercises --------------------------------------------------------------------------------------------------------
class Pairs(data.Sized):
    """24 samples: 1000 numbers, each of which is the index, and the index."""

    size = 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((1000,), float(index)), index


@exercise
def wasteful(collate_fn: Callable[[list[tuple[torch.Tensor, int]]], Any]) -> str:
    """A collate_fn that gives up the shortcut: the feeder copies every byte."""
    collate_fn([Pairs()[index] for index in range(4)])  # an error of it is seen here as it is, and not as a worker's
    batches, trace = record("your collate_fn", Pairs(), num_workers=2, collate_fn=collate_fn, keep=lambda batch: batch)
    for number, batch in enumerate(batches):
        _same_batch(batch, number, trace)
    events = trace.to_pandas()
    done = events[(events.phase == "B") & (events.name == "shm_copy")].groupby("task").bytes.sum()
    least = min(int(done.get(task, 0)) for task in range(len(batches)))
    whole = 4 * 1000 * 4 + 4 * 8
    if least < whole:
        shortcut = " The shortcut is still taken." if (events.name == "shm_alloc").any() else ""
        raise Wrong(
            f"The feeder copied {least:,} bytes of a batch of {whole:,}.{shortcut}",
            "The step `shm_copy`, inside `result_pickle`: what is not in shared memory is copied into it, tensor by tensor. In a worker, "
            "`default_collate` makes its output in shared memory (`shm_alloc`).",
            trace, batches=[2],
        )  # fmt: skip
    return (
        f"All {whole:,} bytes of each batch are copied once more, by the feeder thread, between the begin and the end of "
        "`result_pickle`. Nothing else has changed, and no error says so: the trace does."
    )


def _same_batch(batch: Any, number: int, trace: minidl.Trace) -> None:
    step = "The step `collate`: it makes one batch of the samples, and loses none of them."
    wanted = torch.arange(4.0) + 4 * number
    if not isinstance(batch, (list, tuple)) or len(batch) != 2:
        raise Wrong(f"Batch {number} is of type {type(batch).__name__}; it has to be (images, labels).", step, trace)
    images, labels = batch
    for name, tensor, shape in (("images", images, (4, 1000)), ("labels", labels, (4,))):
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != shape:
            raise Wrong(f"The {name} of batch {number} have to be a tensor of shape {shape}.", step, trace)
    if not (torch.equal(images[:, 0], wanted) and torch.equal(labels, wanted.long())):
        raise Wrong(f"Batch {number} holds other samples, or in another order, than the sampler gave.", step, trace)


@exercise
def worker_of(function: Callable[[minidl.Trace, int], int]) -> str:
    """The worker that fetched a task, from a trace in which the turns are broken."""
    gate, came = multiprocessing.get_context("fork").Event(), itertools.count()

    def open_late(_: object) -> None:
        if next(came) == 3:
            gate.set()

    held = data.Held(32, held=0, gate=gate)
    _, trace = record("out of order", held, num_workers=3, in_order=False, keep=open_late)
    events = trace.to_pandas()
    begun = events[(events.name == "fetch") & (events.phase == "B")]
    for task, worker in sorted(zip(begun.task, begun.worker, strict=True)):
        said = whole(
            function(trace, int(task)), f"Of task {task}",
            "The step `fetch`: many events carry a task's number. Take one that the worker itself has written, and its `worker`.",
        )  # fmt: skip
        if said != worker:
            raise Wrong(
                f"Task {task} was fetched by worker {worker}; your function says {said}.",
                "-1 is no worker: the sampler's events, in the loader, come first. The step `task_assigned`: this run has `in_order=False` and a slow sample: a worker that is still busy is passed "
                "over, so that the number of a task does not say whose it is. The events do.",
                trace, batches=[int(task)],
            )  # fmt: skip
    return "It reads who did it from the event, and does not compute it from the number: this run was out of order."


@exercise
def slowest(function: Callable[[minidl.Trace], int]) -> str:
    """The index of the slowest sample, in recorded runs and in parts of them."""
    for name, trace in runs("head-of-line-in-order", "workers-2"):
        spans = trace.spans()
        samples = spans[spans["code"] == SAMPLE[0]]
        longest = samples[(samples["end"] - samples["begin"]).argmax()]
        said = whole(function(trace), f"In {name}", "The step `sample`: its field `by` is one sample's index.")
        if said != longest["by"]:
            kind = {int(longest[column]): about for column, about in KINDS.items()}
            about = f" ({said} is {kind[said]})" if said in kind else ""
            raise Wrong(
                f"In {name}, sample {longest['by']} took longest; your function says {said}{about}.",
                "The step `sample`: from its begin to its end, in the worker's lane, inside `fetch`. `trace.spans()` has both.",
                trace, batches=[int(longest["task"])],
            )  # fmt: skip
    return "The bar of a sample begins where the fetcher calls `dataset[i]` and ends where it returns."


KINDS = {"task": "its task", "bx": "its place in the batch", "worker": "its worker"}
