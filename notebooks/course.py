"""What the notebooks share: datasets for their workers, and the grading of predictions.

Datasets live here and not in the notebooks, because a spawned worker imports what it runs. Their work is waiting
(`time.sleep`), so that a run has the shape that a notebook is about on any machine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

import minidl


class Uneven(minidl.Dataset[torch.Tensor]):
    """`size` samples; sample i is `tensor(i)` and takes `seconds` of waiting, or `slow[i]` where it is named there."""

    def __init__(self, size: int, seconds: float = 0.01, slow: Mapping[int, float] | None = None) -> None:
        self.size = size
        self.seconds = seconds
        self.slow = dict(slow or {})

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.slow.get(index, self.seconds))
        return torch.tensor(index)


def grade(prediction: object, recorded: object, why: str) -> str:
    """Hold a prediction against what the trace says; `why` names the step of the protocol that makes it so."""
    if prediction is None:
        return (
            "no prediction yet: write it in the place of None above, run that cell and this one, and the trace answers"
        )
    if prediction == recorded:
        return f"right: {recorded}. {why}"
    return f"you said {prediction}, the trace says {recorded}. {why}"
