"""What a worker gets from the user, on its way to a new interpreter: in a file in memory that the worker reads itself.

`multiprocessing` pickles a process's arguments into a pipe. With spawn it waits until they are read, and keeps the
pipe's other end open meanwhile: a worker that dies or stops before it has read them, in an import of the dataset's
module for example, would block the loader forever. An error of the import would only be printed. So the arguments
themselves stay small, and the worker unpickles the rest where it can report an error.
"""

from __future__ import annotations

import os
import pickle
from multiprocessing import reduction
from typing import Any


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
