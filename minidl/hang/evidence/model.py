"""Evidence as plain values: of a machine, its processes, their threads, descriptors, semaphores and locks.

Interface: `RunEvidence.to_json()` and `RunEvidence.from_json(text)`. Nothing is executed by reading: each value has
the type that its field declares, or `EvidenceError` names the field.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

VERSION: Final = 1

_T = TypeVar("_T")


class EvidenceError(ValueError):
    """A text that is no evidence, or that of another version."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame of Python. source: its line. variables: name -> repr; of the user's frames, integers alone.

    within: the `with` statements around its line, and the calls of acquire before it, innermost first.
    """

    function: str
    file: str
    line: int
    variables: dict[str, str] = field(default_factory=dict)
    source: str = ""
    within: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The function's own name, without its class."""
        return self.function.rpartition(".")[2]

    @property
    def base(self) -> str:
        """The file's name."""
        return self.file.replace("\\", "/").rpartition("/")[2]

    def __str__(self) -> str:
        return f"{self.function} ({self.base}:{self.line})"


@dataclass(frozen=True, slots=True)
class Syscall:
    """The system call that a thread is in. name: "running" = in none. words: its arguments as far as they are known.

    fds: the descriptors that it waits on. address: of the futex that it waits on. target: the process or thread that it
    waits for, 0 = any child. timeout: seconds, -1 = none, -2 = unknown.
    """

    name: str
    words: str = ""
    args: tuple[int, ...] = ()
    fds: tuple[int, ...] = ()
    address: int = 0
    target: int = -1
    timeout: float = -2.0


_NO_CALL: Final = Syscall("")


@dataclass(frozen=True, slots=True)
class SeenThread:
    """A thread, looked at twice: `RunEvidence.interval` seconds lie between the pairs.

    state: the kernel's letters: R runs, S sleeps, D uninterruptible, T stopped, t traced, Z ended. cpu: seconds of CPU
    time. switches: how often it gave up the CPU by itself. stack: None = not seen. gil: whether it holds the
    interpreter's lock, None = unknown. owner: the thread that the mutex it waits for names as its owner, -1 = none.
    idle: seconds since it ran last, -1 = unknown. read: bytes from files and pipes, -1 = unknown. copies: pid -> the
    value of the lock that it waits for in the parent and in the parent's other forks: 0 = held, 1 = free, -1 = another
    thing is at its address.
    """

    tid: int
    name: str
    state: tuple[str, str]
    cpu: tuple[float, float]
    switches: tuple[int, int]
    wchan: str = ""
    syscall: Syscall | None = None
    syscall_before: Syscall | None = None
    blocked: tuple[str, ...] = ()
    python_name: str = ""
    stack: tuple[Frame, ...] | None = None
    gil: bool | None = None
    owner: int = -1
    idle: float = -1.0
    read: tuple[int, int] = (-1, -1)
    copies: dict[str, int] = field(default_factory=dict)

    @property
    def call(self) -> Syscall:
        """The system call that it is in; one without a name if that was not seen."""
        return self.syscall or _NO_CALL

    @property
    def used(self) -> float:
        """Seconds of CPU time between the two looks."""
        return self.cpu[1] - self.cpu[0]

    @property
    def slept(self) -> bool:
        """Whether it was asleep all the time between the two looks."""
        now, then = self.syscall, self.syscall_before
        same = now is None or then is None or (now.name, now.args) == (then.name, then.args)
        return self.used == 0 and self.switches[0] == self.switches[1] and same and "R" not in self.state


BACKLOG: Final = "not accepted"
"""What is known `about` a socket whose connection waits to be accepted; its peer is the socket that listens."""


@dataclass(frozen=True, slots=True)
class Descriptor:
    """An open descriptor. kind: pipe, fifo, socket, file, shm, eventfd, epoll, pidfd, device, directory, other.

    mode: r, w or rw. waiting: bytes that can be read, -1 = unknown. peer: the inode at a socket's other end, 0 =
    unknown. watched: the descriptors that an epoll waits on. locks: as /proc/PID/fdinfo has them: the locks that this
    open file holds, whichever process took them. about: what else is known, as an eventfd's counter, or of a file its
    file system if that is on a network. fd -1: not open, but a lock file that one of the process's frames names.
    """

    fd: int
    kind: str
    target: str
    inode: int = 0
    device: int = 0
    mode: str = ""
    waiting: int = -1
    peer: int = 0
    watched: tuple[int, ...] = ()
    locks: tuple[str, ...] = ()
    about: str = ""


@dataclass(frozen=True, slots=True)
class Semaphore:
    """A named semaphore that a process has mapped, as multiprocessing's locks are. value, waiters: -1 = unknown."""

    name: str
    inode: int
    address: int
    value: int = -1
    waiters: int = -1


@dataclass(frozen=True, slots=True)
class FileLock:
    """A line of /proc/locks. waits: it is not granted; `number` is that of the lock that it waits for. pid: -1 = an
    open file description's, which may be shared by several processes."""

    number: int
    kind: str
    mode: str
    pid: int
    device: int
    inode: int
    waits: bool = False


STACKS: Final = "Python stacks"
MEMORY: Final = "memory (poll's descriptors, the values of semaphores, owners of mutexes)"
"""What may not be seen: a line of `not_seen` is one of these or another text, ": ", and the reason."""


@dataclass(frozen=True, slots=True)
class SeenProcess:
    """A process. ppid: its parent; of one that the program has left in the background the program. ended: it is a
    zombie, or went away while it was read. exit_code: of a zombie, as a shell's wait status; -1 = unknown. started:
    seconds, CLOCK_MONOTONIC. limits: in bytes or counts, as /proc names them. rank, ranks: its number in its job and
    how many that has, by its launcher's variables; -1 = it has none. ignored, caught: names of signals.
    """

    pid: int
    ppid: int
    name: str
    command: tuple[str, ...]
    state: str
    started: float
    ended: bool = False
    exit_code: int = -1
    threads: tuple[SeenThread, ...] = ()
    descriptors: tuple[Descriptor, ...] = ()
    semaphores: tuple[Semaphore, ...] = ()
    children: tuple[int, ...] = ()
    ignored: tuple[str, ...] = ()
    caught: tuple[str, ...] = ()
    limits: dict[str, int] = field(default_factory=dict)
    maps: int = -1
    cpus: tuple[int, ...] = ()
    cgroups: tuple[str, ...] = ()
    tracer: int = 0
    rank: int = -1
    ranks: int = -1
    not_seen: tuple[str, ...] = ()

    def thread(self, tid: int) -> SeenThread | None:
        return next((thread for thread in self.threads if thread.tid == tid), None)

    def why_unseen(self, what: str) -> str:
        """The reason why `what`, as STACKS, could not be seen; "" = it could."""
        return next((why for text, _, why in (one.partition(": ") for one in self.not_seen) if text == what), "")

    @property
    def main(self) -> SeenThread | None:
        """Its first thread, which has the process's id."""
        return self.thread(self.pid)

    def descriptor(self, fd: int) -> Descriptor | None:
        return next((one for one in self.descriptors if one.fd == fd), None)


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A cgroup that limits memory or CPUs. Bytes and CPUs; -1 = no limit, or not seen."""

    path: str
    memory: int = -1
    memory_limit: int = -1
    oom_kills: int = -1
    cpu_quota: float = -1.0


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources that all processes share. Bytes; -1 = not seen."""

    cpus: int = -1
    load: float = -1.0
    shm_size: int = -1
    shm_free: int = -1
    max_map_count: int = -1
    cgroups: tuple[Cgroup, ...] = ()


@dataclass(frozen=True, slots=True)
class RunEvidence:
    """Evidence of some processes. moment: ns, CLOCK_MONOTONIC, of the second look; interval: s between the two.

    main: the process that the others are children of. by: the process that looked. stacks: where the Python stacks are
    from, "" = none.
    """

    moment: int
    interval: float
    main: int
    by: int
    host: str = ""
    boot: str = ""
    version: int = VERSION
    stacks: str = ""
    processes: tuple[SeenProcess, ...] = ()
    locks: tuple[FileLock, ...] = ()
    machine: Machine = field(default_factory=Machine)
    not_seen: tuple[str, ...] = ()

    def process(self, pid: int) -> SeenProcess | None:
        return next((process for process in self.processes if process.pid == pid), None)

    def to_json(self) -> str:
        return json.dumps(_plain(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str | bytes) -> RunEvidence:
        """Read what `to_json` wrote. Raises EvidenceError."""
        try:
            return RunEvidence.from_data(json.loads(text))
        except (ValueError, RecursionError) as error:
            if isinstance(error, EvidenceError):
                raise
            raise EvidenceError(f"no evidence: not JSON: {error}") from error

    @staticmethod
    def from_data(data: Any) -> RunEvidence:
        """Read what JSON made of `to_json`. Raises EvidenceError."""
        if isinstance(data, dict) and data.get("version") != VERSION:
            raise EvidenceError(f"evidence of version {data.get('version')!r}: this minidl reads version {VERSION}")
        found: RunEvidence = _value(RunEvidence, data, "evidence")
        return found


def _plain(value: Any) -> Any:
    """A value as JSON has it; fields that have their default are left out."""
    if dataclasses.is_dataclass(value):
        fields = ((one, getattr(value, one.name)) for one in dataclasses.fields(value))
        return {one.name: _plain(each) for one, each in fields if one.name == "version" or each != _default(one)}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value


def _default(one: dataclasses.Field[Any]) -> Any:
    return one.default_factory() if one.default_factory is not dataclasses.MISSING else one.default


@functools.cache
def _fields(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _value(kind: Any, data: Any, where: str) -> Any:
    """Return `data` as the type that a field declares."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return None if data is None else _value(args[0], data, where)
    if origin is tuple:
        return _tuple(args, data, where)
    if (origin is dict or dataclasses.is_dataclass(kind)) and not isinstance(data, dict):
        raise EvidenceError(f"{where}: expected an object, got {type(data).__name__}")
    if origin is dict:
        return {name: _value(args[1], one, f"{where}.{name}") for name, one in data.items()}
    if dataclasses.is_dataclass(kind):
        return _object(typing.cast(type, kind), data, where)
    if kind is float and type(data) is int:
        return float(data)
    if type(data) is not kind:
        raise EvidenceError(f"{where}: expected {kind.__name__}, got {type(data).__name__}")
    return data


def _object(kind: type, data: dict[str, Any], where: str) -> Any:
    hints = _fields(kind)
    needed = {one.name for one in dataclasses.fields(kind) if _default(one) is dataclasses.MISSING}
    if missing := sorted(needed - data.keys()):
        raise EvidenceError(f"{where}: {', '.join(missing)} is missing")
    return kind(**{name: _value(hints[name], one, f"{where}.{name}") for name, one in data.items() if name in hints})


def _tuple(args: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(data, list) or (args[-1] is not ... and len(data) != len(args)):
        raise EvidenceError(f"{where}: expected a list{'' if args[-1] is ... else f' of {len(args)}'}")
    kinds = [args[0]] * len(data) if args[-1] is ... else args
    return tuple(_value(kind, one, f"{where}[{i}]") for i, (kind, one) in enumerate(zip(kinds, data, strict=True)))
