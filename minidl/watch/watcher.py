"""The watchdog's main loop, and its looks at a hang.

Interface: `main(...)`, which `record.watchdog` starts in a process of its own.

Every second it checks that the run's processes exist, samples them from time to time, and reads the new events of the
processes that iterate over a loader (`waits`). After a long wait, a forked child takes a look: evidence of all
processes and, for the alarm, the finding of `minidl doctor`. Another child folds the files of ended workers
(`tracefile.folded`), and one writes the digest of a rank of a job (`digest`). So the watchdog itself waits only for the
next second, the end of a process, or a message of the run, and ends within milliseconds of the run.

A look may never end: a source file or a process that it reads may be on a file system that does not answer. After
LOOK_SECONDS it is given up. The alarm does not wait longer than LOOK_SECONDS for a look: then, or if no look is
possible, it comes without a finding. While a look that was given up can't be killed, no other look begins.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

import minidl
from minidl.hang.evidence.proc import ProcFiles
from minidl.hang.life import exit_code, life
from minidl.hang.limits import EARLY, GROWS, LONGER
from minidl.process_stat import HeldProcess, remove_segments_of
from minidl.tracefile import watched
from minidl.tracefile.attachments import SUFFIX
from minidl.tracefile.calls import OpenCall, OpenCalls
from minidl.tracefile.events import Call
from minidl.tracefile.folded import KEPT, due
from minidl.tracefile.format import STACKS_SUFFIX, header_problem, parts_of, records
from minidl.tracefile.tail import tail
from minidl.tracefile.watched import Ended, Stall
from minidl.watch import looks
from minidl.watch.digest import Digest
from minidl.watch.dumps import crash_in
from minidl.watch.folding import WORKER, ended_workers, fold_gently, runs
from minidl.watch.vitals import VitalSigns

TICK: Final = 1.0
SAMPLE_SECONDS: Final = 10.0
"""The longest pause between two samples; it begins at one second, and grows to a hundredth of the run."""

BEGINNING: Final = 5.0
"""For so many seconds the pause is half of that: a short run is to have some."""

EARLY_LOOKS: Final = 5
MOST_LOOKS: Final = 8
MOST_LOOKS_OF_A_RUN: Final = 64
MOST_OWN_LOOKS: Final = 16
"""The part of them at the program's own code, which may be slow: the rest is kept for a loader's hang."""

IDLE: Final = 0.05
"""CPUs that a program may use and still count as waiting, before it has a loader."""

GRAIN: Final = 0.02
"""The kernel counts CPU time in steps of 10 ms: so many seconds may be of before."""

MOST_BYTES: Final = 32 << 20
MOST_EVENTS: Final = 8192
MOST_TEXT: Final = 4000
KILL_SECONDS: Final = 5.0
LOOK_SECONDS: Final = 45.0
"""How long a look may take: py-spy alone has 30 s for all processes, and the machine may be busy."""


def first_look(hang_after: float, longest: float) -> float:
    """Return after how many seconds a wait is looked at first. longest: of the waits before."""
    return min(hang_after, max(min(EARLY, hang_after / 4), LONGER * longest))


def next_look(hang_after: float, waited: float, looks: int) -> float:
    """Return after how many seconds of waiting the next look is due: in growing pauses, and at the alarm."""
    if waited >= hang_after:
        return waited * GROWS[1]
    return hang_after if looks >= EARLY_LOOKS else min(waited * GROWS[looks > 1], hang_after)


class Watcher:
    """Watches the processes of the trace in `directory` until the one that began it ends, or says so."""

    def __init__(
        self, directory: Path, main_pid: int, channel: socket.socket, hang_after: float, on_hang: str, stacks: bool,
        raises: int, since: int, most_bytes: int | None, main_fd: int,
    ) -> None:  # fmt: skip
        self.directory, self.channel = directory, channel
        self.main_pid, self.since, self.main_fd = main_pid, since, main_fd
        self.most_bytes = most_bytes  # of packs of workers that have ended; None = no limit
        self.hang_after, self.on_hang, self.stacks, self.raises = hang_after, on_hang, stacks, raises
        self.stderr = os.dup(2)  # the run's own; the alarm is all that is written to it
        os.dup2(os.open(os.devnull, os.O_RDWR), 2)
        self.begun = time.monotonic()
        self.processes: dict[int, _Watched] = {}
        self.stems: set[str] = set()  # of the processes' files, as far as they have been found
        self.stalls: dict[tuple[int, int], _StallRecord] = {}  # by process and iterator
        self.lost: list[int] = []  # children that were killed, and are there still
        self.folds = 0  # the child that folds files of workers that have ended; 0 = there is none
        self.digest = Digest(directory)
        self.most = 0  # processes that were there at one time
        self.vitals, self.next_sample = VitalSigns(), 0.0
        self.looks = self.own_looks = 0
        self.waits_since, self.read_at, self.spent = since, since, 0.0  # of the main process, before it has a loader
        self.stays = 0.0  # since when the trace has ended and the process has not; seconds, CLOCK_MONOTONIC
        self.poll = select.poll()
        self.poll.register(channel, select.POLLIN)
        name = f"{watched.KIND}-{main_pid}-{time.monotonic_ns()}{SUFFIX}"
        self.fd = os.open(directory / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.write(watched.description(minidl.__version__, main_pid, hang_after, on_hang=on_hang))

    # --- the loop
    def run(self) -> None:
        """Watch until the run ends."""
        main = _Watched(self.main_pid, self.since, self.main_fd)
        if not self._hold(main):  # it was faster
            self._write_end(main)
        while self.main_pid in self.processes:
            self._find_processes()
            now = time.monotonic()
            if now >= self.next_sample:
                self.write(watched.sample(self.vitals.sample(self.processes)))
                run = now - self.begun
                self.next_sample = now + min(SAMPLE_SECONDS, max(TICK / 2 if run < BEGINNING else TICK, run / 100))
            self._look_at_waits()
            self.digest.attend(self._forked)
            if self._wait_for_next():
                break
        else:
            self._remove_segments()
        self._finish()

    def _wait_for_next(self) -> bool:
        """Wait for a second, or what happens before; return whether the run has ended its trace."""
        over = False
        tick = min(TICK, self.hang_after / 8, max(0.01, self.next_sample - time.monotonic()))
        for fd, _ in self.poll.poll(tick * 1000):
            if fd == self.channel.fileno():
                word = b""
                with contextlib.suppress(OSError):
                    word = self.channel.recv(16)
                if word == b"end":
                    over = True
                    continue
                if word == b"leave":
                    self._stay()
                    continue
                self.poll.unregister(self.channel)  # all that held the other end are gone, or it was closed by mistake
        for pid, process in list(self.processes.items()):
            if not process.is_there():
                self._ended(pid, process)
        for known in self.stalls.values():
            if known.look is not None and known.look.has_ended():
                self._take_words(known)
        self.lost = [child for child in self.lost if not _reaped(child)]
        return over

    def _remove_segments(self) -> None:
        """Remove leftovers of processes that were killed together: no other process of the run is left to do it."""
        self._find_processes()
        end = time.monotonic() + TICK
        while self.processes and time.monotonic() < end and not self._wait_for_next():
            pass
        pids = {int(stem.split("-")[0]) for stem in self.stems}
        remove_segments_of(pids - self.processes.keys())

    def _finish(self) -> None:
        for known in self.stalls.values():
            self._give_up(known)
        if not self.stays:
            self._end_trace()
        self.digest.write_last(self._forked)

    def _stay(self) -> None:
        """End the trace, and watch the process until it ends, because it may hang at exit."""
        self._end_trace()
        self.poll.unregister(self.channel)
        self.channel.close()
        self.stays = time.monotonic()
        self.next_sample = self.stays + first_look(self.hang_after, 0.0)

    def _end_trace(self) -> None:
        left = [pid for pid, one in self.processes.items() if one.is_there()]
        self.write(watched.sample(self.vitals.sample(left)))  # also: who has outlived the main process
        used = os.times()
        self.write(watched.over(round(1000 * sum(used[:4]))))
        for file in self.directory.glob(f"*{STACKS_SUFFIX}"):
            self._take_dumps(file)

    def write(self, line: bytes) -> None:
        with contextlib.suppress(OSError):  # the disk is full, or the trace deleted: nothing can be said
            os.write(self.fd, line)

    # --- processes
    def _find_processes(self) -> None:
        """Find the processes that record into the trace."""
        try:
            names = os.listdir(self.directory)
        except OSError:
            self.processes.clear()  # the trace was deleted: nothing is left to be done
            self.stems.clear()  # nor removed: the run may go on
            return
        for name in names:
            stem, _, kind = name.partition(".")
            if kind == "meta.jsonl" and stem not in self.stems:
                self.stems.add(stem)
                pid, since = parts_of(stem)
                self._watch(pid, since, stem)
        self.most = max(self.most, len(self.processes))
        self._fold(names)

    def _fold(self, names: list[str]) -> None:
        """Fold the files of workers that have ended, if they are many: in a child, which takes its time."""
        if self.folds and _reaped(self.folds):
            self.folds = 0
        if self.folds or len(names) < 4 * max(KEPT, self.most):
            return
        for name in (name for name in names if name.endswith(STACKS_SUFFIX) and not runs(name[: -len(STACKS_SUFFIX)])):
            self._take_dumps(self.directory / name)
        stems = due(ended_workers(self.directory, names), self.most)
        self.folds = self._forked(lambda: fold_gently(self.directory, stems, self.most_bytes)) if stems else 0

    def _watch(self, pid: int, since: int, stem: str = "") -> None:
        if (pid in self.processes or self._hold(_Watched(pid, since))) and stem:
            self.processes[pid].readers.append(_CallReader(self.directory, stem, pid))

    def _hold(self, process: _Watched) -> bool:
        """Watch a process from now on, if it has not ended."""
        if process.is_there():
            self.processes[process.pid] = process
            if process.fd >= 0:
                self.poll.register(process.fd, select.POLLIN)
        return process.pid in self.processes

    def _ended(self, pid: int, process: _Watched) -> None:
        if not self.stays or self.own_looks:  # a trace that has ended is left alone, unless its program hangs at exit
            self._write_end(process)
        if process.held is not None:
            self.poll.unregister(process.fd)
            process.held.close()
        del self.processes[pid]

    def _write_end(self, process: _Watched) -> None:
        """Write that a process has ended, and how."""
        pid, code = process.pid, process.exit_code()  # before anything else: its parent may wait for it now
        if not any(self._take_dumps(file) for file in self.directory.glob(f"{pid}-*{STACKS_SUFFIX}")):
            self.write(watched.ended(Ended(pid, time.monotonic_ns(), code)))

    def _take_dumps(self, file: Path) -> bool:
        """Remove a file of dumps that nobody asks for any more; whether a fault has ended its process.

        The exit code of a process that its parent has waited for is not to be had otherwise.
        """
        crash = crash_in(file)
        if crash is not None:
            pid, _ = parts_of(file.name.removesuffix(STACKS_SUFFIX))
            self.write(watched.ended(Ended(pid, time.monotonic_ns(), -crash.signum, crash.stack)))
        with contextlib.suppress(OSError):
            file.unlink()
        return crash is not None

    # --- waits
    def _look_at_waits(self) -> None:
        found = {}
        for reader in (reader for process in self.processes.values() for reader in process.readers):
            for wait in reader.calls():
                stall = Stall(wait.loader, wait.call, wait.since, reader.pid)
                found[reader.pid, wait.loader] = stall, reader.past(wait)
        if not any(reader.known for process in self.processes.values() for reader in process.readers):
            found[self.main_pid, 0] = self._before_any_loader(), 0
        for key in self.stalls.keys() - found.keys():
            self._give_up(self.stalls.pop(key))
        for key, (stall, longest) in found.items():
            known = self.stalls.get(key)
            if known is None or known.stall != stall:
                if known is not None:
                    self._give_up(known)
                known = self.stalls[key] = _StallRecord(stall, first_look(self.hang_after, longest / 1e9))
            self._attend_to(known)

    def _before_any_loader(self) -> Stall:
        """The wait of a program that has no loader yet: since it last computed."""
        now, stat = time.monotonic_ns(), ProcFiles(self.main_pid).stat()
        if stat is not None:
            if stat.cpu - self.spent > GRAIN + IDLE * (now - self.read_at) / 1e9:
                self.waits_since = now
            self.read_at, self.spent = now, stat.cpu
        return Stall(0, Call.OWN, self.waits_since, self.main_pid)

    def _attend_to(self, known: _StallRecord) -> None:
        """Take a look at a stall if one is due. Give the alarm in time, with a look's words if there are any."""
        waited = looks.waited(known.stall)
        if known.look is not None and time.monotonic() >= known.look.until:
            self._give_up(known)
        if known.look is None and waited >= known.due and self._may_look(known):
            self._begin_look(known, alarm=waited >= self.hang_after and not known.said)
            known.due = next_look(self.hang_after, waited, known.looks)
        late = waited >= self.hang_after + LOOK_SECONDS
        if waited >= self.hang_after and not known.said and (known.look is None or late):
            self._alarm(known, "")

    def _may_look(self, known: _StallRecord) -> bool:
        if known.looks >= MOST_LOOKS or self.looks >= MOST_LOOKS_OF_A_RUN or self.lost:
            return False
        if known.stall.call is Call.OWN and self.own_looks >= MOST_OWN_LOOKS:
            return False
        return os.fstat(self.fd).st_size < MOST_BYTES

    def _begin_look(self, known: _StallRecord, alarm: bool) -> None:
        pids = list(self.processes)
        words, tell = os.pipe()
        child = self._forked(lambda: self._take_look(known, pids, tell if alarm else -1))
        os.close(tell)
        if not child:
            os.close(words)
            return
        known.look = _Look(child, words, alarm)
        known.looks += 1
        self.looks += 1
        self.own_looks += known.stall.call is Call.OWN

    def _take_look(self, known: _StallRecord, pids: list[int], tell: int) -> None:
        """Write evidence, in a child. tell: a pipe for the words of an alarm, -1 = there is to be none."""
        stall = known.stall
        found = looks.look_at(stall, self.directory, self.main_pid, pids, stacks=self.stacks)
        kept: dict[str, Any] = json.loads(found.to_json())
        self.write(watched.look(stall, known.looks + 1, time.monotonic_ns(), kept))
        if tell >= 0:
            words = looks.alarm(stall, self.directory, found)
            os.write(tell, words.encode("utf-8", "backslashreplace")[:MOST_TEXT])

    def _forked(self, act: Callable[[], object]) -> int:
        """Run `act` in a child, which may hang; return its id, 0 = no child could be made."""
        try:
            child = os.fork()
        except OSError as error:
            self.write(watched.said(f"could not start a look at the processes: {error.strerror}"))
            return 0
        if child:
            return child
        try:
            if self.channel.fileno() >= 0:
                self.channel.close()  # the run waits at its end until the watchdog has closed it
            act()
        except BaseException as error:  # whatever it is, this process ends here
            self.write(watched.said(f"a look at the processes failed: {type(error).__name__}: {error}"))
        finally:
            os._exit(0)

    def _take_words(self, known: _StallRecord) -> None:
        """A look has ended: if it was for the alarm, give that."""
        look, known.look = known.look, None
        assert look is not None
        text = look.words()
        if look.alarm and not known.said:
            self._alarm(known, text)

    def _give_up(self, known: _StallRecord) -> None:
        """End the look that runs: it takes too long, or its stall, or the run, is over."""
        if known.look is None:
            return
        child, known.look = known.look.child, known.look.close()  # type: ignore[func-returns-value]
        os.kill(child, signal.SIGKILL)  # a child that was not waited for keeps its id
        until = time.monotonic() + TICK / 10
        while not (gone := _reaped(child)) and time.monotonic() < until:
            time.sleep(0.002)
        self.lost += [] if gone else [child]

    def _alarm(self, known: _StallRecord, text: str) -> None:
        """Report a stall as a hang, and act as configured. text: the words of a look, "" = none."""
        stall, known.said = known.stall, True
        if not text and stall.call is not Call.OWN:
            text = f"{looks.in_words(stall)}; the state of its processes could not be read"
        if text:
            self._say(f"{text}; next: minidl doctor {self.directory}")
        if stall.call is not Call.OWN:  # the program's own code may take as long as it likes
            self._act(stall)

    def _say(self, text: str) -> None:
        """Send a message to the run's user and to the run."""
        self.write(watched.said(text))
        line = f"minidl: {text}\n".encode("utf-8", "backslashreplace")
        child = self._forked(lambda: os.write(self.stderr, line))  # stderr may be a pipe without a reader
        until = time.monotonic() + TICK
        while child and not (gone := _reaped(child)) and time.monotonic() < until:
            time.sleep(0.002)
        self.lost += [child] if child and not gone else []
        if self.on_hang == "raise":
            with contextlib.suppress(OSError):
                self.channel.send(text.encode("utf-8", "replace")[:MOST_TEXT], socket.MSG_DONTWAIT)

    def _act(self, stall: Stall) -> None:
        """Act on a hang of the loader as configured."""
        if self.on_hang == "raise" and self.raises and stall.pid == self.main_pid and stall.call is not Call.SHUTDOWN:
            self._kill(self.raises, self.main_pid)
        elif self.on_hang == "kill":
            self._kill(signal.SIGTERM, self.main_pid)
            self._kill(signal.SIGKILL, *(self.processes.keys() - {self.main_pid}))
            until = time.monotonic() + KILL_SECONDS
            while self._is_there(self.main_pid) and time.monotonic() < until:
                time.sleep(0.05)
            self._kill(signal.SIGKILL, self.main_pid)

    def _is_there(self, pid: int) -> bool:
        return pid in self.processes and self.processes[pid].is_there()  # its end may have been noticed a moment ago

    def _kill(self, signum: int, *pids: int) -> None:
        for pid in pids:
            process = self.processes.get(pid)
            if process is not None and process.held is not None:
                process.held.send(signum)


def _reaped(child: int) -> bool:
    """Whether a child has ended, and was waited for."""
    return bool(os.waitpid(child, os.WNOHANG)[0])


class _Watched:
    """A process that is watched. since: ns, CLOCK_MONOTONIC: it was there then, so one that began later is another.

    fd: a pidfd of it that is open already, -1 = none.
    """

    def __init__(self, pid: int, since: int, fd: int = -1) -> None:
        self.pid, self.since = pid, since
        self.readers: list[_CallReader] = []  # of its files: it has more than one if it has recorded twice
        self.held: HeldProcess | None = None
        with contextlib.suppress(OSError):  # it is gone, or the kernel has no such: then it can't be signalled
            self.held = HeldProcess(pid, fd)

    @property
    def fd(self) -> int:
        """It can be read from once the process has ended; -1 = there is none."""
        return -1 if self.held is None else self.held.fd

    def exit_code(self) -> int | None:
        """Its exit code; None if it has none, or if its parent has waited for it and the kernel does not tell."""
        code = exit_code(self.pid)
        return self.held.exit_code() if code is None and self.held is not None else code

    def is_there(self) -> bool:
        """Whether it has not ended; a zombie has."""
        return (self.held is None or self.held.is_there()) and life(self.pid, self.since).there


class _CallReader:
    """Reads the new events of one process, if it iterates over a loader."""

    def __init__(self, directory: Path, stem: str, pid: int) -> None:
        self.events, self.side, self.pid = directory / f"{stem}.events", directory / f"{stem}.meta.jsonl", pid
        self.read = 0
        self.known: OpenCalls | None = None  # once it is known to have a loader
        self.works = False  # it is a worker, and what it waits for is no hang of the loader

    def past(self, wait: OpenCall) -> int:
        """The longest call before that is like this one, ns."""
        return 0 if self.known is None else self.known.past(wait)

    def calls(self) -> list[OpenCall]:
        """Return the calls that the process is in, as of its newest event."""
        if self.known is None:
            self.known = self._calls()
        if self.known is None:
            return []
        data = tail(self.events, MOST_EVENTS, self.read)
        if not header_problem(data):
            rows = records(data)
            rows = np.sort(rows[rows["seq"] > 0], order="seq")
            if len(rows):
                self.known.take(rows, gap=bool(self.read) and int(rows["seq"][0]) > self.read + 1)
                self.read = int(rows["seq"][-1])
        return self.known.open()

    def _calls(self) -> OpenCalls | None:
        """Return where its calls are kept, if it has a loader: not of a worker, nor of a process that has none yet."""
        if self.works:
            return None
        try:
            facts = self.side.read_bytes()
        except OSError:
            return None
        self.works = WORKER in facts
        return OpenCalls() if b'"role": "loader"' in facts else None


class _Look:
    """A look that runs, in a child. pipe: to it the child writes the words of an alarm, if the look is for one."""

    def __init__(self, child: int, pipe: int, alarm: bool) -> None:
        self.child, self.pipe, self.alarm = child, pipe, alarm
        self.until = time.monotonic() + LOOK_SECONDS

    def has_ended(self) -> bool:
        return _reaped(self.child)

    def words(self) -> str:
        """The text that the child has written. It has ended."""
        with open(self.pipe, "rb") as file:
            return file.read().decode("utf-8", "replace")

    def close(self) -> None:
        os.close(self.pipe)


class _StallRecord:
    """A stall that lasts. due: seconds of waiting at the next look; said: the alarm was given."""

    def __init__(self, stall: Stall, due: float) -> None:
        self.stall, self.due = stall, due
        self.looks = 0
        self.said = False
        self.look: _Look | None = None


def main(directory: str, main_pid: int, channel: int, **settings: Any) -> None:
    """Watch a run. directory: of its trace; main_pid: the process that began it; channel: a socket to that.

    since: a moment at which that process was there, ns, CLOCK_MONOTONIC.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text("minidl-watch")
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    watcher = Watcher(Path(directory), main_pid, socket.socket(fileno=channel), **settings)
    try:
        watcher.run()
    except Exception as error:
        watcher.write(watched.said(f"the watchdog failed: {type(error).__name__}: {error}"))
        sys.exit(1)
