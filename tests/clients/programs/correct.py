"""Two ranks, and programs that share their data in the ways of the field: none of them makes a mistake.

Argument: which of `GROUPS`. Each program's datasets are of a class that has the program's name, by which the audit
names what it finds.
"""

import itertools
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from seen import Numbers
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

LENGTH, BATCH = 43, 4
GROUPS: dict[str, dict[str, Callable[..., None]]] = {}


def program(group: str, **asked: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A program of a group. asked: the questions that the audit has for it, as `questions`."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        GROUPS.setdefault(group, {})[function.__name__] = function
        function.questions = set(asked.get("questions", ()))  # type: ignore[attr-defined]
        return function

    return add


def loaded(dataset: Any, **options: Any) -> Any:
    size = {} if "batch_sampler" in options else {"batch_size": BATCH}
    return DataLoader(dataset, num_workers=1, multiprocessing_context="fork", **size, **options)


def part(data: Any, length: int, indices: Any) -> Any:
    kind: Any = type(data.__name__, (Subset,), {})
    return kind(data(length), indices)


def run(loader: Any, epochs: int = 2, sampler: Any = None) -> None:
    for epoch in range(epochs):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        for _ in loader:
            pass


def shared(dataset: Any, epochs: int = 2, **options: Any) -> None:
    """Train on a share of the dataset."""
    sampler: Any = DistributedSampler(dataset, **options)
    run(loaded(dataset, sampler=sampler), epochs, sampler)


# --- One process group, torch alone -----------------------------------------------------------------------------------
@program("plain", questions=["the same samples on each rank"])
def validation_on_every_rank(data: Any, rank: int) -> None:
    sampler = DistributedSampler(data(LENGTH))
    training, validation = loaded(data(LENGTH), sampler=sampler), loaded(data(19))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        run(training, 1)
        run(validation, 1)


@program("plain")
def validation_on_rank_0(data: Any, rank: int) -> None:
    shared(data(LENGTH))
    if rank == 0:
        run(loaded(data(19)))


@program("plain")
def validation_in_shares(data: Any, rank: int) -> None:
    shared(data(LENGTH), shuffle=False)


@program("plain", questions=["uneven batches"])
def uneven_validation(data: Any, rank: int) -> None:
    run(loaded(part(data, LENGTH, range(25 if rank else 0, 43 if rank else 25))))


@program("plain")
def disjoint_subsets(data: Any, rank: int) -> None:
    run(loaded(part(data, 40, range(rank, 40, 2)), shuffle=True))


@program("plain")
def folds(data: Any, rank: int) -> None:
    """Each rank has folds of its own, and trains a model of its own."""
    for fold in range(2):
        held = range(10 * (2 * rank + fold), 10 * (2 * rank + fold) + 10)
        run(loaded(part(data, 40, [i for i in range(40) if i not in held]), shuffle=True), 1)


@program("plain")
def folds_in_shares(data: Any, rank: int) -> None:
    for fold in range(2):
        shared(part(data, 40, [i for i in range(40) if i % 2 != fold]))


@program("plain")
def a_file_list_each(data: Any, rank: int) -> None:
    dataset = data(20)
    dataset.files = [f"{number}.png" for number in range(40)][rank::2]
    run(loaded(dataset, shuffle=True))


@program("plain")
def tensors_each(data: Any, rank: int) -> None:
    kind: Any = type(data.__name__, (TensorDataset,), {})
    run(loaded(kind(torch.arange(20.0) + 20 * rank), shuffle=True))


@program("plain")
def concatenated(data: Any, rank: int) -> None:
    kind: Any = type(data.__name__, (ConcatDataset,), {})
    shared(kind([data(20), Subset(data(30), range(5, 28))]))


class Curriculum(Sampler[int]):
    """More of the samples in each epoch, easy ones first; each rank has its share of them."""

    def __init__(self, length: int, rank: int) -> None:
        self.length, self.rank, self.epoch = length, rank, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.length * (self.epoch + 1) // 4, generator=torch.Generator().manual_seed(self.epoch))
        return iter(order.tolist()[self.rank :: 2])


@program("plain")
def curriculum(data: Any, rank: int) -> None:
    sampler = Curriculum(40, rank)
    run(loaded(data(40), sampler=sampler), 4, sampler)


@program("plain")
def weighted(data: Any, rank: int) -> None:
    """Each rank draws by itself."""
    run(loaded(data(LENGTH), sampler=WeightedRandomSampler([1.0] * LENGTH, 20)))


@program("plain")
def with_replacement(data: Any, rank: int) -> None:
    run(loaded(data(1000), sampler=RandomSampler(data(1000), replacement=True, num_samples=40)))


@program("plain")
def batch_sampler(data: Any, rank: int) -> None:
    dataset = data(LENGTH)
    sampler: Any = DistributedSampler(dataset)
    run(loaded(dataset, batch_sampler=BatchSampler(sampler, BATCH, drop_last=False)), 2, sampler)


@program("plain")
def buckets(data: Any, rank: int) -> None:
    """Batches of neighbours, dealt out in turn."""
    order = torch.randperm(10, generator=torch.Generator().manual_seed(1)).tolist()[rank::2]
    run(loaded(data(40), batch_sampler=[list(range(4 * at, 4 * at + 4)) for at in order]))


@program("plain")
def drop_last(data: Any, rank: int) -> None:
    dataset = data(LENGTH)
    sampler: Any = DistributedSampler(dataset, drop_last=True)
    run(loaded(dataset, sampler=sampler, drop_last=True), 3, sampler)


@program("plain")
def ended_early(data: Any, rank: int) -> None:
    """So many steps, on each rank."""
    dataset = data(LENGTH)
    sampler: Any = DistributedSampler(dataset)
    loader = loaded(dataset, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for _ in itertools.islice(loader, 3):
            pass


class Skipping(Sampler[int]):
    """The rest of an epoch."""

    def __init__(self, sampler: Any) -> None:
        self.sampler, self.skipped = sampler, 0

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(iter(self.sampler), self.skipped, None)


@program("plain", questions=["missing"])
def resumed_by_skipping(data: Any, rank: int) -> None:
    dataset = data(LENGTH)
    sampler = DistributedSampler(dataset)
    skipping = Skipping(sampler)
    loader = loaded(dataset, sampler=skipping)
    for epoch in (3, 4):
        skipping.skipped = 12 if epoch == 3 else 0
        sampler.set_epoch(epoch)
        run(loader, 1)


@program("plain", questions=["missing"])
def resumed_by_state(data: Any, rank: int) -> None:
    import minidl

    dataset = data(LENGTH)
    states = []
    for resumes in (False, True):
        sampler: Any = DistributedSampler(dataset)
        loader = minidl.DataLoader(dataset, BATCH, sampler=sampler, num_workers=1, multiprocessing_context="fork")
        if resumes:
            loader.load_state_dict(states[0])
        for batch, _ in enumerate(loader):
            if batch == 2 and not resumes:
                states.append(loader.state_dict())
                break
        loader.close()


class Shards:
    """Mixed in: 0, 1, ..., dealt out by rank and worker."""

    def __iter__(self) -> Any:
        info = get_worker_info()
        workers, worker = (1, 0) if info is None else (info.num_workers, info.id)
        return iter(range(dist.get_rank() * workers + worker, 40, 2 * workers))


@program("plain")
def stream_in_shards(data: Any, rank: int) -> None:
    run(loaded(type(data.__name__, (Shards, IterableDataset), {})()))


@program("plain", questions=["uneven batches"])
def uneven_stream(data: Any, rank: int) -> None:
    class Uneven(Shards):
        def __iter__(self) -> Any:
            return iter(range(20 + 8 * dist.get_rank()))

    run(loaded(type(data.__name__, (Uneven, IterableDataset), {})()))


@program("plain", questions=["the same samples on each rank", "same seeds on several ranks"])
def parts_of_one_model(data: Any, rank: int) -> None:
    torch.manual_seed(11)
    run(loaded(data(LENGTH), shuffle=True))


@program("plain", questions=["the same samples on each rank"])
def generator_of_one_seed(data: Any, rank: int) -> None:
    """The parts of one model, whose order alone is common."""
    run(loaded(data(LENGTH), sampler=RandomSampler(data(LENGTH), generator=torch.Generator().manual_seed(4))))


@program("plain", questions=["same seeds on several ranks"])
def one_seed_and_no_augmentation(data: Any, rank: int) -> None:
    """The workers of all ranks have one seed, and draw nothing."""
    torch.manual_seed(11)
    shared(data(LENGTH))


@program("plain", questions=["same seeds in each epoch"])
def seeded_in_each_epoch_and_no_augmentation(data: Any, rank: int) -> None:
    dataset = data(LENGTH)
    sampler: Any = DistributedSampler(dataset)
    loader = loaded(dataset, sampler=sampler)
    for epoch in range(2):
        torch.manual_seed(rank)
        sampler.set_epoch(epoch)
        run(loader, 1)


@program("plain")
def generator_each(data: Any, rank: int) -> None:
    dataset = data(LENGTH)
    sampler: Any = DistributedSampler(dataset)
    run(loaded(dataset, sampler=sampler, generator=torch.Generator().manual_seed(100 + rank)), 2, sampler)


class Repeated(DistributedSampler[Any]):
    """Each sample three times in a row, as timm's RepeatAugSampler."""

    num_repeats = 3

    def __iter__(self) -> Any:
        order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(self.epoch)).repeat_interleave(3)
        return iter(order[: order.numel() // 2 * 2].tolist()[self.rank :: 2])


@program("plain")
def repeated(data: Any, rank: int) -> None:
    dataset = data(LENGTH)
    sampler: Any = Repeated(dataset)
    run(loaded(dataset, sampler=sampler), 2, sampler)


@program("plain")
def shares_in_another_order(data: Any, rank: int) -> None:
    shared(data(LENGTH), num_replicas=2, rank=1 - rank)


@program("plain")
def several_loaders_of_one_line(data: Any, rank: int) -> None:
    for length in (40, LENGTH):
        shared(data(length))


# --- torchdata, ignite ------------------------------------------------------------------------------------------------
@program("others", questions=["missing"])
def torchdata_resumed(data: Any, rank: int) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    states = []
    for resumes in (False, True):
        sampler: Any = StatefulDistributedSampler(data(LENGTH))
        loader = StatefulDataLoader(data(LENGTH), BATCH, sampler=sampler, num_workers=1, multiprocessing_context="fork")
        if resumes:
            loader.load_state_dict(states[0])
        for batch, _ in enumerate(loader):
            if batch == 2 and not resumes:
                states.append(loader.state_dict())
                break


@program("others", questions=["missing"])
def ignite_resumed(data: Any, rank: int) -> None:
    from ignite.engine import Events
    from ignite.engine.deterministic import DeterministicEngine

    sampler: Any = DistributedSampler(data(LENGTH))
    engine = DeterministicEngine(lambda engine, batch: None)
    engine.add_event_handler(Events.EPOCH_STARTED, lambda: sampler.set_epoch(engine.state.epoch))
    engine.load_state_dict({"iteration": 3, "max_epochs": 2, "epoch_length": 6, "rng_states": None})
    engine.run(loaded(data(LENGTH), sampler=sampler))


# --- Accelerate, and the Trainer of Transformers ----------------------------------------------------------------------
def accelerator(**options: Any) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    made = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    torch.manual_seed(7)  # the order, which the ranks have to share
    torch.rand(0 if options.get("dispatch_batches") else made.process_index)  # what the workers are seeded by
    return made


def prepared(data: Any, shuffle: bool = True, length: int = LENGTH, **options: Any) -> Any:
    return accelerator(**options).prepare(loaded(data(length), shuffle=shuffle))


@program("accelerate")
def accelerate(data: Any, rank: int) -> None:
    run(prepared(data, use_seedable_sampler=True))


@program("accelerate", questions=["missing"])
def accelerate_skip_first_batches(data: Any, rank: int) -> None:
    from accelerate import skip_first_batches

    loader = prepared(data, use_seedable_sampler=True)
    run(skip_first_batches(loader, 3), 1)
    run(loader, 1)


@program("accelerate")
def accelerate_dispatch_batches(data: Any, rank: int) -> None:
    """Rank 0 fetches for both; the workers of rank 1 have its seeds, and nobody gets what they make."""
    run(prepared(data, dispatch_batches=True))


@program("accelerate")
def accelerate_split_batches(data: Any, rank: int) -> None:
    run(prepared(data, split_batches=True, use_seedable_sampler=True))


@program("accelerate", questions=["uneven batches"])
def accelerate_even_batches_false(data: Any, rank: int) -> None:
    run(prepared(data, even_batches=False, use_seedable_sampler=True, length=33))


@program("accelerate")
def accelerate_validation(data: Any, rank: int) -> None:
    run(prepared(data, shuffle=False))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        return {"loss": (x * self.weight).mean(), "logits": x * self.weight}


@program("trainer", questions=["same seeds on several ranks"])
def trainer(data: Any, rank: int) -> None:
    import transformers

    class Named:
        def __getitem__(self, index: int) -> Any:
            return {"x": torch.tensor(float(index)), "labels": 0}

    kind: Any = type(data.__name__, (Named, data), {})
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, per_device_train_batch_size=BATCH, num_train_epochs=2, report_to=[], use_cpu=True, seed=3,
            dataloader_num_workers=1, save_strategy="no", eval_strategy="epoch", disable_tqdm=True,
            logging_strategy="no", ddp_backend="gloo",
        )  # fmt: skip
        transformers.Trainer(Model(), arguments, train_dataset=kind(LENGTH), eval_dataset=kind(19)).train()


# --- Lightning, which starts the second rank itself -------------------------------------------------------------------
@program("lightning")
def lightning(data: Any) -> None:
    import lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return (batch * self.weight).mean()

        def validation_step(self, batch: torch.Tensor, _: int) -> None: ...

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    pl.seed_everything(3, workers=True, verbose=False)
    fit = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    fit.fit(Module(), loaded(data(LENGTH), shuffle=True), loaded(data(19)))


def main(group: str) -> None:
    logging.disable(logging.WARNING)
    if group == "lightning":
        GROUPS[group]["lightning"](type("lightning", (Numbers,), {}))
        return
    if group == "trainer":
        trainer(type("trainer", (Numbers,), {}), int(os.environ["RANK"]))
        return
    if group != "accelerate":
        dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    chosen = sys.argv[2:] or GROUPS[group]
    for number, name in enumerate(chosen):
        torch.manual_seed(1000 * number + rank)
        GROUPS[group][name](type(name, (Numbers,), {}), rank)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
