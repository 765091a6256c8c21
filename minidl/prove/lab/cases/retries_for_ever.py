"""A sample that cannot be decoded is tried again, and again. The worker computes; it is not blocked."""

from __future__ import annotations

from typing import Any

from minidl.prove.lab.case import LabCase, Pictures, in_sample

CASE = LabCase(
    theme="a sample that never comes",
    title="a damaged sample is retried forever",
    users_see="The progress bar stops, and one worker has 100 % CPU.",
    thread="https://github.com/ScrollPrize/villa/issues/1482",
    fix="Limit the number of tries; then raise an error that names the sample, or return another sample.",
    truth=in_sample("computing"),
)


class Photos(Pictures):
    """Sample `at` is damaged."""

    def __getitem__(self, index: int) -> Any:
        tries = 0
        while True:
            try:
                return self.decoded(index)
            except ValueError:
                tries += 1
            if self.options.fixed and tries == 3:
                return super().__getitem__(0)

    def decoded(self, index: int) -> Any:
        """The picture. Raises ValueError if it is damaged."""
        if index == self.options.at:
            raise ValueError(f"photo {index} is cut off")
        return super().__getitem__(index)
