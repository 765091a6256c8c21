"""Workers ask the training's own process for features; it answers between two batches, and waits for the first one."""

from __future__ import annotations

import socket
import threading
from typing import Any

from torch.utils.data import DataLoader

from minidl.prove.lab.case import LabCase, LabOptions, Pictures, Truth, step

CASE = LabCase(
    theme="cycles of waiting",
    title="the loop itself should accept the workers' connections",
    users_see="It hangs before the first batch.",
    fix="Accept and answer in a thread.",
    truth=lambda o: Truth("worker", -1, -1, ("sample",), ("socket", "cycle")),
)


class Featured(Pictures):
    """Each picture needs features of the server."""

    port = 0

    def __getitem__(self, index: int) -> Any:
        with socket.create_connection(("127.0.0.1", self.port)) as server:
            server.sendall(b"?")
            server.recv(1)
        return super().__getitem__(index)


def answer(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        connection.recv(1)
        connection.sendall(b"!")


def serve(server: socket.socket) -> None:
    while True:
        answer(server)


def main(options: LabOptions) -> None:
    server, pictures = socket.create_server(("127.0.0.1", 0)), Featured(options)
    pictures.port = server.getsockname()[1]
    if options.fixed:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
    for number, _ in enumerate(DataLoader(pictures, **options.loading)):
        step(number)
        if not options.fixed:
            answer(server)
