"""A regular expression backtracks without end on one text. It runs in C, and the thread keeps the GIL all the time."""

from __future__ import annotations

import re
from typing import Any

from minidl.prove.lab.case import LabCase, Pictures, in_sample

CASE = LabCase(
    theme="a sample that never comes",
    title="a regular expression never ends, with the GIL kept",
    users_see="The progress bar stops with one worker at 100 % CPU, and not even faulthandler or SIGTERM gets through.",
    fix="Write the expression without nested repetition; bound the length of the text.",
    truth=in_sample("keeps-the-gil", "computing"),
)

WORDS = re.compile(r"(\w+\s?)*$")
WORDS_FIXED = re.compile(r"(?:\w+\s)*\w*$")


class Captions(Pictures):
    """Texts; sample `at` is a long one with a sign at its end."""

    def __getitem__(self, index: int) -> Any:
        text = "x" * 5000 + "!" if index == self.options.at else "a cat on a mat"
        match = (WORDS_FIXED if self.options.fixed else WORDS).match(text)
        return len(match.group()) if match else 0
