"""Real runs of several gloo ranks, each traced: `record(place)` runs all of `SCENES`.

The ranks are forked by a program of their own (this file), which has imported torch and run nothing: a process that
has run autograd can't be forked, and one interpreter that starts is enough for all. No port is opened: the ranks meet
in a file, and talk through the loopback.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.data
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

import minidl
from minidl import cli
from minidl.record import clocks

BATCH = 4


class Samples(minidl.Dataset[torch.Tensor]):
    """i -> a tensor of i, and what the worker's generator draws."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.stack([torch.tensor(float(index)), torch.rand(())])


class AtOnce(Samples):
    """Serves a batch at once, so that no event tells the indices."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


class Part(AtOnce):
    """A share of the data, as an Arrow dataset that was split by rank tells it."""

    @property
    def _fingerprint(self) -> str:
        return f"part {dist.get_rank()}"


class Order(torch.utils.data.Sampler[int]):
    """An order by the epoch: each rank has the whole of it."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, 0

    def __iter__(self) -> Any:
        return iter(torch.randperm(self.length, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class InTurn(torch.utils.data.BatchSampler):
    """Deals out whole batches of one order in turn, and pads from its begin: as Accelerate does, by the same names."""

    def __init__(self, length: int) -> None:
        super().__init__(Order(length), BATCH, drop_last=False)
        self.num_processes, self.process_index = dist.get_world_size(), dist.get_rank()

    def set_epoch(self, epoch: int) -> None:
        self.sampler.epoch = epoch  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return -(-self.sampler.length // (BATCH * self.num_processes))  # type: ignore[attr-defined]

    def __iter__(self) -> Any:
        order = list(self.sampler)
        for turn in range(len(self)):
            first = (turn * self.num_processes + self.process_index) * BATCH
            yield [order[at % len(order)] for at in range(first, first + BATCH)]


@dataclass(frozen=True)
class Scene:
    """A training. tell(sampler, epoch, rank): the call of set_epoch; seed(rank): of the global generator."""

    ranks: int = 2
    samples: int = 31
    epochs: int = 2
    workers: int = 1
    detail: str = "sample"
    loader: Callable[[Any, int], dict[str, Any]] = lambda dataset, rank: {"sampler": minidl.DistributedSampler(dataset)}
    tell: Callable[[Any, int, int], None] = lambda sampler, epoch, rank: sampler.set_epoch(epoch)
    seed: Callable[[int], int] = lambda rank: 100 + rank
    each_epoch: Callable[[int], None] = lambda rank: None
    dataset: Callable[[int], Any] = Samples
    aligned: bool = True
    early: bool = False  # takes all batches and does not ask for another
    observed: bool = False  # of torch's own loader


def told_nothing(sampler: Any, epoch: int, rank: int) -> None: ...


def shuffled(dataset: Any, rank: int) -> dict[str, Any]:
    return {"shuffle": True}


def persistent(dataset: Any, rank: int) -> dict[str, Any]:
    return {"sampler": minidl.DistributedSampler(dataset), "persistent_workers": True}


def dropping(dataset: Any, rank: int) -> dict[str, Any]:
    return {"sampler": minidl.DistributedSampler(dataset, drop_last=True), "drop_last": True}


def reseeding(dataset: Any, rank: int) -> dict[str, Any]:
    def worker_init_fn(worker: int) -> None:
        torch.manual_seed(1000 * rank + torch.initial_seed())

    return {"sampler": minidl.DistributedSampler(dataset), "worker_init_fn": worker_init_fn}


def in_turn(dataset: Any, rank: int) -> dict[str, Any]:
    return {"batch_sampler": InTurn(len(dataset)), "batch_size": 1}


def uneven(dataset: Any, rank: int) -> dict[str, Any]:
    return {"sampler": range(rank, len(dataset), 2)}


SCENES: dict[str, Scene] = {
    "correct": Scene(),
    "four ranks": Scene(ranks=4, samples=33),
    "persistent": Scene(samples=32, loader=persistent),
    "dropping": Scene(ranks=3, samples=32, loader=dropping),
    "no workers": Scene(workers=0),
    "in order": Scene(loader=lambda d, r: {"sampler": minidl.DistributedSampler(d, shuffle=False)}),
    "forgotten sampler": Scene(loader=shuffled, tell=told_nothing),
    "forgotten set_epoch": Scene(ranks=4, epochs=3, tell=told_nothing),
    "persistent, forgotten set_epoch": Scene(loader=persistent, tell=told_nothing),
    "set_epoch on one rank": Scene(tell=lambda sampler, epoch, rank: sampler.set_epoch(epoch if rank else 0)),
    "uneven": Scene(samples=9 * BATCH - 3, epochs=1, loader=uneven, tell=told_nothing, aligned=False),
    "same seeds": Scene(seed=lambda rank: 7),
    "same seeds, and worker_init_fn reseeds": Scene(seed=lambda rank: 7, loader=reseeding),
    "ended early": Scene(early=True),
    "ended early, no workers": Scene(early=True, workers=0),
    "ended early, forgotten set_epoch": Scene(early=True, tell=told_nothing),
    "seeded in each epoch": Scene(each_epoch=lambda rank: torch.manual_seed(rank) and None),
    "one share twice": Scene(
        loader=lambda d, r: {"sampler": minidl.DistributedSampler(d, num_replicas=2, rank=0)}
    ),
    "batches: correct": Scene(detail="batch"),
    "batches: forgotten sampler": Scene(detail="batch", loader=shuffled, tell=told_nothing),
    "batches: forgotten set_epoch": Scene(detail="batch", tell=told_nothing),
    "batches in turn: correct": Scene(loader=in_turn),
    "observed: correct": Scene(observed=True),
    "observed: forgotten sampler": Scene(observed=True, loader=shuffled, tell=told_nothing),
    "each rank its own data": Scene(dataset=Part, loader=shuffled, tell=told_nothing),
    "at once: correct": Scene(dataset=AtOnce),
    "at once: forgotten sampler": Scene(dataset=AtOnce, loader=shuffled, tell=told_nothing),
}  # fmt: skip


def train(scene: Scene, rank: int, directory: Path) -> None:
    """One rank's training."""
    torch.manual_seed(scene.seed(rank))
    dataset = scene.dataset(scene.samples)
    options = {"batch_size": BATCH, "num_workers": scene.workers} | scene.loader(dataset, rank)
    if scene.observed:
        options["multiprocessing_context"] = minidl.observe()
    loader: Any = (torch.utils.data.DataLoader if scene.observed else minidl.DataLoader)(dataset, **options)
    sampler = options.get("batch_sampler", options.get("sampler"))
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimiser = torch.optim.SGD(model.parameters(), 1e-4)
    with minidl.trace(directory, detail=scene.detail), contextlib.nullcontext() if scene.observed else loader:
        if scene.aligned:
            minidl.align_clocks()
        for epoch in range(scene.epochs):
            scene.tell(sampler, epoch, rank)
            scene.each_epoch(rank)
            for batch in itertools.islice(loader, len(loader)) if scene.early else loader:
                optimiser.zero_grad()
                model(batch).mean().backward()
                optimiser.step()
        if scene.aligned:
            minidl.align_clocks()


def uneven_end(scene: Scene, rank: int, directory: Path) -> None:
    """The rank that has more batches finds the other one gone."""
    try:
        train(scene, rank, directory)
    except RuntimeError as error:
        (directory.parent / f"error{rank}").write_text(str(error))


SKEW = (0, 7_000_000_000, -3_500_000_000)
"""By how much the ranks' clocks in `skewed` are ahead of rank 0's, ns."""


def skewed(rank: int, directory: Path) -> None:
    """Two readings of clocks that are apart, and the second time further."""
    found = []
    for drift in (0, 40_000 * rank):
        reading = clocks._read(lambda drift=drift: time.monotonic_ns() + SKEW[rank] + drift, 20.0)
        found.append([reading.offset_ns, reading.error_ns, SKEW[rank] + drift])
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.with_suffix(".json").write_text(json.dumps(found))


def alone(rank: int, directory: Path) -> None:
    """Only rank 0 asks for the time; both go on, and the group works as before."""
    reading = None
    with minidl.trace(directory):
        if rank == 0:
            reading = minidl.align_clocks(timeout=1.0)
        total = torch.ones(1)
        dist.all_reduce(total)
    directory.with_suffix(".json").write_text(json.dumps([reading is None, total.item()]))


UNTOUCHED = """
import sys, torch.distributed as dist
from torch.distributed import destroy_process_group
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
destroy_process_group()
"""


def untouched(rank: int, directory: Path) -> None:
    """`minidl run --align-clocks` on a script that knows nothing of it, and makes the group itself."""
    script = directory.with_suffix(".py")
    directory.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(UNTOUCHED)
    recorded = ["run", "--align-clocks", "--trace", str(directory.parent)]
    if code := cli.main([*recorded, str(script), f"{directory.parent}/store", str(rank)]):
        raise SystemExit(code)


OTHERS: dict[str, tuple[int, Callable[[int, Path], None]]] = {
    "skewed": (3, skewed),
    "alone": (2, alone),
    "untouched": (2, untouched),
}


# --- The program that forks them --------------------------------------------------------------------------------------
def _rank(rank: int, name: str, place: Path, size: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    directory = place / name / f"rank{rank}"
    if name == "untouched":
        return untouched(rank, directory)
    dist.init_process_group("gloo", init_method=f"file://{place}/{name}.store", rank=rank, world_size=size)
    try:
        if name in OTHERS:
            OTHERS[name][1](rank, directory)
        else:
            (uneven_end if name == "uneven" else train)(SCENES[name], rank, directory)
    finally:
        dist.destroy_process_group()


def _run(name: str, place: Path) -> None:
    """Fork the ranks, which end with this process, and wait for them. Raises the first error of one of them."""
    size = OTHERS[name][0] if name in OTHERS else SCENES[name].ranks
    start_processes(_rank, (name, place, size), nprocs=size, start_method="fork")


def record(place: Path) -> None:
    """Write all scenes' traces there: a directory for each, with rank0, rank1, ... in it."""
    place.mkdir()
    environment = dict(os.environ, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MINIDL_TRACE"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, __file__, str(place)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


if __name__ == "__main__":
    import torch._dynamo  # else each rank imports it, when its optimiser is made

    for scene_name in [*SCENES, *OTHERS]:
        _run(scene_name, Path(sys.argv[1]))
