"""Nested batches: what is found inside, and that nothing is kept."""

from __future__ import annotations

import gc
import weakref

import torch

from minidl.device.nest import map_nested, tensors_in


class Holder:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def to(self, device: str) -> Holder:
        return Holder(self.tensor.to(device))


def test_no_batch_outlives_its_last_reference() -> None:
    """Memory of a device must be free before the garbage collector comes."""
    gc.collect()
    gc.disable()
    try:
        alive = []
        for _ in range(3):
            batch = {"image": torch.ones(2), "rest": [Holder(torch.ones(3))]}
            alive += [weakref.ref(tensor) for tensor in tensors_in(batch)]
            map_nested(batch, lambda item: item + 1 if isinstance(item, torch.Tensor) else NotImplemented)
        del batch
        assert len(alive) == 6
        assert not [tensor for tensor in (reference() for reference in alive) if tensor is not None]
    finally:
        gc.enable()
