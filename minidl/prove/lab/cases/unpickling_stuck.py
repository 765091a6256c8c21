"""A batch's object connects to a server when it is rebuilt, in the main process, and the server does not answer."""

from __future__ import annotations

import socket
from typing import Any

from torch.utils.data import DataLoader

from minidl.prove.lab.case import LabCase, LabOptions, Pictures, Truth, step

CASE = LabCase(
    theme="a result that is lost on its way",
    title="an object's __setstate__ does not return in the main process",
    users_see="The workers are idle and healthy; the main process hangs inside queue.get, below pickle.loads.",
    fix="Connect at the first use, with a timeout, and not in __setstate__.",
    truth=lambda o: Truth("loop", -1, -1, ("unpickle",), ("socket",)),
)


class Annotation:
    """A label whose details are on a server."""

    def __init__(self, port: int) -> None:
        self.port = port

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.port:
            with socket.create_connection(("127.0.0.1", self.port)) as line:
                line.recv(100)


class Labelled(Pictures):
    """Sample `at` has a label of the other kind."""

    def __init__(self, options: LabOptions, port: int) -> None:
        super().__init__(options)
        self.port = port

    def __getitem__(self, index: int) -> Any:
        return Annotation(self.port if index == self.options.at and not self.options.fixed else 0)


def main(options: LabOptions) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        labelled = Labelled(options, server.getsockname()[1])
        for number, _ in enumerate(DataLoader(labelled, collate_fn=list, **options.loading)):
            step(number)
