"""A watchdog watches runs that hang, die or are healthy: what is in their traces, and what is left of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from programs import python, write
from sizes import slow

import minidl
from minidl import cli
from minidl.commands import _hang_after
from minidl.hang.evidence.model import RunEvidence
from minidl.hang.headline import headline
from minidl.hang.life import ProcessLife, life
from minidl.job.digests import JobRecord, load, read_job
from minidl.record import watchdog
from minidl.record.recorder import TraceConfig
from minidl.tracefile.calls import OpenCall
from minidl.tracefile.events import Call
from minidl.tracefile.process import Process
from minidl.tracefile.reader import Trace, read_trace
from minidl.tracefile.watched import Stall
from minidl.watch import watcher
from minidl.watch.watcher import EARLY_LOOKS, MOST_LOOKS, MOST_LOOKS_OF_A_RUN, Watcher, first_look, next_look

STUCK = "os.read(READ, 1)  # nobody writes"
HANGS = f"""
    import os
    from torch.utils.data import DataLoader, Dataset

    READ, WRITE = os.pipe()

    class Samples(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            if index == 13:
                {STUCK}
            return index

    if __name__ == "__main__":
        try:
            for batch in DataLoader(Samples(), batch_size=2, num_workers=2):
                pass
        except RuntimeError:
            os.write(WRITE, b"!")  # the worker can end
            raise
"""


HEALTHY = HANGS.replace("index == 13", "index < 0")


def run(folder: Path, program: str, *options: str) -> subprocess.CompletedProcess[str]:
    write(folder / "train.py", program)
    return python("-m", "minidl", "run", "--trace", "trace", *options, "train.py", cwd=folder)


def finished(folder: Path, place: str = "trace") -> Trace:
    """The trace, once its watchdog has ended, which is soon after the run."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        if (trace := read_trace(folder / place)).watched.complete and not watchdogs(folder / place):
            break
        time.sleep(0.05)
    assert watchdogs(folder / place) == []
    return trace


def loop_of(trace: Trace) -> Process:
    """The process that iterates."""
    (main,) = [process for process in trace.processes if process.role == "loader"]
    return main


def all_gone(trace: Trace) -> bool:
    return {life(process.pid, process.start_ns) for process in trace.processes} == {ProcessLife.GONE}


def watchdogs(trace: Path) -> list[int]:
    """The processes that watch this trace."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_bytes()
        except OSError:  # it has ended meanwhile
            continue
        found += [int(place.parent.name)] * (b"minidl.watch.watcher" in words and str(trace).encode() in words)
    return found


def test_a_wait_is_looked_at_in_growing_pauses_and_at_the_alarm() -> None:
    looks = [first_look(120, longest=0)]
    while len(looks) < MOST_LOOKS:
        looks.append(next_look(120, looks[-1], len(looks)))
    assert looks == pytest.approx([2, 5.2, 9.36, 16.848, 30.3264, 120, 216, 388.8])
    assert next_look(10_000, 80, EARLY_LOOKS) == 10_000, "however late the alarm is, looks are left for it"
    assert first_look(120, longest=20) == 60, "it is slow, which is no hang"
    assert first_look(120, longest=500) == 120
    assert first_look(2, longest=0) == 0.5


def test_a_wait_is_looked_at_first_by_the_longest_one_that_was_like_it(monkeypatch: pytest.MonkeyPatch) -> None:
    watcher: Any = object.__new__(Watcher)
    wait = OpenCall(1, Call.NEXT, 0)
    reader = SimpleNamespace(pid=7, known=True, calls=lambda: [wait], past=lambda one: 20e9 * (one is wait))
    watcher.processes, watcher.stalls, watcher.hang_after = {7: SimpleNamespace(readers=[reader])}, {}, 120
    monkeypatch.setattr(Watcher, "_attend_to", lambda self, known: None)
    watcher._look_at_waits()
    assert [known.due for known in watcher.stalls.values()] == [60]


def test_a_program_without_a_loader_waits_since_it_last_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    one: Any = object.__new__(Watcher)
    reader = SimpleNamespace(pid=7, known=None, calls=list)
    one.processes, one.stalls, one.hang_after, one.main_pid = {7: SimpleNamespace(readers=[reader])}, {}, 120, 7
    one.waits_since, one.read_at, one.spent = 0, 0, 0.0
    monkeypatch.setattr(Watcher, "_attend_to", lambda self, known: None)
    monkeypatch.setattr(Watcher, "_give_up", lambda self, known: None)
    read = iter([(10, 9.0), (11, 9.05), (12, 9.05), (13, 10.0), (14, 10.0)])

    def looks() -> list[tuple[int, int]]:
        now, cpu = next(read)
        monkeypatch.setattr("time.monotonic_ns", lambda: now * 10**9)
        monkeypatch.setattr(watcher, "ProcFiles", lambda pid: SimpleNamespace(stat=lambda: SimpleNamespace(cpu=cpu)))
        one._look_at_waits()
        return [(known.stall.loader, known.stall.since // 10**9) for known in one.stalls.values()]

    assert [looks() for _ in range(5)] == [[(0, 10)], [(0, 10)], [(0, 10)], [(0, 13)], [(0, 13)]]
    reader.known = True
    one._look_at_waits()
    assert one.stalls == {}


WAITS = """
    import os

    def prepare():
        os.read(os.pipe()[0], 1)  # nobody writes

    prepare()
"""


@pytest.mark.live
def test_a_program_that_hangs_before_its_first_loader_leaves_evidence(tmp_path: Path) -> None:
    write(tmp_path / "train.py", WAITS)
    trace = tmp_path / "trace"
    command = [sys.executable, "-m", "minidl", "run", "--trace", "trace", "train.py"]
    with subprocess.Popen(command, cwd=tmp_path) as program:
        until = time.monotonic() + 60
        while time.monotonic() < until and not (trace.exists() and len(read_trace(trace).watched.looks) > 1):
            time.sleep(0.1)
        program.kill()
    looks = finished(tmp_path).watched.looks
    assert {(one.stall.loader, one.stall.call, one.stall.pid) for one in looks} == {(0, Call.OWN, program.pid)}
    assert "before any DataLoader: the program" in headline(read_trace(trace)).title


@pytest.mark.live
@pytest.mark.parametrize("options", [(), *slow((("--observe",),))], ids=["ours", "torch's"])
def test_a_hang_is_looked_at_and_raised_in_the_loop(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = run(tmp_path, HANGS, "--hang-after", "0.6", "--on-hang", "raise", *options)
    trace = finished(tmp_path)
    assert done.returncode == 1
    assert f"LoaderHangError: {trace.watched.said[0]} (more: minidl help hang)\n" in done.stderr
    assert f"minidl: {trace.watched.said[0]}\n" in done.stderr
    assert f"next: minidl doctor {tmp_path / 'trace'}" in trace.watched.said[0]
    (uncaught,) = trace.described("uncaught")
    assert uncaught["error"].startswith("minidl.wire.errors.LoaderHangError")

    main = loop_of(trace)
    looks = [one for one in trace.watched.looks if one.stall.call is Call.NEXT]
    assert [one.number for one in looks] == list(range(1, len(looks) + 1))
    assert {(one.stall.loader, one.stall.pid) for one in looks} == {(1, main.pid)}
    assert len({one.stall.since for one in looks}) == 1
    (stuck,) = [process for process in trace.processes if process.worker == 0]
    seen = RunEvidence.from_data(looks[0].evidence).process(stuck.pid)
    assert seen.main.stack[0].function.endswith("__getitem__")
    assert os.path.basename(seen.main.stack[0].file) == "train.py"
    assert trace.watched.hang_after_s == 0.6
    assert not list((tmp_path / "trace").glob("*.stacks"))


@pytest.mark.live
def test_a_hang_is_killed_if_that_is_asked_for(tmp_path: Path) -> None:
    done = run(tmp_path, HANGS, "--hang-after", "0.6", "--on-hang", "kill", "--observe")
    trace = finished(tmp_path)
    assert done.returncode == -15
    assert len(trace.watched.said) == 1
    assert all_gone(trace)


UNREADABLE = HANGS.replace(STUCK, "stuck()").replace("class Samples", """\
os.mkfifo("source.py")  # who opens it to read the line that a stack names waits for ever
    exec(compile("def stuck():\\n    os.read(READ, 1)", os.path.abspath("source.py"), "exec"))

    class Samples""")  # fmt: skip

HURRIED = """
    import runpy, sys
    from minidl.record import watchdog

    short = "import minidl.watch.watcher as watcher; watcher.LOOK_SECONDS = 2.0; main(**given)"
    watchdog._BOOT = watchdog._BOOT.replace("main(**given)", short)
    sys.argv = sys.argv[1:]
    runpy.run_module("minidl", run_name="__main__", alter_sys=True)
"""


@pytest.mark.live
@pytest.mark.slow
def test_a_look_that_never_ends_keeps_no_alarm_from_coming(tmp_path: Path) -> None:
    write(tmp_path / "start.py", HURRIED)
    write(tmp_path / "train.py", UNREADABLE)
    command = ["start.py", "minidl", "run", "--trace", "trace", "--hang-after", "5", "--on-hang", "kill", "train.py"]
    done = python(*command, cwd=tmp_path)
    trace = finished(tmp_path)
    assert done.returncode == -15
    (said,) = trace.watched.said
    assert "has waited for a batch" in said
    assert f"minidl: {said}\n" in done.stderr
    assert trace.watched.looks == []
    assert all_gone(trace)


class Alone(watcher.Watcher):
    """A watchdog without processes, which writes down what it does."""

    def __init__(self, lost: list[int], looks: int) -> None:
        self.hang_after, self.lost, self.looks, self.own_looks = 10.0, lost, looks, 0
        self.done: list[str] = []
        self.fd = os.open(os.devnull, os.O_WRONLY)

    def _begin_look(self, known: watcher._StallRecord, alarm: bool) -> None:
        self.done.append(f"look{' for the alarm' * alarm}")

    def _alarm(self, known: watcher._StallRecord, text: str) -> None:
        self.done.append("alarm")
        known.said = True


@pytest.mark.parametrize(
    ("lost", "looks", "done"),
    [([1], 0, ["alarm"]), ([], MOST_LOOKS_OF_A_RUN, ["alarm"]), ([], 0, ["look for the alarm", "alarm"])],
    ids=["an unkillable look", "no look left", "a look that could not begin"],
)
def test_the_alarm_comes_in_time_where_no_look_is_possible(lost: list[int], looks: int, done: list[str]) -> None:
    one = Alone(lost, looks)
    known = watcher._StallRecord(Stall(1, Call.NEXT, time.monotonic_ns() - 11 * 10**9, 1), 2.0)
    for _ in range(2):
        one._attend_to(known)
    os.close(one.fd)
    assert one.done[: len(done)] == done
    assert one.done.count("alarm") == 1


@pytest.mark.live
def test_a_death_is_seen_with_the_last_signs_of_life(tmp_path: Path) -> None:
    """A worker kills all of the run: nobody but the watchdog is left to record that, and to remove what it left."""
    segment = "open(f'/dev/shm/torch_{os.getpid()}_1_1', 'w').close()"
    program = HANGS.replace(STUCK, f"{segment}, os.killpg(0, 9)")
    write(tmp_path / "start.py", "import os, runpy, sys\nos.setpgid(0, 0)\nsys.argv = sys.argv[1:]\n"
          "runpy.run_module('minidl', run_name='__main__', alter_sys=True)\n")  # fmt: skip
    write(tmp_path / "train.py", program)
    done = python("start.py", "minidl", "run", "--trace", "trace", "train.py", cwd=tmp_path)
    trace = finished(tmp_path)
    assert done.returncode == -9
    assert loop_of(trace).pid in {one.pid for one in trace.watched.ended}
    assert [left for one in trace.processes for left in Path("/dev/shm").glob(f"torch_{one.pid}_*")] == []
    assert (trace.watched.looks, trace.watched.said) == ([], [])


@pytest.mark.live
def test_a_process_that_ended_before_its_watchdog_is_there_is_told_with_its_signal() -> None:
    """Its parent has waited for it at once: only a pidfd that was opened before knows the signal."""
    with subprocess.Popen(["sleep", "60"]) as child:
        fd = os.pidfd_open(child.pid)
        child.terminate()
    late = watcher._Watched(child.pid, time.monotonic_ns(), fd)
    kernel = tuple(map(int, os.uname().release.split(".")[:2]))
    assert not late.is_there()
    assert late.exit_code() == (-15 if kernel >= (6, 15) else None)
    os.close(fd)


def test_a_process_hands_its_own_pidfd_to_its_watchdog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[int] = []

    def start(module: str, fds: tuple[int, ...], main_fd: int, **given: Any) -> None:
        about = Path(f"/proc/self/fdinfo/{main_fd}").read_text().split()
        handed.extend([int(about[about.index("Pid:") + 1]), main_fd in fds])

    monkeypatch.setattr(watchdog, "_beside", start)
    dog = watchdog.Watchdog(TraceConfig(str(tmp_path)))
    dog.mine.close()
    assert handed == [os.getpid(), True]


@pytest.mark.live
@pytest.mark.parametrize("options", [("--observe",), *slow(((),))], ids=["torch's", "ours"])
def test_a_crash_leaves_the_stack_that_it_came_in(tmp_path: Path, options: tuple[str, ...]) -> None:
    """torch's workers have a handler of their own, which still says what it has to say."""
    crash = "os.kill(os.getpid(), 7)  # SIGBUS"
    done = run(tmp_path, HANGS.replace(STUCK, crash), *options)
    trace = finished(tmp_path)
    assert done.returncode == 1
    assert not options or "Unexpected bus error encountered in worker" in done.stderr
    (ended,) = [one for one in trace.watched.ended if one.stack]
    assert (ended.code, ended.pid) == (-7, next(one.pid for one in trace.processes if one.worker == 0))
    assert (ended.stack[-1].function, ended.stack[-1].source) == ("__getitem__", crash)
    found = headline(trace)
    assert found.title.endswith(f"in sample 13 (task 6), at train.py:{ended.stack[-1].line}")
    assert not list((tmp_path / "trace").glob("*.stacks"))


@pytest.mark.live
def test_a_healthy_rank_is_sampled_and_says_nothing_and_has_its_digest_when_it_has_ended(tmp_path: Path) -> None:
    write(tmp_path / "train.py", HEALTHY)
    command = ("-m", "minidl", "run", "--trace", "job", "--observe", "train.py")
    done = python(*command, cwd=tmp_path, RANK="1", WORLD_SIZE="2")
    trace = finished(tmp_path, "job/rank-1")
    # its own code may be slow on a busy machine
    looks = [one for one in trace.watched.looks if one.stall.call is not Call.OWN]
    assert (done.returncode, looks, trace.watched.said) == (0, [], [])
    assert trace.watched.hang_after_s == 120
    main = loop_of(trace)
    first, *_, last = [one.processes[main.pid] for one in trace.watched.samples]
    assert min(first.rss_kib, first.private_kib) > 1000
    assert last.cpu_ms >= first.cpu_ms  # on a busy machine, the first one may come at the end
    assert trace.watched.cpu_of(main.pid, trace.start, trace.watched.until) is not None
    assert trace.watched.machine_busy(trace.start, trace.watched.until) is not None
    assert done.stderr.splitlines()[-1] == "minidl: recorded in job/rank-1; next: minidl summary job"
    assert "LoaderHangError" not in done.stderr
    until = time.monotonic() + 30
    while load(trace.path) is None and time.monotonic() < until:
        time.sleep(0.05)
    (table,) = (load(trace.path) or JobRecord()).ranks
    assert (table.facts.rank, table.facts.over, len(table.steps), table.facts.problem) == (1, True, 20, "")
    assert read_job([tmp_path / "job"]) is not None


def test_without_a_watchdog_nothing_is_there(tmp_path: Path) -> None:
    arguments = cli.parser().parse_args(["run", "--hang-after", "off", "train.py"])
    with minidl.trace(tmp_path / "trace", hang_after=_hang_after(arguments.hang_after)):
        assert list(minidl.DataLoader(range(4), batch_size=None)) == [0, 1, 2, 3]
    trace = read_trace(tmp_path / "trace")
    assert not trace.watched
    assert trace.described("stacks") == []


def test_a_run_whose_trace_was_deleted_keeps_its_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on, and may not have opened yet what workers that have ended have left for it."""
    removed: list[set[int]] = []
    monkeypatch.setattr(watcher, "remove_segments_of", removed.append)
    one = watcher.Watcher.__new__(watcher.Watcher)
    one.directory, one.processes, one.stems = tmp_path / "deleted", {}, {"123-1", "456-1"}
    one._remove_segments()
    assert removed == [set()]
