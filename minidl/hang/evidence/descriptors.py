"""A process's open descriptors: what each is, what waits in it, and the locks that it holds.

Interface: `read_descriptors(files)`; `sockets(unseen)` -> what the kernel's socket tables say, by inode.

Rules of use: a pipe's bytes are asked of an anonymous pipe whose reading end is open somewhere, through a descriptor
that is opened for the question and closed: that wakes no process. A named FIFO is never opened, which could let another
process go on. The status of a file on a network is not asked for, which could hang.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import stat
import struct
import termios
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from minidl.hang.evidence.model import BACKLOG, Descriptor
from minidl.hang.evidence.proc import ProcFiles, Unseen

MOST: Final = 1024
"""Descriptors of one process that are read."""

_ANONYMOUS: Final = {"eventfd": "eventfd", "eventpoll": "epoll", "pidfd": "pidfd", "timerfd": "timerfd"}

_REMOTE: Final = re.compile(r"nfs|cifs|smb|fuse|ceph|lustre|gpfs|9p|afs|glusterfs|beegfs")
_ON_A_NETWORK: Final = re.compile(rf" - ({_REMOTE.pattern})")


def read_descriptors(files: ProcFiles) -> Iterator[Descriptor]:
    """Yield a process's descriptors."""
    try:
        numbers = files.names("fd")
    except (FileNotFoundError, ProcessLookupError):
        return
    except OSError as error:
        files.unseen.because("open descriptors", error)
        return
    if len(numbers) > MOST:
        files.unseen.add(f"{len(numbers) - MOST} of {len(numbers)} descriptors", f"only the first {MOST} are read")
    mounts = _mounts(files.text("mountinfo"))
    for fd in numbers[:MOST]:
        with contextlib.suppress(OSError):  # closed meanwhile
            target, info = os.readlink(f"{files.place}/fd/{fd}"), files.text(f"fdinfo/{fd}", "open descriptors")
            if info:
                yield _described(files.pid, fd, target, info, mounts)


def _mounts(text: str) -> dict[str, tuple[int, str]]:
    """Mount id -> its device and file system, as /proc/PID/mountinfo has them."""
    out = {}
    for line in text.splitlines():
        fields, _, rest = line.partition(" - ")
        number, _, device, *_ = fields.split()
        major, _, minor = device.partition(":")
        out[number] = os.makedev(int(major), int(minor)), rest.split()[0]
    return out


def _described(pid: int, fd: int, target: str, info: str, mounts: dict[str, tuple[int, str]]) -> Descriptor:
    lines = [line.partition(":") for line in info.splitlines()]
    known = {name: value.strip() for name, _, value in lines}
    mounted, system = mounts.get(known.get("mnt_id", ""), (0, ""))
    if _REMOTE.match(system):  # to ask for such a file's status can hang as the process does
        kind, inode, device = "file", int(known.get("ino", "0")), mounted
    else:
        kind, inode, device = _kind(pid, fd, target)
    mode = ("r", "w", "rw", "")[int(known.get("flags", "3"), 8) & 3]
    locks = tuple(" ".join(value.split()) for name, _, value in lines if name == "lock")
    watched = tuple(int(value.split()[0]) for name, _, value in lines if name == "tfd")
    about = "".join(f"{key} {known[key]}" for key in ("eventfd-count", "Pid", "it_value") if key in known)
    about = about or (system if _REMOTE.match(system) else "")
    waiting = _in_pipe(pid, fd) if kind == "pipe" and mode == "r" else -1
    return Descriptor(fd, kind, target, inode, device, mode, waiting, 0, watched, locks, about)


def lock_files(pid: int, names: Iterable[str]) -> Iterator[Descriptor]:
    """Yield the lock files that a process names and that exist; about: the process that such a file names."""
    remote = [line.split()[4] for line in ProcFiles(pid).text("mountinfo").splitlines() if _ON_A_NETWORK.search(line)]
    for name in names:
        with contextlib.suppress(OSError):
            path = os.path.join(os.readlink(f"/proc/{pid}/cwd"), name)
            if any(path.startswith(place) for place in remote):
                continue
            status = os.stat(f"/proc/{pid}/root{path}")
            maker = Path(f"/proc/{pid}/root{path}").read_bytes()[:64].split() if status.st_size < 4096 else []
            known = maker[:1] and maker[0].isdigit()
            state = "runs" if known and os.path.exists(f"/proc/{int(maker[0])}") else "has ended"
            about = f"it names process {int(maker[0])}, which {state}" if known else ""
            yield Descriptor(-1, "file", path, status.st_ino, status.st_dev, about=about)


def _kind(pid: int, fd: int, target: str) -> tuple[str, int, int]:
    """The kind of a descriptor, its inode, its device."""
    for kind in ("pipe", "socket"):
        if found := re.fullmatch(rf"{kind}:\[(\d+)\]", target):
            return kind, int(found[1]), 0
    if target.startswith("anon_inode:"):
        return _ANONYMOUS.get(target.removeprefix("anon_inode:").strip("[]"), "other"), 0, 0
    try:
        status = os.stat(f"/proc/{pid}/fd/{fd}")
    except OSError:
        return "other", 0, 0
    named = {stat.S_IFIFO: "fifo", stat.S_IFDIR: "directory", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}
    kind = named.get(stat.S_IFMT(status.st_mode), "file")
    if kind == "file" and target.startswith(("/dev/shm/", "/memfd:", "/torch_", "/minidl_")):
        kind = "shm"
    return kind, status.st_ino, status.st_dev


def _in_pipe(pid: int, fd: int) -> int:
    """The bytes that wait in an anonymous pipe; -1 = unknown."""
    held = opened = -1
    try:
        held = os.open(f"/proc/{pid}/fd/{fd}", os.O_PATH | os.O_CLOEXEC)  # opens nothing: it may be another file by now
        if not re.fullmatch(r"pipe:\[\d+\]", os.readlink(f"/proc/self/fd/{held}")):
            return -1
        opened = os.open(f"/proc/self/fd/{held}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        return int(struct.unpack("i", fcntl.ioctl(opened, termios.FIONREAD, bytes(4)))[0])
    except OSError:
        return -1
    finally:
        for one in (opened, held):
            if one >= 0:
                os.close(one)


# --- Sockets ----------------------------------------------------------------------------------------------------------
class SocketEnd(NamedTuple):
    """A socket, as the kernel knows it. waiting: bytes that can be read, -1 = unknown; peer: inode, 0 = unknown.

    backlog: no process has accepted the connection yet, and `peer` is the socket that listens.
    """

    waiting: int
    peer: int
    backlog: bool = False


def with_sockets(descriptors: tuple[Descriptor, ...], known: dict[int, SocketEnd]) -> tuple[Descriptor, ...]:
    """The descriptors with the bytes that wait in their sockets, and their peers. known: of `sockets`."""
    return tuple(
        replace(one, waiting=end.waiting, peer=end.peer, about=BACKLOG if end.backlog else one.about)
        if one.kind == "socket" and (end := known.get(one.inode)) is not None
        else one
        for one in descriptors
    )


_SOCK_DIAG, _BY_FAMILY, _DUMP, _DONE, _ERROR = 4, 20, 0x301, 3, 2
_SHOW_PEER, _SHOW_QUEUES = 4, 16
_PEER, _QUEUES = 2, 4


def sockets(unseen: Unseen) -> dict[int, SocketEnd]:
    """inode -> what the kernel tells of it, of the sockets on this machine."""
    found = dict(_tcp())
    try:
        found.update(_unix())
    except OSError as error:
        unseen.because("bytes in Unix sockets and their peers", error)
    return found


def _unix() -> dict[int, SocketEnd]:
    """Ask the kernel's socket diagnostics, as `ss -x` does; /proc/net/unix has neither queues nor peers."""
    found: dict[int, SocketEnd] = {}
    request = struct.pack(
        "=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _SHOW_PEER | _SHOW_QUEUES, *(2 * [2**32 - 1])
    )
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as link:
        link.settimeout(1.0)
        link.send(struct.pack("=IHHII", 16 + len(request), _BY_FAMILY, _DUMP, 1, 0) + request)
        while True:
            for kind, body in _messages(link.recv(1 << 16)):
                if kind == _DONE:
                    return found
                if kind == _ERROR:
                    raise OSError(-struct.unpack_from("=i", body)[0], "the kernel has no socket diagnostics")
                inode, values = struct.unpack_from("=I", body, 4)[0], dict(_attributes(body[16:]))
                peer = struct.unpack_from("=I", values[_PEER])[0] if _PEER in values else 0
                waiting = struct.unpack_from("=I", values[_QUEUES])[0] if _QUEUES in values else -1
                listening = body[2] == 10  # then the number is of connections that wait to be accepted
                found[inode] = SocketEnd(-1 if listening else waiting, peer)


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= 16:
        size, kind = struct.unpack_from("=IH", data)
        yield kind, data[16:size]
        data = data[(max(size, 16) + 3) & ~3 :]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= 4:
        size, kind = struct.unpack_from("=HH", data)
        yield kind, data[4:size]
        data = data[(max(size, 4) + 3) & ~3 :]


_ESTABLISHED, _CONNECTS, _LISTENS = "01", "02", "0A"


def _tcp() -> Iterator[tuple[int, SocketEnd]]:
    """TCP sockets of this network namespace; the peer is known if it is on this machine."""
    rows = []
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/net/{name}", encoding="ascii", errors="replace") as file:
            rows += [line.split() for line in file.readlines()[1:]]
    rows = [row for row in rows if len(row) > 9]
    ends = {(row[1], row[2]): int(row[9]) for row in rows}
    listening = {row[1]: int(row[9]) for row in rows if row[3] == _LISTENS}
    for row in rows:
        (local, remote, state, queued), inode = row[1:5], int(row[9])
        if inode:
            waiting = int(queued.partition(":")[2], 16) if state != _LISTENS else -1
            peer, listener = ends.get((remote, local)), _listener(remote, listening)
            unaccepted = peer == 0 and state == _ESTABLISHED  # it is there, and no descriptor is open on it
            backlog = unaccepted or (state == _CONNECTS and listener > 0)
            yield inode, SocketEnd(waiting, listener if backlog else peer or 0, backlog)


def _listener(address: str, listening: dict[str, int]) -> int:
    """The socket that listens at an address, or at its port of all addresses; 0 = none."""
    host, _, port = address.partition(":")
    return listening.get(address, 0) or listening.get(f"{'0' * len(host)}:{port}", 0)
