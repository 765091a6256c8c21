"""Questions and checks of 08_shutdown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import minidl
from course.asking import Asked, Choice, Count, question, rows, workers_of
from course.checking import Wrong, as_trace, exercise, explored, fails
from minidl.explore.guards import GUARDS, OURS, PINNED, PLAIN, STREAMS
from minidl.explore.model import Model
from minidl.explore.search import Bad, shortest
from minidl.loader.dispatcher import Dispatcher
from minidl.loader.driver import Driver, JoinPin, Simple
from minidl.loader.protocol import LoaderEvent, LoaderLifecycle
from minidl.tracefile.words import counted


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
        "The epoch is over. Who is told to end first? (The pin thread reads what the workers send.)",
        Choice("the pin thread", {
            "the pin thread": ("Then the workers would write into a queue that is read by a thread which is told nothing.", "pin", "pin-memory thread", "pin memory thread"),
            "the workers": ("If a worker ends in the middle of a message, who is left with half of it?", "workers", "worker"),
            "all at once": ("There are two done events. One would do, if all could be told at once.", "both", "both at once"),
        }),
        "The pin thread reads the queue into which the workers write. In which state may a worker leave it?",
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
        f"Take the guard `{name}` away. It {guard.purpose}. What is the worst that the explorer finds?",
        Choice({"hang": "the loader hangs", "stall": "it ends late, after a timeout", "orphan": "workers are left behind"}[bad.kind], {
            "the loader hangs": ("A hang is a wait without a bound. Is there a timeout on this one, or is the loader gone anyway?", "hang", "hangs", "deadlock"),
            "it ends late, after a timeout": ("Late is what a bounded wait costs. Which bound would end this one?", "late", "stall", "timeout", "it stalls"),
            "workers are left behind": ("Who is still there to end the workers? If there is somebody, they do not stay.", "orphan", "orphans", "left behind"),
        }),
        "Who waits for whom, and with a bound or without one?",
        f"{bad.what[0].upper()}{bad.what[1:]}. It takes {counted(len(steps_of(trace)), 'step')}; the last is: {last[1]} {last[2]}.",
    )  # fmt: skip


# --- Exercises --------------------------------------------------------------------------------------------------------
def _driver(method: str, function: Callable[[Any], Any]) -> type[Driver]:
    """A driver with the reader's method, which may return any sequence of steps; tried once for a stub."""

    def plan(driver: Any) -> tuple[Any, ...]:
        steps = function(driver)
        if not hasattr(steps, "__iter__"):
            raise Wrong(
                f"`{method}` returns {type(steps).__name__}: return a tuple or a list of steps.",
                "The driver performs the steps of the tuple, from left to right.",
            )
        return tuple(steps)

    kind = type("MyDriver", (Driver,), {method: plan})
    _planned(kind, method, pin=True)
    return kind


def _planned(kind: type[Driver], method: str, *, pin: bool) -> tuple[Any, ...]:
    """The steps of a method, of a driver with two workers, with or without a pin thread."""
    driver = kind(Dispatcher(2, 2), LoaderLifecycle())
    driver.lifecycle.handle(LoaderEvent.START)
    for _ in range(2):
        driver.worker_started()
    if pin:
        driver.pin_started()
    steps: tuple[Any, ...] = getattr(driver, method)()
    return steps


def _shown(steps: tuple[Any, ...]) -> str:
    return "\n".join(str(getattr(one, "name", one)) for one in steps)


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
    step = (
        "The step `_stop_pin`: set the done event (`SET_PIN_DONE`), wake the thread, which waits at the result queue (`WAKE_PIN`), wait until it has ended "
        "(`JoinPin`), and only then close the queue (`CLOSE_RESULT_QUEUE`)."
    )
    found = explored(PINNED, driver=kind)
    if found is not None:
        raise fails(*found, step)
    if steps := _planned(kind, "_stop_pin", pin=False):
        raise Wrong(
            f"A loader without a pin thread: there is nothing to do, and your plan has {counted(len(steps), 'step')}.",
            step,
            evidence=_shown(steps),
        )
    steps = _planned(kind, "_stop_pin", pin=True)
    joins = [at for at, one in enumerate(steps) if isinstance(one, JoinPin)]
    closes = [at for at, one in enumerate(steps) if one is Simple.CLOSE_RESULT_QUEUE]
    # A plan that never closes hangs at exit, one that never joins leaves the thread behind: the explorer has found those.
    # Nor does it let a join pass that has no bound.
    early, at_once = min(closes) < max(joins), any(steps[at].timeout <= 0 for at in joins)
    for is_wrong, words in (
        (
            early,
            "Your plan closes the result queue before the pin thread has ended: the thread may be reading from it.",
        ),
        (at_once, "Your join has no time: the thread may be in a `pin_memory()` of the user's."),
    ):
        if is_wrong:
            raise Wrong(words, step, evidence=_shown(steps))
    return "In every interleaving, the pin thread sees its done event, and has ended before the workers are told."
