"""The table of all rules, with two rules that apply it again: to the owner of a lock, and to a child.

Interface: `RULES`, in order; `judged(chain)` -> `Judgement` of the first that applies.
"""

from __future__ import annotations

from typing import Final

from minidl.hang.chain import OWNED, Chain
from minidl.hang.evidence.waits import Blocked
from minidl.hang.finding import HangCause, Sure
from minidl.hang.rules import kernel, motion, parties, processes, semaphores, threads
from minidl.hang.rules.activity import holders_of, none_can_end
from minidl.hang.rules.judgement import CauseRule, Judgement, wait_seen
from minidl.hang.rules.kernel import MAY_POLL, by_kind, holders_seen


def _held_lock(chain: Chain) -> Judgement | None:
    """The owner of a lock waits itself; the rule for that wait names the reason."""
    waiter = next((link for link in reversed(chain.links) if link.kind in OWNED), None)
    if waiter is None or waiter is chain.end:
        return None
    below, polls = _judged_alone(chain), waiter.wait.bounded
    cause = HangCause.FILE_LOCK if waiter.kind is Blocked.FILE_LOCK else HangCause.LOCK
    holder = chain.links[chain.links.index(waiter) + 1]
    what = "waits for its next task" if chain.end.in_worker and chain.end.is_idle else below.what
    inherited = any(one.inherited and one.pid == holder.pid for one in waiter.wait.holders)
    has = "inherited" if inherited else "holds"
    fix = f"keep the lock for as short a time as possible, and do nothing slow meanwhile; {below.remedy}"
    return Judgement(
        cause,
        f"{has} that lock, and {what}" if holder is chain.end else f"{what}; {holder.name}, which {has} that lock, "
        "waits for it", Sure.LIKELY if polls else below.sure,
        (*holders_seen(waiter), *below.facts), (*below.also, *(MAY_POLL if polls else ())),
        _CLOSE if inherited else fix,
    )  # fmt: skip


_CLOSE: Final = (
    "close the locked file before that process starts, or start it with close_fds=True: a lock of flock lasts until "
    "the last copy of its descriptor is closed"
)


_READ_FIRST: Final = (
    "read all that the child sends before you wait for its end: get all items of its queue before join(), or use "
    "communicate()"
)


def _waiting_child(chain: Chain) -> Judgement | None:
    """The awaited child waits itself; the rule for that wait names the reason."""
    waiter = next((link for link in reversed(chain.links) if link.kind is Blocked.CHILD), None)
    if waiter is None or waiter.pid == chain.end.pid or chain.end.in_worker:
        return None
    below = _judged_alone(chain)
    if chain.end.kind is Blocked.PIPE_WRITE and none_can_end(chain.end, holders_of(chain.end)):
        facts = (wait_seen(waiter), *below.facts)
        return Judgement(HangCause.CYCLE, below.what, below.sure, facts, fix=_READ_FIRST, alone=True)
    fix = f"{below.remedy}; or end the child, or give the wait a timeout"
    return Judgement(HangCause.CHILD, below.what, below.sure, (wait_seen(waiter), *below.facts), below.also, fix,
                     alone=below.alone)  # fmt: skip


RULES: Final = (
    CauseRule(processes.worker_is_gone, "a worker has exited", "it is there"),
    CauseRule(processes.idle_and_joined, "the loop joins a worker that was not told to end",
              "it does not wait for a task"),
    CauseRule(processes.none_has_it, "a result was lost: all workers are idle", "a worker, or its feeder, is at work"),
    CauseRule(processes.worker_has_ended, "a worker died, perhaps in a message", "it runs"),
    CauseRule(by_kind(Blocked.STOPPED, Blocked.TRACED), "SIGSTOP or a debugger", "its state is not T or t"),
    CauseRule(by_kind(Blocked.UNINTERRUPTIBLE), "the kernel waits for a device", "it ran between the looks"),
    CauseRule(processes.keeps_the_gil, "C code keeps the GIL", "other threads of the process run"),
    CauseRule(processes.cycle, "each waits for the next", "one link of the cycle has a timeout"),
    CauseRule(kernel.file_lock, "a file lock is held", "the lock is free in /proc/locks"),
    CauseRule(_held_lock, "the owner of a file lock or mutex waits itself", "the lock is free"),
    CauseRule(kernel.event_loop, "an event loop has nothing to run", "it runs no event loop"),
    CauseRule(threads.mutex, "a library's mutex is held", "its owner is a thread of the process that runs"),
    CauseRule(kernel.debugger, "a debugger waits for its user", "it has no debugger's frame"),
    CauseRule(kernel.child, "a child does not end", "the child has ended"),
    CauseRule(_waiting_child, "a child waits itself", "the child has ended"),
    CauseRule(parties.barrier, "not all parties came", "all parties are at the barrier"),
    CauseRule(parties.same_half, "ranks all send, or all receive", "one of them does the other half"),
    CauseRule(parties.collective_missed, "another rank did not come", "all ranks are in the collective"),
    CauseRule(parties.rank_naps, "a rank sleeps outside of the collective", "it has gone on since the first look"),
    CauseRule(parties.manager, "a Manager's object is waited for", "its client goes on"),
    CauseRule(parties.store, "no process sets a key of a TCPStore", "a process sets it"),
    CauseRule(threads.exit_waits, "a thread that is no daemon holds up Python's exit", "the thread ends"),
    CauseRule(threads.thread_is_missing, "fork copied no threads", "a thread of the process could answer"),
    CauseRule(threads.pool_does_nothing, "a pool lost the task", "one of the pool is at work"),
    CauseRule(threads.import_waits_for_itself, "an import waits for threads that wait for it", "one of them goes on"),
    CauseRule(threads.threads_wait_for_one_another, "all threads wait for results that they should make",
              "one of them is at work"),
    CauseRule(threads.thread_answers_late, "another thread does not answer", "that thread is at work"),
    CauseRule(threads.no_thread_answers, "no thread can answer", "a thread of the process could answer"),
    CauseRule(threads.native_pool_is_missing, "fork copied no threads of a C library", "the line takes a lock"),
    CauseRule(threads.lock_of_another_thread, "another thread holds a lock of Python's", "its holder runs"),
    CauseRule(threads.module_lock, "a module's import lock was held at the fork", "another thread imports it"),
    CauseRule(threads.lock_at_the_fork, "a lock was held at the fork, or by the worker", "no thread was forked away"),
    CauseRule(threads.lock_stays_held, "a lock that no thread can release", "another thread may release it"),
    CauseRule(semaphores.full_queue, "a bounded queue is full", "a process reads it"),
    CauseRule(semaphores.loaders_queue, "the lock of a loader's queue is held", "its holder runs"),
    CauseRule(semaphores.none_notifies, "an Event or Condition shared between processes", "a process sets it"),
    CauseRule(semaphores.held_by_itself, "a process takes its lock twice", "its stack has not taken the lock before"),
    CauseRule(semaphores.crossed_locks, "two locks shared between processes, crossed",
              "another process may hold one of them"),
    CauseRule(semaphores.shared_lock, "a lock shared between processes is held", "its holder runs"),
    CauseRule(semaphores.permit_lost, "a permit was not given back", "a process that shares it could release it"),
    CauseRule(kernel.pipe_full, "the other end of a pipe does not read", "bytes move"),
    CauseRule(kernel.writer_is_elsewhere, "the process with a pipe's writing end does something else", "bytes move"),
    CauseRule(kernel.queue_empty, "no process puts into a queue", "a process puts"),
    CauseRule(kernel.pipe_empty, "the other end of a pipe does not write", "bytes move"),
    CauseRule(by_kind(Blocked.FIFO, Blocked.TERMINAL, Blocked.SIGNAL, Blocked.FILE),
              "a FIFO, a terminal, a signal or a file", "the other end answers"),
    CauseRule(kernel.server_without_clients, "no client connects to a server", "a client connects"),
    CauseRule(kernel.socket, "the other end does not answer", "bytes move"),
    CauseRule(motion.sleeps, "it sleeps", "the sleep ends soon"),
    CauseRule(motion.waits_for_a_gpu, "a GPU's result is waited for", "the line computes on the CPU"),
    CauseRule(motion.computes, "it computes", "its sample changed between the looks"),
    CauseRule(motion.no_cpu, "other threads use the CPUs", "it gets CPU time"),
    CauseRule(motion.moves, "it moves", ""),
    CauseRule(motion.unknown, "nothing above fits", ""),
)  # fmt: skip
"""The first rule that applies names the cause. Rules that do not depend on the code come first."""


def judged(chain: Chain) -> Judgement:
    """The result of the first rule that applies."""
    return next(found for rule in RULES if (found := rule.test(chain)) is not None)


def _judged_alone(chain: Chain) -> Judgement:
    """The result of the first rule that applies to the chain's last link."""
    return judged(Chain(chain.links[-1:]))
