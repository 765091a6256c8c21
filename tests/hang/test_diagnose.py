"""What the doctor says of made evidence: who, where and what; how sure; and when it does not know."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from made_evidence import (
    CONNECTION,
    FORK,
    LOCKED,
    LOOP,
    MAIN,
    QUEUES,
    RESULTS,
    SLEEPS,
    feeder,
    later,
    library,
    look,
    loop,
    next_stack,
    polls,
    process,
    thread,
    user,
    worker,
)  # fmt: skip

from minidl.hang.case import RunFacts
from minidl.hang.diagnose import diagnose
from minidl.hang.evidence.model import (
    BACKLOG,
    Descriptor,
    FileLock,
    Frame,
    RunEvidence,
    SeenProcess,
    SeenThread,
    Semaphore,
    Syscall,
)
from minidl.hang.finding import Finding, HangCause, RecordedWait, RunOutcome, Sure
from minidl.hang.places import LoaderStep
from minidl.hang.rules.activity import stirs

OPENS = Syscall("openat", "opens /data/a.fifo")
FLOCK = Syscall("flock", "LOCK_EX", (7, 2), (7,), timeout=-1.0)
IDLE = worker(0, step="idle")


def found(*processes: SeenProcess, **more: object) -> Finding:
    return diagnose([look(*processes, **more)])  # type: ignore[arg-type]


def with_locks(pid: int, *held: str) -> Descriptor:
    return Descriptor(7, "file", "/data/index.lock", 77, 3, "rw", locks=held)


def sharing(one: SeenProcess) -> SeenProcess:
    """The process with the semaphore of several processes that LOCKED waits for."""
    return replace(one, semaphores=(Semaphore("sem.mp", 700, 4096, 0, 1),))


# --- Who, where, what -------------------------------------------------------------------------------------------------
def test_a_file_lock_names_its_holder_and_what_that_is_in() -> None:
    holder = worker(
        0, user("time.sleep(990)"), call=SLEEPS, descriptors=(with_locks(101, "1: FLOCK ADVISORY WRITE 101"),)
    )
    waiter = worker(1, user("fcntl.flock(f, fcntl.LOCK_EX)"), call=FLOCK, descriptors=(with_locks(102),))
    locks = (FileLock(1, "FLOCK", "WRITE", 101, 3, 77), FileLock(1, "FLOCK", "WRITE", 102, 3, 77, waits=True))
    said = found(loop(1), holder, waiter, locks=locks)
    at = "in sample 37 (Data.__getitem__ at data.py:12) for 41.0 s"
    assert said.sentence == (
        f"hung: the loop (pid 100) waits for worker 1 (pid 102), {at}: it is waiting in flock on /data/index.lock; "
        f"worker 0 (pid 101), {at}, holds that lock, and is asleep (990 s more)"
    )
    assert (said.cause, said.sure) == (HangCause.FILE_LOCK, Sure.CERTAIN)
    assert (said.who["worker"], said.where["sample"]) == (0, 37)


def test_the_holder_of_an_inherited_lock_is_who_has_the_open_file_and_not_who_took_it() -> None:
    child = process(300, LOOP, thread(300, None, SLEEPS), name="sleep", descriptors=(with_locks(300, "1: FLOCK"),))
    waiter = worker(1, user("flock"), call=FLOCK, descriptors=(with_locks(102),))
    said = found(loop(1), IDLE, waiter, child, locks=(FileLock(1, "FLOCK", "WRITE", LOOP, 3, 77),))
    assert said.who["pid"] == 300
    assert any("which process 100 took and passed on" in fact.text for fact in said.evidence)


def test_two_that_wait_for_each_other_are_a_cycle() -> None:
    def stuck(number: int, wants: int, has: int) -> SeenProcess:
        files = (
            Descriptor(7, "file", f"/data/{wants}.lock", wants, 3, "rw"),
            Descriptor(8, "file", f"/data/{has}.lock", has, 3, "rw", locks=("1: FLOCK",)),
        )
        return worker(number, user("flock"), call=FLOCK, descriptors=files)

    locks = tuple(FileLock(i, "FLOCK", "WRITE", 101 + i, 3, 70 + i) for i in (0, 1))
    said = found(loop(1), stuck(0, 71, 70), stuck(1, 70, 71), locks=locks)
    assert said.cause is HangCause.CYCLE
    assert "worker 1 (pid 102) -> worker 0 (pid 101) -> worker 1 (pid 102)" in said.sentence


POOL = ("/lib/python3.11/concurrent/futures/_base.py", "/lib/python3.11/concurrent/futures/thread.py")
WAIT = library("Condition.wait", source="waiter.acquire()")


@pytest.mark.parametrize(
    ("inside", "call", "main", "cause", "said"),
    [
        ((user("time.sleep(990)"),), SLEEPS, {}, HangCause.SLEEP, "it is asleep (990 s more)"),
        ((user("x"),), SLEEPS, {"state": "T"}, HangCause.STOPPED, "it is stopped by a signal (state T)"),
        ((user("x"),), SLEEPS, {"state": "D"}, HangCause.UNINTERRUPTIBLE, "in an uninterruptible sleep"),
        ((user("sleep"),), SLEEPS, {"gil": True}, HangCause.GIL, "it keeps the GIL, asleep (990 s more)"),
        ((user("os.waitpid(pid, 0)"),), Syscall("wait4", "for any child", target=0, timeout=-1.0), {}, HangCause.CHILD,
         "waits for its child"),
        ((user("open(fifo)"),), None, {}, HangCause.UNKNOWN, "asleep"),
        ((user("with lock:"),), LOCKED, {}, HangCause.SELF_LOCK, "that no thread of its process can release"),
        ((user("with lock:"),), LOCKED, {"owner": 100}, HangCause.FORK_LOCK, "was locked at the fork"),
        ((WAIT, library("Event.wait"), user("ready.wait()")), LOCKED, {}, HangCause.NOBODY, "waits in Event.wait"),
        ((WAIT, library("Queue.get", "/lib/python3.11/queue.py"), user("q.get()")), LOCKED, {}, HangCause.QUEUE_EMPTY,
         "waits in Queue.get"),
        ((WAIT, library("Future.result", POOL[0]), user("f.result()")), LOCKED, {}, HangCause.MISSING_THREAD,
         "waits in Future.result (_base.py) for a thread that the fork did not copy"),
        ((user("sock.recv(1)"),), Syscall("recvfrom", "", (9,), (9,)), {}, HangCause.SOCKET,
         "waiting for data at a socket"),
        ((user("p.stdin.write(data)"),), Syscall("write", "", (8,), (8,)), {}, HangCause.PIPE_FULL,
         "waiting for room in pipe 80"),
        ((user("os.read(r, 1)"),), Syscall("read", "", (6,), (6,)), {}, HangCause.PIPE_EMPTY,
         "waiting for data in pipe 60"),
        ((user("open(path)"),), OPENS, {"wchan": "wait_for_partner"}, HangCause.FIFO,
         "opening /data/a.fifo, a FIFO whose other end no process has opened"),
        ((user("input()"),), Syscall("read", "", (10,), (10,)), {}, HangCause.TERMINAL,
         "waiting for input at /dev/pts/3"),
        ((user("signal.pause()"),), Syscall("pause"), {}, HangCause.SIGNAL, "waiting for a signal"),
        ((user("f.read()"),), Syscall("read", "", (11,), (11,)), {}, HangCause.FILE, "in read of /data/a.bin"),
        ((user("return torch.rand(9).add(1)"),), LOCKED, {}, HangCause.MISSING_THREAD, "waits in C code for threads"),
        ((user("x"),), None, {"state": "R", "cpu": 0.01}, HangCause.NO_CPU, "ready to run, but gets only 2% of a CPU"),
        ((user("x"),), None, {"cpu": 0.01, "switches": 9}, HangCause.NONE, "running from time to time"),
    ],
)  # fmt: skip
def test_a_worker_stuck_in_a_sample(
    inside: tuple[Frame, ...], call: Syscall | None, main: dict[str, object], cause: HangCause, said: str
) -> None:
    files = (
        Descriptor(9, "socket", "socket:[90]", 90, mode="rw"),
        Descriptor(8, "pipe", "pipe:[80]", 80, mode="w"),
        Descriptor(6, "pipe", "pipe:[60]", 60, mode="r"),
        Descriptor(10, "device", "/dev/pts/3", 1, 2, "r"),
        Descriptor(11, "file", "/data/a.bin", 2, 2, "r"),
    )
    verdict = found(loop(1), IDLE, worker(1, *inside, call=call, descriptors=files, **main))  # type: ignore[arg-type]
    assert verdict.cause is cause
    assert said in verdict.sentence
    assert "the loop (pid 100) waits for worker 1 (pid 102), in sample 37" in verdict.sentence


def test_a_lock_that_a_thread_of_the_parent_holds_was_held_at_the_fork() -> None:
    other = thread(150, (user("with lock:", "hold"),), SLEEPS, name="refresher")
    said = found(loop(1, other), IDLE, worker(1, user("with lock:"), call=LOCKED))
    assert (said.cause, said.sure) == (HangCause.FORK_LOCK, Sure.LIKELY)
    assert any("refresher" in fact.text for fact in said.evidence)


@pytest.mark.parametrize(
    ("step", "words", "where"),
    [("collate", "collating a batch", "collate"), ("init", "in worker_init_fn", "init")],
)
def test_the_users_own_code_is_named(step: str, words: str, where: str) -> None:
    said = found(loop(1), IDLE, worker(1, user("time.sleep(990)", "mine"), call=SLEEPS, step=step))
    assert f"{words} (mine at data.py:12)" in said.sentence
    assert said.where["step"] == where


def test_a_feeder_thread_in_the_users_reduce() -> None:
    feeding = feeder(
        202, user("time.sleep(990)", "Image.__reduce__"), source="obj = _ForkingPickler.dumps(obj)", call=SLEEPS
    )
    said = found(loop(1), IDLE, worker(1, step="idle", others=(feeding,)))
    assert "worker 1 (pid 102), pickling a batch (Image.__reduce__ at data.py:12)" in said.sentence
    assert said.where["step"] == "pickle"


def test_a_barrier_names_who_has_not_come() -> None:
    stack = (library("Barrier.wait"), user("barrier.wait()"))
    said = found(loop(1), IDLE, worker(1, *stack, call=LOCKED))
    assert said.cause is HangCause.BARRIER
    assert "it waits at a barrier; worker 0 (pid 101) has not reached it" in said.sentence


def test_a_collective_without_the_other_ranks_says_that_they_were_not_seen() -> None:
    collective = library("all_reduce", "/site-packages/torch/distributed/distributed_c10d.py")
    said = found(loop(stack=(collective, MAIN_OF), call=LOCKED), IDLE)
    assert (said.cause, said.sure) == (HangCause.COLLECTIVE, Sure.LIKELY)
    assert "on other machines" in said.also[0]


def test_a_queue_that_the_dataset_asks_is_not_the_loaders() -> None:
    get = Frame("Queue.get", QUEUES, 103, source="res = self._recv_bytes()")
    reads = Syscall("read", "", (6,), (6,))
    users = Descriptor(6, "pipe", "pipe:[60]", 60, mode="r")
    said = found(loop(1), IDLE, worker(1, get, user("cache.get()"), call=reads, descriptors=(users,)))
    assert (said.cause, said.where["step"], said.where["sample"]) == (HangCause.QUEUE_EMPTY, "sample", 37)


def test_a_lock_without_an_owner_is_held_by_who_is_further_in_the_same_function() -> None:
    queue = {"self": "<Queue at 0x20>"}  # the loop's is at 0x10
    asks = Frame("Queue.get", QUEUES, 102, queue, "with self._rlock:")
    gets = Frame("Queue.get", QUEUES, 103, queue, "res = self._recv_bytes()")
    reads = Syscall("read", "", (6,), (6,))
    users = Descriptor(6, "pipe", "pipe:[60]", 60, mode="r")
    holder = sharing(worker(0, gets, user("q.get()"), call=reads, descriptors=(users,)))
    said = found(sharing(loop(1)), holder, sharing(worker(1, asks, user("q.get()"), call=LOCKED)))
    assert (said.cause, said.who["worker"]) == (HangCause.QUEUE_EMPTY, 0)
    assert "holds the lock, by its stack" in said.chain[2]


def test_a_signal_handler_is_not_the_code_that_it_interrupted() -> None:
    stack = (user("time.sleep(990)", "handler"), library("Select.select", "/lib/python3.11/selectors.py",
             "fd_event_list = self._selector.poll(timeout)"), *next_stack(1))  # fmt: skip
    said = found(loop(stack=stack, call=SLEEPS), IDLE)
    assert "in a signal handler or finalizer" in said.sentence
    assert said.cause is HangCause.SLEEP
    assert said.where["step"] == "signal-handler"


def test_a_signal_handler_that_interrupts_the_users_code_has_a_frame_as_its_argument() -> None:
    stack = (user("with lock:", "save"), user("save()", "handler", signum="10", _="<frame at 0x77>"), MAIN_OF)
    said = found(loop(stack=stack, call=LOCKED), IDLE)
    assert (said.cause, said.where["step"]) == (HangCause.SELF_LOCK, "signal-handler")


def test_a_loop_that_shuts_down_waits_for_a_worker_and_not_for_a_pipe() -> None:
    join = Frame("It._shutdown_workers", "/site-packages/torch/utils/data/dataloader.py", 1650, {}, "w.join(timeout=5)")
    ended = Descriptor(3, "pipe", "pipe:[600]", 600, mode="r")
    sentinel = Descriptor(8, "pipe", "pipe:[600]", 600, mode="w")
    said = found(
        loop(stack=(join, MAIN_OF), descriptors=(ended,)),
        worker(0, user("sleep"), call=SLEEPS, descriptors=(sentinel,)),
    )
    assert said.cause is HangCause.SLEEP
    assert "shuts down, and waits for worker 0 (pid 101), in sample 37" in said.sentence


SERVER = ("python", "-c", "from multiprocessing.forkserver import main; main(3, 4, [], {})")
"""The command line of a fork server, and of all that it starts."""


@pytest.mark.parametrize("finalizes", [True, False])
def test_the_pipe_of_a_fork_server_tells_of_its_childs_end(finalizes: bool) -> None:
    """The server has the pipe that the loop waits at, and does not end: the loop waits for one of the server's."""
    join = Frame("It._shutdown_workers", "/site-packages/torch/utils/data/dataloader.py", 1650, {}, "w.join(timeout=5)")
    ended = Descriptor(3, "pipe", "pipe:[600]", 600, mode="r")
    tells = Descriptor(8, "pipe", "pipe:[600]", 600, mode="w")
    selects = library("EpollSelector.select", "/lib/python3.11/selectors.py", "fd_event_list = self._selector.poll()")
    asleep = Syscall("epoll_wait", "3 descriptors", (4,), (), timeout=-1.0)
    server = process(90, LOOP, thread(90, (selects,), asleep), command=SERVER, descriptors=(tells,))
    last = library("_run_finalizers", "/lib/python3.11/multiprocessing/util.py", "finalizer()")
    ends = process(101, 90, thread(101, (last, user("main()")), SLEEPS), name="pt_data_worker", command=SERVER)
    stopping = loop(stack=(join, MAIN_OF), descriptors=(ended,))
    said = diagnose(later(stopping, server, *([ends] if finalizes else [])))
    if finalizes:
        assert "shuts down, and waits for worker 0 (pid 101), at Python's exit" in said.sentence
        assert (said.outcome, said.who["role"]) == (RunOutcome.MAYBE_HUNG, "worker")
    else:  # the worker has just ended, and the loop is about to hear of it
        assert (said.cause, said.who["role"]) == (HangCause.UNKNOWN, "loop")
    stopped = replace(server, threads=(replace(server.threads[0], state=("T", "T")),))
    said = diagnose(later(stopping, stopped))
    assert (said.cause, said.who["pid"]) == (HangCause.STOPPED, 90)


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("parents", [True, False])
def test_a_rank_that_a_fork_server_has_started_iterates(seen: bool, parents: bool) -> None:
    """Its workers are forks of it. seen: there are stacks; parents: its parents were looked at, too."""
    serves = library("_serve_one", "/lib/python3.11/multiprocessing/forkserver.py", "code = spawn._main(child_r, x)")
    stack = (*next_stack(1), serves) if seen else None
    rank = process(LOOP, 90, thread(LOOP, stack, polls(3), idle=1.0, switches=1), command=SERVER)
    rank = replace(rank, descriptors=loop(1).descriptors)
    asleep = worker(1, user("time.sleep(990)"), call=SLEEPS)
    others = [replace(one, command=SERVER) for one in (IDLE, asleep)]
    launch = process(80, 1, thread(80, None, Syscall("wait4", "for process 90", target=90, timeout=-1.0)))
    server = process(90, 80, thread(90, None, Syscall("epoll_wait", "", (4,), (), timeout=-1.0)), command=SERVER)
    more = (launch, server) if parents else ()
    said = diagnose(later(rank, *others, *more))
    assert (said.cause, said.who["worker"]) == (HangCause.SLEEP, 1)
    assert "the loop (pid 100) waits for worker 1 (pid 102)" in said.sentence


def test_a_loop_that_joins_a_thread_waits_for_what_that_waits_for() -> None:
    join = library("Thread.join", source="self._wait_for_tstate_lock()", self="<Thread at 0x77>")
    bottom = library("Thread._bootstrap_inner", self="<Thread at 0x77>")
    trainer = thread(150, (*next_stack(1), bottom), polls(3), name="trainer", idle=1.0, switches=1)
    said = found(loop(1, trainer, stack=(join, MAIN_OF), call=LOCKED), IDLE, worker(1, user("sleep"), call=SLEEPS))
    assert "waits for worker 1 (pid 102), in sample 37" in said.sentence
    puts = thread(150, (WAIT, library("Queue.put", "/lib/python3.11/queue.py"), user("out.put(x)", "prefetch"), bottom),
                  LOCKED, name="prefetch")  # fmt: skip
    said = found(loop(1, puts, stack=(join, MAIN_OF), call=LOCKED), IDLE)
    assert "the loop (pid 100), in its own code, waits for its thread prefetch, in its own code" in said.sentence


def test_a_signal_handler_that_joins_a_thread_waits_for_what_that_waits_for() -> None:
    join = library("Thread.join", source="self._wait_for_tstate_lock()", self="<Thread at 0x77>")
    bottom = library("Thread._bootstrap_inner", self="<Thread at 0x77>")
    stack = (join, user("saver.join()", "handler"), library("Select.select", "/lib/python3.11/selectors.py",
             "fd_event_list = self._selector.poll(timeout)"), *next_stack(1))  # fmt: skip
    saver = thread(150, (user("time.sleep(990)", "save"), bottom), SLEEPS, name="saver")
    said = found(loop(1, saver, stack=stack, call=LOCKED), IDLE)
    assert (said.cause, said.who["thread"], said.where["function"]) == (HangCause.SLEEP, 150, "save")
    assert "in a signal handler or finalizer (handler at data.py:12), waits for" in said.sentence


MAIN_OF = Frame("<module>", "/home/a/train.py", 30, source="trainer.join()")


def test_a_rank_in_a_collective_leads_to_the_rank_that_did_not_come() -> None:
    collective = library("all_reduce", "/site-packages/torch/distributed/distributed_c10d.py")
    first = loop(stack=(collective, MAIN_OF), call=LOCKED)
    other = replace(loop(1), pid=200, ppid=1, threads=(replace(loop(1).threads[0], tid=200),))
    guilty = replace(worker(1, user("sleep"), call=SLEEPS), ppid=200)
    said = diagnose([look(first, other, guilty, replace(IDLE, ppid=LOOP))])
    assert said.who["pid"] == guilty.pid
    assert "in sample 37" in said.sentence


def test_a_rank_in_a_collective_names_the_other_collective_that_a_rank_is_in() -> None:
    """The other rank's loop is over, and its workers are gone: the trace knows that it was one."""
    where = "/site-packages/torch/distributed/distributed_c10d.py"
    first = loop(stack=(library("all_reduce", where), user("dist.all_reduce(x)", "train", 13), MAIN), call=LOCKED)
    other = process(200, 1, thread(200, (library("recv", where), user("dist.recv(t)", "train", 15), MAIN), LOCKED))
    told = RecordedWait(hung=True, seconds=9.0, pid=LOOP, own_code=True, ranks={LOOP: 0, 200: 1})
    said = diagnose([look(first, other, IDLE)], told)
    assert said.cause is HangCause.COLLECTIVE
    assert "the other ranks; rank 1: the loop (pid 200) is in recv (train at data.py:15)" in said.sentence
    assert not said.also
    same = process(200, 1, thread(200, first.threads[0].stack, LOCKED))
    assert diagnose([look(first, same, IDLE)], told).also


@pytest.mark.parametrize(("half", "other"), [("recv", "sends"), ("send", "receives")])
def test_two_ranks_that_do_the_same_half_of_a_transfer_wait_for_one_another(half: str, other: str) -> None:
    where = "/site-packages/torch/distributed/distributed_c10d.py"
    stack = (library(half, where), user("", "meet", 14), MAIN)

    def rank(function: str) -> SeenProcess:
        return process(200, 1, thread(200, (library(function, where), user("", "meet", 20), MAIN), LOCKED))

    told = RecordedWait(hung=True, seconds=9.0, pid=LOOP, own_code=True, ranks={LOOP: 0, 200: 1})
    said = diagnose([look(loop(stack=stack, call=LOCKED), rank(half), IDLE)], told)
    assert (said.outcome, said.cause, said.sure) == (RunOutcome.HUNG, HangCause.CYCLE, Sure.LIKELY)
    assert said.sentence.endswith(
        f"waits in {half} for another rank; so does rank 1: the loop (pid 200), and none of them {other}"
    )
    said = diagnose([look(loop(stack=stack, call=LOCKED), rank("all_reduce"), IDLE)], told)
    assert said.cause is HangCause.COLLECTIVE
    assert f"waits in {half} for the other ranks; rank 1: the loop (pid 200) is in all_reduce" in said.sentence
    assert diagnose([look(loop(stack=stack, call=LOCKED), IDLE)], told).cause is HangCause.COLLECTIVE


def test_what_is_told_of_one_loop_hides_no_workers_of_another() -> None:
    """A trace of two ranks tells of rank 0's loop, whose own code waits for rank 1, whose worker sleeps."""
    reduces = library("all_reduce", "/site-packages/torch/distributed/distributed_c10d.py")
    first = loop(stack=(reduces, MAIN_OF), call=LOCKED)
    other = replace(loop(1), pid=200, ppid=1, threads=(replace(loop(1).threads[0], tid=200),))
    guilty = replace(worker(1, user("sleep"), call=SLEEPS), ppid=200)
    told = RecordedWait(
        hung=True, seconds=9.0, pid=LOOP, own_code=True, numbers={101: 0}, others=frozenset((guilty.pid,))
    )
    assert diagnose([look(first, other, guilty, IDLE)], told).who["pid"] == guilty.pid


def test_a_lock_of_several_processes_that_nobody_is_about_to_release() -> None:
    said = found(sharing(loop(1)), sharing(IDLE), sharing(worker(1, user("lock.acquire()"), call=LOCKED)))
    assert (said.cause, said.sure) == (HangCause.PERMIT_LOST, Sure.LIKELY)
    holder = worker(0, user("compute()"), call=SLEEPS)
    said = found(sharing(loop(1)), sharing(holder), sharing(worker(1, user("lock.acquire()"), call=LOCKED)))
    assert (said.cause, said.sure) == (HangCause.SEMAPHORE, Sure.POSSIBLE)


def test_two_locks_of_several_processes_that_are_crossed_are_a_circle() -> None:
    def stuck(number: int, wants: int, step: str = "sample") -> SeenProcess:
        call = Syscall("futex", "wait", (wants, 393), address=wants, timeout=-1.0)
        return worker(number, user("with second:"), call=call, step=step)

    def shared(*processes: SeenProcess) -> Finding:
        both = (Semaphore("sem.a", 700, 4096, 0, 1), Semaphore("sem.b", 701, 8192, 0, 1))
        return found(*[replace(one, semaphores=both) for one in processes])

    said = shared(loop(1), stuck(0, 4096), stuck(1, 8192))
    assert (said.outcome, said.cause, said.sure) == (RunOutcome.HUNG, HangCause.CYCLE, Sure.LIKELY)
    assert "a lock that only worker 0 (pid 101), in Data.__getitem__ at data.py:12, may hold" in said.sentence
    third = worker(2, user("compute()"), call=SLEEPS)
    assert shared(loop(1), stuck(0, 4096), stuck(1, 8192), third).cause is HangCause.SEMAPHORE


def test_a_lock_that_is_asked_for_again_and_again_is_waited_for() -> None:
    """`while not lock.acquire(timeout=0.5)`: one look does not tell it from a wait that ends."""

    asks = replace(LOCKED, timeout=0.4)
    waits = sharing(worker(1, user("while not lock.acquire(timeout=0.5):"), call=asks, idle=0.1, switches=1))
    everyone = (sharing(loop(1)), sharing(worker(0, user("compute()"), call=SLEEPS)), waits)
    assert found(*everyone).cause is HangCause.UNKNOWN
    said = diagnose(later(*everyone))
    assert (said.outcome, said.cause, said.who["worker"]) == (RunOutcome.MAYBE_HUNG, HangCause.SEMAPHORE, 1)


def test_a_child_whose_pipes_are_not_read_makes_a_circle_that_names_both_pipes() -> None:
    def pipe(inode: int, fd: int, mode: str) -> Descriptor:
        return Descriptor(fd, "pipe", f"pipe:[{inode}]", inode, mode=mode)

    reads, writes = Syscall("read", "", (7,), (7,)), Syscall("write", "", (2,), (2,))
    waits = worker(1, user("p.stdout.read()"), call=reads, descriptors=(pipe(60, 7, "r"), pipe(61, 8, "r")))
    child = process(300, 102, thread(300, (), writes), name="ffmpeg", descriptors=(pipe(60, 1, "w"), pipe(61, 2, "w")))
    said = found(loop(1), IDLE, waits, child)
    assert (said.cause, said.sure) == (HangCause.CYCLE, Sure.CERTAIN)
    assert "is waiting for data in pipe 60" in said.sentence
    assert said.sentence.endswith("process ffmpeg (pid 300), a child of worker 1 is waiting for room in pipe 61)")
    assert "communicate()" in said.fix


@pytest.mark.parametrize("computes", [True, False])
def test_a_loop_that_waits_for_a_pool_whose_processes_compute_is_no_hang_for_certain(computes: bool) -> None:
    pool = "/lib/python3.11/multiprocessing/pool.py"
    waits = (library("Event.wait"), library("ApplyResult.get", pool), user("pool.map(score, parts)", "evaluate"), MAIN)
    results = thread(150, (library("Pool._handle_results", pool, "task = get()"),), polls(3), name="results")

    def scores(pid: int) -> SeenProcess:
        stack = (user("while left:", "score"), library("worker", pool, "result = (True, func(*args, **kwds))"), MAIN)
        busy = thread(pid, stack, None, state="R", cpu=0.4) if computes else thread(pid, stack, SLEEPS)
        return process(pid, LOOP, busy)

    told = RecordedWait(hung=True, seconds=20.0, past=0.1, pid=LOOP, own_code=True, numbers={101: 0})
    both = later(loop(0, results, stack=waits, call=LOCKED), IDLE, scores(301), scores(302))
    said = diagnose(both, told)
    assert said.outcome is (RunOutcome.MAYBE_HUNG if computes else RunOutcome.HUNG)
    assert (
        "of its pool, process python (pid 301) and process python (pid 302) are at work" in said.sentence
    ) is computes


def test_a_process_of_the_programs_that_was_killed_is_named_for_who_waits_for_its_items() -> None:
    get = Frame("Queue.get", QUEUES, 103, source="res = self._recv_bytes()")
    users = Descriptor(6, "pipe", "pipe:[60]", 60, mode="r")
    waits = worker(1, get, user("replay.get()"), call=Syscall("read", "", (6,), (6,)), descriptors=(users,))
    actor = replace(process(300, LOOP, thread(300, (), None, state="Z"), name="actor"), exit_code=9, ended=True)
    said = found(loop(1), IDLE, waits, actor)
    assert (said.cause, said.also[0]) == (
        HangCause.QUEUE_EMPTY, "process actor (pid 300), which has ended (SIGKILL), should have put it"
    )  # fmt: skip


# --- Results that are lost --------------------------------------------------------------------------------------------
def test_a_result_is_lost_if_all_are_idle_for_long() -> None:
    idle = (IDLE, worker(1, step="idle", others=(feeder(202),)))
    assert found(loop(1), *idle).outcome is RunOutcome.MAYBE_HUNG
    said = diagnose(later(loop(1), *idle))
    assert (said.outcome, said.cause) == (RunOutcome.HUNG, HangCause.LOST_RESULT)


def test_bytes_that_make_no_message_are_a_torn_one() -> None:
    said = diagnose(later(loop(1, waiting=4096), IDLE, worker(1, step="idle")))
    assert said.cause is HangCause.TORN_MESSAGE
    assert "4096 bytes" in said.sentence


def test_a_worker_that_died_in_a_message_leaves_the_loop_in_a_read() -> None:
    get = Frame("Queue.get", QUEUES, 103, source="res = self._recv_bytes()")
    read = Frame("It._try_get_data", "/site-packages/torch/utils/data/dataloader.py", 1291, {}, "data = queue.get()")
    stack = (get, read, *next_stack(1)[2:])
    dead = replace(worker(1, user("x"), state="Z"), ended=True, exit_code=9)
    said = found(loop(stack=stack, call=Syscall("read", "", (3,), (3,)), waiting=0), IDLE, dead)
    assert (said.outcome, said.cause) == (RunOutcome.HUNG, HangCause.TORN_MESSAGE)
    assert "has ended (SIGKILL) in the middle of a message" in said.sentence
    said = diagnose(later(loop(1), IDLE, dead))
    assert said.cause is HangCause.DIED


# --- Slow is not hung -------------------------------------------------------------------------------------------------
def ran(one: SeenProcess, switches: int = 0, cpu: float = 0.0) -> SeenProcess:
    """The process at a second look, its first thread having woken so often, and used so many seconds, since the first.

    It rests at both looks, and for as long as each of them takes.
    """
    first, *others = one.threads
    before, used = first.switches[1] + switches, first.cpu[1] + cpu
    return replace(one, threads=(replace(first, switches=(before, before), cpu=(used, used)), *others))


@pytest.mark.parametrize(("switches", "cpu"), [(300, 0.0), (0, 0.5)], ids=["switches", "CPU time"])
@pytest.mark.parametrize("who", ["the loop", "the worker", "another worker"])
def test_a_loader_whose_workers_are_all_idle_at_two_moments_moves(who: str, switches: int, cpu: float) -> None:
    rests = {"the loop": loop(1), "another worker": IDLE, "the worker": worker(1, step="idle")}
    then, now = look(*rests.values()), {**rests, who: ran(rests[who], switches, cpu)}
    said = diagnose([then, look(*now.values(), moment=4_000_000_000)])
    assert (said.outcome, said.cause) == (RunOutcome.MOVES, HangCause.NONE)
    assert "lost" not in said.sentence
    told = RecordedWait(hung=True, pid=LOOP, task=9, worker=1, worker_pid=102, seconds=30.0)
    said = diagnose([then, look(*now.values(), moment=4_000_000_000)], told)
    assert (said.outcome, said.cause) == (RunOutcome.MAYBE_HUNG, HangCause.LOST_RESULT), (
        "the others may still be at work"
    )


@pytest.mark.parametrize(
    ("switches", "at_once", "goes_on"), [(4, 0, False), (5, 0, True), (500, 0, True), (500, 75, False)]
)
def test_polls_and_asking_for_the_gil_in_vain_are_no_going_on(switches: int, at_once: int, goes_on: bool) -> None:
    """4 s apart, two wakes, and one each two seconds, are polls. Who asks for the GIL does so each 5 ms."""
    stuck = worker(1, user("lock.acquire()"), call=replace(LOCKED, timeout=0.005))
    then, woke = stuck.threads[0], stuck.threads[0].switches[1] + switches
    now = replace(then, switches=(woke - at_once, woke), idle=0.0)
    last = look(loop(1), IDLE, replace(stuck, threads=(now,)), moment=4_000_000_000)
    assert stirs(RunFacts([look(loop(1), IDLE, stuck), last]).at(102)) is goes_on


@pytest.mark.parametrize("was", ["there", "not there"])
def test_a_worker_that_began_or_ended_between_two_looks_is_no_hang(was: str) -> None:
    """An epoch has ended, and the next one makes new workers."""
    dead = replace(worker(1, user("x"), state="Z", idle=2.0), ended=True, exit_code=0)
    before = (worker(1, user("x")),) if was == "there" else ()
    said = diagnose([look(loop(1), IDLE, *before), look(loop(1), IDLE, dead, moment=6_000_000_000)])
    assert said.outcome is RunOutcome.MAYBE_HUNG
    assert (
        diagnose([look(loop(1), IDLE, dead), look(loop(1), IDLE, dead, moment=6_000_000_000)]).outcome
        is RunOutcome.HUNG
    )


def test_a_loop_that_starts_workers_is_not_hung_while_these_import_their_modules() -> None:
    told = RecordedWait(hung=True, pid=LOOP, seconds=9.0)
    reads = process(LOOP, 1, thread(LOOP, None, Syscall("read", "", (3,), (3,)), idle=9.0))
    child = process(300, LOOP, thread(300, None, None, state="R", cpu=0.4, idle=0.0))
    still = process(300, LOOP, thread(300, None, LOCKED))
    assert diagnose(later(reads, child), told).outcome is RunOutcome.MAYBE_HUNG
    assert diagnose(later(reads, still), told).outcome is RunOutcome.HUNG


def test_a_worker_that_goes_on_to_another_sample_moves() -> None:
    first = look(loop(1), IDLE, worker(1, user("x"), cpu=0.5, index=37))
    last = look(loop(1), IDLE, worker(1, user("x"), cpu=0.5, index=38), moment=4_000_000_000)
    said = diagnose([first, last])
    assert (said.outcome, said.cause, said.fix) == (RunOutcome.MOVES, HangCause.NONE, "")


def test_a_worker_that_computes_in_one_sample_may_hang_and_hangs_by_the_runs_past() -> None:
    computing = later(loop(1), IDLE, worker(1, user("while True: pass"), cpu=0.5))
    assert diagnose(computing).outcome is RunOutcome.MAYBE_HUNG
    told = RecordedWait(hung=True, seconds=60.0, pid=LOOP, task=9, worker=1, worker_pid=102, numbers={101: 0, 102: 1})
    assert (
        diagnose(computing, told).outcome is RunOutcome.MAYBE_HUNG
    )  # the first wait: nothing tells it from a slow one
    said = diagnose(computing, replace(told, past=0.5))
    assert (said.outcome, said.cause) == (RunOutcome.HUNG, HangCause.COMPUTING)
    assert said.sentence.startswith("hung for 60.0 s: the loop (pid 100) waits for batch 9 of worker 1 (pid 102)")


def test_a_sentence_has_one_duration() -> None:
    """The wait's, if a trace tells it; what a thread's sleep was at the last look stands in the chain."""
    stuck = worker(1, user("f.read()"), call=READS)
    assert found(loop(1), IDLE, stuck).sentence.startswith(
        "hung: the loop (pid 100) waits for worker 1 (pid 102), in sample 37 (Data.__getitem__ at data.py:12) "
        "for 41.0 s"
    )
    told = RecordedWait(hung=True, seconds=44.0, pid=LOOP, task=9, worker=1, worker_pid=102, numbers={101: 0, 102: 1})
    said = diagnose([look(loop(1), IDLE, stuck)], told)
    assert said.sentence.startswith(
        "hung for 44.0 s: the loop (pid 100) waits for batch 9 of worker 1 (pid 102), in sample 37 (Data.__getitem__ "
        "at data.py:12): "
    )
    assert "for 41.0 s" not in said.sentence
    assert "for 41.0 s" in said.chain[1]


@pytest.mark.parametrize(
    ("call", "idle", "state"),
    [
        (Syscall("clock_nanosleep", "9 s more", (1, 1), timeout=9.0), 8.0, RunOutcome.MAYBE_HUNG),
        (SLEEPS, 1.0, RunOutcome.HUNG),
        (Syscall("recvfrom", "", (9,), (9,)), 8.0, RunOutcome.MAYBE_HUNG),
        (Syscall("recvfrom", "", (9,), (9,)), 12.0, RunOutcome.HUNG),
        (LOCKED, 4.0, RunOutcome.HUNG),
    ],
)
def test_what_may_only_be_slow_is_waited_for_longer(call: Syscall, idle: float, state: RunOutcome) -> None:
    socket = Descriptor(9, "socket", "socket:[90]", 90, mode="rw")
    stuck = worker(1, user("with lock:"), call=call, idle=idle, descriptors=(socket,))
    assert found(loop(1), IDLE, stuck).outcome is state


@pytest.mark.parametrize(
    ("state", "outcome"), [("T", RunOutcome.HUNG), ("t", RunOutcome.HUNG), ("S", RunOutcome.UNKNOWN)]
)
def test_what_is_stopped_hangs_however_short_and_what_nothing_is_known_of_is_unknown(
    state: str, outcome: RunOutcome
) -> None:
    assert found(loop(1), IDLE, worker(1, user("x"), call=None, idle=1.0, state=state)).outcome is outcome


def test_a_loop_that_is_stopped_waits_for_nobody() -> None:
    main = replace(loop(1).threads[0], state=("T", "T"))
    said = found(replace(loop(1), threads=(main,)), IDLE, worker(1, user("time.sleep(990)"), call=SLEEPS))
    assert (said.outcome, said.cause, said.who["pid"]) == (RunOutcome.HUNG, HangCause.STOPPED, LOOP)


def test_a_short_sleep_is_no_hang() -> None:
    short = Syscall("clock_nanosleep", "0.3 s more", (1, 1), timeout=0.3)
    said = found(loop(1), IDLE, worker(1, user("time.sleep(1)"), call=short, idle=0.2))
    assert said.outcome is RunOutcome.MOVES


# --- What can't be seen -----------------------------------------------------------------------------------------------
def blind(evidence: RunEvidence) -> RunEvidence:
    """The same without a stack."""

    def without(one: SeenProcess) -> SeenProcess:
        threads = tuple(replace(t, stack=None, gil=None, python_name="") for t in one.threads)
        return replace(one, threads=threads, not_seen=("Python stacks: py-spy is not installed",))

    return replace(evidence, processes=tuple(map(without, evidence.processes)))


def test_without_stacks_the_worker_and_its_call_are_named() -> None:
    busy = worker(1, user("flock"), call=FLOCK, descriptors=(with_locks(102),))
    said = diagnose([blind(look(loop(1), IDLE, busy, locks=(FileLock(1, "FLOCK", "WRITE", 400, 3, 77),)))])
    assert "waits for worker 1 (pid 102), which is waiting in flock on /data/index.lock; process 400" in said.sentence
    assert said.not_seen == ("Python stacks: py-spy is not installed (pid 100, 101 and 102)",)


def test_without_stacks_a_feeder_that_sleeps_is_found_and_a_lost_result_is_only_possible() -> None:
    feeding = feeder(202, user("time.sleep(990)", "Image.__reduce__"), source="dumps(obj)", call=SLEEPS)
    said = diagnose([blind(look(loop(-1), IDLE, worker(1, step="idle", others=(feeding,))))])
    assert (said.cause, said.who["worker"]) == (HangCause.SLEEP, 1)
    said = diagnose([blind(one) for one in later(loop(-1), IDLE, worker(1, step="idle", others=(feeder(202),)))])
    assert (said.cause, said.sure) == (HangCause.LOST_RESULT, Sure.POSSIBLE)


def test_without_stacks_a_loop_at_a_socket_waits_for_the_worker_that_is_stopped() -> None:
    asks = Syscall("recvmsg", "", (9,), (9,))
    served = Descriptor(9, "socket", "socket:[90]", 90, mode="rw")
    said = diagnose([blind(look(loop(call=asks, descriptors=(served,)), IDLE, worker(1, user("x"), state="T")))])
    assert (said.cause, said.who["worker"]) == (HangCause.STOPPED, 1)


def test_without_a_stack_a_lock_of_the_process_is_not_guessed_at() -> None:
    said = diagnose([blind(look(loop(1), IDLE, worker(1, user("with lock:"), call=LOCKED)))])
    assert (said.cause, said.sure) == (HangCause.UNKNOWN, Sure.UNKNOWN)


def test_without_ptrace_the_kernels_function_tells() -> None:
    hidden = blind(look(loop(1), IDLE, worker(1, user("x"))))
    processes = []
    for one in hidden.processes:
        name = {LOOP: "poll_schedule_timeout", 101: "poll_schedule_timeout", 102: "hrtimer_nanosleep"}[one.pid]
        threads = tuple(replace(t, syscall=None, syscall_before=None, wchan=name) for t in one.threads)
        processes.append(replace(one, threads=threads))
    told = RecordedWait(hung=True, seconds=60.0, pid=LOOP, task=9, worker=1, worker_pid=102, numbers={101: 0, 102: 1})
    said = diagnose([replace(hidden, processes=tuple(processes))], told)
    assert "worker 1 (pid 102)" in said.sentence
    assert "asleep (the kernel's hrtimer_nanosleep)" in said.sentence


def test_where_nothing_but_times_can_be_seen_the_worker_that_does_not_poll_is_named() -> None:
    hidden = blind(look(loop(1), IDLE, worker(1, user("x"))))
    bare = tuple(
        replace(p, threads=tuple(replace(t, syscall=None, syscall_before=None) for t in p.threads), descriptors=())
        for p in hidden.processes
    )
    said = diagnose([replace(hidden, processes=bare)])
    assert (said.outcome, said.cause) == (RunOutcome.MAYBE_HUNG, HangCause.UNKNOWN)
    assert said.who["worker"] == 1
    locks = (FileLock(1, "FLOCK", "WRITE", 400, 3, 77), FileLock(1, "FLOCK", "WRITE", 102, 3, 77, waits=True))
    said = diagnose([replace(hidden, processes=bare, locks=locks)])
    assert said.cause is HangCause.FILE_LOCK
    assert "process 400 (not examined) took it, and may have passed it on" in said.sentence


def test_a_process_that_is_gone_has_ended_and_one_that_was_killed_has_died() -> None:
    assert diagnose([look()]).outcome is RunOutcome.ENDED
    zombie = process(LOOP, 1, thread(LOOP, None, None, state="Z"), ended=True, exit_code=9)
    assert diagnose([look(zombie)]).sentence == "died: process 100 has ended: SIGKILL"


def test_a_program_without_a_loader_gets_no_verdict_on_one() -> None:
    said = found(process(LOOP, 1, thread(LOOP, (MAIN_OF,), SLEEPS)))
    assert "in its own code" in said.sentence


# --- Its forms --------------------------------------------------------------------------------------------------------
def test_json_has_what_the_text_has_and_escapes_control_characters() -> None:
    said = found(loop(1), IDLE, worker(1, user("\x1b[31mx", "mine\x1b"), call=SLEEPS))
    data = json.loads(said.to_json())
    assert (data["cause"], data["sure"], data["state"]) == ("sleep", "certain", "hung")
    assert "\x1b" not in said.text()
    assert said.title.startswith("hung: the loop waits for worker 1, in sample 37")


def test_a_title_has_neither_process_ids_nor_for_how_long_each_thread_has_slept() -> None:
    said = found(loop(1), IDLE, worker(1, user("time.sleep(990)"), call=SLEEPS, idle=3.9))
    where = "in sample 37 (Data.__getitem__ at data.py:12)"
    what = "it is asleep (990 s more)"
    assert said.sentence == f"hung: the loop (pid 100) waits for worker 1 (pid 102), {where} for 3.90 s: {what}"
    assert said.title == f"hung: the loop waits for worker 1, {where}: {what}"
    assert (said.waiting, said.loop_step) == (f"the loop waits for worker 1, {where}", LoaderStep.NEXT)


# --- What may still be answered ---------------------------------------------------------------------------------------
RECEIVES = Syscall("recvfrom", "", (9,), (9,), timeout=-1.0)
ACCEPTS = Syscall("accept4", "", (6,), (6,), timeout=-1.0)
OUR_WORKER = "/home/a/minidl/loader/worker.py"


def connection(fd: int, inode: int, peer: int, about: str = "") -> Descriptor:
    return Descriptor(fd, "socket", f"socket:[{inode}]", inode, mode="rw", peer=peer, about=about)


def test_the_other_end_of_a_socket_is_a_thread_and_no_circle() -> None:
    """The loop's process serves the worker from a thread, which sleeps: its main thread has nothing to do with it."""
    serve = thread(190, (user("time.sleep(990)", "serve"),), SLEEPS, name="server")
    served = loop(1, serve, descriptors=(connection(8, 91, 90),))
    stuck = worker(1, user("sock.recv(1)"), call=RECEIVES, descriptors=(connection(9, 90, 91),))
    said = found(served, IDLE, stuck)
    assert said.cause is not HangCause.CYCLE
    assert said.who["thread"] == 190


def test_a_thread_that_waits_for_its_own_process_at_a_socket_is_told_so() -> None:
    """A blocking recv in a coroutine: who would send is a coroutine of the same event loop."""
    aio = thread(190, (user("self.a.recv(1)", "get", 22),), RECEIVES, name="aio")
    ends = (connection(8, 91, 90), connection(9, 90, 91))
    said = found(loop(1), IDLE, worker(1, *RESULT, call=LOCKED, others=(aio,), descriptors=ends))
    assert "aio (get at data.py:22) is waiting for data at a socket (it has the other end itself)" in said.sentence
    served = process(300, 1, thread(300, (user("serve()"),), LOCKED), descriptors=ends[:1])
    said = found(loop(1), IDLE, worker(1, *RESULT, call=LOCKED, others=(aio,), descriptors=ends[1:]), served)
    assert "has that itself" not in said.sentence
    polls = Syscall("poll", "2 descriptors", (9, 12), (9, 12), timeout=-1.0)
    several = thread(190, (user("select()", "get", 22),), polls, name="aio")
    elsewhere = connection(12, 99, 0)
    said = found(loop(1), IDLE, worker(1, *RESULT, call=LOCKED, others=(several,), descriptors=(*ends, elsewhere)))
    assert "aio (get at data.py:22) is waiting for one of 2 descriptors" in said.sentence
    assert "has that itself" not in said.sentence, "one of the two may be answered by another machine"


def test_two_threads_that_wait_for_each_others_mutex_have_no_other_end() -> None:
    wants = [Syscall("futex", "wait", (at, 0), address=at, timeout=-1.0) for at in (8192, 8256)]
    one = thread(190, (user("a.step()", "one", 22),), wants[0], name="one", owner=191)
    two = thread(191, (user("b.step()", "two", 33),), wants[1], name="two", owner=190)
    said = found(loop(1), IDLE, worker(1, *RESULT, call=LOCKED, others=(one, two)))
    assert "one (one at data.py:22) is waiting for a mutex" in said.sentence
    assert "the other end" not in said.sentence


def test_who_receives_bytes_between_two_looks_moves() -> None:
    def at(switches: int) -> SeenProcess:
        return worker(1, user("sock.recv(1)"), call=RECEIVES, switches=switches, descriptors=(connection(9, 90, 0),))

    assert diagnose(later(loop(1), IDLE, at(3))).outcome is RunOutcome.MOVES
    assert diagnose(later(loop(1), IDLE, at(0))).outcome is RunOutcome.HUNG


def test_who_gets_bytes_from_a_slow_writer_moves_though_the_writer_naps() -> None:
    """A child writes a little and sleeps, again and again. The signal for a stack wakes the reader once, too."""
    told = RecordedWait(hung=True, seconds=14.0, past=0.5, pid=LOOP, worker=1, worker_pid=102, numbers={101: 0, 102: 1})
    reads, nap = Syscall("read", "", (6,), (6,)), Syscall("clock_nanosleep", "0.2 s more", (1, 1), timeout=0.2)
    writer = process(
        300, 102, thread(300, None, nap, switches=2), descriptors=(Descriptor(1, "pipe", "", 60, mode="w"),)
    )

    def read(switches: int) -> Finding:
        pipe = Descriptor(6, "pipe", "pipe:[60]", 60, mode="r")
        reader = worker(1, user("p.stdout.read()"), call=reads, switches=switches, descriptors=(pipe,))
        return diagnose(later(loop(1), IDLE, reader, writer), told)

    assert read(9).outcome is RunOutcome.MOVES
    assert "and writes from time to time" in read(9).sentence
    assert read(1).outcome is RunOutcome.HUNG


def test_a_socket_that_is_asked_again_and_again_with_a_timeout_is_polled() -> None:
    """A datagram that nobody answers."""
    asks = Syscall("poll", "1 descriptor", (9,), (9,), timeout=0.7)

    def at(times: int) -> SeenProcess:
        stuck = worker(1, user("s.recvfrom(512)"), call=asks, idle=0.3, descriptors=(connection(9, 90, 0),))
        return replace(stuck, threads=(replace(stuck.threads[0], switches=(times, times)),))

    said = diagnose([look(loop(1), IDLE, at(10)), look(loop(1), IDLE, at(14), moment=4_000_000_000)])
    assert said.cause is HangCause.SOCKET
    assert "with a timeout, 4 times in 4.5 s: it polls" in said.sentence
    assert "polls" not in found(loop(1), IDLE, at(14)).sentence


def test_of_a_connection_that_no_thread_accepts_that_is_said() -> None:
    unheard = worker(1, user("sock.recv(1)"), call=RECEIVES, descriptors=(connection(9, 90, 70, BACKLOG),))

    def heard_by(call: Syscall) -> str:
        accepts = thread(190, (user("server.accept()", "serve"),), call, name="server")
        return found(loop(1, accepts, descriptors=(connection(6, 70, 0),)), IDLE, unheard).sentence

    assert heard_by(SLEEPS).endswith("should accept it, but no thread of it calls accept()")
    assert heard_by(ACCEPTS).endswith("should accept it")


def test_a_connection_that_nobody_accepts_names_who_listens() -> None:
    stuck = worker(1, user("sock.recv(1)"), call=RECEIVES, descriptors=(connection(9, 90, 70, BACKLOG),))
    stopped = process(
        300, LOOP, thread(300, None, ACCEPTS, state="T"), name="server", descriptors=(connection(6, 70, 0),)
    )
    said = found(loop(1), IDLE, stuck, stopped)
    assert (said.cause, said.who["pid"]) == (HangCause.STOPPED, 300)


def test_the_memory_of_a_batch_is_fetched_from_the_worker_at_the_sockets_other_end() -> None:
    """The loop has the result of worker 0, and was to wait for worker 1's, by its stack."""
    asks = Frame(
        "DupFd.detach", "/lib/python3.11/multiprocessing/resource_sharer.py", 86, {}, "conn = get_connection()"
    )
    first = thread(LOOP, (library("Connection._recv"), asks, *next_stack(1)), RECEIVES)
    home = process(LOOP, 1, first, descriptors=(connection(9, 90, 91, BACKLOG),))
    keeps = worker(0, user("native()"), call=SLEEPS, gil=True, descriptors=(connection(6, 91, 0),))
    said = diagnose(later(home, keeps, worker(1, step="idle")))
    assert (said.cause, said.who["worker"]) == (HangCause.GIL, 0)


def test_a_managers_process_says_in_which_call_it_waits_and_what_ends_that() -> None:
    """Each client has a thread of the manager's own, and nothing tells which is whose: these are in the same call."""
    managers = "/lib/python3.11/multiprocessing/managers.py"

    def serving(tid: int, method: str) -> SeenThread:
        frame = library("Server.serve_client", managers, "res = function(*args, **kwds)", methodname=f"'{method}'")
        return thread(tid, (frame,), LOCKED, name=f"Thread-{tid}")

    def said(*served: SeenThread) -> Finding:
        ends = (connection(8, 91, 90),)
        manager = process(300, LOOP, thread(300, (), ACCEPTS), *served, name="manager", descriptors=ends)
        asks = worker(1, user("with lock:"), call=RECEIVES, descriptors=(connection(9, 90, 91),))
        return found(loop(1), IDLE, asks, manager)

    one = said(serving(301, "acquire"), serving(302, "acquire"))
    assert (one.cause, one.who["pid"]) == (HangCause.LOCK, 300)
    assert one.sentence.endswith("waits in acquire() until another client calls release()")
    assert said(serving(301, "acquire"), serving(302, "get")).cause is HangCause.SOCKET


def own_code(*inside: Frame, call: Syscall | None, seconds: float = 20.0, **main: object) -> Finding:
    """The loop is in its own code, for much longer than any step before."""
    ends = (connection(6, 60, 0), Descriptor(10, "pipe", "pipe:[100]", 100, mode="r"))
    first = thread(LOOP, (*inside, MAIN), call, **main)  # type: ignore[arg-type]
    home = replace(loop(1), threads=(first,), descriptors=ends)
    told = RecordedWait(hung=True, seconds=seconds, past=0.1, pid=LOOP, own_code=True, numbers={101: 0})
    return diagnose([look(home, IDLE), look(home, IDLE, moment=4_000_000_000)], told)


@pytest.mark.parametrize(
    ("inside", "call", "main", "state"),
    [
        ((user("evaluate()"),), None, {"state": "R", "cpu": 0.5}, RunOutcome.MAYBE_HUNG),
        ((user("time.sleep(30)"),), Syscall("clock_nanosleep", "9 s more", (1, 1), timeout=9.0), {},
         RunOutcome.MAYBE_HUNG),
        ((user("server.accept()"),), ACCEPTS, {}, RunOutcome.MAYBE_HUNG),
        ((library("Pdb.interaction", "/lib/python3.11/pdb.py"), user("breakpoint()")),
         Syscall("read", "", (10,), (10,)), {}, RunOutcome.MAYBE_HUNG),
        ((library("select", "/lib/python3.11/selectors.py"),
          library("BaseEventLoop._run_once", "/lib/python3.11/asyncio/base_events.py"), user("asyncio.run(main())")),
         Syscall("epoll_wait", "", (4,), (4,), timeout=-1.0), {}, RunOutcome.MOVES),
        ((user("native()"),), None, {}, RunOutcome.MAYBE_HUNG),
        ((user("with lock:"),), LOCKED, {}, RunOutcome.HUNG),
    ],
)  # fmt: skip
def test_between_two_batches_the_loop_may_work_or_wait_for_a_person(
    inside: tuple[Frame, ...], call: Syscall | None, main: dict[str, object], state: RunOutcome
) -> None:
    assert own_code(*inside, call=call, **main).outcome is state


def test_a_queue_whose_thread_computes_is_not_hung_for_certain() -> None:
    def queue_of(**other: object) -> RunOutcome:
        computes = thread(190, (user("decode()", "produce"),), None, name="producer", **other)  # type: ignore[arg-type]
        get = (WAIT, library("Queue.get", "/lib/python3.11/queue.py"), user("q.get()"))
        return found(loop(1, computes, stack=(*get, MAIN), call=LOCKED)).outcome

    assert queue_of(state="R", cpu=0.5) is RunOutcome.MAYBE_HUNG


QUEUE = Descriptor(6, "pipe", "pipe:[60]", 60, mode="r")
PUTS = Descriptor(7, "pipe", "pipe:[60]", 60, mode="w")
GETS = (library("Queue.get", QUEUES, "res = self._recv_bytes()"), user("q.get()"))
READS = Syscall("read", "", (6,), (6,), timeout=-1.0)


def asks_workers(*others: SeenThread, call: Syscall = READS, worker_0: SeenProcess | None = None) -> Finding:
    """The loop's own code waits for an item that its workers could put."""
    home = process(LOOP, 1, thread(LOOP, (*GETS, MAIN), call), descriptors=(QUEUE, PUTS, *loop().descriptors))
    first = worker_0 or worker(0, step="idle", others=others, descriptors=(PUTS,))
    told = RecordedWait(hung=True, seconds=8.0, past=0.1, pid=LOOP, own_code=True, numbers={101: 0, 102: 1})
    return diagnose(later(home, first, worker(1, step="idle", descriptors=(PUTS,))), told)


def test_a_loop_that_waits_for_an_item_of_its_idle_workers_hangs() -> None:
    said = asks_workers(feeder(201))
    assert (said.outcome, said.cause) == (RunOutcome.HUNG, HangCause.QUEUE_EMPTY)
    assert "only worker 0 (pid 101) and worker 1 (pid 102) could, and they wait for this process" in said.sentence
    at_work = asks_workers(worker_0=worker(0, user("x"), cpu=0.5, descriptors=(PUTS,)))
    sends = asks_workers(feeder(201, source="send_bytes(obj)"))
    other_thread = asks_workers(thread(201, (user("q.put(1)", "produce"),), SLEEPS, name="producer"))
    gives_up = asks_workers(call=Syscall("poll", "", (6,), (6,), timeout=60.0))
    assert {one.outcome for one in (at_work, sends, other_thread, gives_up)} == {RunOutcome.MAYBE_HUNG}


def test_an_item_that_only_processes_could_put_that_wait_for_the_reader_never_comes() -> None:
    """Worker 1 reads the queue, worker 0 waits for the queue's lock, and the loop for worker 1."""
    queue = {"self": "<Queue at 0x20>"}
    asks = (Frame("Queue.get", QUEUES, 102, queue, "with self._rlock:"), user("q.get()", "Feed.__iter__"))
    gets = (Frame("Queue.get", QUEUES, 103, queue, "res = self._recv_bytes()"), user("q.get()", "Feed.__iter__"))
    ends = (QUEUE, PUTS)
    first = worker(0, *asks, call=LOCKED, descriptors=ends, idle=5.0)
    reader = worker(1, *gets, call=READS, descriptors=ends, idle=5.0)
    home = replace(loop(1), descriptors=(*ends, *loop(1).descriptors))
    shared = [replace(one, semaphores=(Semaphore("sem.mp", 700, 4096, 0, 1),)) for one in (home, first, reader)]
    said = diagnose(later(*shared))
    assert (said.outcome, said.cause, said.who["worker"]) == (RunOutcome.HUNG, HangCause.QUEUE_EMPTY, 1)
    assert "only the loop (pid 100) and worker 0 (pid 101) could, and they wait for this process" in said.sentence


@pytest.mark.parametrize(("mode", "state"), [("rw", RunOutcome.HUNG), ("r", RunOutcome.MAYBE_HUNG)])
def test_a_pipe_that_only_its_reader_has_open_is_not_slow(mode: str, state: RunOutcome) -> None:
    fifo = Descriptor(6, "fifo", "/data/a.fifo", 60, mode=mode)
    said = found(loop(1), IDLE, worker(1, user("os.read()"), call=READS, idle=5.0, descriptors=(fifo,)))
    assert said.outcome is state


def test_a_process_that_joins_its_spawned_ranks_waits_for_them() -> None:
    join = Frame("ProcessContext.join", "/site-packages/torch/multiprocessing/spawn.py", 1, {}, "wait(self.sentinels)")
    spawn = library("_main", "/lib/python3.11/multiprocessing/spawn.py", "prepare(preparation_data)")
    ended = Descriptor(6, "pipe", "pipe:[60]", 60, mode="r")
    rank = replace(process(101, LOOP, thread(101, (spawn,), None, cpu=0.4)), descriptors=(PUTS,))
    said = diagnose(later(loop(stack=(join, MAIN), call=Syscall("poll", "", (6,), (6,), timeout=-1.0),
                               descriptors=(ended,)), rank))  # fmt: skip
    assert (said.outcome, said.cause, said.who["pid"]) == (RunOutcome.MAYBE_HUNG, HangCause.COMPUTING, 101)


def test_a_lock_that_a_signal_handler_takes_twice_hangs_though_signals_wake_it() -> None:
    """A timer's signals come all the time: they interrupt the wait, which goes on."""
    handler = user("with LOCK:", "on_alarm", frame="<frame at 0x7f>")
    stuck = (handler, user("with LOCK:", "train"), MAIN)

    def at(line: int) -> SeenProcess:
        stack = (replace(handler, line=line), *stuck[1:])
        return loop(stack=stack, call=LOCKED)

    assert diagnose(later(at(7), IDLE)).outcome is RunOutcome.HUNG
    assert diagnose([look(at(7), IDLE), look(at(8), IDLE, moment=4_000_000_000)]).outcome is RunOutcome.MAYBE_HUNG
    assert diagnose([look(at(7), IDLE)]).outcome is RunOutcome.MAYBE_HUNG


def test_a_thread_of_our_workers_own_hides_no_fork_hazard() -> None:
    watches = thread(190, (library("_end_orphan", OUR_WORKER), library("Thread.run")), SLEEPS, name="end_orphan")
    refresh = thread(191, (user("time.sleep(1)", "refresh"),), SLEEPS, name="refresh")
    stuck = worker(0, user("with lock:"), call=LOCKED, others=(watches,))
    assert found(loop(0, refresh), stuck).cause is HangCause.FORK_LOCK


@pytest.mark.parametrize(("ignored", "state"), [((), RunOutcome.MAYBE_HUNG), (("SIGTERM",), RunOutcome.HUNG)])
def test_a_shutdown_is_hung_if_its_signal_does_nothing(ignored: tuple[str, ...], state: RunOutcome) -> None:
    joins = Frame("It._shutdown_workers", "/site-packages/torch/utils/data/dataloader.py", 1, {}, "w.join(timeout=5)")
    home = replace(loop(1), threads=(thread(LOOP, (joins, MAIN), polls(3), idle=1.0, switches=1),))
    told = RecordedWait(hung=True, seconds=6.0, past=0.1, pid=LOOP, worker=1, worker_pid=102, numbers={101: 0, 102: 1})
    asleep = replace(worker(1, user("time.sleep(990)"), call=SLEEPS), ignored=ignored)
    assert diagnose([look(home, IDLE, asleep)], told).outcome is state
    assert diagnose([look(home, IDLE, asleep)], replace(told, seconds=60.0)).outcome is RunOutcome.HUNG


def test_a_worker_that_only_inherited_a_socket_has_lost_no_result() -> None:
    """The loop rebuilds a batch, and asks a server; the only worker, which is idle, has a copy of the server's end."""
    rebuild = Frame("Queue.get", QUEUES, 122, {}, "return _ForkingPickler.loads(res)")
    stack = (user("sock.recv(1)", "Note.__setstate__"), rebuild, *next_stack(0)[2:])
    home = process(LOOP, 1, thread(LOOP, stack, RECEIVES), descriptors=(connection(9, 90, 91),))
    idle = worker(0, step="idle", descriptors=(connection(8, 91, 90),))
    said = diagnose(later(home, idle))
    assert (said.cause, said.who["role"], said.where["step"]) == (HangCause.SOCKET, "loop", "unpickle")


def test_what_came_to_its_end_between_two_looks_may_hang() -> None:
    first = look(loop(1), IDLE, worker(1, user("x"), cpu=0.5, index=36))
    last = look(loop(1), IDLE, worker(1, user("with lock:"), call=LOCKED, idle=2.0), moment=4_000_000_000)
    told = RecordedWait(hung=True, seconds=9.0, past=0.5, pid=LOOP, worker=1, worker_pid=102, numbers={101: 0, 102: 1})
    said = diagnose([first, last], told)
    assert (said.outcome, said.cause) == (RunOutcome.MAYBE_HUNG, HangCause.SELF_LOCK)
    assert diagnose([first, last]).outcome is RunOutcome.MOVES  # nothing says that it takes long


def test_a_circle_that_closed_between_two_looks_may_hang_though_the_loop_polls() -> None:
    lock = Descriptor(7, "file", "/data/index.lock", 77, 3, "rw")
    kept = replace(lock, locks=("1: FLOCK ADVISORY WRITE 100",))
    home = replace(loop(1), descriptors=(*loop(1).descriptors, kept))
    locks = (FileLock(1, "FLOCK", "WRITE", LOOP, 3, 77), FileLock(1, "FLOCK", "WRITE", 102, 3, 77, waits=True))
    first = look(home, IDLE, worker(1, user("x"), cpu=0.5, index=36))
    stuck = worker(1, user("fcntl.flock(f, fcntl.LOCK_EX)"), call=FLOCK, descriptors=(lock,), idle=2.0)
    last = look(home, IDLE, stuck, locks=locks, moment=4_000_000_000)
    told = RecordedWait(hung=True, seconds=9.0, past=0.5, pid=LOOP, worker=1, worker_pid=102, numbers={101: 0, 102: 1})
    said = diagnose([first, last], told)
    assert (said.outcome, said.cause) == (RunOutcome.MAYBE_HUNG, HangCause.CYCLE)


# --- Who is meant -----------------------------------------------------------------------------------------------------
def test_of_two_file_locks_in_a_chain_the_last_is_the_cause() -> None:
    """Worker 1 waits for worker 0's lock, and worker 0 for one of a process that was not looked at."""
    other = Descriptor(8, "file", "/data/cache.lock", 78, 3, "rw")
    kept = with_locks(101, "1: FLOCK ADVISORY WRITE 101")
    asks = replace(FLOCK, args=(8, 2), fds=(8,))
    holder = worker(0, user("flock(cache)"), call=asks, descriptors=(kept, other))
    waiter = worker(1, user("flock(index)"), call=FLOCK, descriptors=(with_locks(102),))
    locks = (FileLock(1, "FLOCK", "WRITE", 101, 3, 77), FileLock(2, "FLOCK", "WRITE", 900, 3, 78))
    said = found(loop(1), holder, waiter, locks=locks)
    assert (said.cause, said.who["worker"]) == (HangCause.FILE_LOCK, 0)
    assert "in flock on /data/cache.lock; process 900" in said.sentence


@pytest.mark.parametrize(("name", "cause"), [("python", HangCause.DIED), ("ffmpeg", HangCause.UNKNOWN)])
def test_a_childs_zombie_is_a_worker_only_if_it_ran_the_loops_program(name: str, cause: HangCause) -> None:
    """No worker is known by number: torch's stack of the loop tells none before the first batch."""
    zombie = process(300, LOOP, thread(300, None, None, state="Z"), name=name, ended=True, exit_code=9)
    stuck = thread(LOOP, next_stack(-1), polls(3), idle=1.0, switches=1)
    said = diagnose(later(replace(loop(), threads=(stuck,)), zombie))
    assert said.cause is cause


def test_a_circle_with_a_timeout_of_the_users_may_end() -> None:
    def stuck(number: int, wants: int, has: int, call: Syscall) -> SeenProcess:
        files = (
            Descriptor(7, "pipe", f"pipe:[{wants}]", wants, mode="r"),
            Descriptor(8, "pipe", f"pipe:[{has}]", has, mode="w"),
        )
        return worker(number, user("pipe.poll(600)"), call=call, descriptors=files)

    def circle(call: Syscall) -> Finding:
        return diagnose(later(loop(1), stuck(0, 71, 70, call), stuck(1, 70, 71, call)))

    read = Syscall("read", "", (7,), (7,), timeout=-1.0)
    assert (circle(read).outcome, circle(read).cause) == (RunOutcome.HUNG, HangCause.CYCLE)
    bounded = circle(replace(read, name="poll", timeout=600.0))
    assert (bounded.outcome, bounded.cause, bounded.sure) == (RunOutcome.MAYBE_HUNG, HangCause.CYCLE, Sure.POSSIBLE)


def test_a_process_that_got_the_id_of_another_is_not_compared_with_it() -> None:
    first = look(loop(1), IDLE, worker(1, user("x"), cpu=0.5, index=36))
    reborn = replace(worker(1, user("time.sleep(990)"), call=SLEEPS), started=999.0)
    assert diagnose([first, look(loop(1), IDLE, reborn, moment=4_000_000_000)]).outcome is RunOutcome.HUNG


# --- Sleeps again and again -------------------------------------------------------------------------------------------
def nap(times: int, index: int = 37) -> SeenProcess:
    """A worker in a short sleep, to which it came back so often by now."""
    short = Syscall("clock_nanosleep", "0.03 s more", (1, 1), timeout=0.03)
    stuck = worker(1, user("time.sleep(0.05)"), call=short, idle=0.02, switches=10, index=index)
    return replace(stuck, threads=(replace(stuck.threads[0], switches=(times - 10, times)),))


def test_a_loop_that_polls_is_told_with_its_pause_if_two_looks_show_one_place() -> None:
    told = RecordedWait(hung=True, seconds=12.0, past=0.5, pid=LOOP, worker=1, worker_pid=102, numbers={101: 0, 102: 1})
    first, last = look(loop(1), IDLE, nap(20)), look(loop(1), IDLE, nap(100), moment=4_000_000_000)
    said = diagnose([first, last], told)
    assert (said.outcome, said.cause) == (RunOutcome.HUNG, HangCause.SLEEP)
    assert said.sentence == (
        "hung for 12.0 s: the loop (pid 100) waits for worker 1 (pid 102), in sample 37 (Data.__getitem__ at "
        "data.py:12): it polls: it slept for about 0.05 s repeatedly in the 4.5 s observed"
    )
    assert "polls" not in diagnose([last]).sentence
    slept = replace(nap(100), threads=(replace(nap(100).threads[0], idle=3.3),))
    assert "polls" not in diagnose([first, look(loop(1), IDLE, slept, moment=4_000_000_000)], told).sentence
    moved = diagnose([first, look(loop(1), IDLE, nap(110, index=38), moment=4_000_000_000)], told)
    assert moved.outcome is RunOutcome.MOVES


def test_short_sleeps_of_a_worker_may_hang_if_the_wait_is_long_by_the_trace() -> None:
    """The earlier look saw the worker start: nothing says yet whether it stays where it is."""
    told = RecordedWait(hung=True, seconds=12.0, pid=LOOP, worker=1, worker_pid=102, numbers={101: 0, 102: 1})
    starts = look(loop(1), IDLE)
    assert diagnose([starts, look(loop(1), IDLE, nap(20), moment=4_000_000_000)], told).outcome is RunOutcome.MAYBE_HUNG


@pytest.mark.parametrize(
    ("since", "sample", "state"),
    [(6, 37, RunOutcome.MAYBE_HUNG), (9, 37, RunOutcome.MOVES), (0, 37, RunOutcome.MOVES), (6, -1, RunOutcome.MOVES)],
)
def test_a_worker_that_came_to_its_step_between_two_looks_may_hang_if_that_was_long_ago(
    since: int, sample: int, state: RunOutcome
) -> None:
    """By the trace: the looks are at 4 s and 10 s. since: s, 0 = unknown; sample: -1 = the step is a whole batch."""
    told = RecordedWait(
        hung=True, seconds=12.0, pid=LOOP, worker=1, worker_pid=102, numbers={101: 0, 102: 1}, sample=sample
    )
    told = replace(told, step_since=since * 1_000_000_000)
    first = look(loop(1), IDLE, nap(20, index=36), moment=4_000_000_000)
    last = look(loop(1), IDLE, nap(100), moment=10_000_000_000)
    assert diagnose([first, last], told).outcome is state
    collates = worker(1, user("collate()"), step="collate", cpu=0.5)
    earlier = look(loop(1), IDLE, collates, moment=4_000_000_000)
    assert diagnose([earlier, last], told).outcome is (RunOutcome.MAYBE_HUNG if since == 6 else RunOutcome.MOVES)


# --- Workers that have ended ------------------------------------------------------------------------------------------
DEAD = replace(worker(1, user("x"), state="Z"), ended=True, exit_code=0)


def test_a_loop_that_polls_finds_its_dead_worker_within_its_5_seconds() -> None:
    first = look(loop(1), IDLE, DEAD)
    assert diagnose([first, replace(first, moment=4_000_000_000)]).outcome is RunOutcome.MAYBE_HUNG
    assert diagnose([first, replace(first, moment=6_000_000_000)]).outcome is RunOutcome.HUNG


def test_a_dead_worker_of_another_loader_is_not_the_one_that_is_waited_for() -> None:
    """The workers of the next epoch start, and those of the last have not been reaped by the fork server."""
    told = RecordedWait(hung=True, seconds=12.0, pid=LOOP, task=0, worker=1, others=frozenset((101, 102)))
    said = diagnose(later(loop(1), replace(DEAD, pid=101), DEAD), told)
    assert (said.cause, said.who["role"]) == (HangCause.UNKNOWN, "loop")


# --- Locks that are polled for ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("source", "lock", "cause", "who"),
    [
        ("self.db.execute('insert ...')", FileLock(1, "POSIX", "WRITE", 101, 3, 77), HangCause.FILE_LOCK, 0),
        ("self.db.execute('insert ...')", FileLock(1, "POSIX", "WRITE", 900, 3, 77), HangCause.FILE_LOCK, 1),
        ("self.db.execute('insert ...')", FileLock(1, "POSIX", "READ", 101, 3, 77), HangCause.SLEEP, 1),
        ("self.db.execute('insert ...')", FileLock(1, "POSIX", "WRITE", 102, 3, 77), HangCause.SLEEP, 1),
        ("self.db.execute('insert ...')", FileLock(1, "POSIX", "WRITE", 101, 3, 78), HangCause.SLEEP, 1),
        ("time.sleep(0.1)", FileLock(1, "POSIX", "WRITE", 101, 3, 77), HangCause.SLEEP, 1),
    ],
)
def test_c_code_that_sleeps_with_a_locked_file_open_polls_for_the_lock(
    source: str, lock: FileLock, cause: HangCause, who: int
) -> None:
    """As SQLite's busy handler; of the same evidence, without an exclusive lock of another's on its file, it sleeps."""
    short = Syscall("clock_nanosleep", "0.03 s more", (1, 1), timeout=0.03)
    file = Descriptor(7, "file", "/data/cache.db", 77, 3, "rw")
    holder = worker(0, user("time.sleep(990)"), call=SLEEPS, descriptors=(file,))
    waiter = worker(1, user(source), call=short, idle=0.02, switches=5, descriptors=(file,))
    told = RecordedWait(hung=True, seconds=20.0, past=0.5, pid=LOOP, worker=1, worker_pid=102, numbers={101: 0, 102: 1})
    said = diagnose([look(loop(1), holder, waiter, locks=(lock,))], told)
    assert (said.cause, said.who["worker"]) == (cause, who)
    if cause is HangCause.FILE_LOCK:
        assert said.sure is Sure.LIKELY
        assert "polling for the lock of /data/cache.db (its C code sleeps); " in said.sentence
        assert said.also
    if who == 0:
        assert said.sentence.endswith("holds that lock, and is asleep (990 s more)")


# --- The lock of the loader's queue -----------------------------------------------------------------------------------
@pytest.mark.parametrize("feeds", [True, False])
def test_the_lock_of_the_results_is_held_by_a_feeder_that_does_not_get_the_gil(feeds: bool) -> None:
    """Worker 0's sample keeps the GIL: its feeder has the lock, and can't go on. feeds: the feeder's stack is there."""
    asks = Syscall("futex", "wait", (4096, 393), address=4096, timeout=-1.0)
    gil = Syscall("futex", "wait", (8192, 393), address=8192, timeout=0.005)
    line = Frame("Queue._feed", QUEUES, 250, source="wacquire()")
    starved = thread(201, (line,) if feeds else None, gil, name="QueueFeederThread", idle=0.0, switches=75)
    keeps = worker(0, user("re.match(...)"), cpu=0.5, gil=True, others=(starved,), index=22)
    waits = worker(1, step="idle", others=(thread(202, (line,), asks, name="QueueFeederThread"),))
    shared = [replace(p, semaphores=(Semaphore("sem.mp", 700, 4096, 0, 1),)) for p in (loop(1), keeps, waits)]
    said = diagnose(later(*shared))
    assert (said.cause, said.who["worker"], said.who["role"]) == (HangCause.GIL, 0, "worker")


def importing(number: int) -> SeenProcess:
    """A spawned worker that imports the program, which imports the loader's modules."""
    spawn = "/lib/python3.11/multiprocessing/spawn.py"
    stack = (
        library("<module>", "/site-packages/torch/utils/data/sampler.py", "from torch import Generator"),
        library("_call_with_frames_removed", "<frozen importlib._bootstrap>"),
        library("_main", spawn, "prepare(preparation_data)"),
    )
    new = worker(number)
    return replace(new, name="python", threads=(thread(new.pid, stack, None, cpu=0.2),))


def test_a_spawned_worker_that_imports_a_module_of_the_loader_imports() -> None:
    """The module's own code is no step of the loader that it is for."""
    assert found(loop(1), IDLE, importing(1)).where["step"] == "import"


AFTER_WORKER_1 = RecordedWait(hung=True, seconds=11.0, pid=LOOP, task=0, worker=0, numbers={102: 1}, workers=2)


def test_a_worker_that_comes_up_after_its_sibling_is_not_gone() -> None:
    """The trace has nothing of worker 0 yet: it still imports, while worker 1 has made its batches."""
    idle = worker(1, step="idle")
    said = diagnose(later(loop(0), importing(0), idle), AFTER_WORKER_1)
    assert (said.who["pid"], said.where["step"]) == (101, "import")
    assert "worker 0 (pid 101)" in said.sentence
    unseen = diagnose(later(loop(0), idle), AFTER_WORKER_1)  # nor is it if nothing shows which process it is
    assert "has ended" not in unseen.sentence
    gone = diagnose(later(loop(0), idle), replace(AFTER_WORKER_1, numbers={101: 0, 102: 1}))
    assert "waits for worker 0, which has ended" in gone.sentence


def test_a_worker_that_comes_up_has_its_number_in_its_own_loader() -> None:
    """The program's first loader has two workers, which came before."""
    first = [replace(worker(number), pid=pid, threads=()) for number, pid in ((0, 98), (1, 99))]
    told = replace(AFTER_WORKER_1, others=frozenset((98, 99)))

    def numbers(told: RecordedWait, *processes: SeenProcess) -> dict[int, int]:
        return {number: one.pid for number, one in RunFacts([look(*processes)], told).workers_of(LOOP).items()}

    assert numbers(told, loop(0), *first, importing(0), worker(1)) == {0: 101, 1: 102}
    third = importing(2)  # of a loader of which the trace has nothing
    assert numbers(told, loop(0), importing(0), worker(1), third) == {0: 101, 1: 102}
    told = replace(told, numbers={101: 0, 102: 1}, workers=3)  # worker 0 is gone
    assert numbers(told, loop(2), worker(1), third) == {1: 102, 2: 103}


# --- Who could end a wait, and what that one is in --------------------------------------------------------------------
RESULT = (WAIT, library("Future.result", POOL[0]), user("pool.submit(f).result()", "step", 40))
FIFO = {"call": OPENS, "wchan": "wait_for_partner"}


def of_pool(pid: int, *inside: Frame) -> SeenProcess:
    """A process of the loop's own ProcessPoolExecutor; inside: "" = it waits for a task."""
    at_work = library("_process_worker", "/lib/python3.11/concurrent/futures/process.py")
    call = OPENS if inside else LOCKED
    return process(pid, LOOP, thread(pid, (*inside, at_work, FORK, MAIN), call, wchan="wait_for_partner"))


def test_who_waits_for_a_result_waits_for_the_task_of_its_pool() -> None:
    asks = loop(stack=(*RESULT, MAIN_OF), call=LOCKED)
    said = found(asks, IDLE, of_pool(300, user("open(fifo)", "tokenize")), of_pool(301))
    assert (said.cause, said.who["pid"], said.where["function"]) == (HangCause.FIFO, 300, "tokenize")
    said = found(asks, IDLE, of_pool(300), of_pool(301))
    assert (said.cause, said.who["role"]) == (HangCause.NOBODY, "loop")
    assert "for the result of an idle pool" in said.sentence
    two = (of_pool(300, user("open(fifo)")), of_pool(301, user("open(fifo)")))
    assert found(asks, IDLE, *two).who["role"] == "loop"  # it can't be known which of them has the task


def test_a_thread_that_waits_for_a_task_of_its_own_pool_leads_to_that_task() -> None:
    task = (WAIT, library("Future.result", POOL[0]), user("inner.result()", "outer", 50), library("_worker", POOL[1]))
    pooled = thread(202, task, LOCKED, name="pool_0")
    said = found(loop(1), IDLE, worker(1, *RESULT, call=LOCKED, others=(pooled,)))
    assert (said.who["thread"], said.where["sample"], said.where["step"]) == (202, 37, "sample")
    assert "its thread pool_0, (outer at data.py:50) for 41.0 s, waits in Future.result" in said.sentence
    assert said.cause is HangCause.NOBODY
    assert "which has no free thread" in said.also[0]


def test_an_event_names_the_threads_that_could_set_it_and_whom_they_wait_for() -> None:
    ready = (WAIT, library("Event.wait"), user("ready.wait()"))
    reads = Syscall("read", "", (6,), (6,))
    io = thread(202, (user("conn.recv()", "pump", 70),), reads, name="io")
    files = (Descriptor(6, "pipe", "pipe:[60]", 60, mode="r"),)
    decoder = process(300, 102, thread(300, None, SLEEPS, state="T"), name="sh",
                      descriptors=(Descriptor(1, "pipe", "pipe:[60]", 60, mode="w"),))  # fmt: skip
    said = found(loop(1), IDLE, worker(1, *ready, call=LOCKED, others=(io,), descriptors=files), decoder)
    assert said.who["worker"] == 1
    assert "its thread io (pump at data.py:70) is waiting for data in pipe 60" in said.sentence
    assert "process sh (pid 300), a child of worker 1 is stopped by a signal" in said.sentence


def test_a_lock_names_what_the_other_threads_are_in_and_not_a_librarys() -> None:
    syncs = thread(150, (user("time.sleep(990)", "sync", 80),), SLEEPS, name="sync")
    monitor = thread(151, (WAIT, library("TMonitor.run", "/site-packages/tqdm/_monitor.py")), LOCKED, name="tqdm")
    said = found(loop(0, syncs, monitor, stack=(user("with self.lock:", "save"), MAIN_OF), call=LOCKED), IDLE)
    assert (said.cause, said.sure) == (HangCause.LOCK, Sure.POSSIBLE)
    assert "waits for a lock [its thread sync (sync at data.py:80) is asleep (990 s more)]" in said.sentence


def test_threads_that_all_wait_for_locks_may_wait_for_each_other() -> None:
    def second(address: int) -> SeenProcess:
        call = Syscall("futex", "wait", (address, 393), address=address, timeout=-1.0)
        other = thread(150, (user("with A:", "val", 22),), call, name="val")
        return loop(0, other, stack=(user("with B:", "train"), MAIN_OF), call=LOCKED)

    said = found(second(8192), IDLE)
    assert "each may hold the lock that the next one waits for [its thread val (val at data.py:22)" in said.sentence
    assert "each may hold" not in found(second(4096), IDLE).sentence  # both wait for one lock


def test_who_has_the_other_end_and_waits_in_turn_is_said_to() -> None:
    """A duplex Pipe of the loop's, whose both ends the worker has inherited."""
    mine = Descriptor(6, "socket", "socket:[60]", 60, mode="rw", peer=61)
    theirs = Descriptor(7, "socket", "socket:[61]", 61, mode="rw", peer=60)
    asks = worker(1, user("conn.recv()"), call=Syscall("read", "", (6,), (6,)), descriptors=(mine, theirs))
    answers = loop(1, descriptors=(Descriptor(3, "pipe", "pipe:[500]", RESULTS, mode="r"), theirs))
    said = found(answers, IDLE, asks)
    assert said.sentence.endswith(
        "the other end: the loop (pid 100) [waits for it in turn] and worker 1 (pid 102) itself"
    )
    serves = thread(150, (user("conn.recv()", "serve", 90),), LOCKED, name="server")
    served = found(replace(answers, threads=(*answers.threads, serves)), IDLE, asks)
    assert "waits for it in turn" not in served.sentence
    assert "its thread server (serve at data.py:90)" in served.sentence


def test_the_feeder_of_a_users_queue_is_not_that_of_the_results() -> None:
    """A child that is joined before its queue is read: it ends once its feeder has written all."""
    join = (Frame("Popen.poll", "/lib/python3.11/multiprocessing/popen_fork.py", 27, source="os.waitpid(self.pid)"),)
    waits = Syscall("wait4", "for process 300", target=300, timeout=-1.0)
    pipe = Descriptor(6, "pipe", "pipe:[60]", 60, mode="r")
    sends = Frame("Connection._send", CONNECTION, 384, source="n = write(self._handle, buf)")
    feeds = feeder(301, sends, source="send_bytes(obj)", call=Syscall("write", "", (8,), (8,)))
    ends = library("_exit_function", "/lib/python3.11/multiprocessing/util.py", "_run_finalizers()")
    finalizer = library("Thread.join", source="self._wait_for_tstate_lock()", self="<Thread at 0x77>")
    bottom = library("Thread._bootstrap_inner", self="<Thread at 0x77>")
    child = process(
        300, LOOP, thread(300, (finalizer, ends, FORK, MAIN), LOCKED),
        replace(feeds, stack=(*(feeds.stack or ()), bottom)),
        descriptors=(Descriptor(8, "pipe", "pipe:[60]", 60, mode="w"), pipe),
    )  # fmt: skip
    joins = loop(stack=(*join, user("p.join()", "step"), MAIN_OF), call=waits, descriptors=(pipe,))
    said = found(replace(joins, children=(300,)), IDLE, child)
    assert "writing a batch" not in said.sentence
    assert "waiting for room in pipe 60; the loop (pid 100) [waits for it in turn] has its reading end" in said.sentence


def test_permits_that_a_thread_gives_out_now_and_then_are_not_lost() -> None:
    """A token bucket: a thread of the loop's process releases a permit, and sleeps."""

    def seen(left: float) -> Finding:
        call = Syscall("clock_nanosleep", f"{left} s more", (1, 1), timeout=left)
        refills = thread(150, (user("time.sleep(4)", "refill"),), call, name="refill")
        return found(sharing(loop(1, refills)), sharing(IDLE), sharing(worker(1, user("SEM.acquire()"), call=LOCKED)))

    assert seen(4.0).outcome is RunOutcome.MAYBE_HUNG
    assert seen(990.0).outcome is RunOutcome.HUNG


def test_a_process_of_the_programs_own_may_hold_the_permits() -> None:
    waits = sharing(worker(1, user("with SLOTS:"), call=LOCKED))
    hog = sharing(process(300, LOOP, thread(300, (user("time.sleep(990)", "hog"), FORK, MAIN), SLEEPS)))
    said = found(sharing(loop(1)), sharing(IDLE), waits, hog)
    assert (said.cause, said.sure) == (HangCause.SEMAPHORE, Sure.POSSIBLE)
    assert "process python (pid 300) may hold it" in said.sentence
    said = found(sharing(loop(1)), sharing(IDLE), waits)
    assert said.cause is HangCause.PERMIT_LOST
    assert said.sentence.endswith("it was lost, or the loop (pid 100) holds it while waiting for the batch")


@pytest.mark.parametrize(
    ("inside", "batch", "task", "cause"),
    [
        ((user("with LOCK:"),), "[37, 38]", "1", HangCause.FORK_LOCK),
        ((user("with LOCK:"),), "[36, 37]", "1", HangCause.SELF_LOCK),  # sample 36 may have kept it
        ((user("with LOCK:"),), "[37, 38]", "3", HangCause.SELF_LOCK),
        ((user("with LOCK:"), user("return self.read(i)")), "[37, 38]", "1", HangCause.SELF_LOCK),
        ((library("cached_property.__get__", "/lib/python3.11/functools.py"), user("self.table")), "[36, 37]", "3",
         HangCause.FORK_LOCK),
    ],
)  # fmt: skip
def test_a_lock_that_the_worker_can_not_have_taken_before_was_held_at_the_fork(
    inside: tuple[Frame, ...], batch: str, task: str, cause: HangCause
) -> None:
    made = worker(1, *inside, call=LOCKED)
    stack = tuple(
        replace(f, variables={**f.variables, "idx": task}) if f.function == "_worker_loop"
        else replace(f, variables={**f.variables, "possibly_batched_index": batch}) if f.function == "F.fetch" else f
        for f in made.threads[0].stack or ()
    )  # fmt: skip
    assert found(loop(1), IDLE, replace(made, threads=(replace(made.threads[0], stack=stack),))).cause is cause


def test_a_fork_server_that_imports_is_who_the_loop_waits_for_and_no_worker() -> None:
    server = "/lib/python3.11/multiprocessing/forkserver.py"
    command = ("python", "-c", "from multiprocessing.forkserver import main; main(3, 4, ['big'], {})")
    imports = (user("time.sleep(990)", "<module>"), library("main", server, "__import__(modname)"))
    asks = (library("read_signed", server, "s = os.read(fd, n)"),
            library("Popen._launch", "/lib/python3.11/multiprocessing/popen_forkserver.py"),
            Frame("It.__init__", "/site-packages/torch/utils/data/dataloader.py", 1170, {}, "w.start()"))  # fmt: skip
    reads = Syscall("read", "", (6,), (6,))
    pipe = Descriptor(6, "pipe", "pipe:[60]", 60, mode="r")
    starts = loop(stack=(*asks, MAIN_OF), call=reads, descriptors=(pipe,))
    said = found(starts, process(90, LOOP, thread(90, imports, SLEEPS), command=command))
    assert (said.cause, said.who["pid"]) == (HangCause.SLEEP, 90)
    assert "the fork server (pid 90)" in said.sentence
    assert "worker" not in said.who["role"]


def test_a_loop_that_is_seen_in_next_is_not_in_its_own_code() -> None:
    """Its batches are asked for by one thread after another, as asyncio's executor does: the trace knows one only."""
    own_end = Descriptor(6, "pipe", "pipe:[60]", 60, mode="rw")
    reads = worker(1, user("os.read(r, 1)"), call=Syscall("read", "", (6,), (6,)), descriptors=(own_end,))
    told = RecordedWait(hung=True, seconds=12.0, past=0.5, pid=LOOP, own_code=True, numbers={101: 0, 102: 1})
    assert diagnose(later(loop(1), IDLE, reads), told).outcome is RunOutcome.HUNG


def test_a_short_sleep_that_is_never_seen_at_one_call_is_told_as_polling() -> None:
    naps = worker(1, user("time.sleep(0.001)", "wait_page"), call=None, switches=300, cpu=0.01)
    more = replace(naps, threads=(replace(naps.threads[0], switches=(3000, 3300)),))
    told = RecordedWait(hung=True, seconds=20.0, past=0.5, pid=LOOP, worker=1, worker_pid=102, numbers={101: 0, 102: 1})
    said = diagnose([look(loop(1), IDLE, naps), look(loop(1), IDLE, more, moment=4_000_000_000)], told)
    assert (said.outcome, said.cause) == (RunOutcome.MAYBE_HUNG, HangCause.SLEEP)
    assert "polls: it woke 3295 times" in said.sentence


def test_a_process_without_a_loader_is_given_none() -> None:
    said = found(loop(stack=(user("lock.acquire()", "<module>"),), call=LOCKED))
    assert "the loop" not in said.sentence
    assert "process python (pid 100), in no loader now" in said.sentence


def test_a_worker_that_ignores_the_signal_to_end_is_said_to() -> None:
    exits = library("_exit_function", "/lib/python3.11/multiprocessing/util.py", "p._join()")
    waits = Syscall("wait4", "for process 102", target=102, timeout=-1.0)
    joins = loop(stack=(exits, MAIN_OF), call=waits)
    stuck = worker(1, user("time.sleep(990)"), call=SLEEPS)
    assert "SIGTERM" not in found(joins, stuck).sentence
    assert found(joins, replace(stuck, ignored=("SIGTERM",))).sentence.endswith(
        "; it ignores SIGTERM, the signal that should end it"
    )


def test_a_rank_without_workers_is_who_a_rank_in_a_barrier_waits_for() -> None:
    """Its workers have ended, as those of an epoch do: the trace knows that it iterates."""
    collective = library("barrier", "/site-packages/torch/distributed/distributed_c10d.py")
    first = loop(stack=(collective, MAIN_OF), call=LOCKED)
    validates = process(200, 1, thread(200, (user("evaluate()", "validate"), MAIN_OF), None, cpu=0.4))
    told = RecordedWait(
        hung=True, seconds=12.0, past=0.5, pid=LOOP, own_code=True, numbers={101: 0}, ranks={LOOP: 0, 200: 1}
    )
    said = diagnose(later(first, IDLE, validates), told)
    assert (said.outcome, said.who["pid"], said.cause) == (RunOutcome.MAYBE_HUNG, 200, HangCause.COMPUTING)


def test_a_rank_that_naps_outside_of_a_collective_is_why_the_others_wait() -> None:
    """A sleep of 0.2 s would end soon, but it is at one line at both looks: it waits for something by itself."""
    collective = library("all_reduce", "/site-packages/torch/distributed/distributed_c10d.py")
    first = loop(stack=(collective, MAIN_OF), call=LOCKED)
    nap = Syscall("clock_nanosleep", "0.2 s more", (1, 1), timeout=0.2)
    told = RecordedWait(hung=True, seconds=12.0, past=0.5, pid=LOOP, own_code=True, ranks={LOOP: 0, 200: 1})

    def rank(*lines: int) -> list[RunEvidence]:
        at = [(user("time.sleep(0.2)", "rank", 24 + line), MAIN_OF) for line in lines]
        last = process(200, 1, thread(200, at[1], nap, idle=0.1, switches=30))
        then = process(200, 1, thread(200, at[0], nap, idle=0.1, switches=5))
        return [look(first, IDLE, then), look(first, IDLE, last, moment=4_000_000_000)]

    said = diagnose(rank(1, 1), told)
    assert (said.outcome, said.cause, said.who["pid"]) == (RunOutcome.MAYBE_HUNG, HangCause.COLLECTIVE, 200)
    assert "has not reached the collective all_reduce: it " in said.sentence
    assert diagnose(rank(1, 2), told).cause is HangCause.NONE


def test_a_poll_says_of_what_by_the_heads_of_its_blocks() -> None:
    nap = Syscall("clock_nanosleep", "0.1 s", (1, 1), timeout=0.1)
    source = "while lock.exists(): time.sleep(0.1)"
    first = worker(1, user(source), call=nap, idle=0.05, switches=5)
    last = replace(first, threads=(replace(first.threads[0], switches=(40, 45)),))
    said = diagnose([look(loop(1), IDLE, first), look(loop(1), IDLE, last, moment=4_000_000_000)])
    assert said.sentence.endswith(f"in the 4.5 s observed, in `{source}`")


SYNCHRONIZE = "/lib/python3.11/multiprocessing/synchronize.py"


@pytest.mark.parametrize(
    ("inside", "cause", "words"),
    [
        ((library("Queue.put", QUEUES), user("out.put(x)")), HangCause.QUEUE_FULL, "room in a bounded queue"),
        ((library("Condition.wait", SYNCHRONIZE), library("Event.wait", SYNCHRONIZE), user("ready.wait()")),
         HangCause.NOBODY, "a shared Event that no process sets"),
        ((library("Condition.wait", SYNCHRONIZE), user("news.wait()")),
         HangCause.NOBODY, "the notify of a shared Condition"),
    ],
)  # fmt: skip
def test_what_a_semaphore_stands_for_is_told_by_the_stack(
    inside: tuple[Frame, ...], cause: HangCause, words: str
) -> None:
    said = found(sharing(loop(1)), sharing(IDLE), sharing(worker(1, *inside, call=LOCKED)))
    assert (said.cause, said.where["sample"]) == (cause, 37)
    assert f"it waits for {words}" in said.sentence


def test_the_lock_of_the_result_queue_that_nobody_gives_back_was_a_dead_workers() -> None:
    """A worker was killed in the middle of a message: the others' feeders wait for the lock."""
    feeding = feeder(202, source="wacquire()")
    stuck = replace(worker(1, step="idle", others=(feeding,)), semaphores=(Semaphore("sem.mp", 700, 4096, 0, 1),))
    said = found(sharing(loop(1)), sharing(IDLE), stuck)
    assert said.cause is HangCause.DEAD_LOCK_HOLDER
    assert "waits for the lock of the loader's own queue" in said.sentence


def test_a_child_that_is_waited_for_is_told_with_what_it_waits_for() -> None:
    waits = worker(1, user("p.wait()"), call=Syscall("wait4", "for process 300", target=300, timeout=-1.0))
    child = process(300, 102, thread(300, None, SLEEPS), name="ffmpeg")
    said = found(loop(1), IDLE, replace(waits, children=(300,)), child)
    assert (said.cause, said.who["pid"]) == (HangCause.CHILD, 300)
    assert "process ffmpeg (pid 300), a child of worker 1" in said.sentence
    assert "is asleep (990 s more)" in said.sentence
    assert said.fix.startswith("end the child")


def test_a_debugger_that_reads_its_commands_from_a_pipe_waits_for_a_person() -> None:
    inside = (library("Pdb.interaction", "/lib/python3.11/pdb.py"), user("breakpoint()"))
    said = found(loop(1), IDLE, worker(1, *inside, call=READS, descriptors=(QUEUE,)))
    assert (said.cause, "in a debugger" in said.sentence) == (HangCause.TERMINAL, True)


def test_a_worker_that_is_joined_and_waits_for_a_task_was_not_told_to_end() -> None:
    joins = Frame("It._shutdown_workers", "/site-packages/torch/utils/data/dataloader.py", 1, {}, "w.join(timeout=5)")
    waits = Syscall("wait4", "for process 102", target=102, timeout=-1.0)
    said = found(replace(loop(stack=(joins, MAIN), call=waits), children=(101, 102)), IDLE, worker(1, step="idle"))
    assert (said.cause, said.who["worker"]) == (HangCause.NOBODY, 1)
    assert said.sentence.endswith("is idle; it was not told to end")
