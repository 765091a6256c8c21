"""What the user gives to a spawned worker travels in a file in memory, whatever its size."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from multiprocessing import context
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest

from minidl.wire.message import WorkerPayload


class Inherited:
    """Stands for `multiprocessing`'s handle of a descriptor that a child inherits: the child has it under a number."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def detach(self) -> int:
        return os.dup(self.fd)


class Spawning:
    """Stands for the process that is being started."""

    DupFd = Inherited

    def duplicate_for_child(self, fd: int) -> int:
        return fd


@pytest.fixture
def spawning() -> Iterator[None]:
    """As in `Process.start`: what is pickled goes to a new process."""
    context.set_spawning_popen(Spawning())
    yield
    context.set_spawning_popen(None)


def refuse() -> None:
    raise ImportError("no such module")


class Broken:
    """Can't be unpickled."""

    def __reduce__(self) -> Any:
        return refuse, ()


@pytest.mark.usefixtures("spawning")
def test_a_parcel_is_small_and_its_content_is_whole() -> None:
    content = {"dataset": bytes(1 << 20)}
    parcel = WorkerPayload(content)
    open_before = len(os.listdir("/proc/self/fd"))
    data = bytes(ForkingPickler.dumps(parcel))
    assert len(data) < 1000
    sent = pickle.loads(data)
    parcel.close()
    assert sent.unpack() == content
    assert len(os.listdir("/proc/self/fd")) == open_before


@pytest.mark.usefixtures("spawning")
def test_each_worker_gets_a_file_of_its_own() -> None:
    parcel = WorkerPayload(["the same"])
    sent = [pickle.loads(ForkingPickler.dumps(parcel)) for _ in range(2)]
    parcel.close()
    assert [each.unpack() for each in sent] == [["the same"]] * 2


@pytest.mark.usefixtures("spawning")
def test_what_cannot_be_unpickled_is_heard_of_when_the_worker_unpacks_it() -> None:
    parcel = WorkerPayload(Broken())
    sent = pickle.loads(ForkingPickler.dumps(parcel))
    parcel.close()
    with pytest.raises(ImportError, match="no such module"):
        sent.unpack()


def test_a_forked_worker_has_the_content_itself() -> None:
    content = object()
    assert WorkerPayload(content).unpack() is content
