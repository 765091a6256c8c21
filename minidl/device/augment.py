"""Image augmentation on a device: whole batches, from bytes to a network's input.

Interface: `Augment(crop, ...)` is called with a batch, on any device. Decoding gives uint8 images, height by width by
channels; a copy of those is a quarter of the bytes of float32. The random numbers come from a CPU generator, so that
the same seed gives the same batch on a CPU and on an accelerator. A call draws three numbers for each image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class Augment:
    """uint8 (N, H, W, C) -> float32 (N, C, crop, crop): random crop, random horizontal flip, normalised.

    mean, std: of each channel, for values in [0, 1]. seed: of the random numbers.
    A batch may be the images, or a tuple, list or dict that holds them first (under "image" in a dict); the rest is
    passed on. ValueError for images that are not uint8, or smaller than the crop.
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
                f"Augment: images are {images.dtype} of shape {tuple(images.shape)}: give uint8 images (N, H, W, C) "
                f"of at least {self.crop} pixels a side"
            )
        rows, columns = (_sent(place, images.device) for place in self._places(*images.shape[:3]))
        scale, shift = self._scale(images.device)
        number = torch.arange(len(images), device=images.device)[:, None, None]
        cut = images[number, rows[:, :, None], columns[:, None, :]]
        return torch.addcmul(shift, cut.permute(0, 3, 1, 2).float(), scale).contiguous()

    def _places(self, count: int, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the rows and columns of each image that are kept, int64 (N, crop); a flip reverses the columns."""
        top, left, flip = (
            torch.randint(limit, (count, 1), generator=self.generator)
            for limit in (height - self.crop + 1, width - self.crop + 1, 2)
        )
        step = torch.arange(self.crop)
        return top + step, left + torch.where(flip.bool(), step.flip(0), step)

    def _scale(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(1 / 255 / std, -mean / std), each (1, C, 1, 1), on the device; created once."""
        if device not in self._scales:
            mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (self.mean, self.std))
            self._scales[device] = (1 / 255 / std).to(device), (-mean / std).to(device)
        return self._scales[device]


def _sent(places: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy the numbers to the device from pinned memory; a copy from pageable memory would block the host."""
    return places if device.type == "cpu" else places.pin_memory().to(device, non_blocking=True)
