"""Which actor died, what a timeout was spent on: evidence and words for errors.

`evidence_of` is what `driver.Driver.nothing_came` decides from; `error_of` makes the error that it asks for.
Article 4 §shutdown; upstream: `_try_get_data`.
"""

from __future__ import annotations

from minidl.loader.crew import Crew
from minidl.loader.driver import PIN, Evidence, Failure, NoteDeath, Raise
from minidl.loader.ports import FoundAlive, FoundDead, Ports, TimedOut
from minidl.wire.errors import ExceptionWrapper, more, with_remedy
from minidl.wire.messages import Result


def evidence_of(crew: Crew, ports: Ports, *, timed_out: bool = False) -> Evidence:
    """Which workers have ended, with their exit codes, and whether the pin thread runs: a liveness check.

    Whether the result queue is jammed takes up to a second to see, so it is looked at only if it counts.
    """
    dead = {number: worker.exitcode for number, worker in enumerate(crew.workers) if not worker.is_alive()}
    pin_alive = crew.pin_thread is None or crew.pin_thread.is_alive()
    has_work = crew.driver.dispatcher.workers_status
    if pin_alive and not any(has_work[number] for number in dead):
        ports.note(FoundAlive(sum(has_work)))
    return Evidence(
        dead=dead,
        pin_alive=pin_alive,
        timed_out=timed_out,
        jammed=bool(crew.driver.leavers(dead)) and crew.result_queue.jammed(),
        unsent=tuple(number for number, queue in enumerate(crew.index_queues) if queue.failure),
    )


def note_death(crew: Crew, death: NoteDeath, ports: Ports) -> None:
    """Tell the ports which actor was found dead."""
    if death.who == PIN:
        ports.note(FoundDead("pin thread", -1, crew.pid, None))
    else:
        worker = crew.workers[death.who]
        ports.note(FoundDead("worker", death.who, worker.pid, worker.exitcode))


def error_of(crew: Crew, effect: Raise, timeout: float, waited: float, ports: Ports) -> RuntimeError:
    """The error that the driver asks for. timeout: the user's, waited: how long the loader has waited; seconds."""
    if effect.why is Failure.WORKER_DIED:
        return _worker_died(crew, effect.workers)
    if effect.why is Failure.TASK_LOST:
        lost = "; ".join(f"worker {number}: {crew.index_queues[number].failure}" for number in effect.workers)
        return RuntimeError(f"DataLoader could not send a task ({lost}): its batch is lost. Make a new DataLoader")
    if effect.why is Failure.TIMED_OUT:
        return _timed_out(crew, effect.workers, timeout, waited, ports)
    failure = crew.pin_thread.failure
    reason = "" if failure is None else f": {type(failure).__name__}: {failure}"
    return RuntimeError(f"Pin memory thread exited unexpectedly{reason}")


def _worker_died(crew: Crew, workers: tuple[int, ...]) -> RuntimeError:
    pids = ", ".join(str(crew.workers[worker].pid) for worker in workers)
    last = "; ".join(f"worker {i}: exit code {crew.workers[i].exitcode}, last {crew.doing(i)}" for i in workers)
    return RuntimeError(f"DataLoader worker ({crew.handles}(s) {pids}) exited unexpectedly ({last}) ({more('died')})")


def _timed_out(crew: Crew, workers: tuple[int, ...], timeout: float, waited: float, ports: Ports) -> RuntimeError:
    message = f"DataLoader timed out after {timeout} seconds"
    if crew.driver.resume_iteration_cnt:
        ports.note(TimedOut(-1, -1, waited))
        late = f"{crew.driver.resume_iteration_cnt} of {len(crew.workers)} workers"
        message += f": waited {waited:.1f} s for {late} to begin epoch {crew.driver.epoch}"
    for number in workers:
        worker, task = crew.workers[number], crew.driver.dispatcher.rcvd_idx
        ports.note(TimedOut(task, number, waited))
        alive = "alive" if worker.is_alive() else f"dead, exit code {worker.exitcode}"
        message += (
            f": waited {waited:.1f} s for task {task} of worker {number} "
            f"({crew.handles} {worker.pid}, {alive}), which is {crew.doing(number)}, "
            f"for {crew.board.read(number).seconds:.1f} s"
        )
    return RuntimeError(f"{message} ({more('hung')})")


def not_handed_over(crew: Crew, result: Result, timeout: float, ports: Ports) -> RuntimeError:
    """The error of a batch that came, and whose worker did not answer for `timeout` seconds when asked for its memory.

    The batch is given up: its descriptors can be asked for only once.
    """
    number = result.worker_id
    ports.note(TimedOut(result.idx, number, timeout))
    return RuntimeError(
        f"DataLoader timed out after {timeout} seconds: the message of task {result.idx} is here, but worker {number} "
        f"(pid {crew.workers[number].pid}, alive) does not hand over its memory: the process is stopped, or a call "
        f"keeps its GIL. Its last step: {crew.doing(number)}"
    )


def wait_for_a_dying_worker(crew: Crew, worker_id: int, error: Exception) -> None:
    """Wait for the worker to end: a dying process closes its socket before it can be found dead.

    One that has removed its socket is on its way out, and gets more time than one that only does not answer.
    """
    if isinstance(error, (ConnectionError, FileNotFoundError, EOFError)):
        crew.workers[worker_id].join(timeout=5.0 if isinstance(error, FileNotFoundError) else 1.0)


def _refused(error: Exception) -> Exception:
    """The error in words, if it says only that a connection has ended: the worker lives, and has printed the reason."""
    if not isinstance(error, (EOFError, ConnectionError)):
        return error
    refused = RuntimeError(
        "the worker has closed the connection when it was asked for the memory of its batch. It has printed the "
        "reason: for example 'Too many open files', which `ulimit -n` helps against"
    )
    refused.__cause__ = error
    return refused


def explained(result: Result, error: Exception) -> Result:
    """The result with an error in place of the data that can't be rebuilt, so that the epoch goes on."""
    error = with_remedy(_refused(error))
    where = "in the loader while it rebuilt a batch"
    wrapper = ExceptionWrapper(error, where, f"Task {result.idx} of worker {result.worker_id}.")
    return Result(result.idx, result.worker_id, wrapper, result.state)
