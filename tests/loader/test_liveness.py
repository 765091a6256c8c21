"""Evidence and words for errors, of a crew that exists in name only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from minidl.loader import liveness
from minidl.loader.driver import PIN, Failure, NoteDeath, Raise
from minidl.loader.ports import FoundAlive, FoundDead, Note, TimedOut
from minidl.wire.messages import Result


class Worker:
    """Its process has ended if there is an exit code."""

    def __init__(self, pid: int, exitcode: int | None = None) -> None:
        self.pid, self.exitcode, self.joined = pid, exitcode, list[float]()

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, timeout: float) -> None:
        self.joined.append(timeout)


def crew_of(*workers: Worker, missing: int = 0, pin_thread: Any = None, jammed: bool = True, failures: Any = ()) -> Any:
    asked: list[str] = []
    return SimpleNamespace(
        handles="pid",
        pid=9,
        workers=workers,
        pin_thread=pin_thread,
        index_queues=[SimpleNamespace(failure=failure) for failure in failures],
        result_queue=SimpleNamespace(jammed=lambda: asked.append("the queue") or jammed),
        driver=SimpleNamespace(
            resume_iteration_cnt=missing,
            epoch=3,
            dispatcher=SimpleNamespace(rcvd_idx=7, workers_status=[True] * len(workers)),
            leavers=lambda dead: [worker for worker, code in dead.items() if code],
        ),
        asked=asked,
        doing=lambda number: f"step {number}",
        board=SimpleNamespace(read=lambda number: SimpleNamespace(seconds=number + 0.25)),
    )


class Notes(list[Note]):
    note = list.append


def pin_thread(alive: bool, failure: Any = None) -> Any:
    return SimpleNamespace(is_alive=lambda: alive, failure=failure)


def test_a_task_that_could_not_be_sent_is_evidence_and_an_error() -> None:
    crew = crew_of(Worker(100), Worker(101), failures=("", "MemoryError: no room"))
    assert liveness.evidence_of(crew, Notes()).unsent == (1,)
    error = liveness.error_of(crew, Raise(Failure.TASK_LOST, (1,)), 0, 0, Notes())
    assert "could not send a task (worker 1: MemoryError: no room)" in str(error)


def test_evidence_is_who_has_ended() -> None:
    crew = crew_of(Worker(100), Worker(101, -9), Worker(102, 0))
    evidence = liveness.evidence_of(crew, Notes())
    assert (evidence.dead, evidence.pin_alive, evidence.timed_out) == ({1: -9, 2: 0}, True, False)
    assert (evidence.jammed, crew.asked) == (True, ["the queue"])
    for alive in (True, False):
        crew.pin_thread = pin_thread(alive)
        evidence = liveness.evidence_of(crew, Notes(), timed_out=True)
        assert (evidence.pin_alive, evidence.timed_out) == (alive, True)


def test_who_is_found_alive_is_told_unless_somebody_with_work_is_dead() -> None:
    crew, notes = crew_of(Worker(100), Worker(101, 0)), Notes()
    liveness.evidence_of(crew, notes)
    crew.pin_thread = pin_thread(alive=False)
    crew.driver.dispatcher.workers_status[1] = False
    liveness.evidence_of(crew, notes)
    assert notes == []
    crew.pin_thread = pin_thread(alive=True)
    liveness.evidence_of(crew, notes)
    assert notes == [FoundAlive(1)]


@pytest.mark.parametrize(("code", "jammed", "asked"), [(-9, False, 1), (0, True, 0), (None, True, 0)])
def test_a_queue_is_asked_whether_it_is_jammed_only_if_that_counts(code: Any, jammed: bool, asked: int) -> None:
    crew = crew_of(Worker(100, code), jammed=jammed)
    assert liveness.evidence_of(crew, Notes()).jammed is False
    assert len(crew.asked) == asked


def test_a_death_is_noted_with_pid_and_exit_code() -> None:
    crew, notes = crew_of(Worker(100), Worker(101, -9)), Notes()
    liveness.note_death(crew, NoteDeath(1), notes)  # type: ignore[arg-type]
    liveness.note_death(crew, NoteDeath(PIN), notes)  # type: ignore[arg-type]
    assert notes == [FoundDead("worker", 1, 101, -9), FoundDead("pin thread", -1, 9, None)]


@pytest.mark.parametrize(
    ("effect", "missing", "words", "noted"),
    [
        (
            Raise(Failure.WORKER_DIED, (0, 1)),
            0,
            "DataLoader worker (pid(s) 100, 101) exited unexpectedly "
            "(worker 0: exit code None, last step 0; worker 1: exit code -9, last step 1)",
            [],
        ),
        (
            Raise(Failure.TIMED_OUT, (0,)),
            0,
            "DataLoader timed out after 5 seconds: waited 6.2 s for task 7 of worker 0 (pid 100, alive), "
            "which is step 0, for 0.2 s",
            [TimedOut(7, 0, 6.21)],
        ),
        (
            Raise(Failure.TIMED_OUT, (1,)),
            0,
            "DataLoader timed out after 5 seconds: waited 6.2 s for task 7 of worker 1 (pid 101, dead, exit code -9), "
            "which is step 1, for 1.2 s",
            [TimedOut(7, 1, 6.21)],
        ),
        (
            Raise(Failure.TIMED_OUT),
            1,
            "DataLoader timed out after 5 seconds: waited 6.2 s for 1 of 2 workers to begin epoch 3",
            [TimedOut(-1, -1, 6.21)],
        ),
        (Raise(Failure.TIMED_OUT), 0, "DataLoader timed out after 5 seconds", []),
    ],
)
def test_words_about_workers(effect: Raise, missing: int, words: str, noted: list[Note]) -> None:
    crew, notes = crew_of(Worker(100), Worker(101, -9), missing=missing), Notes()
    error = liveness.error_of(crew, effect, 5, 6.21, notes)  # type: ignore[arg-type]
    assert (type(error), str(error), notes) == (RuntimeError, f"{words} (more: minidl help hang)", noted)


@pytest.mark.parametrize(("failure", "words"), [(None, ""), (ValueError("no"), ": ValueError: no")])
def test_words_about_the_pin_thread(failure: Any, words: str) -> None:
    crew = crew_of(pin_thread=pin_thread(False, failure))
    error = liveness.error_of(crew, Raise(Failure.PIN_THREAD_DIED), 5, 6.2, Notes())  # type: ignore[arg-type]
    assert (type(error), str(error)) == (RuntimeError, f"Pin memory thread exited unexpectedly{words}")


def test_words_about_memory_that_is_not_handed_over() -> None:
    crew, notes = crew_of(Worker(100), Worker(101)), Notes()
    error = liveness.not_handed_over(crew, Result(4, 1, None), 2.5, notes)  # type: ignore[arg-type]
    assert str(error) == (
        "DataLoader timed out after 2.5 seconds: the message of task 4 is here, but worker 1 (pid 101, alive) does not "
        "hand over its memory: the process is stopped, or a call keeps its GIL. Its last step: step 1"
    )
    assert notes == [TimedOut(4, 1, 2.5)]


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (ConnectionRefusedError(), [1.0]),
        (EOFError(), [1.0]),
        (FileNotFoundError(), [5.0]),
        (RuntimeError(), []),
        (PermissionError(), []),
    ],
)
def test_only_a_worker_that_may_be_dying_is_waited_for(error: Exception, seconds: list[float]) -> None:
    crew = crew_of(Worker(100), Worker(101))
    liveness.wait_for_a_dying_worker(crew, 1, error)
    assert [worker.joined for worker in crew.workers] == [[], seconds]


@pytest.mark.parametrize("lack", [None, RuntimeError("Too many open files")])
@pytest.mark.parametrize("error", [EOFError("the end"), ConnectionResetError("reset"), ValueError("wrong")])
def test_a_result_that_cannot_be_rebuilt_is_an_error_that_is_explained(
    error: Exception, lack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "with_remedy", lambda error: lack or error)
    result = liveness.explained(Result(4, 1, "lost", (2, b"state")), error)
    assert (result.idx, result.worker_id, result.state) == (4, 1, (2, b"state"))
    assert result.data.where == "in the loader while it rebuilt a batch"
    assert result.data.place == "Task 4 of worker 1."
    if lack is not None:
        assert result.data.last_line == "RuntimeError: Too many open files"
    elif isinstance(error, ValueError):
        assert result.data.last_line == "ValueError: wrong"
    else:
        assert result.data.last_line == (
            "RuntimeError: the worker has closed the connection when it was asked for the memory of its batch. It has "
            "printed the reason: for example 'Too many open files', which `ulimit -n` helps against"
        )
        assert str(error) in result.data.text
