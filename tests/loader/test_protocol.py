"""The lifecycles: their tables as graphs, and scripts that read as prose: event, state, event, state."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidl.check.slabs import SLAB_TABLE, SlabEvent, SlabLifecycle, SlabState
from minidl.loader.protocol import (
    LOADER_TABLE,
    PIN_TABLE,
    WORKER_TABLE,
    Action,
    Lifecycle,
    LoaderEvent,
    LoaderLifecycle,
    LoaderState,
    PinEvent,
    PinLifecycle,
    PinState,
    ProtocolError,
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
