"""Evidence of real processes: what the kernel shows of them, and that looking changes nothing in them."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from minidl.hang.evidence.collect import collect
from minidl.hang.evidence.descriptors import lock_files
from minidl.hang.evidence.model import RunEvidence
from minidl.hang.evidence.processes import first_look, read_process
from minidl.hang.evidence.stacks import parsed, py_spy
from minidl.hang.evidence.waits import Blocked, waits
from minidl.prove.sessions import living

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not os.path.exists("/proc/self/syscall"), reason="this system has no /proc/PID/syscall"),
]


@contextmanager
def child(code: str, **options: object) -> Iterator[subprocess.Popen[bytes]]:
    """A Python program that has come to where it says "ready"."""
    program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, **options)  # type: ignore[call-overload]
    try:
        assert program.stdout.readline() == b"ready\n"
        yield program
    finally:
        program.kill()
        program.wait()
        program.stdout.close()


def look(pid: int, state: str = "S") -> RunEvidence:
    """Look at a process until it is in a state: it has said "ready" a moment before."""
    for _ in range(200):
        found = collect(pid, interval=0.05, py_spy=False)
        process = found.process(pid)
        if process.main is not None and process.main.state == (state, state) and (state != "S" or process.main.slept):
            return found
    raise AssertionError(f"process {pid} never came to state {state}: {process}")


def blocked(found: RunEvidence, pid: int) -> tuple[Blocked, str, set[int]]:
    wait = waits(found)[pid, pid]
    return wait.kind, wait.words, {holder.pid for holder in wait.holders}


READY = "import sys; print('ready', flush=True); "


def test_a_file_lock_and_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "index.lock"
    wanted = f"import fcntl; f = open({str(path)!r}); {READY} fcntl.flock(f, fcntl.LOCK_EX)"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with child(wanted) as program:
            found = look(program.pid)
            kind, words, holders = blocked(found, program.pid)
            assert fcntl.fcntl(file, fcntl.F_GETFD) >= 0
    if found.process(program.pid).main.syscall is None:  # type: ignore[union-attr]
        pytest.skip("ptrace is forbidden here")
    assert (kind, words, holders) == (Blocked.FILE_LOCK, f"waiting in flock on {path}", {os.getpid()})


def test_a_program_elsewhere_that_has_locked_an_open_file_is_looked_at(tmp_path: Path) -> None:
    """The one that polls does not wait for the lock in the kernel."""
    path = tmp_path / "index.lock"
    holds = f"import fcntl, time; f = open({str(path)!r}, 'w'); fcntl.lockf(f, fcntl.LOCK_EX); {READY} time.sleep(99)"
    with child(holds) as other, child(f"import time; f = open({str(path)!r}); {READY} time.sleep(99)") as program:
        assert collect(program.pid, interval=0.0, py_spy=False).process(other.pid) is not None


def test_a_lock_file_is_known_by_its_name_and_by_the_process_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "a.lock").write_text(f"{os.getpid()}\n")
    (tmp_path / "b.lock").write_text("4194305 left by a host\n")
    (tmp_path / "c.lock").touch()
    named = [str(tmp_path / name) for name in ("a.lock", "b.lock", "c.lock", "gone.lock")]
    found = list(lock_files(os.getpid(), [*named, "no-such-folder/d.lock"]))
    assert [one.about for one in found] == [
        f"it names process {os.getpid()}, which runs", "it names process 4194305, which has ended", "",
    ]  # fmt: skip
    assert [(one.fd, one.inode) for one in found] == [(-1, os.stat(name).st_ino) for name in named[:3]]


def test_the_shared_memory_is_that_of_the_program_and_not_our_own() -> None:
    mounts = "import time; from minidl.prove.faults.program import small_shm; small_shm()"
    with child(f"{mounts}; {READY} time.sleep(99)") as program:
        if os.path.samefile(f"/proc/{program.pid}/ns/mnt", "/proc/self/ns/mnt"):
            pytest.skip("this user may not mount")
        machine = collect(program.pid, interval=0.0, py_spy=False).machine
    assert (machine.shm_size, machine.shm_free) == (1 << 20, 1 << 20)


def test_a_full_pipe_its_bytes_and_its_reader() -> None:
    reading, writing = os.pipe()
    with ExitStack() as stack:
        stack.callback(os.close, reading)
        code = f"import os; {READY} os.write({writing}, bytes(1 << 20))"
        program = stack.enter_context(child(code, pass_fds=(writing,)))
        os.close(writing)
        found = collect(os.getpid(), [look(program.pid).main], interval=0.05, py_spy=False)
        mine = found.process(os.getpid())
        pipe = mine.descriptor(reading)
        assert pipe.waiting > 0
        kind, _, holders = blocked(found, program.pid)
        assert (kind, holders) == (Blocked.PIPE_WRITE, {os.getpid()})
        assert len(os.read(reading, pipe.waiting)) == pipe.waiting  # looking has read nothing


def test_a_fifo_is_not_opened_by_looking(tmp_path: Path) -> None:
    path = tmp_path / "a.fifo"
    os.mkfifo(path)
    with child(f"{READY} open({str(path)!r}).read(); print('opened', flush=True)") as program:
        found = look(program.pid)
        found = look(program.pid)
        assert program.poll() is None
        assert blocked(found, program.pid)[0] is Blocked.FIFO


def test_a_stopped_process_stays_stopped() -> None:
    with child(f"import time; {READY} time.sleep(999)") as program:
        os.kill(program.pid, signal.SIGSTOP)
        found = look(program.pid, "T")
        assert blocked(found, program.pid)[0] is Blocked.STOPPED
        look(program.pid, "T")


def test_a_sleep_has_its_end_and_a_process_that_is_gone_is_left_out() -> None:
    with child(f"import time; {READY} time.sleep(999)") as program:
        found = look(program.pid)
        kind, words, _ = blocked(found, program.pid)
        assert kind is Blocked.SLEEPS
        assert "s more" in words or words == "asleep (999 s)"
        assert RunEvidence.from_json(found.to_json()) == found
    assert collect(program.pid, interval=0.0, py_spy=False).processes == ()


WAITS_FOR_CHILD = f"import subprocess, sys; p = subprocess.Popen(['sleep', '999']); {READY} p.wait()"


def test_a_child_waited_for_is_looked_at_too_beside_another_process() -> None:
    """Of another rank its workers tell that it iterates."""
    with child(WAITS_FOR_CHILD) as program, child(f"import time; {READY} time.sleep(999)") as other:
        found = look(program.pid)
        sleeper = found.process(program.pid).children  # type: ignore[union-attr]
        try:
            kind, _, holders = blocked(found, program.pid)
            assert (kind, holders) == (Blocked.CHILD, set(sleeper))
            beside = collect(other.pid, [program.pid], interval=0.0, py_spy=False).processes
            assert {one.pid for one in beside} == {other.pid, program.pid, *sleeper}
        finally:
            for pid in sleeper:
                os.kill(pid, signal.SIGKILL)


LEAVES_A_SHELL = """
import os, subprocess, time
subprocess.run(["sh", "-c", "sleep 999 & sleep 998 &"])
print(os.getpid(), flush=True)
time.sleep(997)
"""


@pytest.mark.parametrize(
    "started", ["bash run.sh", "bash run.sh &", "python train.py &", "set -m; python train.py | cat"]
)
def test_what_a_program_leaves_in_the_background_counts_as_its_child(tmp_path: Path, started: str) -> None:
    """Not so what has started it, which may be an orphan itself, nor another program of that, nor of its pipeline."""
    (tmp_path / "train.py").write_text(LEAVES_A_SHELL)
    (tmp_path / "run.sh").write_text(f"sleep 996 & '{sys.executable}' train.py & wait\n")
    command = ["bash", "-c", started.replace("python", f"'{sys.executable}'")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, cwd=tmp_path) as shell:
        try:
            program = int(shell.stdout.readline())
            found = look(program)
            assert {one.ppid for one in found.processes if one.pid != program} == {program}
            assert sorted(one.command[-1] for one in found.processes) == ["998", "999", "train.py"]
        finally:
            for pid in living(shell.pid):
                os.kill(pid, signal.SIGKILL)


IN_A_FORK = """
import ctypes, mmap, os, sys, threading, time
libc, page = ctypes.CDLL(None), mmap.mmap(-1, 4096)
mutex, kind = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(page))), ctypes.create_string_buffer(64)
libc.pthread_mutexattr_init(kind), libc.pthread_mutexattr_setpshared(kind, 1), libc.pthread_mutex_init(mutex, kind)
held, free = threading.Lock(), threading.Lock()
held.acquire()

def child(act):
    pid = os.fork()
    if not pid:
        act()
        time.sleep(999)
    return pid

def twice():
    free.acquire(), free.acquire()

def new():
    made = [threading.Lock() for _ in range(99999)][-1]
    made.acquire(), made.acquire()

def die():
    libc.pthread_mutex_lock(mutex), os._exit(0)

if sys.argv[1] == "mutex":
    libc.pthread_mutex_lock(mutex)
elif sys.argv[1] == "dead":
    os.waitpid(child(die), 0)
takes = {"held": held.acquire, "free": twice, "new": new}.get(sys.argv[1], lambda: libc.pthread_mutex_lock(mutex))
print("ready", child(lambda: None), child(takes), flush=True)
time.sleep(999)
"""


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="a lock is no semaphore of glibc there")
@pytest.mark.parametrize(("lock", "values"), [("held", (0, 0)), ("free", (1, 1)), ("new", (-1, -1))])
def test_a_lock_is_compared_with_the_parents_and_with_the_one_in_another_fork(
    lock: str, values: tuple[int, int]
) -> None:
    with forked(lock) as (parent, other, pid):
        copies = look_at_fork(parent, pid).process(pid).main.copies  # type: ignore[union-attr]
        assert tuple(copies.get(str(one)) for one in (parent, other)) == values


@pytest.mark.parametrize("lock", ["mutex", "dead"])
def test_the_owner_of_a_mutex_of_several_processes_may_have_ended(lock: str) -> None:
    with forked(lock) as (parent, _, pid):
        kind, words, holders = blocked(look_at_fork(parent, pid), pid)
        assert (kind, holders) == (Blocked.MUTEX, {parent} if lock == "mutex" else set())
        assert ("has ended" in words) is (lock == "dead")


@contextmanager
def forked(lock: str) -> Iterator[tuple[int, int, int]]:
    """A program with two forks; the second one waits for a lock."""
    command = [sys.executable, "-c", IN_A_FORK, lock]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as program:
        try:
            first, second = map(int, program.stdout.readline().split()[1:])
            yield program.pid, first, second
        finally:
            os.killpg(program.pid, signal.SIGKILL)


def look_at_fork(parent: int, pid: int) -> RunEvidence:
    """Look at a program until a fork of it waits for its lock."""
    for _ in range(100):
        found = collect(parent, interval=0.05, py_spy=False)
        main = found.process(pid).main  # type: ignore[union-attr]
        if main is not None and main.call.name == "futex" and main.slept:
            return found
    raise AssertionError(f"process {pid} never waited for its lock: {main}")


@pytest.mark.skipif(py_spy() is None, reason="py-spy is not installed")
def test_py_spy_gives_stacks_or_the_reason_why_not() -> None:
    with child(f"import time; {READY} time.sleep(999)") as program:
        look(program.pid)
        process = collect(program.pid, interval=0.0).process(program.pid)
    seen = process.main.stack is not None and process.main.stack[-1].function == "<module>"
    assert seen or any("Python stacks" in text for text in process.not_seen)


def test_what_is_not_py_spys_json_has_no_stacks() -> None:
    assert parsed("[1, 2]") == {}
    assert parsed("{") == {}


def test_a_process_that_got_the_id_of_another_is_not_compared_with_it() -> None:
    before = first_look(os.getpid())
    before.threads = {tid: seen._replace(switches=-1) for tid, seen in before.threads.items()}

    def first(started: str) -> int:
        before.started = started
        seen = read_process(os.getpid(), before)
        return seen.main.switches[0]

    assert first(before.started) == -1
    assert first("1") >= 0
