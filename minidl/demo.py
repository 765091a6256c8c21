"""The training run of `minidl demo`: real image files, real workers, recorded; on a CPU, a GPU or the simulated one.

Eight photographs (`photos/`) are cut once into a few hundred JPEG files. Workers decode and augment them; a small
convolutional network learns which photograph a cut is from. `Photos` and `Network` are ordinary torch code. One line,
`with minidl.trace(...)`, records the run.

Interface: `train(Options(...))` trains and returns the losses and the trace's directory. Everything that a worker needs
is in this module, so every start method works. Pillow decodes the files and is imported only here.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import minidl
from minidl.device import sim
from minidl.device.loader import open_device
from minidl.loader.pin_memory import accelerator_type
from minidl.record import recorder
from minidl.run import free_directory
from minidl.terminal import progress

CUTS_PER_PHOTOGRAPH = 60
CUT_SIDE = 320  # pixels, of a cut's file
SIDE = 64  # pixels, of the network's input
SUFFIXES = {".jpg", ".jpeg", ".png"}
SLOW = {"kernel": 0.6e6, "pinned": 0.1, "pageable": 0.04}
"""What the simulated accelerator is set to: so slow that a CPU computes a kernel in its modelled time, also beside
workers, and that the copies of the demo's small batches are visible."""


class DemoError(Exception):
    """The demo cannot run with these options."""


@dataclass(frozen=True)
class Options:
    """Options of the demo. images: a folder with one folder of images per class; None = the photographs.

    device: "cpu", an accelerator's name, or "sim", the simulated one; None = the accelerator if there is one.
    pin: None = if it trains on an accelerator. side_stream: a DeviceLoader copies ahead, not the step itself.
    trace: where to record; None = the first free `trace-N` in work_dir.
    """

    workers: int = 4
    epochs: int = 2
    batch_size: int = 16
    work_dir: Path = Path("minidl-demo")
    images: Path | None = None
    trace: Path | None = None
    device: str | None = None
    pin: bool | None = None
    side_stream: bool = True


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise DemoError("images are decoded with Pillow, which is not installed: pip install pillow") from error
    return Image


# --- The images -------------------------------------------------------------------------------------------------------
def cut_photographs(directory: Path, photographs: Path | None = None) -> Path:
    """Cut the photographs into `directory`/NAME/NNN.jpg, unless `directory` exists; return it.

    A cut is a square of random position, size and angle. The cuts are the same each time.
    """
    if directory.is_dir():
        return directory
    image_module = _pillow()
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Made beside its final place and renamed, so that an interrupted run leaves no incomplete set.
    draft = Path(tempfile.mkdtemp(prefix=".cutting-", dir=directory.parent))
    try:
        for source in sorted((photographs or Path(__file__).parent / "photos").glob("*.jpg")):
            _cut(image_module, source, draft / source.stem)
        draft.rename(directory)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return directory


def _cut(image_module: Any, source: Path, directory: Path) -> None:
    dice = random.Random(source.stem)
    directory.mkdir()
    with image_module.open(source) as photograph:
        whole = photograph.convert("RGB")
    for number in range(CUTS_PER_PHOTOGRAPH):
        side = dice.randint(min(whole.size) // 3, min(whole.size))
        left, top = dice.randint(0, whole.width - side), dice.randint(0, whole.height - side)
        cut = whole.rotate(dice.uniform(-15, 15), image_module.Resampling.BILINEAR)
        cut = cut.crop((left, top, left + side, top + side)).resize((CUT_SIDE, CUT_SIDE))
        cut.save(directory / f"{number:03}.jpg", quality=90)


class Photos(minidl.Dataset[tuple[torch.Tensor, int]]):
    """Image files in one folder per class. A sample: float32 (3, SIDE, SIDE) in [0, 1], augmented; and its class.

    Raises DemoError unless `directory` holds at least two folders with images.
    """

    def __init__(self, directory: Path) -> None:
        _pillow().init()  # loads Pillow's decoders once, before workers are forked
        found = sorted(path for path in directory.glob("*/*") if path.suffix.lower() in SUFFIXES)
        self.classes = sorted({path.parent.name for path in found})
        if len(self.classes) < 2:
            raise DemoError(
                f"{directory} holds images of {len(self.classes)} class(es): give a folder that has one folder of "
                f"{', '.join(sorted(SUFFIXES))} files for each class, two classes or more"
            )
        self.files = [(path, self.classes.index(path.parent.name)) for path in found]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[index]
        return augment(decode(path)), label


def decode(path: Path) -> torch.Tensor:
    """Decode an image file: uint8 (3, height, width)."""
    with _pillow().open(path) as image:
        rgb = image.convert("RGB")
    pixels = torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8)
    return pixels.view(rgb.height, rgb.width, 3).permute(2, 0, 1)


def augment(image: torch.Tensor) -> torch.Tensor:
    """Crop to 70..100%, flip, change brightness and contrast at random: float32 (3, SIDE, SIDE) in [0, 1]."""
    side = int(min(image.shape[1:]) * random.uniform(0.7, 1.0))
    top = random.randint(0, image.shape[1] - side)
    left = random.randint(0, image.shape[2] - side)
    crop = image[:, top : top + side, left : left + side].float().div_(255)
    small = functional.interpolate(crop[None], size=(SIDE, SIDE), mode="bilinear", antialias=True)[0]
    if random.random() < 0.5:
        small = small.flip(2)
    mean = small.mean()
    return ((small - mean) * random.uniform(0.8, 1.2) + mean * random.uniform(0.8, 1.2)).clamp_(0, 1)


# --- The training -----------------------------------------------------------------------------------------------------
class Network(nn.Sequential):
    """Three convolutions and a linear layer: enough to distinguish the photographs, fast on a CPU."""

    def __init__(self, classes: int) -> None:
        layers: list[nn.Module] = []
        for before, after in ((3, 16), (16, 32), (32, 64)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64 * 16, classes))


@dataclass(frozen=True)
class TrainingResult:
    """The mean loss of each epoch, and the trace's directory."""

    losses: tuple[float, ...]
    trace: Path


def train(options: Options) -> TrainingResult:
    """Train and record. Raises DemoError (unsuitable images or device, no Pillow), TraceError (the trace exists)."""
    device = _device(options.device)
    dataset = Photos(options.images or cut_photographs(options.work_dir / "photos"))
    torch.manual_seed(0)
    network = Network(len(dataset.classes)).to(device)
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-3)
    pin = device.type != "cpu" if options.pin is None else options.pin
    print(f"{len(dataset)} images of {len(dataset.classes)} classes, {options.workers} workers, training on {device}")
    directory = options.trace or free_directory(options.work_dir, "trace")
    losses = []
    with _cores_for(options.workers), _model_of(device) as model, minidl.trace(directory):
        if (recording := recorder.active()) and model:
            recording.describe("simulated accelerator", **model)
        with _loader(dataset, options, pin) as loader:
            aside = options.side_stream and device.type != "cpu"
            batches = minidl.DeviceLoader(loader, device) if aside else loader
            for epoch in range(options.epochs):
                steps = list(_epoch(batches, network, optimiser, device))
                losses.append(sum(steps) / len(steps))
                print(f"epoch {epoch}: {len(steps)} batches, mean loss {losses[-1]:.3f}")
    return TrainingResult(tuple(losses), directory)


def _device(name: str | None) -> torch.device:
    """Return the device to train on."""
    try:
        if name == sim.NAME:
            sim.use()
        sim.load_if_wanted()
        name = name or accelerator_type() or "cpu"
        return torch.device("cpu") if name == "cpu" else open_device(name).device
    except (RuntimeError, ValueError) as error:
        raise DemoError(f"it cannot train on {name}: {error}") from error


@contextlib.contextmanager
def _model_of(device: torch.device) -> Iterator[dict[str, float]]:
    """Slow a simulated accelerator down; yield, and print, all that is modelled of it."""
    if device.type != sim.NAME:
        yield {}
        return
    before = sim.configure(**SLOW)
    model = sim.model()
    values = ", ".join(f"{name} {model[name]:g} {unit}" for name, unit in sim.SETTINGS.items())
    print(f"{sim.get_device_name()}: {values}")
    try:
        yield model
    finally:
        sim.configure(**before)


@contextlib.contextmanager
def _cores_for(workers: int) -> Iterator[None]:
    """Limit torch's own threads, which busy-wait, so that the workers have their cores.

    It also silences the warning about fewer cores than workers: the demo exists to watch the workers.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - workers))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
            yield
    finally:
        torch.set_num_threads(threads)


def _loader(dataset: Photos, options: Options, pin: bool) -> minidl.DataLoader[Any]:
    return minidl.DataLoader(
        dataset,
        batch_size=options.batch_size,
        shuffle=True,
        num_workers=options.workers,
        pin_memory=pin,
        persistent_workers=options.workers > 0 and options.epochs > 1,
    )


def _epoch(
    batches: minidl.DataLoader[Any] | minidl.DeviceLoader,
    network: nn.Module,
    optimiser: torch.optim.Optimizer,
    device: torch.device,
) -> Iterator[float]:
    """Train for one epoch; yield the loss of each batch."""
    for done, (images, labels) in enumerate(batches, start=1):
        with _span("step", device):
            if images.device != device:  # no DeviceLoader has copied it
                with _span("copy", device):
                    images, labels = (tensor.to(device, non_blocking=True) for tensor in (images, labels))
            loss = _step(network, optimiser, images, labels)
        progress(f"batch {done} of {len(batches)}, loss {loss.item():.3f}")
        yield loss.item()
    progress("")


def _span(name: str, device: torch.device) -> Any:
    return minidl.span(name, device=None if device.type == "cpu" else device)


def _step(
    network: nn.Module, optimiser: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Train on one batch; return its loss."""
    loss = functional.cross_entropy(network(images), labels)
    optimiser.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimiser.step()
    return loss.detach()
