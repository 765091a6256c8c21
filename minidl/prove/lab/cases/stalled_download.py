"""A sample comes from a server that accepts the connection and then says nothing. The client has no timeout."""

from __future__ import annotations

import socket
import time
from typing import Any

import torch
from torch.utils.data import DataLoader

from minidl.prove.lab.case import LabCase, LabOptions, Pictures, in_sample, step

CASE = LabCase(
    theme="a sample that never comes",
    title="a server does not answer, and the download has no timeout",
    users_see="Training on a bucket stops after some hours. The network is up; a restart helps.",
    thread="https://github.com/pytorch/pytorch/issues/96629",
    fix="Give the client a timeout, and limit the number of retries.",
    truth=in_sample("socket"),
)


class Bucket(Pictures):
    """Samples in a cache, but one that is to be downloaded."""

    def __init__(self, options: LabOptions, port: int) -> None:
        super().__init__(options)
        self.port = port

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.options.pause)
        if index != self.options.at:
            return super().__getitem__(index)
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1 if self.options.fixed else None) as line:
                line.sendall(f"GET /photos/{index}\r\n".encode())
                return torch.frombuffer(bytearray(line.recv(3 * 16 * 16)), dtype=torch.uint8)
        except TimeoutError:
            return torch.zeros(3, 16, 16)


def main(options: LabOptions) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # no accept(): the kernel does the handshake
        for number, _ in enumerate(DataLoader(Bucket(options, server.getsockname()[1]), **options.loading)):
            step(number)
