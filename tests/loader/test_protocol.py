"""The lifecycles: their tables as graphs, and scripts that read as prose: event, state, event, state."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidl.check import RULES
from minidl.explore.guards import GUARDS
from minidl.loader.protocol import (
    JOINT_RULES,
    LOADER_TABLE,
    PIN_TABLE,
    RULES_OF,
    SLAB_TABLE,
    WORKER_TABLE,
    Act,
    Action,
    Fact,
    JointState,
    Lifecycle,
    LoaderEvent,
    LoaderLifecycle,
    LoaderState,
    PinEvent,
    PinLifecycle,
    PinState,
    ProtocolError,
    Role,
    SlabEvent,
    SlabLifecycle,
    SlabState,
    WorkerEvent,
    WorkerLifecycle,
    WorkerState,
)

Table = Mapping[Any, Mapping[Any, Any]]

WORKER_STATES: Table = {
    state: {event: following for event, (following, _) in row.items()} for state, row in WORKER_TABLE.items()
}
TABLES: dict[str, tuple[type[enum.Enum], type[enum.Enum], Table, enum.Enum, set[Any], Any]] = {
    # states, events, table, initial state, terminal states, how to make the lifecycle
    "loader": (LoaderState, LoaderEvent, LOADER_TABLE, LoaderState.NEW, {LoaderState.CLOSED}, LoaderLifecycle),
    "worker": (
        WorkerState, WorkerEvent, WORKER_STATES, WorkerState.STARTING, {WorkerState.ENDED},
        lambda: WorkerLifecycle(3),
    ),
    "pin": (PinState, PinEvent, PIN_TABLE, PinState.STARTING, {PinState.ENDED}, PinLifecycle),
    "slab": (SlabState, SlabEvent, SLAB_TABLE, SlabState.FREE, set(), lambda: SlabLifecycle(1, 3)),
}  # fmt: skip
every_table = pytest.mark.parametrize("name", TABLES)


def reachable_from(table: Table, state: Any) -> set[Any]:
    seen, todo = {state}, [state]
    while todo:
        for following in table[todo.pop()].values():
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return seen


def moved_to(lifecycle: Lifecycle[Any, Any], state: Any) -> Lifecycle[Any, Any]:
    lifecycle.state = state
    return lifecycle


# --- The tables as graphs ---------------------------------------------------------------------------------------------
@every_table
def test_every_state_is_in_the_table_and_every_event_is_possible_somewhere(name: str) -> None:
    states, events, table, *_ = TABLES[name]
    assert set(table) == set(states)
    assert {event for row in table.values() for event in row} == set(events)
    assert {following for row in table.values() for following in row.values()} <= set(states)


@every_table
def test_every_state_is_reached_and_the_end_is_reached_from_every_state(name: str) -> None:
    states, _, table, initial, terminal, make = TABLES[name]
    assert make().state is initial
    assert reachable_from(table, initial) == set(states)
    for state in states:
        ends = terminal or {initial}  # a slab is used again and again
        assert ends & reachable_from(table, state), f"no way out of {state}"


@every_table
def test_terminal_states_are_left_by_nothing(name: str) -> None:
    states, _, table, _, terminal, _ = TABLES[name]
    assert {state for state in states if reachable_from(table, state) == {state}} == terminal


@every_table
def test_a_missing_entry_is_the_error_and_leaves_the_state(name: str) -> None:
    states, events, table, _, _, make = TABLES[name]
    actor = {"loader": "loader", "worker": "worker 3", "pin": "pin thread", "slab": "slab 3 of worker 1"}[name]
    for state in states:
        for event in events:
            lifecycle = moved_to(make(), state)
            if event in table[state]:
                assert lifecycle.allows(event)
                assert lifecycle.handle(event) is table[state][event] is lifecycle.state
                continue
            assert not lifecycle.allows(event)
            with pytest.raises(ProtocolError) as caught:
                lifecycle.handle(event)
            possible = ", ".join(e.name for e in table[state]) or "nothing"
            expected = f"{actor}: event {event.name} is impossible in state {state.name}; possible there: {possible}"
            assert str(caught.value) == expected
            assert lifecycle.state is state


def test_repr_names_actor_and_state() -> None:
    assert [repr(make()) for *_, make in TABLES.values()] == [
        "<loader NEW>", "<worker 3 STARTING>", "<pin thread STARTING>", "<slab 3 of worker 1 FREE>"
    ]  # fmt: skip


# --- The loader -------------------------------------------------------------------------------------------------------
def tell(lifecycle: Lifecycle[Any, Any], script: str) -> None:
    """Play "EVENT -> STATE" lines, and check each state."""
    events, states = {"loader": (LoaderEvent, LoaderState), "pin thread": (PinEvent, PinState)}.get(
        lifecycle.actor, (WorkerEvent, WorkerState)
    )
    for line in script.strip().splitlines():
        event, state = (word.strip() for word in line.split("->"))
        assert lifecycle.handle(events[event]) is states[state], line


ONE_EPOCH = """
    START       -> STARTING
    EPOCH_BEGIN -> PRIMING
    PRIMED      -> IDLE
    NEXT        -> WAITING
    YIELD       -> IDLE
    NEXT        -> WAITING
    RAISE       -> IDLE
    NEXT        -> WAITING
    EPOCH_END   -> EXHAUSTED
"""
THE_END = """
    SHUT_DOWN   -> STOPPING_PIN
    PIN_STOPPED -> STOPPING_WORKERS
    SIGNALLED   -> JOINING
    JOINED      -> TERMINATING
    TERMINATED  -> CLOSED
"""


def test_loader_one_epoch_and_the_end() -> None:
    loader = LoaderLifecycle()
    tell(loader, ONE_EPOCH)
    assert not loader.shut_down
    tell(loader, THE_END)
    assert loader.shut_down
    tell(loader, "NEXT -> CLOSED")  # next() on a closed iterator says StopIteration, as often as it is asked


def test_loader_persistent_epochs() -> None:
    loader = LoaderLifecycle()
    tell(loader, ONE_EPOCH)
    tell(loader, "NEXT -> WAITING\nEPOCH_END -> EXHAUSTED")  # StopIteration again
    tell(loader, "RESUME -> RESUMING\nEPOCH_BEGIN -> PRIMING\nPRIMED -> IDLE\nNEXT -> WAITING\nYIELD -> IDLE")
    tell(loader, "RESUME -> RESUMING\nEPOCH_BEGIN -> PRIMING")  # iterated anew in the middle of an epoch
    tell(loader, "RESUME -> RESUMING\nRESUME -> RESUMING")  # a sampler raised while the epoch was primed
    tell(loader, THE_END)


def test_loader_interrupted_shutdown_ends_all_the_same() -> None:
    for steps in range(4):
        loader = LoaderLifecycle()
        tell(loader, "\n".join(THE_END.strip().splitlines()[: steps + 1]))
        assert loader.shut_down
        tell(loader, "TERMINATED -> CLOSED")


def test_loader_says_what_is_impossible() -> None:
    with pytest.raises(ProtocolError, match="loader: event YIELD is impossible in state NEW; possible there: START"):
        LoaderLifecycle().handle(LoaderEvent.YIELD)


# --- A worker ---------------------------------------------------------------------------------------------------------
def do(worker: WorkerLifecycle, script: str) -> None:
    """Play "EVENT -> ACTION, STATE" lines."""
    for line in script.strip().splitlines():
        event, _, after = line.partition("->")
        action, state = (word.strip() for word in after.split(","))
        assert worker.decide(WorkerEvent[event.strip()]) is Action[action], line
        assert worker.state is WorkerState[state], line


def test_worker_serves_a_map_dataset_and_leaves() -> None:
    do(
        WorkerLifecycle(0),
        """
        READY              -> WAIT,  WAITING
        TASK               -> FETCH, FETCHING
        FETCHED            -> WAIT,  WAITING
        TASK               -> FETCH, FETCHING
        FETCHED            -> WAIT,  WAITING
        TASK_WHEN_DONE     -> SKIP,  WAITING
        SENTINEL_WHEN_DONE -> LEAVE, ENDED
        """,
    )


def test_worker_exhausts_an_iterable_dataset_and_leaves_before_the_rest() -> None:
    do(
        WorkerLifecycle(0),
        """
        READY         -> WAIT,  WAITING
        TASK          -> FETCH, FETCHING
        ITERATION_END -> WAIT,  EXHAUSTED
        TASK          -> SKIP,  EXHAUSTED
        SENTINEL      -> LEAVE, ENDED
        """,
    )


def test_persistent_worker_is_resumed_from_its_end() -> None:
    do(
        WorkerLifecycle(0),
        """
        READY              -> WAIT,   WAITING
        TASK               -> FETCH,  FETCHING
        ITERATION_END      -> WAIT,   EXHAUSTED
        TASK               -> SKIP,   EXHAUSTED
        RESUME             -> RESUME, WAITING
        TASK               -> FETCH,  FETCHING
        FETCHED            -> WAIT,   WAITING
        RESUME             -> RESUME, WAITING
        SENTINEL_WHEN_DONE -> LEAVE,  ENDED
        """,
    )


def test_worker_that_has_work_takes_no_sentinel() -> None:
    worker = WorkerLifecycle(5)
    do(worker, "READY -> WAIT, WAITING")
    with pytest.raises(ProtocolError, match="worker 5: event SENTINEL is impossible in state WAITING"):
        worker.decide(WorkerEvent.SENTINEL)


@pytest.mark.parametrize("event", [WorkerEvent.PARENT_DIED, WorkerEvent.INTERRUPTED])
def test_worker_without_a_parent_leaves_in_any_state(event: WorkerEvent) -> None:
    for state in set(WorkerState) - {WorkerState.ENDED}:
        worker = WorkerLifecycle(0)
        worker.state = state
        assert worker.decide(event) is Action.LEAVE
        assert worker.state is WorkerState.ENDED


@given(st.lists(st.sampled_from(WorkerEvent), max_size=30))
def test_worker_leaves_exactly_when_it_ends(events: list[WorkerEvent]) -> None:
    """FETCH is asked for only where FETCHING follows, LEAVE only where ENDED follows, and the other way round."""
    worker = WorkerLifecycle(0)
    for event in filter(worker.allows, events):
        action = worker.decide(event)
        assert (action is Action.LEAVE) == (worker.state is WorkerState.ENDED)
        assert (action is Action.FETCH) == (worker.state is WorkerState.FETCHING)


# --- The pin-memory thread --------------------------------------------------------------------------------------------
def test_pin_thread_pins_and_is_woken_to_end() -> None:
    tell(
        PinLifecycle(),
        """
        READY  -> WAITING
        RESULT -> PINNING
        PINNED -> PUTTING
        PUT    -> WAITING
        WOKEN  -> WAITING
        DONE   -> ENDED
        """,
    )


def test_pin_thread_may_die_or_see_the_end_at_any_step() -> None:
    for state in set(PinState) - {PinState.ENDED}:
        assert PIN_TABLE[state][PinEvent.DIED] is PinState.ENDED
    for state in (PinState.WAITING, PinState.PINNING, PinState.PUTTING):
        assert PIN_TABLE[state][PinEvent.DONE] is PinState.ENDED


# --- Joint rules ------------------------------------------------------------------------------------------------------
def play(joint: JointState, script: str) -> None:
    """Play "who: ACT worker" lines; a line "+ FACT worker" lets a fact hold."""
    for line in filter(None, map(str.strip, script.splitlines())):
        if line.startswith("+"):
            fact, *worker = line[1:].split()
            joint.add(Fact[fact], *map(int, worker))
            continue
        who, _, rest = line.partition(":")
        act, *worker = rest.split()
        joint.do(Role(who), Act[act], *map(int, worker))


WITH_PIN_THREAD = """
    loader: SET_PIN_DONE
    loader: WAKE_PIN
    pin thread: END
    + BOUNDED
    loader: JOIN_PIN
    loader: SET_WORKERS_DONE
    loader: SEND_SENTINEL 0
    loader: SEND_SENTINEL 1
    worker: LEAVE 0
    loader: JOIN_WORKER 0
    loader: JOIN_WORKER 1
    + DEAD 0
    loader: TERMINATE 1
    loader: KILL 1
    loader: CLOSE 0
    loader: CLOSE 1
"""


def test_a_shutdown_in_the_order_of_the_article() -> None:
    play(JointState(), WITH_PIN_THREAD)


def test_each_step_of_it_depends_on_one_before() -> None:
    """Without any one line of the loader or fact, some later line is impossible, but for the last of each worker."""
    lines = [line.strip() for line in WITH_PIN_THREAD.strip().splitlines()]
    harmless = {
        *("pin thread: END", "worker: LEAVE 0", "loader: JOIN_WORKER 0", "loader: CLOSE 0", "loader: CLOSE 1"),
    }
    for number, line in enumerate(lines):
        script = "\n".join(lines[:number] + lines[number + 1 :])
        if line in harmless:
            play(JointState(), script)
            continue
        with pytest.raises(ProtocolError):
            play(JointState(), script)


IMPOSSIBLE = [
    # what holds, who does what, and what the error says
    ("", "loader: SET_WORKERS_DONE", "there is no pin thread or the join of the pin thread is over"),
    ("+ NO_PIN_THREAD", "loader: SEND_SENTINEL 1", "the workers' done event is set or its dataset has ended"),
    ("+ NO_PIN_THREAD\n+ EXHAUSTED 0", "loader: SEND_SENTINEL 1", "now there is no pin thread; otherwise"),
    ("", "worker: LEAVE 3", "worker 3: LEAVE is impossible"),
    ("+ WORKERS_NOT_DONE", "worker: FETCH 0", "it requires that it waits at its index queue; now the workers'"),
    ("", "pin thread: END", "pin thread: END is impossible: it requires that the pin thread's done event is set"),
    ("+ PIN_DONE\n+ PIN_WOKEN", "loader: JOIN_PIN", "the wait has a timeout; now the pin thread's done event is set"),
    ("+ TOLD 0", "loader: JOIN_WORKER 0", "a worker that is stuck in its dataset would block the loader forever"),
    ("+ TOLD 0\n+ BOUNDED", "loader: TERMINATE 0", r"its join is over .* \(rule join-first, article 4 §shutdown\)"),
    ("+ JOINED 0", "loader: KILL 0", "it was sent SIGTERM"),
    ("+ NO_PIN_THREAD", "loader: CLOSE 0", "a worker would outlive its loader"),
    ("+ KILLED 0", "loader: CLOSE 0", "the pin thread would outlive its loader"),
    ("", "loader: BEGIN_EPOCH 1", "it has acknowledged the new epoch; now nothing holds"),
    ("", "worker: LEAVE_ORPHANED 0", "its loader's process is gone"),
    ("+ WORKERS_DONE", "pin thread: FETCH", "no joint rule lets a pin thread do it"),
]


@pytest.mark.parametrize(("holds", "line", "message"), IMPOSSIBLE)
def test_what_no_row_allows_is_an_error_that_names_all_of_it(holds: str, line: str, message: str) -> None:
    joint = JointState()
    play(joint, holds)
    with pytest.raises(ProtocolError, match=message):
        play(joint, line)


@pytest.mark.parametrize("act", Act, ids=lambda act: act.name)
def test_every_act_has_a_row_and_one_actor(act: Act) -> None:
    assert len({rule.who for rule in RULES_OF[act]}) == 1


def test_rows_say_why_and_what_breaks_them() -> None:
    assert {guard for rule in JOINT_RULES for guard in rule.guards} <= set(GUARDS)
    assert {rule.name for rule in JOINT_RULES} <= set(RULES)
    for rule in JOINT_RULES:
        assert rule.why
        assert rule.demand.startswith(f"the {rule.who.value} ")


@pytest.mark.parametrize("state", [WorkerState.WAITING, WorkerState.EXHAUSTED])
@pytest.mark.parametrize("done", [False, True])
def test_a_workers_table_says_what_the_rows_say(state: WorkerState, done: bool) -> None:
    joint = JointState(Fact.WORKERS_DONE if done else Fact.WORKERS_NOT_DONE, Fact[state.name], Fact.TOLD)
    allowed = {act for act in (Act.FETCH, Act.SKIP, Act.LEAVE) if not any(joint.broken(act))}
    task = WORKER_TABLE[state][WorkerEvent.TASK_WHEN_DONE if done else WorkerEvent.TASK][1]
    sentinel = WorkerEvent.SENTINEL_WHEN_DONE if done else WorkerEvent.SENTINEL
    assert allowed == {Act[task.name]} | ({Act.LEAVE} if sentinel in WORKER_TABLE[state] else set())


@given(st.lists(st.tuples(st.sampled_from(Act), st.integers(0, 1)), max_size=40))
def test_no_order_of_acts_stops_the_workers_before_the_pin_thread(acts: list[tuple[Act, int]]) -> None:
    """Whatever is tried: what the rows let through keeps the order of the shutdown."""
    joint, done = JointState(Fact.BOUNDED), []
    for act, worker in acts:
        if any(joint.broken(act, worker)):
            continue
        joint.do(RULES_OF[act][0].who, act, worker)
        done.append(act)
    order = [Act.SET_PIN_DONE, Act.WAKE_PIN, Act.JOIN_PIN, Act.SET_WORKERS_DONE, Act.SEND_SENTINEL, Act.JOIN_WORKER,
             Act.TERMINATE, Act.KILL, Act.CLOSE]  # fmt: skip
    first = [done.index(act) if act in done else len(done) for act in order]
    assert first == sorted(first)


def test_a_joint_state_tells_what_holds_for_one_worker() -> None:
    state = JointState(Fact.PIN_DONE)
    state.add(Fact.TOLD, 1)
    assert state.describe(1) == "the pin thread's done event is set, its sentinel is sent"
    assert state.describe(0) == state.describe() == "the pin thread's done event is set"
    state.remove(Fact.TOLD, 1)
    state.remove(Fact.PIN_DONE)
    assert state.describe(1) == "nothing holds"
    state.add(Fact.TOLD, 1)
    with pytest.raises(ProtocolError, match=r"SEND_TASK is impossible.*; now its sentinel is sent; otherwise"):
        state.do(Role.LOADER, Act.SEND_TASK, 1)


def test_a_workers_lifecycle_knows_its_number() -> None:
    assert WorkerLifecycle(3).worker_id == 3
