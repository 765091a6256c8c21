"""Two ranks, one correct loader, and one for each mistake that `minidl audit` is to find.

Argument: who starts the ranks. `env`: a launcher, which has set RANK and so on; `spawn` or `fork`: torch's
multiprocessing; else one of Lightning Fabric's strategies.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from seen import Numbers
from torch.utils.data import DataLoader, DistributedSampler


class Planted(Numbers):
    """Its name says what is wrong with its loader; here, nothing."""

    mistakes: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__(31)

    def options(self, rank: int) -> dict[str, Any]:
        """Of the loader."""
        return {"sampler": DistributedSampler(self)}

    def before(self, epoch: int, rank: int, sampler: Any) -> None:
        """Before each epoch."""
        sampler.set_epoch(epoch)


class InBatches(Planted):
    """Correct, and fetched at once."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


class Reseeded(Planted):
    """Correct: the seeds that the workers begin with are the same on all ranks, and worker_init_fn makes others."""

    def options(self, rank: int) -> dict[str, Any]:
        def worker_init_fn(worker: int) -> None:
            torch.manual_seed(torch.initial_seed() + 1000 * rank)

        return super().options(rank) | {"generator": seeded(7), "worker_init_fn": worker_init_fn}


class ForgottenSampler(Planted):
    mistakes = ("forgotten DistributedSampler",)

    def options(self, rank: int) -> dict[str, Any]:
        return {"shuffle": True}

    def before(self, epoch: int, rank: int, sampler: Any) -> None: ...


class ForgottenSamplerInBatches(ForgottenSampler, InBatches):
    """The same where a batch is fetched at once."""


class ForgottenSetEpoch(Planted):
    mistakes = ("forgotten set_epoch",)

    def before(self, epoch: int, rank: int, sampler: Any) -> None: ...


class UnequalEpochs(Planted):
    mistakes = ("set_epoch on some ranks",)

    def before(self, epoch: int, rank: int, sampler: Any) -> None:
        sampler.set_epoch(epoch if rank else 0)


class OneShareTwice(Planted):
    mistakes = ("wrong share",)

    def options(self, rank: int) -> dict[str, Any]:
        return {"sampler": DistributedSampler(self, num_replicas=2, rank=0)}


class OtherOrders(Planted):
    mistakes = ("different sampler seeds",)

    def options(self, rank: int) -> dict[str, Any]:
        return {"sampler": DistributedSampler(self, seed=rank)}


class Augmented(Planted):
    """Each sample draws a random number, as an augmentation does."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + 0 * torch.rand(())


class SameSeeds(Augmented):
    mistakes = ("same seeds on several ranks",)

    def options(self, rank: int) -> dict[str, Any]:
        return super().options(rank) | {"generator": seeded(7)}


class SameSeedsInEachEpoch(Augmented):
    mistakes = ("same seeds in each epoch",)

    def before(self, epoch: int, rank: int, sampler: Any) -> None:
        super().before(epoch, rank, sampler)
        torch.manual_seed(rank)


class Uneven(Planted):
    mistakes = ("uneven batches",)

    def options(self, rank: int) -> dict[str, Any]:
        return {"sampler": range(17) if rank == 0 else range(17, 31)}

    def before(self, epoch: int, rank: int, sampler: Any) -> None: ...


ALL = (
    *(Planted, InBatches, Reseeded, ForgottenSampler, ForgottenSamplerInBatches, ForgottenSetEpoch, UnequalEpochs),
    *(OneShareTwice, OtherOrders, SameSeeds, SameSeedsInEachEpoch, Uneven),
)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def train(rank: int) -> None:
    for number, kind in enumerate(ALL):
        torch.manual_seed(1000 * number + rank)
        dataset = kind()
        options = dataset.options(rank)
        # In a spawned rank, workers would be spawned too, and each imports torch.
        loader = DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context="fork", **options)
        for epoch in range(2):
            dataset.before(epoch, rank, options.get("sampler"))
            for _ in loader:
                pass


def in_group(rank: int, place: str = "") -> None:
    """Train as a rank: of two that meet in a file, or as the environment says."""
    if place:
        dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
    else:
        dist.init_process_group("gloo")
    train(dist.get_rank())
    dist.destroy_process_group()


def by_fabric(strategy: str) -> None:
    import lightning

    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch(lambda fabric: train(fabric.global_rank))


def main(how: str) -> None:
    ways: dict[str, Callable[[], Any]] = {
        "env": lambda: in_group(0),
        **{
            method: lambda method=method: mp.start_processes(
                in_group, (os.environ["MEETING"],), nprocs=2, start_method=method
            )
            for method in ("spawn", "fork")
        },
    }
    ways.get(how, lambda: by_fabric(how))()


if __name__ == "__main__":
    main(*sys.argv[1:])
