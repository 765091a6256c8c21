"""A crew's shutdown without processes: its steps, in order; and that an interruption at any place leaves nobody behind.

The workers, the pin-memory thread and the queues are stand-ins that keep what is done to them.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
from exceptions_everywhere import Interruption

from minidl.loader import crew as module
from minidl.loader.crew import Crew
from minidl.loader.dispatcher import Dispatcher
from minidl.loader.driver import END, MP_STATUS_CHECK_INTERVAL, Driver, Evidence, JoinWorkers, PutSentinel
from minidl.loader.liveness import evidence_of
from minidl.loader.ports import Ports
from minidl.loader.progress import Place, Stage
from minidl.loader.protocol import LoaderEvent, LoaderLifecycle, LoaderState
from minidl.wire.messages import Sentinel
from minidl.wire.queues import NoThreadError

pytestmark = pytest.mark.core  # `test_shutdown.py` has what takes processes


class Log(list[str]):
    """What was done, in order; at the place called `strikes` (counted from 0) an interruption comes."""

    def __init__(self) -> None:
        super().__init__()
        self.strikes: list[int] = []
        self.places = 0

    def place(self) -> None:
        self.places += 1
        if self.places - 1 in self.strikes:
            raise KeyboardInterrupt

    def do(self, what: str, told: list[str] | None = None) -> None:
        self.place()
        self.append(what)
        if told is not None:
            told.append(what.split()[0])
        self.place()


ENDS = ("sentinel", "terminate", "kill")


class Worker:
    """A process that its sentinel ends, or only SIGTERM, or only SIGKILL."""

    exitcode: int | None = None

    def __init__(self, log: Log, number: int, ends_by: str = "sentinel") -> None:
        self.log, self.number, self.ends_by = log, number, ends_by
        self.pid = (1 << 30) + number  # no process has it
        self.told: list[str] = []
        self.timeouts: list[float | None] = []

    def is_alive(self) -> bool:
        return not set(self.told) & set(ENDS[ENDS.index(self.ends_by) :])

    def join(self, timeout: float | None) -> None:
        self.timeouts.append(timeout)
        self.log.do(f"join {self.number}")

    def terminate(self) -> None:
        self.log.do(f"terminate {self.number}", self.told)

    def kill(self) -> None:
        self.log.do(f"kill {self.number}", self.told)


class Queue:
    def __init__(self, log: Log, name: str, worker: Worker | None = None) -> None:
        self.log, self.name, self.worker, self.closed = log, name, worker, False
        self.full = False
        self.failure = ""

    def put(self, message: Any) -> None:
        if self.closed:
            raise ValueError("the queue is closed")
        if self.full:
            raise NoThreadError("no thread")
        assert isinstance(message, Sentinel)
        self.log.do(f"sentinel into {self.name}", [] if self.worker is None else self.worker.told)

    def cancel_join_thread(self) -> None:
        self.log.do(f"let go of {self.name}")

    def close(self) -> None:
        self.closed = True
        self.log.do(f"close {self.name}")

    def let_go(self) -> None:
        self.log.append(f"forget {self.name}")


class PinThread:
    alive = False

    def __init__(self, log: Log) -> None:
        self.log = log

    def join(self, timeout: float | None) -> None:
        assert timeout == 2 * MP_STATUS_CHECK_INTERVAL
        self.log.do("join the pin thread")

    def is_alive(self) -> bool:
        return self.alive


def flag(log: Log, name: str) -> Any:
    return SimpleNamespace(set=lambda: log.do(f"set {name}"))


class LoggedDriver(Driver):
    """An interruption may come before and after each answer, too."""

    log: Log

    def done(self) -> Any:
        self.log.place()
        effect = super().done()
        if effect is not END:
            self.log.place()
        return effect


def made(*, pin: bool = True, ends_by: str = "sentinel") -> Crew:
    log = Log()
    driver = LoggedDriver(Dispatcher(2, 1), LoaderLifecycle())
    driver.log = log
    driver.lifecycle.handle(LoaderEvent.START)
    crew: Any = Crew(driver, Queue(log, "results"), flag(log, "the workers' done event"), SimpleNamespace())  # type: ignore[arg-type]
    for number in range(2):
        worker = Worker(log, number, ends_by)
        crew.add_worker(worker, Queue(log, f"index queue {number}", worker))
    if pin:
        crew.add_pin_thread(PinThread(log), flag(log, "the pin thread's done event"))
    crew.log = log
    return crew  # type: ignore[no-any-return]


def ended(crew: Any) -> bool:
    return crew.driver.lifecycle.state is LoaderState.CLOSED and not any(w.is_alive() for w in crew.workers)


STOP_PIN = [
    "set the pin thread's done event", "sentinel into results", "join the pin thread",
    "let go of results", "close results",
]  # fmt: skip
TELL = ["set the workers' done event", "sentinel into index queue 0", "sentinel into index queue 1"]
JOIN = [
    "join 0", "join 1", "let go of index queue 0", "close index queue 0", "let go of index queue 1",
    "close index queue 1",
]  # fmt: skip
FORGET = ["forget results", "forget index queue 0", "forget index queue 1"]


def test_the_pin_thread_then_the_workers_then_the_queues() -> None:
    crew: Any = made()
    assert crew in module._running
    crew.shut_down()
    assert crew.log == [*STOP_PIN, *TELL, *JOIN, *FORGET]
    assert ended(crew)
    assert crew not in module._running
    crew.shut_down()
    assert crew.log[-1] == FORGET[-1]


def test_a_new_crew_has_started_nothing() -> None:
    board: Any = SimpleNamespace()
    crew: Any = Crew(Driver(Dispatcher(1, 1), LoaderLifecycle()), Queue(Log(), "results"), None, board)
    assert crew.board is board
    assert (crew.workers, crew.pin_thread, crew.pin_done_event) == ([], None, None)
    assert (crew.named, crew.pids_set, crew.closes_at_exit) == (False, False, False)
    module._running.discard(crew)


def test_the_lock_of_the_result_queue_is_looked_at_only_if_a_worker_was_killed_on_its_way_out() -> None:
    crew: Any = made(pin=False)
    asked: list[str] = []
    crew.result_queue.jammed = lambda: asked.append("lock") or True
    worker = crew.workers[0]
    worker.told.append("kill")
    worker.exitcode = -9
    assert evidence_of(crew, Ports()) == Evidence({0: -9}), "it had work to do"
    crew.driver.dispatcher.workers_status[0] = False
    worker.exitcode = 0
    assert evidence_of(crew, Ports()) == Evidence({0: 0}), "it has left"
    assert asked == []
    worker.exitcode = -9
    assert evidence_of(crew, Ports(), timed_out=True) == Evidence({0: -9}, timed_out=True, jammed=True)
    assert asked == ["lock"]
    crew.shut_down()


@pytest.mark.parametrize(("ends_by", "ends"), [
    ("terminate", ["terminate 0", "terminate 1", "join 0", "join 1"]),
    ("kill", ["terminate 0", "terminate 1", "join 0", "join 1", "kill 0", "kill 1", "join 0", "join 1"]),
])  # fmt: skip
def test_a_worker_that_does_not_leave_is_terminated_and_at_last_killed(ends_by: str, ends: list[str]) -> None:
    crew: Any = made(pin=False, ends_by=ends_by)
    crew.shut_down()
    assert crew.log == [*TELL, *JOIN, *ends, *FORGET]
    assert ended(crew)
    joins = len(ends) // 4
    assert [worker.timeouts[1:] for worker in crew.workers] == 2 * [joins * [MP_STATUS_CHECK_INTERVAL]]


def test_only_those_that_are_alive_are_terminated() -> None:
    crew: Any = made(pin=False)
    crew.workers[1].ends_by = "terminate"
    crew.shut_down()
    assert [what for what in crew.log if what.startswith("terminate")] == ["terminate 1"]


def test_a_pin_thread_that_does_not_end_is_left_behind_with_a_warning() -> None:
    crew: Any = made()
    crew.pin_thread.alive = True
    with pytest.warns(RuntimeWarning) as caught:
        crew.shut_down()
    assert str(caught[0].message) == (
        f"the pin memory thread did not end within {2 * MP_STATUS_CHECK_INTERVAL:g} s: it is probably in the "
        "pin_memory() of a batch. It is left behind as a daemon thread; the workers are stopped."
    )
    assert ended(crew)


def test_a_sentinel_that_no_thread_can_write_is_passed_over() -> None:
    crew: Any = made()
    crew.result_queue.full = True
    crew.shut_down()
    assert ended(crew)


def test_a_message_to_a_queue_that_a_signals_handler_has_closed_is_dropped() -> None:
    crew: Any = made()
    sentinel = functools.partial(crew.perform, PutSentinel(0))
    task = functools.partial(crew.put, 0, "task")
    crew.index_queues[0].closed = True
    for put in (sentinel, task):
        with pytest.raises(ValueError, match="closed"):
            put()
    crew.driver.close()
    sentinel()
    task()
    assert crew.log == []
    crew.driver.interrupted()
    crew.shut_down()


def test_in_a_forked_child_and_while_python_exits_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    crew: Any = made()
    with monkeypatch.context() as patch:
        patch.setattr(module, "python_exit_status", True)
        crew.shut_down()
    crew.pid += 1
    crew.shut_down()
    assert crew.log == []
    crew.pid -= 1
    crew.shut_down()
    assert ended(crew)


def test_a_crew_is_kept_until_its_driver_says_that_it_has_ended() -> None:
    driver: Any = SimpleNamespace(close=lambda: END, ended=False)
    crew: Any = Crew(driver, SimpleNamespace(let_go=lambda: None), None, None)  # type: ignore[arg-type]
    for driver.ended in (False, True):
        crew.shut_down()
        assert (crew in module._running) is not driver.ended


def test_an_effect_that_is_no_step_is_refused() -> None:
    crew: Any = made()
    with pytest.raises(KeyError, match="END"):
        crew.perform(END)
    crew.shut_down()


def test_all_joins_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    crew: Any = made(pin=False)
    clock = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(crew.log, "place", lambda: clock.__setitem__(0, clock[0] + 1.5))  # twice in each join
    crew.perform(JoinWorkers(5.0))
    assert [worker.timeouts for worker in crew.workers] == [[5.0], [2.0]]
    crew.perform(JoinWorkers(2.0))
    assert [worker.timeouts[1:] for worker in crew.workers] == [[2.0], [0.0]]
    crew.shut_down()


def test_what_killed_workers_have_left_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[list[int]] = []
    monkeypatch.setattr(module, "remove_left", removed.append)
    crew: Any = made()
    pids = [worker.pid for worker in crew.workers]
    module._remove_segments()
    assert pids in removed
    removed.clear()
    crew.shut_down()
    assert removed == [pids]


def test_when_python_begins_to_exit_only_what_asks_for_it_is_shut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[str] = []
    exits = SimpleNamespace(
        register=lambda what: registered.append(f"+{what.__name__}"),
        unregister=lambda what: registered.append(f"-{what.__name__}"),
    )
    monkeypatch.setattr(module, "atexit", exits)
    crew, other = made(), made()
    crew.close_at_exit()
    assert registered == ["-_close_all", "+_close_all"]
    module._close_all()
    assert ended(crew)
    assert not ended(other)
    other.shut_down()


def test_the_death_of_a_worker_is_an_error_until_the_crew_forgets_its_pids(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[int, tuple[int, ...]] = {}
    monkeypatch.setattr(module, "_set_worker_pids", known.__setitem__)
    monkeypatch.setattr(module, "_remove_worker_pids", known.__delitem__)
    monkeypatch.setattr(module, "_set_SIGCHLD_handler", lambda: None)
    monkeypatch.setattr(module, "python_exit_status", False)
    crew, other = made(), made()
    crew.watch_pids()
    other.watch_pids()
    assert known[id(crew)] == tuple(worker.pid for worker in crew.workers)
    crew.shut_down()
    assert list(known) == [id(other)]
    module._set_python_exit_flag()
    assert known == {}
    assert module.python_exit_status is True
    monkeypatch.setattr(module, "python_exit_status", False)
    other.shut_down()


def test_an_exception_before_the_pids_are_known_or_after_they_are_forgotten_leaves_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An id may come again; torch refuses one that is known, and one that is not."""
    known: dict[int, tuple[int, ...]] = {}

    def add(key: int, pids: tuple[int, ...]) -> None:
        known[key] = pids
        raise Interruption

    def remove(key: int) -> None:
        if key not in known:
            raise ValueError("Cannot find worker information")
        del known[key]

    monkeypatch.setattr(module, "_set_worker_pids", add)
    monkeypatch.setattr(module, "_remove_worker_pids", remove)
    crew = made()
    with pytest.raises(Interruption):
        crew.watch_pids()
    assert known
    crew._forget_pids()
    assert not known
    crew.pids_set = True
    crew.shut_down()
    assert ended(crew)


class At(Place):
    seconds = 1.54  # type: ignore[assignment]


class Board:
    """A progress board with these stages; worker 1 is in task 1."""

    def __init__(self, *stages: Stage) -> None:
        self.stages = stages

    def read(self, worker_id: int) -> Place:
        return At(worker_id, self.stages[worker_id], 0, 0)


@pytest.mark.parametrize(("stage", "gone"), [(Stage.STARTING, False), (Stage.INITIALISING, True)])
def test_names_of_semaphores_go_once_every_worker_has_begun(stage: Stage, gone: bool) -> None:
    crew: Any = made()
    crew.board, crew.named = Board(Stage.WAITING, stage), True
    for queue in (crew.result_queue, *crew.index_queues):
        queue.forget_names = functools.partial(crew.log.append, f"no names of {queue.name}")
    crew.forget_names()
    assert crew.named is not gone
    names = ["no names of results", "no names of index queue 0", "no names of index queue 1"]
    assert crew.log == names * gone
    crew.shut_down()


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError


def test_its_repr_says_where_each_worker_is() -> None:
    crew: Any = made()
    crew.board = Board(Stage.WAITING, Stage.FETCHING)
    for index in ([10], [11]):
        crew.driver.dispatcher.assign(index)
    first, second = (worker.pid for worker in crew.workers)
    crew.workers[0].told, crew.workers[0].exitcode = ["kill"], -9
    assert list(crew._phrases())[:2] == [
        f"worker 0 (pid {first}, exit code -9) has task 0, waiting for a task for 1.5 s",
        f"worker 1 (pid {second}, alive) has task 1, in task 1, sample index 11 (place 1 of 1) for 1.5 s",
    ]
    assert list(crew._phrases())[2].startswith("pin thread <")
    assert crew.doing(1) == "in task 1, sample index 11 (place 1 of 1)"
    crew.driver.dispatcher.task_info[1].worker_id = 0  # of the next epoch: the board is read without a lock
    assert crew.doing(1) == crew.board.read(1).describe()
    crew.driver.dispatcher.task_info[1].worker_id = 1
    crew.driver.dispatcher.task_info[1].index = [Unprintable()]
    assert "has task 1, ... ValueError for 1.5 s" in list(crew._phrases())[1]
    crew.pid += 1
    assert next(iter(crew._phrases())) == f"worker 0 (pid {first}) belongs to process {crew.pid}"
    crew.pid -= 1
    crew.shut_down()


def places(ends_by: str) -> int:
    crew: Any = made(ends_by=ends_by)
    crew.shut_down()
    return crew.log.places  # type: ignore[no-any-return]


def leaves_nobody(crew: Any) -> bool:
    return ended(crew) and crew not in module._running and "set the pin thread's done event" in crew.log


@pytest.mark.parametrize("ends_by", ENDS)
def test_an_interruption_at_any_place_ends_the_workers_all_the_same(ends_by: str) -> None:
    for place in range(places(ends_by)):
        crew: Any = made(ends_by=ends_by)
        crew.log.strikes = [place]
        with pytest.raises(KeyboardInterrupt):
            crew.shut_down()
        assert leaves_nobody(crew), (place, crew.log)
        assert "let go of results" in crew.log


@pytest.mark.parametrize("ends_by", ENDS)
def test_what_two_interruptions_leave_the_next_shutdown_ends(ends_by: str) -> None:
    for first in range(places(ends_by)):
        for second in range(first + 1, first + 8):
            crew: Any = made(ends_by=ends_by)
            crew.log.strikes = [first, second]
            with pytest.raises(KeyboardInterrupt):
                crew.shut_down()
            crew.log.strikes = []
            crew.shut_down()
            assert leaves_nobody(crew), (first, second, crew.log)
