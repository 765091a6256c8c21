"""Image files to load: drawn once, decompressed by each worker.

Interface: `draw(directory, count, side)` makes the files; `Images` and `Shards` are datasets of them. A machine that
records may have nothing but torch and NumPy, so the files are NumPy's compressed arrays (.npz).
"""

from __future__ import annotations

import functools
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

import minidl
from minidl.device.augment import IMAGENET_MEAN, IMAGENET_STD

Pixels = npt.NDArray[np.uint8]
"""Shape (height, width, 3)."""

CLASSES: Final = 10


def draw(directory: Path, count: int, side: int) -> Path:
    """Draw `count` images of `side` x `side` pixels into `directory`, unless they exist; return it.

    NNN-C.npz is of class C, which determines its hue; the rest is smooth noise and grain. Each call draws the same.
    """
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".drawing-", dir=directory.parent))
    try:
        for number in range(count):
            label = number % CLASSES
            np.savez_compressed(draft / f"{number:03}-{label}.npz", pixels=_drawn(number, label, side))
        draft.rename(directory)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return directory


def _drawn(number: int, label: int, side: int) -> Pixels:
    dice = np.random.default_rng(number)
    hue = 128 + 60 * np.cos(2 * np.pi * (label / CLASSES + np.array([0, 1 / 3, 2 / 3])))
    coarse = torch.from_numpy(dice.normal(0, 25, (1, 3, 9, 9)))
    smooth = torch.nn.functional.interpolate(coarse, size=(side, side), mode="bicubic")[0].permute(1, 2, 0).numpy()
    grain = dice.normal(0, 4, (side, side, 1))
    pixels: Pixels = np.clip(hue + smooth + grain, 0, 255).astype(np.uint8)
    return pixels


def to_float(pixels: Pixels) -> torch.Tensor:
    """Return float32 (3, height, width), normalised: the worker's part if the device does not do it."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))
    return (torch.from_numpy(pixels).permute(2, 0, 1).float() / 255 - mean) / std


@dataclass(frozen=True)
class Images(minidl.Dataset[tuple[torch.Tensor, int]]):
    """The images of a directory. A sample: uint8 (height, width, 3), or float32 (3, height, width); and its class.

    delay: seconds that each sample waits, as for a file on a distant disk; slow: index -> additional seconds. failing:
    the index that raises.
    """

    directory: Path
    count: int
    as_float: bool = False
    delay: float = 0.0
    slow: Mapping[int, float] = field(default_factory=dict)
    failing: int = -1

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == self.failing:
            raise ValueError(f"image {index} is damaged")
        time.sleep(self.delay + self.slow.get(index, 0.0))
        files = _files(self.directory)
        path = files[index % len(files)]
        with np.load(path) as file:
            pixels = file["pixels"]
        return to_float(pixels) if self.as_float else torch.from_numpy(pixels), int(path.stem[-1])


@functools.cache
def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.npz"))


@dataclass(frozen=True)
class Shards(minidl.IterableDataset[tuple[torch.Tensor, int]]):
    """The same images as a stream: worker i serves `sizes[i]` of them."""

    images: Images
    sizes: tuple[int, ...]

    def __iter__(self) -> Iterator[Any]:
        info = minidl.get_worker_info()
        worker = 0 if info is None else info.id
        begin = sum(self.sizes[:worker])
        return (self.images[index] for index in range(begin, begin + self.sizes[worker]))
