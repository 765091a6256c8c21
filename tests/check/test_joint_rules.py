"""The rows that couple the actors: each step of a shutdown needs the one before, and what a row forbids is said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidl.check import RULES
from minidl.check.joint_rules import JOINT_RULES, RULES_OF, Act, Fact, JointState, Role
from minidl.explore.guards import GUARDS
from minidl.loader.protocol import WORKER_TABLE, ProtocolError, WorkerEvent, WorkerState


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
