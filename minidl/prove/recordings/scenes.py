"""The recordings: for each, what it shows and the recorded program.

Interface: `SCENES`, name -> Recording. `recording.record(setting, directory)` runs the program to its end and returns
the trace's path. Each runs in a process of its own, because it may leave killed workers behind.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.utils.data
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import minidl
from minidl.device import sim
from minidl.merge import merge
from minidl.prove.lab.faulty import die_in_the_middle_of_a_message
from minidl.prove.recordings.images import Images, Shards
from minidl.prove.recordings.training import Setting, Training, in_the_step, network
from minidl.record import recorder

Program = Callable[..., None]


@dataclass(frozen=True)
class Recording:
    """One recording. record: (setting, an unused directory) -> the trace's path."""

    name: str
    shows: str
    record: Callable[[Setting, Path], Path]


SCENES: dict[str, Recording] = {}


def tell(name: str, setting: Setting, *, on_device: bool = True) -> None:
    """Write the recording's name and device into the trace, for the table of recordings; on_device: it uses that."""
    recording = recorder.active()
    assert recording is not None
    accelerator = torch.get_device_module(setting.compute).get_device_name()
    cores = len(os.sched_getaffinity(0))
    recording.describe("recording", name=name, device=setting.device, accelerator=accelerator, cores=cores)
    if setting.simulated and on_device:
        recording.describe(accelerator, **sim.model(), delay_of_a_sample=setting.delay)


def _scene(name: str, shows: str, **options: Any) -> Callable[[Program], Program]:
    """Declare a program, called with the setting and the options, as a recording; all of it is traced.

    Of several recordings of one program, the lowest is declared first.
    """

    def declare(program: Program) -> Program:
        def record(setting: Setting, directory: Path) -> Path:
            setting.images()  # drawn before the trace begins
            with minidl.trace(directory):
                tell(name, setting)
                program(setting, **options)
            return directory

        SCENES[name] = Recording(name, shows, record)
        return program

    return declare


def _usual(
    name: str,
    shows: str,
    workers: int,
    share: int = 2,
    images: dict[str, Any] | None = None,
    transform: Callable[[Any], Any] | None = None,
    prepare: Callable[[Any], Any] | None = None,
    **options: Any,
) -> None:
    """Declare an epoch of the usual training, through a DeviceLoader, as a recording.

    share: the epoch has 1/share of the setting's batches. images, options: of the dataset and of the loader; transform:
    of the DeviceLoader, by default augmentation; prepare: what the step does to a batch.
    """

    @_scene(name, shows)
    def _epoch(setting: Setting) -> None:
        training = Training(setting)
        with setting.loader(setting.images(setting.batches // share, **images or {}), workers, **options) as loader:
            training.epoch(setting.to_device(loader, transform), prepare)


def _unchanged(batch: Any) -> Any:
    return batch


# --- The whole pipeline, and parts of it ------------------------------------------------------------------------------
_usual("healthy-8-pinned", "eight workers, pinned memory, copies and augmentation on a side stream of the device", 8, 1)
_usual(
    "healthy-8-pageable",
    "the same without pinning: the host waits for each copy from pageable memory",
    8,
    1,
    pin_memory=False,
)


@_scene("healthy-8-no-device-loader", "the same without the DeviceLoader: copy and augmentation are part of the step")
def _no_device_loader(setting: Setting) -> None:
    with setting.loader(setting.images()) as loader:
        Training(setting).epoch(loader, in_the_step(setting))


for _number in (0, 1, 2, 4, 8, 12):
    _usual(f"workers-{_number}", f"the same training with {_number or 'no'} worker{'s' * (_number != 1)}", _number)


@_scene("starved-gpu", "one worker decodes for a step that is much faster than it: the device waits for data")
def _starved(setting: Setting) -> None:
    training = Training(replace(setting, width=max(2, setting.width // 8)))
    with setting.loader(setting.images(setting.batches // 2, delay=4 * setting.delay), 1) as loader:
        training.epoch(setting.to_device(loader))


# --- Order ------------------------------------------------------------------------------------------------------------
@_scene(
    "head-of-line-out-of-order", "the same sample with in_order=False: the batches behind it overtake", in_order=False
)
@_scene(
    "head-of-line-in-order", "one sample takes 0.6 s longer: finished batches wait behind it, and their workers too"
)
def _one_slow_sample(setting: Setting, in_order: bool = True) -> None:
    slow = {setting.batch_size * 9 + 3: 0.6}  # of batch 9
    with setting.loader(setting.images(slow=slow), 8, in_order=in_order) as loader:
        Training(setting).epoch(setting.to_device(loader))


# --- Copies -----------------------------------------------------------------------------------------------------------
def collate_in_private_memory(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Collate without shared memory: the feeder thread copies each batch once more."""
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor(labels)


def collate_to_many(samples: list[Any]) -> list[torch.Tensor]:
    """Return each image as a tensor of its own: a segment, a descriptor and a copy to the device for each."""
    images, labels = zip(*samples, strict=True)
    return [*images, torch.tensor(labels)]


def _stacked(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    *images, labels = tensors
    return [torch.stack(images), labels]


def _as_float(batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = batch
    return images.permute(0, 3, 1, 2).float() / 255, labels


_usual(
    "collate-extra-copy",
    "a custom collate_fn stacks in private memory, and the feeder copies the batch once more",
    4,
    collate_fn=collate_in_private_memory,
)
_usual("collate-shortcut", "the default collate_fn stacks straight into shared memory", 4)
_usual(
    "float-on-cpu",
    "workers make float32: four times the bytes through shared memory, pinning and the bus",
    8,
    images={"as_float": True},
    transform=_unchanged,
)
_usual("uint8-gpu-transform", "workers send bytes; the device crops, flips and normalises on the side stream", 8)
_usual(
    "many-small-tensors",
    "each image is sent as a tensor of its own: a segment and a descriptor for each",
    8,
    transform=_stacked,
    prepare=_as_float,
    collate_fn=collate_to_many,
)
_usual("packed", "the same images in one tensor", 8, transform=_unchanged, prepare=_as_float)


# --- Transports -------------------------------------------------------------------------------------------------------
class InMemory(minidl.Dataset[tuple[torch.Tensor, int]]):
    """Images that need no work: float32, 3 x 224 x 224. What a batch of them costs is collation and its way."""

    def __init__(self, count: int, kinds: int = 16) -> None:
        self.count = count
        self.images = torch.rand(kinds, 3, 224, 224, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index % len(self.images)], index


def _transport_scene(transport: str, shows: str) -> None:
    name = f"transport-{transport}"

    def record(setting: Setting, directory: Path) -> Path:
        images = InMemory(100 * 32)
        with minidl.trace(directory, detail="batch"):
            tell(name, setting, on_device=False)
            loader: Any = minidl.DataLoader(images, 32, num_workers=1, transport=transport)
            with loader:
                for _ in loader:
                    pass
        return directory

    SCENES[name] = Recording(name, shows, record)


_transport_scene(
    "upstream", "a hundred batches of 19 MB by one worker, each in a new segment, and a loop that only takes them"
)
_transport_scene(
    "arena", "the same batches in slabs, memory that is used again; no feeder thread, one descriptor a slab"
)


# --- Epochs -----------------------------------------------------------------------------------------------------------
@_scene("respawn", "three epochs, workers and pin thread started again for each", persistent=False)
@_scene("persistent", "three epochs, workers and pin thread kept", persistent=True)
def _three_epochs(setting: Setting, persistent: bool) -> None:
    training = Training(setting)
    with setting.loader(setting.images(setting.batches // 4), 4, persistent_workers=persistent) as loader:
        for _ in range(3):
            training.epoch(setting.to_device(loader))


@_scene("iterable-uneven-shards", "an iterable dataset whose four workers run out of data one after the other")
def _uneven(setting: Setting) -> None:
    sizes = tuple(setting.batch_size * (2 + 4 * worker) for worker in range(4))
    with setting.loader(Shards(setting.images(), sizes), 4) as loader:
        Training(setting).epoch(setting.to_device(loader))


# --- Ends -------------------------------------------------------------------------------------------------------------
@_scene("shutdown-exhausted", "the epoch ends: pin thread, sentinels, joins")
def _exhausted(setting: Setting) -> None:
    with setting.loader(setting.images(8), 4) as loader:
        Training(setting).epoch(setting.to_device(loader))


@_scene("shutdown-closed", "closed in the middle of an epoch: what is in flight is skipped")
def _closed(setting: Setting) -> None:
    with setting.loader(setting.images(), 4) as loader:
        Training(setting).epoch(itertools.islice(setting.to_device(loader), 6))


@_scene("shutdown-error", "a sample raises: its error comes in its batch's turn, and ends the training")
def _error(setting: Setting) -> None:
    images = setting.images(failing=6 * setting.batch_size + 2)
    with contextlib.suppress(ValueError), setting.loader(images, 4) as loader:
        Training(setting).epoch(setting.to_device(loader))


def _until_noticed(batches: Iterator[Any], training: Training, at: int, what: Callable[[], None]) -> None:
    """Train, act on a worker after `at` batches, and continue until the loader raises an error."""
    try:
        training.epoch(itertools.islice(batches, at))
        what()
        training.epoch(batches)
    except RuntimeError as error:
        print(f"the loader says: {error}", file=sys.stderr)
        return
    raise AssertionError("the loader did not notice what became of its worker")


@_scene(
    "worker-sigstopped", "worker 1 is stopped: it lives, sends nothing, and the loader's timeout names it",
    number=signal.SIGSTOP, timeout=1.5,
)  # fmt: skip
@_scene(
    "worker-sigkilled", "worker 1 is killed in the middle of the epoch, and the loader finds it dead",
    number=signal.SIGKILL,
)  # fmt: skip
def _signalled(setting: Setting, number: signal.Signals, timeout: float = 0) -> None:
    """Send a signal to worker 1 after six batches; wake it at the end, if it lives."""
    training = Training(setting)
    with setting.loader(setting.images(), 4, timeout=timeout) as loader:
        iterator = iter(loader)
        pid = iterator._workers[1].pid
        try:
            _until_noticed(iter(setting.to_device(_Once(iterator))), training, 6, lambda: os.kill(pid, number))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@dataclass(frozen=True)
class _Once:
    """An iterator as a loader, so that its workers can be reached."""

    iterator: Any

    def __iter__(self) -> Any:
        return self.iterator


class TornMessage(minidl.Dataset[Any]):
    """Images; a worker that is asked for `at` announces a message, writes a part of it, and is killed."""

    def __init__(self, images: Images, at: int) -> None:
        self.images = images
        self.at = at

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            time.sleep(0.2)  # until the feeder thread has written what came before
            die_in_the_middle_of_a_message()
        return self.images[index]


@_scene(
    "torn-message-pin-thread",
    "a worker is killed in the middle of a message; the pin thread does not wait for the rest",
)
def _torn(setting: Setting) -> None:
    training = Training(setting)
    dataset = TornMessage(setting.images(), 9 * setting.batch_size + 2)
    with setting.loader(dataset, 4) as loader:
        _until_noticed(iter(setting.to_device(loader)), training, 2, lambda: None)


# --- Ranks ------------------------------------------------------------------------------------------------------------
def _rank(rank: int, world: int, name: str, setting: Setting, directory: Path, command: list[str]) -> None:
    """Train for two epochs on a rank's share, in the rank's process."""
    setting = Setting.of(setting.device, setting.work)  # this process has no simulated accelerator yet
    sys.argv = sys.orig_argv = command
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo"}
    meeting = f"file://{directory.absolute()}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    training = Training(setting, _data_parallel(setting))
    torch.manual_seed(rank)  # else the workers of all ranks would be seeded alike, as minidl audit says
    images = setting.images(setting.batches)
    sampler: Any = minidl.DistributedSampler(images)
    with minidl.trace(directory / f"rank-{rank}"):
        tell(name, setting)
        minidl.align_clocks()
        # Ranks that torchrun starts fork their workers; in one that was spawned, spawning is the default.
        options = {"sampler": sampler, "persistent_workers": True, "multiprocessing_context": "fork"}
        with setting.loader(images, 2, **options) as loader:
            for epoch in range(2):
                sampler.set_epoch(epoch)
                training.epoch(setting.to_device(loader))
        minidl.align_clocks()
    dist.destroy_process_group()


def _data_parallel(setting: Setting) -> torch.nn.Module:
    """Return the network; all ranks get the mean of their gradients."""
    model = network(setting)
    if not setting.simulated:
        return DistributedDataParallel(model)
    for parameter in model.parameters():  # gloo knows no simulated device: the gradients go through the host
        parameter.register_post_accumulate_grad_hook(_average)  # type: ignore[no-untyped-call]
    return model


def _average(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    gradient = parameter.grad.cpu()
    dist.all_reduce(gradient)
    parameter.grad.copy_(gradient / dist.get_world_size())


def _ranks_scene(world: int) -> None:
    name = f"ranks-{world}-one-gpu"

    def record(setting: Setting, directory: Path) -> Path:
        setting.images()
        directory.mkdir()
        arguments = (world, name, setting, directory, sys.orig_argv)
        torch.multiprocessing.spawn(_rank, arguments, nprocs=world)  # type: ignore[attr-defined,no-untyped-call]
        return merge([directory / f"rank-{rank}" for rank in range(world)], directory / "joined")

    SCENES[name] = Recording(
        name, f"{world} ranks of a data-parallel training share one device, each with its share", record
    )


for _number in (2, 4):
    _ranks_scene(_number)


# --- Other recorders and other loaders --------------------------------------------------------------------------------
@_scene("upstream-beside", "torch's own loader, observed from outside, and then this one on the same work")
def _upstream(setting: Setting) -> None:
    training = Training(setting)
    images = setting.images(setting.batches // 2)
    theirs = torch.utils.data.DataLoader(
        images, setting.batch_size, num_workers=4, pin_memory=True, multiprocessing_context=minidl.observe("fork")
    )
    training.epoch(theirs, in_the_step(setting))
    with setting.loader(images, 4) as loader:
        training.epoch(loader, in_the_step(setting))


def _profiled(setting: Setting, directory: Path) -> Path:
    training = Training(setting)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (not setting.simulated)
    images = setting.images(10)
    with minidl.trace(directory), profile(activities=activities) as profiler, setting.loader(images, 4) as loader:
        tell("with-profiler", setting)
        training.epoch(setting.to_device(loader))
    exported = directory.with_name("profile.json")
    profiler.export_chrome_trace(str(exported))
    return merge([directory, exported])


SCENES["with-profiler"] = Recording(
    "with-profiler",
    "ten batches, with torch.profiler's operators and device records under the loader's lanes",
    _profiled,
)
