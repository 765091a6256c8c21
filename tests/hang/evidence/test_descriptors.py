"""What the kernel's tables say of descriptors, from texts as they are there."""

from __future__ import annotations

import ctypes
import io
import os
import struct

import pytest

from minidl.hang.evidence import descriptors
from minidl.hang.evidence.proc import ProcFiles

TCP = """sl local remote state
0: 0100007F:1F90 00000000:0000 0A 00000000:00000001 00:0 0 0 0 70 1
1: 0100007F:C001 0100007F:1F90 02 00000001:00000000 01:0 0 0 0 90 1
2: 0100007F:C002 08080808:01BB 02 00000001:00000000 01:0 0 0 0 92 1
3: 0100007F:C003 08080808:01BB 01 00000000:00000005 00:0 0 0 0 93 1
4: 0100007F:C004 0100007F:1F90 01 00000000:00000000 00:0 0 0 0 94 1
5: 0100007F:1F90 0100007F:C004 01 00000003:00000000 00:0 0 0 0 0 1
"""


def test_a_connection_that_nobody_has_accepted_leads_to_who_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a server whose backlog is full the connection has no other end at all; of another machine none is seen."""
    monkeypatch.setattr(descriptors, "open", lambda name, **more: io.StringIO(TCP * (name[-1] != "6")), raising=False)
    seen = dict(descriptors._tcp())
    assert {inode: (end.peer, end.backlog) for inode, end in seen.items()} == {
        70: (0, False), 90: (70, True), 92: (0, False), 93: (0, False), 94: (70, True),
    }  # fmt: skip
    assert seen[93].waiting == 5


def test_a_timers_descriptor_tells_how_long_is_left() -> None:
    """Of the kernel itself; a timer that is not set has no time left."""
    libc = ctypes.CDLL(None)
    fds = [libc.timerfd_create(1, 0) for _ in range(2)]
    assert libc.timerfd_settime(fds[0], 0, struct.pack("qqqq", 0, 0, 3600, 0), None) == 0
    try:
        seen = {one.fd: one for one in descriptors.read_descriptors(ProcFiles(os.getpid()))}
    finally:
        for fd in fds:
            os.close(fd)
    assert [seen[fd].kind for fd in fds] == ["timerfd", "timerfd"]
    assert 3000 < int(seen[fds[0]].about.removeprefix("it_value (").partition(",")[0]) < 3600
    assert seen[fds[1]].about == "it_value (0, 0)"
