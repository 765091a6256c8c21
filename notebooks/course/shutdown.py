"""Questions and checks of 08_shutdown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import minidl
from course.asking import Asked, Choice, Count, question, rows
from course.checking import Wrong, as_trace, exercise, explored, fails
from minidl.explore.guards import GUARDS, OURS, PINNED, PLAIN, STREAMS
from minidl.explore.model import Model
from minidl.explore.search import Bad, shortest
from minidl.loader.driver import Driver
from minidl.loader.protocol import LoaderEvent, LoaderLifecycle
from minidl.tracefile.words import counted


def workers_of(trace: minidl.Trace) -> int:
    """num_workers of the trace's loader."""
    (facts,) = trace.loaders.values()
    return int(facts["num_workers"])


def without(name: str) -> tuple[Bad, minidl.Trace]:
    """The shortest run that goes wrong without a guard (a name of `minidl explore --list`), as a trace."""
    guard = GUARDS[name]
    model = Model(guard.where[0], OURS.without(guard.field), reduced=True)
    run = shortest(model)
    assert run is not None
    assert run.bad is not None
    return run.bad, as_trace(model, run)


def steps_of(trace: minidl.Trace) -> list[tuple[int, str, str]]:
    """The steps of a run that the explorer has found: number, who, what."""
    found = [line for line in trace.lines if line.get("kind") == "step"]
    return [(int(line["number"]), str(line["who"]), str(line["what"])) for line in found]


# --- Questions --------------------------------------------------------------------------------------------------------
@question
def first_told(trace: minidl.Trace) -> Asked:
    """The pin thread first."""
    first, *_ = rows(trace, "done_event_set")
    return Asked(
        "The epoch is over. Who is told to end first: the workers, or the pin-memory thread? (The pin thread reads what the workers send.)",
        Choice("the pin thread", {
            "the pin thread": ("pin", "pin-memory thread", "pin memory thread", "the reader"),
            "the workers": ("workers", "worker"),
        }),
        "If a worker ends in the middle of a message, who is left with half of it?",
        "The pin thread reads the result queue, and a worker that ends may leave half a message there. So its reader goes first: "
        "`_stop_pin`, while the queue is still whole.",
        first,
    )  # fmt: skip


@question
def sentinels(trace: minidl.Trace) -> Asked:
    """One for each that waits at a queue."""
    put = rows(trace, "sentinel_put")
    workers = workers_of(trace)
    return Asked(
        f"{workers} workers and a pin thread. How many sentinels (messages that say: that was all) does the loader put in this shutdown?",
        Count(len(put)),
        "Each of them waits at a queue. How many queues are read?",
        f"One into each worker's index queue, and one into the result queue, from which the pin thread reads: {workers} + 1. A sentinel wakes "
        "one that waits; the done event says that it is meant.",
        put[-1],
        {workers: "Somebody else waits at a queue, too: the thread that reads the result queue."},
    )  # fmt: skip


@question
def unyielded(trace: minidl.Trace) -> Asked:
    """What is in flight when the loop breaks."""
    sent, had = len(rows(trace, "task_assigned")), len(rows(trace, "yield"))
    (facts,) = trace.loaders.values()
    begin = rows(trace, "shutdown", "B")[0]
    return Asked(
        f"The loop was left by `break` after {had} batches; {workers_of(trace)} workers, `prefetch_factor={facts['prefetch_factor']}`. How many tasks "
        "were sent, and their batches never seen by the loop?",
        Count(sent - had),
        "What is the capacity? When is the next task sent?",
        f"{sent} tasks were sent, {had} batches were yielded. The rest are in index queues, in work, in the result queue or pinned; nobody will "
        "take them.",
        begin,
    )  # fmt: skip


@question
def died_of_it(trace: minidl.Trace) -> Asked:
    """An error in a sample ends no worker."""
    begin = rows(trace, "shutdown", "B")[0]
    early = [row for row in rows(trace, "worker_exit") if row < begin]
    error = rows(trace, "task_error")[0]
    worker = int(trace.events["worker"][error])
    return Asked(
        f"Sample {int(trace.to_pandas()['index'][error])} raised in worker {worker}. How many workers had ended because of it when the loader began its "
        "shutdown?",
        Count(len(early)),
        "See 04, section 6. What does a worker do with an exception?",
        "The exception is the result of its task, and the worker goes on with its next one. It is your loop that ends: the error comes out of "
        "`next`, and the loader is closed.",
        error,
        {1: "It would be a poor worker that dies of one damaged file: how would the loader learn which one it was?"},
    )  # fmt: skip


@question
def unguarded(name: str) -> Asked:
    """A hang, a stall or an orphan."""
    bad, trace = without(name)
    guard = GUARDS[name]
    last = steps_of(trace)[-1]
    return Asked(
        f"Take the guard `{name}` away. It {guard.purpose}. What is the worst that the explorer finds: the loader hangs, it ends late (after a timeout), "
        "or workers are left behind?",
        Choice({"hang": "the loader hangs", "stall": "it ends late", "orphan": "workers are left behind"}[bad.kind], {
            "the loader hangs": ("hang", "hangs", "deadlock"),
            "it ends late": ("late", "stall", "timeout", "it stalls", "after a timeout"),
            "workers are left behind": ("orphan", "orphans", "left behind", "leak"),
        }),
        "Who waits for whom, and with a bound or without one?",
        f"{bad.what[0].upper()}{bad.what[1:]}. It takes {counted(len(steps_of(trace)), 'step')}; the last is: {last[1]} {last[2]}.",
    )  # fmt: skip


# --- Exercises --------------------------------------------------------------------------------------------------------
def _driver(method: str, function: Callable[[Any], tuple[Any, ...]]) -> type[Driver]:
    """A driver with the reader's method, tried once, so that a stub is told from a mistake."""
    kind = type("MyDriver", (Driver,), {method: function})
    from minidl.loader.dispatcher import Dispatcher

    tried = kind(Dispatcher(2, 2), LoaderLifecycle())
    tried.lifecycle.handle(LoaderEvent.START)
    for _ in range(2):
        tried.worker_started()
    tried.pin_started()
    plan = getattr(tried, method)()
    if not isinstance(plan, tuple):
        raise Wrong(
            f"`{method}` returns {type(plan).__name__}: return a tuple of steps.",
            "The driver performs the steps of the tuple, from left to right.",
        )
    return kind


@exercise
def tell_workers(function: Callable[[Any], tuple[Any, ...]]) -> str:
    """The reader's `_signal`: every interleaving of a small loader."""
    kind = _driver("_signal", function)
    for configuration in (PLAIN, STREAMS):
        found = explored(configuration, driver=kind)
        if found is not None:
            raise fails(
                *found, "The step `_signal`: the done event is set first, because a worker takes a sentinel as meant only then; then each worker that has had "
                "none gets its sentinel, because it waits at its queue.",
            )  # fmt: skip
    return "Every run of a map-style and of an iterable dataset ends, at once, and leaves nobody behind."


@exercise
def stop_pin(function: Callable[[Any], tuple[Any, ...]]) -> str:
    """The reader's `_stop_pin`."""
    kind = _driver("_stop_pin", function)
    found = explored(PINNED, driver=kind)
    if found is not None:
        raise fails(
            *found, "The step `_stop_pin`: set the done event (`SET_PIN_DONE`), wake the thread, which waits at the result queue (`WAKE_PIN`), wait until it has ended "
            "(`JoinPin`), and only then close the queue (`CLOSE_RESULT_QUEUE`).",
        )  # fmt: skip
    return "In every interleaving, the pin thread sees its done event, and has ended before the workers are told."
