"""The dataset runs a program for each sample, and waits for its end. On one file the program waits for input."""

from __future__ import annotations

import subprocess
from typing import Any

from minidl.prove.lab.case import LabCase, Pictures, Truth

CASE = LabCase(
    theme="a sample that never comes",
    title="a program that decodes a sample does not end",
    users_see="Video training stops at some file. The worker is asleep, and ffmpeg is among the processes.",
    fix="subprocess.run(..., timeout=...), and -nostdin or stdin=DEVNULL.",
    truth=lambda o: Truth("", -1, -1, (), ("child-process", "cycle")),
    simulated="`cat` on an open pipe stands in for a decoder that waits for input",
)


class Videos(Pictures):
    """Sample `at` needs another program."""

    def __getitem__(self, index: int) -> Any:
        if index == self.options.at:
            with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as decoder:
                if self.options.fixed:
                    decoder.communicate(timeout=5)
                decoder.wait()
        return super().__getitem__(index)
