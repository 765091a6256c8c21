"""A message in its envelope: it pickles itself when a queue's feeder thread asks, and can't get lost there.

`multiprocessing.Queue.put` only appends to a buffer; a feeder thread pickles and writes later. If pickling fails there,
upstream prints a traceback and drops the item, and the consumer waits forever. An `Envelope` catches the failure in the
feeder thread and sends an error in the message's place, under the same task number. In the same way, data that can't be
rebuilt on the reading side comes out of the queue as the error of its task.
"""

from __future__ import annotations

import io
import os
import pickle
from multiprocessing import reduction
from typing import Any

from minidl.wire.errors import ExceptionWrapper, with_remedy
from minidl.wire.messages import RebuildFailure, Result, Task
from minidl.wire.tensors import TensorPickler, remove_unsized


class Envelope:
    """Carries a Task or a Result through a queue; what `get` returns on the other side is the message itself."""

    pickler: type[TensorPickler] = TensorPickler

    def __init__(self, message: Task | Result) -> None:
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        """Called by the feeder thread: this is the moment at which tensors go into shared memory."""
        message = self.message
        data = message.index if isinstance(message, Task) else message.data
        whole = _sure_to_pickle(data)
        about = message.idx, message.worker_id, data if whole else self.payload()[0]
        if isinstance(message, Task):
            return Task if whole else load_task, about
        return Result if whole else load_result, about if message.state is None else (*about, message.state)

    def payload(self) -> tuple[bytes, TensorPickler]:
        """The pickled index or data (or the error that says why it can't be), and the pickler for its counts."""
        message = self.message
        data = message.index if isinstance(message, Task) else message.data
        try:
            return dumps(data, self.pickler)
        except (Exception, SystemExit) as error:  # a SystemExit would end the feeder thread, and nothing would be sent
            remove_unsized(error)
            return dumps(self.instead_of(data, error))

    def instead_of(self, data: Any, error: BaseException) -> ExceptionWrapper:
        """What is sent in place of `data`, which could not be pickled."""
        message = self.message
        if isinstance(data, ExceptionWrapper):
            return data.portable()
        if isinstance(message, Task):
            where = "in the loader while it pickled a task's indices"
        else:
            where = f"in DataLoader worker process {message.worker_id} while it pickled a batch"
        if isinstance(error, (OSError, RuntimeError)):
            error = with_remedy(error)
        wrapper = ExceptionWrapper(error, where, f"Task {message.idx}: its batch can't be sent between processes.")
        as_it_is = isinstance(error, Exception) and _picklable(wrapper)  # a SystemExit would end the loader's process
        return wrapper if as_it_is else wrapper.portable()


# Registered, it is found at once; else a queue's pickler first looks for its class in each of its tables, in Python.
reduction.ForkingPickler.register(Envelope, Envelope.__reduce__)


def _sure_to_pickle(data: Any) -> bool:
    """Whether `data` is a plain value, or a list of them as a BatchSampler gives: pickling and rebuilding never fail.

    So it is not pickled apart, which would cost each side as much as the rest of the message.
    """
    return type(data) in _PLAIN or (type(data) is list and _PLAIN.issuperset(map(type, data)))


_PLAIN = {int, float, bool, str, type(None)}


def _picklable(data: Any) -> bool:
    try:
        dumps(data)
    except Exception:
        return False
    return True


def dumps(data: Any, kind: type[TensorPickler] = TensorPickler) -> tuple[bytes, TensorPickler]:
    """Pickle `data` with its tensors in shared memory; raises what pickle and the sharing of memory raise."""
    buffer = io.BytesIO()
    pickler = kind(buffer, pickle.HIGHEST_PROTOCOL)
    pickler.dump(data)
    return buffer.getvalue(), pickler


def load_task(idx: int, worker_id: int, payload: bytes) -> Task:
    """Called by a worker's unpickler."""
    return Task(idx, worker_id, rebuild(payload))


def load_result(idx: int, worker_id: int, payload: bytes, state: tuple[int, bytes] | None = None) -> Result:
    """Called by the unpickler of the loader, or of its pin thread."""
    return Result(idx, worker_id, rebuild(payload), state)


def rebuild(payload: bytes) -> Any:
    """The data again, or the RebuildFailure that says why not."""
    try:
        return pickle.loads(payload)
    except Exception as error:
        return RebuildFailure(error)


# --- What a worker gets when it starts --------------------------------------------------------------------------------
# `multiprocessing` pickles a process's arguments into a pipe. With spawn it waits until they are read, and keeps the
# pipe's other end open meanwhile: a worker that dies or stops before it has read them, in an import of the dataset's
# module for example, would block the loader forever. An error of the import would only be printed. So the arguments
# themselves stay small, and the worker reads the rest from a file in memory, where it can report an error.
class WorkerPayload:
    """Carries `content` to a worker, which calls `unpack`; a forked worker has it already."""

    def __init__(self, content: Any) -> None:
        self._content = content
        self._sent: list[int] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Called while a process is started by spawn or forkserver."""
        data = reduction.ForkingPickler.dumps(self._content)
        self._sent.append(os.memfd_create("worker's arguments"))
        with open(self._sent[-1], "wb", closefd=False) as file:
            file.write(data)
        return SentPayload, (reduction.DupFd(self._sent[-1]),)

    def unpack(self) -> Any:
        """The content."""
        return self._content

    def close(self) -> None:
        """Close the files; called once the process is started, which has them then."""
        while self._sent:
            os.close(self._sent.pop())


class SentPayload:
    """A payload in the worker's process."""

    def __init__(self, duplicate: Any) -> None:
        self._fd = duplicate.detach()

    def unpack(self) -> Any:
        """The content, once; raises what unpickling it raises."""
        with open(self._fd, "rb") as file:
            file.seek(0)
            return pickle.load(file)
