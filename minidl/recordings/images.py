"""Image files to load: drawn once, kept as PNG, decoded by each worker with zlib and NumPy alone.

Interface: `draw(directory, count, side)` makes the files, `decode(path)` reads one, `Images` and `Shards` are datasets
of them. A machine that records may have nothing but torch and NumPy, so a library that decodes images is not asked for.
Rule of use: `decode` reads what `encode` writes, 8-bit RGB whose rows have the filter "up", and says so of other files.
"""

from __future__ import annotations

import shutil
import struct
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

import minidl
from minidl.augment import IMAGENET_MEAN, IMAGENET_STD

Pixels = npt.NDArray[np.uint8]
"""Shape (height, width, 3)."""

CLASSES: Final = 10

_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_HEADER: Final = struct.Struct(">IIBBBBB")  # width, height, bits, colour type 2 = RGB, deflate, filters, no interlace
_UP: Final = 2  # a row's bytes are differences to the row above it


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def encode(pixels: Pixels) -> bytes:
    """An image as a PNG file."""
    height, width, _ = pixels.shape
    above = np.concatenate([np.zeros((1, width, 3), np.uint8), pixels[:-1]])
    rows = np.concatenate([np.full((height, 1), _UP, np.uint8), (pixels - above).reshape(height, -1)], axis=1)
    header = _HEADER.pack(width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(rows.tobytes(), 6)
    return _SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def decode(path: Path) -> Pixels:
    """A PNG file's pixels. Raises ValueError where it is none, or one that `encode` does not write."""
    data = path.read_bytes()
    if not data.startswith(_SIGNATURE):
        raise ValueError(f"{path} is no PNG file")
    parts: dict[bytes, bytes] = {}
    at = len(_SIGNATURE)
    while at + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        parts[kind] = parts.get(kind, b"") + data[at + 8 : at + 8 + size]
        at += size + 12
    width, height, *form = _HEADER.unpack(parts[b"IHDR"])
    rows = np.frombuffer(zlib.decompress(parts[b"IDAT"]), np.uint8)
    if form != [8, 2, 0, 0, 0] or rows.size != height * (1 + 3 * width) or np.any(rows[:: 1 + 3 * width] != _UP):
        raise ValueError(f"{path}: only 8-bit RGB files with the row filter 'up' are decoded here: draw them again")
    return np.cumsum(rows.reshape(height, -1)[:, 1:], axis=0, dtype=np.uint8).reshape(height, width, 3)


def draw(directory: Path, count: int, side: int) -> Path:
    """Draw `count` images of `side` x `side` pixels into `directory`, unless that was done before; return it.

    NNN-C.png is of class C, which its hue tells; the rest is smooth noise and grain. The same ones come out each time.
    """
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".drawing-", dir=directory.parent))
    try:
        for number in range(count):
            label = number % CLASSES
            (draft / f"{number:03}-{label}.png").write_bytes(encode(_drawn(number, label, side)))
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
    """float32 (3, height, width), normalised: what a worker does to an image where the device does not."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))
    return (torch.from_numpy(pixels).permute(2, 0, 1).float() / 255 - mean) / std


@dataclass(frozen=True)
class Images(minidl.Dataset[tuple[torch.Tensor, int]]):
    """The images of a directory. A sample: uint8 (height, width, 3), or float32 (3, height, width); and its class.

    slow: index -> seconds that it takes longer, as a file on a tired disk does. failing: the index that raises.
    """

    directory: Path
    count: int
    as_float: bool = False
    slow: Mapping[int, float] = field(default_factory=dict)
    failing: int = -1

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == self.failing:
            raise ValueError(f"image {index} is damaged")
        time.sleep(self.slow.get(index, 0.0))
        files = _files(self.directory)
        path = files[index % len(files)]
        pixels = decode(path)
        return to_float(pixels) if self.as_float else torch.from_numpy(pixels), int(path.stem[-1])


_listed: dict[Path, list[Path]] = {}


def _files(directory: Path) -> list[Path]:
    if directory not in _listed:
        _listed[directory] = sorted(directory.glob("*.png"))
    return _listed[directory]


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
