"""The common parts of all recordings: the setting, the data, the training.

A `Setting` is a machine to record on, `Training` the loop of all recordings; `scenes` has the differences. On a device,
the network is large enough to keep it busy. On the simulated one, the CPU computes a small network, and each kernel's
time is modelled (`MODEL`): a step takes as long as on a GPU, and leaves the CPU to the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

import minidl
from minidl.device import sim
from minidl.device.augment import Augment
from minidl.device.streams import AcceleratorDevice
from minidl.prove.recordings.images import CLASSES, Images, draw

MODEL: Final = {"kernel": 150e3, "pinned": 0.85, "pageable": 0.28}
"""What the simulated accelerator is set to. A step's 66 kernels take ten milliseconds. A batch has 1/14 of the bytes of
one on a GPU, and the bus 1/14 of the GB/s."""


@dataclass(frozen=True)
class Setting:
    """The device and the sizes of a recording. device: "cuda" or "sim"; work: a directory for images and traces.

    side: pixels of an image's file; crop: of what the network sees; batch_size, batches: of a usual epoch; width: the
    network's channels; files: how many images are drawn; delay: seconds that each sample waits for its file, so that
    workers can be slower than the step without a processor core for each.
    """

    device: str
    work: Path
    side: int
    crop: int
    batch_size: int
    batches: int
    width: int
    files: int
    delay: float = 0.0

    @classmethod
    def of(cls, device: str, work: Path) -> Setting:
        """Return the sizes for a device; a step takes about ten milliseconds on each."""
        if device == sim.NAME:
            sim.use()
            sim.configure(**MODEL)
            return cls(device, work, side=192, crop=48, batch_size=8, batches=40, width=4, files=40, delay=0.002)
        return cls(device, work, side=256, crop=224, batch_size=64, batches=48, width=96, files=240)

    @property
    def simulated(self) -> bool:
        return self.device == sim.NAME

    @property
    def compute(self) -> torch.device:
        """Device of the network."""
        return torch.device(self.device)

    def images(self, batches: int | None = None, **options: Any) -> Images:
        """Return a dataset of so many batches; default: a usual epoch."""
        directory = draw(self.work / f"images-{self.side}", self.files, self.side)
        count = (self.batches if batches is None else batches) * self.batch_size
        return Images(directory, count, **{"delay": self.delay} | options)

    def loader(self, dataset: Any, workers: int = 8, **options: Any) -> Any:
        """Return minidl's DataLoader, by default with pinned memory."""
        return minidl.DataLoader(
            dataset, **{"batch_size": self.batch_size, "num_workers": workers, "pin_memory": True} | options
        )

    def to_device(self, loader: Iterable[Any], transform: Callable[[Any], Any] | None = None) -> minidl.DeviceLoader:
        """Return a loader of its batches on the device, normalised and augmented there."""
        return minidl.DeviceLoader(loader, self.device, transform=transform or Augment(self.crop))


class Block(nn.Module):
    """Two convolutions beside a shortcut; halves the image's side, doubles its channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1, bias=False)
        self.second = nn.Conv2d(2 * channels, 2 * channels, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(channels, 2 * channels, 1, stride=2, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(2 * channels) for _ in range(2)])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        inner = functional.relu(self.norms[0](self.first(images)))
        return functional.relu(self.norms[1](self.second(inner)) + self.shortcut(images))


def network(setting: Setting) -> nn.Module:
    """A residual network with four blocks."""
    torch.manual_seed(0)
    width = setting.width
    blocks = [Block(width << level) for level in range(1 if setting.simulated else 4)]
    layers = [nn.Conv2d(3, width, 7, stride=2, padding=3), nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(width << len(blocks), CLASSES)).to(setting.compute)


class Training:
    """A network and its optimiser, warmed up so that the first recorded step is like the others."""

    def __init__(self, setting: Setting, model: nn.Module | None = None) -> None:
        self.setting = setting
        if setting.simulated:
            torch.set_num_threads(1)  # more would busy-wait and take the workers' cores
        self.model = network(setting) if model is None else model
        self.optimiser = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        sample = torch.zeros(setting.batch_size, 3, setting.crop, setting.crop, device=setting.compute)
        for _ in range(2):
            self.step(sample, torch.zeros(setting.batch_size, dtype=torch.int64, device=setting.compute))

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Train on one batch; return the loss, which stays on the device so that the host need not wait for it."""
        loss = functional.cross_entropy(self.model(images), labels)
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        return loss.detach()

    def epoch(self, batches: Iterable[Any], prepare: Callable[[Any], Any] | None = None) -> float:
        """Train on every batch, each in a span; return the mean loss. prepare: what the step does to a batch."""
        losses, marks = [], []
        device = AcceleratorDevice(self.setting.compute)
        for batch in batches:
            with minidl.span("step", device=self.setting.device):
                images, labels = prepare(batch) if prepare is not None else batch
                losses.append(self.step(images, labels))
            marks.append(device.mark())
            if len(marks) > 2:
                marks[-3].wait()  # the host stays within two steps of the device; .item() would wait for the latest
        return float(torch.stack(losses).mean()) if losses else float("nan")


def in_the_step(setting: Setting) -> Callable[[Any], Any]:
    """Return the copy and the augmentation as a part of the step, for a training without a DeviceLoader."""
    augment = Augment(setting.crop)

    def prepare(batch: Any) -> Any:
        images, labels = (tensor.to(setting.compute, non_blocking=True) for tensor in batch)
        return augment((images, labels))

    return prepare
