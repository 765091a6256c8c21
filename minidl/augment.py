"""A transform that a device can do: whole batches of images, from bytes to what a network takes.

Interface: `Augment(crop, ...)` is called with a batch, on any device. Decoding gives uint8 images, height by width by
channels; a copy of those is a quarter of the bytes of float32. Rule of use: the dice are a CPU generator's, so that the
same seed gives the same batch on a CPU and on an accelerator; a call draws three numbers for each image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class Augment:
    """uint8 (N, H, W, C) -> float32 (N, C, crop, crop): random crop, random horizontal flip, normalised.

    mean, std: of each channel, for values in [0, 1]. seed: of the dice. A batch may be the images, or a tuple, list or
    dict that holds them first (under "image" in a dict); the rest is passed on. Raises ValueError for images that are
    no uint8, or smaller than the crop.
    """

    def __init__(
        self,
        crop: int,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        seed: int = 0,
    ) -> None:
        self.crop = crop
        self.mean, self.std = tuple(mean), tuple(std)
        self.generator = torch.Generator().manual_seed(seed)
        self._scales: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, batch: Any) -> Any:
        if isinstance(batch, torch.Tensor):
            return self.images(batch)
        if isinstance(batch, dict):
            return {**batch, "image": self.images(batch["image"])}
        return type(batch)([self.images(batch[0]), *batch[1:]])

    def images(self, images: torch.Tensor) -> torch.Tensor:
        """Crop, flip and normalise; each pixel is gathered once."""
        if images.dtype != torch.uint8 or images.dim() != 4 or min(images.shape[1:3]) < self.crop:
            raise ValueError(
                f"Augment: uint8 images (N, H, W, C) of {self.crop} pixels or more a side are wanted, "
                f"not {images.dtype} of shape {tuple(images.shape)}"
            )
        rows, columns = (_sent(place, images.device) for place in self._places(*images.shape[:3]))
        scale, shift = self._scale(images.device)
        number = torch.arange(len(images), device=images.device)[:, None, None]
        cut = images[number, rows[:, :, None], columns[:, None, :]]
        return torch.addcmul(shift, cut.permute(0, 3, 1, 2).float(), scale).contiguous()

    def _places(self, count: int, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Which rows and which columns of each image are kept, int64 (N, crop); a flip counts the columns backwards."""
        top, left, flip = (
            torch.randint(limit, (count, 1), generator=self.generator)
            for limit in (height - self.crop + 1, width - self.crop + 1, 2)
        )
        step = torch.arange(self.crop)
        return top + step, left + torch.where(flip.bool(), step.flip(0), step)

    def _scale(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(1 / 255 / std, -mean / std), each (1, C, 1, 1), on the device; made there once."""
        if device not in self._scales:
            mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (self.mean, self.std))
            self._scales[device] = (1 / 255 / std).to(device), (-mean / std).to(device)
        return self._scales[device]


def _sent(places: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The numbers on the device; from pageable memory, the host would wait there for what the stream does before."""
    return places if device.type == "cpu" else places.pin_memory().to(device, non_blocking=True)
