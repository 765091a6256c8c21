"""`minidl explore`: the search on toys, the model against the live loader, what is found without each guard."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import workloads as wl
from hypothesis import given
from hypothesis import strategies as st

import minidl
from minidl import cli
from minidl.check import examine
from minidl.explore import decisions, trace
from minidl.explore import world as at
from minidl.explore.configurations import CONFIGURATIONS, QUICK, Configuration, Crash, with_threads
from minidl.explore.decisions import FORBIDDEN, Driving
from minidl.explore.follow import configuration_of, follow
from minidl.explore.guards import GUARDS, OF_THREADS, OUR_THREADS, OURS, UPSTREAM, Guard, own
from minidl.explore.model import Model
from minidl.explore.search import Run, explore, shortest
from minidl.explore.threads import model_of
from minidl.explore.world import CREW, CTRL_C, INDEX, PHASE, World
from minidl.loader import protocol
from minidl.loader.dispatcher import STALE, Assignment, Deliver, Dispatcher, NoBatch
from minidl.loader.driver import Driver, Evidence, Get, Simple
from minidl.loader.protocol import Action, LoaderEvent, LoaderLifecycle, WorkerEvent, WorkerState
from minidl.tracefile import events as ev
from minidl.tracefile.reader import Trace, read_trace
from minidl.views.text import render
from minidl.wire.messages import Result, ResumeIteration, WorkerExhausted

pytestmark = pytest.mark.heavy

SMALL = Configuration("small", tasks=2, prefetch=1, may_break=True)
GOOD = (
    Configuration("plain", may_break=True),
    Configuration("pinned", pin=True, may_break=True),
    Configuration("streams", streams=(0, 2)),
    Configuration("persistent", persistent=True, epochs=2, tasks=3, may_break=True),
    Configuration("all of it", streams=(1, 2), persistent=True, epochs=2, pin=True, may_break=True),
    Configuration("out of order", in_order=False),
    Configuration("narrow", tasks=6, pin=True, index_room=1, result_room=1),
)
by_name = pytest.mark.parametrize("configuration", [*GOOD, *map(with_threads, GOOD)], ids=lambda c: c.name)


# --- The search, on graphs that can be seen through -------------------------------------------------------------------
class Graph:
    """A model whose states are letters. A state is (phase, ..., crew, ..., crashed, fault) as far as `judge` looks."""

    def __init__(self, edges: dict[str, str], ends: str = "", faults: str = "") -> None:
        self.edges, self.ends = edges, ends
        self.faults = faults
        self.configuration = Configuration("toy")
        self.initial = self.state("a")

    def state(self, name: str) -> Any:
        world = World(Model(SMALL, OURS).initial)
        world.phase, world.fault = name, "wrong" if name in self.faults else ""
        return world.freeze()

    def steps(self, state: Any) -> list[Any]:
        return [(("an actor", "goes", -1), self.state(name)) for name in self.edges.get(state[0], "")]

    def crashes(self, state: Any) -> list[Any]:
        return []

    def over(self, state: Any) -> bool:
        return state[0] in self.ends


def kinds(graph: Any) -> list[str]:
    return [bad.kind for bad in explore(graph).bad]


def test_the_search_sees_every_state_once() -> None:
    found = explore(Graph({"a": "bc", "b": "d", "c": "d"}, ends="d"))  # type: ignore[arg-type]
    assert (found.states, found.steps, found.ends, found.bad) == (4, 4, 1, [])


@pytest.mark.parametrize(
    ("graph", "kind"),
    [
        (Graph({"a": "bc", "b": "d"}, ends="d"), "hang"),
        (Graph({"a": "b", "b": "cd", "c": "a"}, ends="d"), "endless"),
        (Graph({"a": "b", "b": "b"}), "endless"),
        (Graph({"a": "bc", "b": "c"}, ends="c", faults="b"), "rule"),
    ],
)
def test_the_search_finds(graph: Graph, kind: str) -> None:
    assert kinds(graph) == [kind]


def test_the_shortest_run_is_the_shortest() -> None:
    graph: Any = Graph({"a": "bc", "b": "d", "d": "e", "c": "e", "e": "f"}, ends="f", faults="e")
    run = shortest(graph)
    assert [state[0] for state in run.states] == ["a", "c", "e"]
    assert len(run) == len(run.labels) == 2
    assert shortest(Graph({"a": "b"}, ends="b")) is None  # type: ignore[arg-type]


# --- The model asks the live classes ----------------------------------------------------------------------------------
@given(st.data(), st.integers(1, 3), st.integers(1, 2), st.booleans(), st.booleans())
def test_a_driver_out_of_a_tuple_answers_as_one_that_has_lived(
    data: st.DataObject, workers: int, prefetch: int, in_order: bool, persistent: bool
) -> None:
    c = Configuration("any", workers=workers, prefetch=prefetch, in_order=in_order, persistent=persistent)
    live = Driver(Dispatcher(workers, prefetch, in_order), LoaderLifecycle(), persistent=persistent)
    live.lifecycle.handle(LoaderEvent.START)
    for _ in range(workers):
        live.worker_started()
    driving = Driving(c, OURS)
    state, effect = driving.new, None
    for _ in range(40):
        outstanding = [idx for idx, info in live.dispatcher.task_info.items() if not info.fetched]
        calls: list[tuple[str, Any]] = [("close", None), ("next", None), ("resume", None), ("begin", None)]
        calls += [("drawn", None), ("sampler_ended", None)] if effect is Simple.DRAW else []
        calls += [("done", None)] if live.plan or isinstance(effect, Assignment) else []
        calls += [("yielded", None), ("failed", None)] if isinstance(effect, Deliver) else []
        if isinstance(effect, Get):
            calls += [("received", at.result(kind, idx, live.dispatcher.task_info[idx].worker_id))
                      for idx in outstanding for kind in (at.DATA, at.EXHAUSTED)]  # fmt: skip
            calls += [("received", at.result(at.ACK, live.epoch, worker)) for worker in range(workers)]
            calls += [("nothing_came", (((0, -9),), True, False, jammed)) for jammed in (False, True)]
            calls += [("nothing_came", ((), True, True, False))]
        call, argument = data.draw(st.sampled_from(calls))
        try:
            state, heard, _ = driving.ask(state, call, argument)
        except FORBIDDEN as error:
            with pytest.raises(type(error), match=re.escape(str(error))):
                give(live, call, argument)
            return
        effect = give(live, call, argument)
        assert heard == effect
        assert state.frozen == live.freeze()


def give(driver: Driver, call: str, argument: Any) -> Any:
    """An input, in the model's words."""
    if call == "received":
        kind, idx, worker = at.parts(argument)
        result = Result(idx, worker, WorkerExhausted(worker) if kind == at.EXHAUSTED else None)
        return driver.received(ResumeIteration(idx, worker) if kind == at.ACK else result)
    if call == "nothing_came":
        dead, *others = argument
        return driver.nothing_came(Evidence(dict(dead), *others))
    return getattr(driver, call)(*([None] if call == "drawn" else []))


def reachable(model: Any) -> Iterator[Any]:
    """Every state that the model can come to."""
    todo, seen = [model.initial], {model.initial}
    while todo:
        state = todo.pop()
        yield state
        for _, after in (*model.steps(state), *model.crashes(state)):
            if after not in seen:
                seen.add(after)
                todo.append(after)


def yields_at_once(self: Dispatcher, idx: int, data: Any) -> Any:
    """`receive` of a dispatcher that forgot its reorder buffer."""
    info = self._outstanding(idx)
    self.tasks_outstanding -= 1
    info.data = data
    return self._deliver(idx)


def counts_no_stale_result(self: Dispatcher, idx: int) -> NoBatch:
    """`_unexpected` of a dispatcher that forgets to subtract what was given up."""
    self._given_up.remove(idx)
    return STALE


def keeps_the_batch(self: Driver) -> Any:
    """`resume` of a driver that yields a batch of a next() that was interrupted in the next epoch."""
    kept, effect = self.plan, resume(self)
    self.plan = (*kept, *self.plan)
    return effect


resume = Driver.resume
GOES_ON = Configuration("goes on", goes_on=1, prefetch=1, tasks=2, pin=True, crashes=(Crash.WORKER_KILLED,))
INTERRUPTED = Configuration("Ctrl-C", ctrl_c=1, goes_on=1, persistent=True, epochs=2, prefetch=1, tasks=2)


PLAIN = Configuration("plain")
BROKEN = {
    "a batch before its turn": (Dispatcher, "receive", yields_at_once, PLAIN, "task 0 is yielded after task 1"),
    "a task forgotten": (
        Dispatcher, "next_step", lambda self: NoBatch.EPOCH_END, PLAIN, "the epoch ends after 0 batches of 4",
    ),
    "a stale result not subtracted": (
        Dispatcher, "_unexpected", counts_no_stale_result, GOES_ON,
        "tasks_outstanding is not the number of tasks that have no answer",
    ),
    "a batch kept over an interruption": (
        Driver, "resume", keeps_the_batch, INTERRUPTED, "event YIELD is impossible in state RESUMING",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("broken", "name", "instead", "configuration", "what"), BROKEN.values(), ids=BROKEN)
def test_what_decides_otherwise_is_found_out(
    broken: type, name: str, instead: Any, configuration: Configuration, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broken, name, instead)
    run = shortest(Model(configuration, OURS, reduced=configuration is not PLAIN))
    assert run.bad.kind == "rule"
    assert what in run.bad.what


def test_ctrl_c_comes_at_each_place_of_a_step() -> None:
    """Of the first epoch's beginning: before each draw, and before and after each task is sent."""
    model = Model(Configuration("Ctrl-C", workers=1, prefetch=2, tasks=2, ctrl_c=1), OURS, reduced=True)
    begun = [state for label, state in model.crashes(model.initial)]
    sent = {state[INDEX] for state in begun}
    assert sent == {((),), ((0,),), ((0, 1),)}
    assert all(state[CTRL_C] == 0 and state[PHASE] != at.IDLE for state in begun)
    assert [label for state in begun for label, _ in model.crashes(state)] == []


def test_two_interruptions_leave_the_rest_of_the_shutdown_to_the_next() -> None:
    c = Configuration("Ctrl-C", workers=1, prefetch=1, tasks=1, ctrl_c=2)
    model = Model(c, OURS, reduced=True)
    given_up = [state[CREW] for state in reachable(model) if state[PHASE] == at.GIVEN_UP]
    assert any(worker.place != at.GONE for crew in given_up for worker in crew)
    assert explore(model).bad == []


def test_a_table_that_allows_otherwise_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exhausted worker that answers what it is still sent, in place of skipping it: it may never be read."""
    row = protocol.WORKER_TABLE[WorkerState.EXHAUSTED]
    broken = {**row, WorkerEvent.TASK: (WorkerState.FETCHING, Action.FETCH)}
    monkeypatch.setitem(protocol.WORKER_TABLE, WorkerState.EXHAUSTED, broken)  # type: ignore[arg-type]
    decisions.worker_decides.cache_clear()
    try:
        found = explore(Model(Configuration("streams", streams=(0, 2)), OURS))
    finally:
        decisions.worker_decides.cache_clear()
    assert [bad.kind for bad in found.bad] == ["stall"]
    assert "joins its feeder" in found.bad[0].what


# --- What is found ----------------------------------------------------------------------------------------------------
LARGE = {"pinned", "streams", "persistent", "Ctrl-C"}
"""Of the quick configurations, those that take seconds. Some guards have them, too, with fewer crashes."""


@pytest.mark.parametrize(
    "configuration",
    [
        pytest.param(c, id=c.name, marks=pytest.mark.slow if c.name in LARGE else ())
        for c in CONFIGURATIONS
        if c.name in QUICK
    ],
)
def test_no_run_of_ours_goes_wrong(configuration: Configuration) -> None:
    found = explore(model_of(configuration, own(configuration), reduced=True))
    assert found.bad == []
    assert found.states > 1000
    assert found.ends > 10


@pytest.mark.parametrize("crash", [None, *Crash])
def test_reducing_loses_nothing(crash: Crash | None) -> None:
    """Every step by itself, in a small configuration: no run of ours goes wrong, and there are many more."""
    crashes = () if crash is None else (crash,)
    small = dataclasses.replace(SMALL, pin=True, crashes=crashes, timeout=bool(crashes))
    merged, single = (explore(Model(small, OURS, reduced=reduced)) for reduced in (True, False))
    assert (merged.bad, single.bad) == ([], [])
    assert single.states > 2 * merged.states


ENDS_IN = {
    "stall": """sentinel none-after-exhaustion pin-done-event pin-sentinel cancel-join-results-when-done pin-first
        told-at-last""",
    "rule": """done-event get-timeout-pin bounded-read pin-told-at-last kill-at-last epoch-in-acknowledgement
        leftovers-ended closed-at-exit""",
    "orphan": "watchdog get-timeout-worker bounded-index-read lock-free-event cancel-join-results-when-orphaned",
    "hang": """get-timeout-loader liveness-check pin-liveness-check cancel-join-index join-results-until-done
        bounded-joins daemon exit-flag bounded-read lock-free-event leavers-checked bounded-pin-join
        pin-sentinel-left""",
}
"""How runs go wrong without a guard; in some configurations of it this way, in others that."""
KINDS = {guard: {kind for kind, names in ENDS_IN.items() if guard in names.split()} for guard in (GUARDS | OF_THREADS)}
LARGE_GUARDS = {"pin-told-at-last", "get-timeout-pin", "pin-sentinel-left"}
guards = pytest.mark.parametrize("guard", (GUARDS | OF_THREADS).values(), ids=lambda guard: guard.name)


@functools.cache
def goes_well(configuration: Configuration) -> bool:
    return not explore(model_of(configuration, own(configuration), reduced=True)).bad


@pytest.mark.parametrize(
    "guard",
    [
        pytest.param(guard, id=name, marks=pytest.mark.slow if name in LARGE_GUARDS else ())
        for name, guard in (GUARDS | OF_THREADS).items()
    ],
)
def test_each_guard_is_for_something(guard: Guard) -> None:
    """With it, no run of the same configuration goes wrong; without it, one does, and how."""
    bad = []
    for configuration in guard.where:
        assert goes_well(configuration)
        bad.append(goes_wrong(configuration, guard))
    assert set(bad) == KINDS[guard.name]


def goes_wrong(configuration: Configuration, guard: Guard) -> str:
    """How the shortest run without the guard does."""
    run = shortest(model_of(configuration, own(configuration).without(guard.field), reduced=True))
    assert run is not None
    assert run.bad is not None
    return run.bad.kind


INTERRUPTED_PIN = Configuration("Ctrl-C, pinned", ctrl_c=1, pin=True, prefetch=1, tasks=2)
OF_PIPES = {"watchdog", "get-timeout-worker", "get-timeout-pin", "bounded-read", "bounded-index-read"}
OF_PIPES |= {"lock-free-event", "leavers-checked", "pin-first", "exit-flag", "pin-sentinel-left"}
OF_PIPES |= {name for name in GUARDS if "cancel-join" in name or name == "join-results-until-done"}


@pytest.mark.parametrize("name", [name for name in GUARDS if name not in OF_PIPES])
def test_each_guard_that_is_not_of_pipes_or_processes_is_for_something_with_threads(name: str) -> None:
    configuration = with_threads(INTERRUPTED_PIN if name == "pin-told-at-last" else GUARDS[name].where[0])
    assert goes_well(configuration)
    assert {goes_wrong(configuration, GUARDS[name])} == KINDS[name]


def test_a_thread_is_left_in_its_sample_only_with_a_warning() -> None:
    """And it has to leave once its sample is there."""
    (found,) = (bad.what for bad in explore(model_of(SLEEPS, OUR_THREADS.without("killed_at_last"))).bad)
    assert re.fullmatch("the shutdown leaves worker [01] behind without a warning", found)
    lasting = model_of(SLEEPS, OUR_THREADS)
    closed = [state for state in reachable(lasting) if state[PHASE] == at.CLOSED]
    ends = {label[1] for state in closed for label, _ in (*lasting.steps(state), *lasting.crashes(state))}
    assert {"has its sample at last", "stops before its next sample", "has fetched", "takes the sentinel"} < ends


SLEEPS = Configuration("sleeps", threads=True, tasks=2, prefetch=1, timeout=True, crashes=(Crash.WORKER_SLEEPS,))


@guards
def test_a_guard_stands_where_the_table_says(guard: Guard) -> None:
    for place, home in ((guard.ours, Path(minidl.__file__).parent), (guard.upstream, TORCHS)):
        if place:
            module, path = place.split(":")
            name = path.rpartition(".")[2]
            text = home.joinpath(*module.split(".")).with_suffix(".py").read_text()
            assert f"def {name}(" in text or f"class {name}" in text


TORCHS = Path(wl.torch.utils.data.__file__).parent


def test_torchs_protocol_has_holes() -> None:
    """A torn message ends in an unbounded join of the pin thread; a killed loader leaves an orphan."""
    pinned = Configuration("pinned", pin=True, may_break=True, crashes=(Crash.WORKER_KILLED,))
    torn = shortest(Model(pinned, UPSTREAM, reduced=True), lambda bad: "joins the pin thread" in bad.what)
    assert ("pin thread", "begins to read a torn message", -1) in torn.labels
    killed = shortest(Model(Configuration("killed", crashes=(Crash.LOADER_KILLED,), result_room=1), UPSTREAM))
    assert killed.bad.kind == "orphan"


# --- The model's runs are runs of the protocol, and recorded runs are the model's -------------------------------------
def walk(model: Model, chance: random.Random) -> Run:
    """A run without a crash, its steps drawn by lot."""
    run = Run([], [model.initial], None)
    while steps := model.steps(run.states[-1]):
        label, after = chance.choice(steps)
        run.labels.append(label)
        run.states.append(after)
    return run


@pytest.mark.live
@by_name
def test_good_runs_obey_the_checker_and_the_model_follows_them(configuration: Configuration, tmp_path: Path) -> None:
    model, chance = model_of(configuration, own(configuration)), random.Random(1)
    for number in range(12):
        read = read_trace(trace.write(tmp_path / str(number), model, walk(model, chance)))
        report = examine(read)
        assert (report.violations, read.problems) == ([], [])
        # No actor waits for a feeder thread once all is done; and a thread may stop before its next sample.
        assert [text for text in report.open if not ("to the pipe" in text or STOPPED in text)] == []
        assert report.loaders == 1
        assert len(read.select("shutdown")) == 2
    followed = follow(read)
    assert followed, followed.lost
    assert followed.events > 20


STOPPED = "ended while it was fetching"


def record(directory: Path, dataset: Any, *, epochs: int = 1, leave: int | None = None, **options: Any) -> Trace:
    """A live loader's epochs, the first of them left after `leave` batches."""
    with pytest.MonkeyPatch.context() as patch, minidl.trace(directory, detail="batch"):
        patch.setenv("MINIDL_SIMULATE_DEVICE", "1")
        with minidl.DataLoader(dataset, num_workers=2, **options) as loader:
            for epoch in range(epochs):
                for number, _ in enumerate(loader):
                    if epoch == 0 and number == leave:
                        break
    return read_trace(directory)


NUMBERS, STREAM, THREADS = wl.Numbers(6), wl.Stream(5), {"worker_method": "thread"}
PINNED_AND_LEFT: dict[str, Any] = {"leave": 1, "pin_memory": True}
PERSISTENT: dict[str, Any] = {"epochs": 2, "persistent_workers": True}
OUT_OF_ORDER = {"in_order": False}
TWICE_PINNED = PERSISTENT | {"pin_memory": True}


LIVE = {
    "plain": (NUMBERS, {}, "6 tasks"),
    "pinned and left": (NUMBERS, PINNED_AND_LEFT, "6 tasks; pin thread; may break"),
    "persistent and left": (NUMBERS, PERSISTENT | {"leave": 2}, "6 tasks; persistent, 2 epochs; may break"),
    "out of order": (NUMBERS, OUT_OF_ORDER, "6 tasks; out of order"),
    "prefetch 1": (NUMBERS, {"prefetch_factor": 1}, "prefetch 1, 6 tasks"),
    "threads, pinned and left": (NUMBERS, THREADS | PINNED_AND_LEFT, "6 tasks; pin thread; may break"),
    "threads, persistent and left": (NUMBERS, THREADS | PERSISTENT | {"leave": 2}, "persistent, 2 epochs; may break"),
    "threads, out of order": (NUMBERS, THREADS | OUT_OF_ORDER, "2 worker threads, prefetch 2, 6 tasks; out of order"),
    "stream": (STREAM, {}, "streams of 3, 2"),
    "stream, pinned, twice": (STREAM, TWICE_PINNED, "streams of 3, 2"),
    "threads, stream": (STREAM, THREADS, "streams of 3, 2"),
    "threads, stream, pinned, twice": (STREAM, THREADS | TWICE_PINNED, "streams of 3, 2"),
}


@pytest.mark.live
@pytest.mark.parametrize(("dataset", "options", "words"), LIVE.values(), ids=LIVE)
def test_the_model_follows_a_live_loader(dataset: Any, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    live = record(tmp_path / "live", dataset, **options)
    assert words in configuration_of(live).describe()
    followed = follow(live)
    assert followed, followed.lost
    assert followed.events > 50


@pytest.mark.live
@pytest.mark.usefixtures("no_sigchld")
def test_the_model_follows_a_loader_whose_worker_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with minidl.trace(tmp_path / "live", detail="batch"):
        with monkeypatch.context() as patch:  # for the waits of the epoch, and not for the joins
            wl.impatient(patch)
            iterator: Any = iter(minidl.DataLoader(wl.Gate(20, tmp_path / "never", at=5), num_workers=2))
        for _ in range(5):
            next(iterator)
        while iterator._board.read(1).task != 5 or iterator._board.read(1).position != 0:
            time.sleep(0.002)
        os.kill(iterator._workers[1].pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="exited unexpectedly"):
            next(iterator)
        iterator.close()
    live = read_trace(tmp_path / "live")
    assert cli.main(["explore", "--follow", str(tmp_path / "live")]) == 0
    followed = follow(live, crashes=(Crash.WORKER_KILLED,))
    assert followed, followed.lost
    assert not follow(live)  # a worker does not die by itself
    begun = np.flatnonzero((live.events["code"] == ev.FETCH[0]) & (live.events["task"] == 5))
    live.events["code"][begun] = ev.INDEX_GET[0]  # killed between the task's get and its fetch: not compared
    again = follow(live, crashes=(Crash.WORKER_KILLED,))
    assert again, again.lost
    assert again.events == followed.events - 1


def test_the_model_follows_the_recorded_demo(capsys: Any) -> None:
    """Four workers on real images, two epochs of 30 batches."""
    assert cli.main(["explore", "--follow", str(DEMO)]) == 0
    assert "4 workers, prefetch 2, 30 tasks; persistent, 2 epochs" in capsys.readouterr().out


DEMO = Path(minidl.__file__).parent.parent / "traces" / "demo-cpu-4-workers.minidl"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short live run, which the model follows."""
    directory = tmp_path_factory.mktemp("plain") / "live"
    assert follow(record(directory, wl.Numbers(4), prefetch_factor=1))
    return directory


@pytest.mark.live
@pytest.mark.parametrize(
    ("code", "values"),
    [
        (ev.YIELD, {"task": 1}),
        (ev.TASK_ASSIGNED, {"worker": 1}),
        (ev.FETCH[0], {"task": 3}),
        (ev.SENTINEL_PUT, {"worker": 1}),
        (ev.DONE_EVENT_SET, {"x": int(ev.DoneEvent.PIN_THREAD)}),
    ],
    ids=["yield", "worker", "fetch", "sentinel", "event"],
)
def test_the_model_does_not_follow_what_cannot_be(plain: Path, code: int, values: dict[str, int]) -> None:
    """The first event of a code is changed."""
    live = read_trace(plain)
    row = int((live.events["code"] == code).argmax())
    for column, value in values.items():
        live.events[column][row] = value
    followed = follow(live)
    assert not followed
    assert "task" in followed.lost


# --- Runs as traces ---------------------------------------------------------------------------------------------------
@pytest.fixture
def without_watchdog(tmp_path: Path) -> Path:
    guard = GUARDS["bounded-read"]
    model = Model(guard.where[0], OURS.without(guard.field))
    return trace.write(tmp_path / "run", model, shortest(model))


@pytest.mark.live
def test_a_run_that_goes_wrong_is_a_trace_that_says_so(without_watchdog: Path) -> None:
    read = read_trace(without_watchdog)
    assert read.problems == []
    told = read.manifest["explored"]
    assert told["without"] == ["bounded_result_read"]
    assert "torn message" in told["wrong"]
    assert told["times"] == "made up: 1 ms a step"
    steps = read.described("step")
    assert [step["number"] for step in steps] == list(range(1, len(steps) + 1))
    assert steps[-1]["what"] == "begins to read a torn message"
    spans = read.spans()
    still = spans[(spans["end"] < 0) & (spans["code"] == ev.RESULT_GET[0])]
    assert len(still) == 1
    assert "result_get" in render(read) or len(render(read)) > 100


@pytest.mark.live
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("sentinel", "told-first"), ("none-after-exhaustion", "told-first"), ("done-event", "done-first"),
        ("pin-first", "pin-first"), ("kill-at-last", "leftovers"),
    ],
)  # fmt: skip
def test_the_checker_sees_in_the_trace_which_guard_is_gone(name: str, rule: str, tmp_path: Path) -> None:
    guard = GUARDS[name]
    model = Model(guard.where[0], OURS.without(guard.field), reduced=True)
    report = examine(read_trace(trace.write(tmp_path / "run", model, shortest(model))))
    assert report.first.rule == rule


@pytest.mark.live
def test_a_trace_can_be_packed_and_checked(without_watchdog: Path, tmp_path: Path, capsys: Any) -> None:
    assert cli.main(["pack", str(without_watchdog), "-o", str(tmp_path / "packed.minidl")]) == 0
    assert json.loads(json.dumps(read_trace(tmp_path / "packed.minidl").manifest["explored"]))
    assert cli.main(["timeline", str(without_watchdog)]) == 0
    assert "worker 1" in capsys.readouterr().out


# --- The command ------------------------------------------------------------------------------------------------------
def test_the_command_finds_nothing_in_ours(capsys: Any) -> None:
    assert cli.main(["explore", "--quick", "--only", "stuck"]) == 0
    assert "no configuration(s) with a violation" in capsys.readouterr().out


@pytest.mark.live
def test_the_command_finds_the_holes_of_torch(capsys: Any, tmp_path: Path) -> None:
    assert cli.main(["explore", "--upstream", "--only", "stuck", "-o", str(tmp_path)]) == 1
    assert "leaves 1 worker(s) behind" in capsys.readouterr().out
    lacks = [guard.field for guard in GUARDS.values() if not guard.upstream]
    assert read_trace(tmp_path / "stuck").manifest["explored"]["without"] == lacks


def test_the_command_gives_torchs_protocol_each_guard_that_it_lacks(capsys: Any) -> None:
    assert cli.main(["explore", "--upstream", "--quick", "--only", "stuck", "--with-guard", "all"]) == 0
    assert "no configuration(s) with a violation" in capsys.readouterr().out


@pytest.mark.live
def test_the_command_shows_what_a_guard_is_for(capsys: Any, tmp_path: Path) -> None:
    assert cli.main(["explore", "--guard", "watchdog", "--guard", "daemon", "-o", str(tmp_path)]) == 0
    waits = "worker 0 waits for a task, worker 1 waits for a task"
    assert f"orphan: the loader's process is gone, and {waits}, forever" in " ".join(capsys.readouterr().out.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["daemon", "watchdog"]


def test_the_command_knows_its_names(capsys: Any) -> None:
    assert cli.main(["explore", "--upstream", "--with-guard", "watchdog"]) == 2  # torch has it
    assert "'watchdog' is none of 'bounded-read'," in capsys.readouterr().err
    assert cli.main(["explore", "--with-guard", "kill-at-last"]) == 2
    assert "add --upstream" in capsys.readouterr().err
    assert cli.main(["explore", "--guard", "hope"]) == 2
    assert "'hope' is none of 'sentinel'," in capsys.readouterr().err
    assert cli.main(["explore", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in [*GUARDS, *(c.name for c in CONFIGURATIONS)])


def test_a_guard_that_is_for_nothing_is_found_out(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    harmless = dataclasses.replace(GUARDS["watchdog"], where=(Configuration("nobody dies"),))
    monkeypatch.setitem(GUARDS, "watchdog", harmless)
    assert cli.main(["explore", "--guard", "watchdog"]) == 1
    assert "nothing, in:" in capsys.readouterr().out
