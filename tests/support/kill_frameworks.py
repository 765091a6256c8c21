"""Trainings of frameworks that are killed at chosen moments and resumed: what did the steps learn from that count?

The model has a count of each sample in each epoch, which its training step increments. The framework saves the count in
its checkpoints, with the weights. So the last checkpoint says which samples have reached the steps whose effect is in
it: none may be lost, and none repeated.

A life is a fork of this process, which has imported the framework. It kills itself, with its workers, at a moment: a
number of its ticks, which come before and after each training step, in each batch of a validation, and in a save.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import minidl
from minidl.wire.errors import StateMismatchError

LENGTH, BATCH, EPOCHS = 12, 2, 3
STEPS = LENGTH // BATCH


class Numbers(minidl.Dataset[torch.Tensor]):
    """0 to LENGTH - 1."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


class Stream(minidl.IterableDataset[torch.Tensor]):
    """The same numbers, dealt out to workers and ranks, with a state; it counts its epochs, and turns with each."""

    def __init__(self) -> None:
        self.at, self.go_on, self.epoch = 0, 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = minidl.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        share = range(rank * workers + worker, LENGTH, ranks * workers)
        self.at, self.go_on = self.go_on, 0
        while self.at < len(share):
            self.at += 1
            yield torch.tensor(float(share[(self.at - 1 + self.epoch) % len(share)]))
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.go_on, self.epoch = state["at"], state["epoch"]


class SizedStream(Stream):
    def __len__(self) -> int:
        return LENGTH


@dataclass(frozen=True)
class Case:
    """A training. kind: of the loader, "map", "stream" or "sized stream". every: steps from one checkpoint to the next.

    extra: options of the framework.
    """

    framework: str
    kind: str = "map"
    workers: int = 0
    persistent: bool = False
    every: int = 3
    validates: bool = False
    extra: tuple[tuple[str, Any], ...] = ()
    state_every: int | None = None

    def loader(self) -> Any:
        options: dict[str, Any] = {"num_workers": self.workers, "persistent_workers": self.persistent}
        if self.kind == "map":
            return minidl.DataLoader(Numbers(), BATCH, shuffle=True, **options)
        dataset = Stream() if self.kind == "stream" else SizedStream()
        return minidl.DataLoader(dataset, BATCH, state_every=self.state_every, **options)

    def name(self) -> str:
        parts = [f"{self.kind}, {self.workers} workers", f"every {self.every}"]
        parts += ["persistent"] * self.persistent + ["validates"] * self.validates
        parts += [f"state_every {self.state_every}"] * (self.state_every is not None)
        return ", ".join((*parts, *(f"{key}={value}" for key, value in self.extra)))


@dataclass
class Reaper:
    """Kills this process and its workers at its `at`-th tick of `kind`; None: never, "": of any kind."""

    at: int | None
    kind: str = ""
    ticks: int = field(default=0)

    def tick(self, kind: str) -> None:
        if self.at is None or (self.kind and kind != self.kind):
            return
        self.ticks += 1
        if self.ticks > self.at:
            os.killpg(0, signal.SIGKILL)


class Counting(torch.nn.Module):
    """A model that counts the samples of each epoch."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.register_buffer("seen", torch.zeros(EPOCHS + 2, LENGTH, dtype=torch.int64))

    def learn(self, epoch: int, batch: torch.Tensor) -> torch.Tensor:
        for value in batch.tolist():
            self.seen[epoch, int(value)] += 1
        return (batch * self.weight).mean()


def whole_checkpoints(folder: Path, pattern: str) -> list[Path]:
    """The checkpoints that can be read, the oldest first."""
    found = []
    for path in sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime_ns):
        with contextlib.suppress(Exception):
            torch.load(path, weights_only=False)
            found.append(path)
    return found


# --- Lightning --------------------------------------------------------------------------------------------------------
def lightning_life(case: Case, folder: Path, reaper: Reaper) -> torch.Tensor:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Counting()

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            reaper.tick("step")
            return self.model.learn(self.current_epoch, batch)

        def on_train_batch_end(self, *_: Any) -> None:
            reaper.tick("step")

        def validation_step(self, *_: Any) -> None:
            reaper.tick("validation")

        def on_save_checkpoint(self, _: Any) -> None:
            reaper.tick("save")

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    options = dict(case.extra)
    saves = options.pop("saves", {"every_n_train_steps": case.every})
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, filename="{epoch}-{step}", save_top_k=-1, **dict(saves))],
        **({"max_epochs": EPOCHS, "num_sanity_val_steps": 0} | options),
    )
    module, found = Module(), whole_checkpoints(folder, "*.ckpt")
    validation = torch.utils.data.DataLoader(Numbers(), 4) if case.validates else None
    trainer.fit(module, case.loader(), validation, ckpt_path=str(found[-1]) if found else None)
    return module.model.seen


# --- Frameworks that skip batches, with a sampler that is told its epoch ----------------------------------------------
def told_loader(**options: Any) -> Any:
    return minidl.DataLoader(Numbers(), BATCH, sampler=minidl.DistributedSampler(Numbers(), 1, 0), **options)


def _write(state: Any, path: Path, reaper: Reaper) -> None:
    """Write a checkpoint, which is there as a whole or not at all."""
    reaper.tick("save")
    torch.save(state, path.with_suffix(".torn"))
    reaper.tick("save")
    path.with_suffix(".torn").replace(path)
    reaper.tick("save")


class Place:
    """How far a loop that the program writes itself has come."""

    def __init__(self) -> None:
        self.epoch = self.step = 0

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def accelerate_life(case: Case, folder: Path, reaper: Reaper) -> torch.Tensor:
    """way: "state" registers the loader for checkpointing; "skip" resumes by skip_first_batches."""
    from accelerate import Accelerator, skip_first_batches

    way, place, loader = dict(case.extra)["way"], Place(), told_loader(num_workers=case.workers)
    accelerator = Accelerator(cpu=True)
    plain = Counting()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    accelerator.register_for_checkpointing(place)
    if way == "state":
        accelerator.register_for_checkpointing(loader)
    if saved := sorted(folder.glob("whole-*"), key=lambda path: int(path.name.split("-")[1])):
        accelerator.load_state(str(saved[-1]))
    for epoch in range(place.epoch, EPOCHS):
        loader.sampler.set_epoch(epoch)
        for batch in skip_first_batches(loader, place.step) if way == "skip" and place.step else loader:
            reaper.tick("step")
            accelerator.backward(model.learn(epoch, batch))
            optimizer.step()
            place.step += 1
            reaper.tick("step")
            if place.step % case.every == 0:
                reaper.tick("save")
                torn = folder / f"torn-{time.monotonic_ns()}"
                accelerator.save_state(str(torn))
                reaper.tick("save")
                torn.rename(folder / f"whole-{epoch * STEPS + place.step}")
        place.epoch, place.step = epoch + 1, 0
    return plain.seen


def transformers_life(case: Case, folder: Path, reaper: Reaper) -> torch.Tensor:
    """The Trainer goes on by skipping batches."""
    import transformers

    class Model(Counting):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            reaper.tick("step")
            return {"loss": self.learn(int(holder[0].state.epoch + 1e-6), x)}

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return told_loader(num_workers=case.workers, collate_fn=lambda samples: {"x": torch.stack(samples)})

        def _save_checkpoint(self, *arguments: Any, **options: Any) -> None:
            reaper.tick("save")
            super()._save_checkpoint(*arguments, **options)
            reaper.tick("save")

    arguments = transformers.TrainingArguments(
        str(folder),
        num_train_epochs=EPOCHS,
        save_strategy="steps",
        save_steps=case.every,
        per_device_train_batch_size=BATCH,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
    )
    model = Model()
    holder = [Trainer(model, arguments, train_dataset=Numbers())]
    whole = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    last = max(whole, key=lambda path: int(path.name.split("-")[1]), default=None)
    holder[0].train(resume_from_checkpoint=None if last is None else str(last))
    return model.seen


def ignite_life(case: Case, folder: Path, reaper: Reaper) -> torch.Tensor:
    """way: "state" saves the loader's state beside the engine's; "skip" leaves it to DeterministicEngine."""
    from ignite.engine import Engine, Events
    from ignite.engine.deterministic import DeterministicEngine

    way, loader, model = dict(case.extra)["way"], told_loader(num_workers=case.workers), Counting()

    def step(engine: Any, batch: torch.Tensor) -> None:
        reaper.tick("step")
        model.learn(engine.state.epoch - 1, batch)

    engine = Engine(step) if way == "state" else DeterministicEngine(step)

    def save(engine: Any) -> None:
        state = {"engine": engine.state_dict(), "model": model.state_dict()}
        _write(state | {"loader": loader.state_dict()}, folder / f"{engine.state.iteration}.ckpt", reaper)

    engine.add_event_handler(Events.EPOCH_STARTED, lambda: loader.sampler.set_epoch(engine.state.epoch - 1))
    engine.add_event_handler(Events.ITERATION_COMPLETED(every=case.every), save)
    if found := whole_checkpoints(folder, "*.ckpt"):
        state = torch.load(found[-1], weights_only=False)
        engine.load_state_dict(state["engine"])
        model.load_state_dict(state["model"])
        if way == "state":
            loader.load_state_dict(state["loader"])
    loader.sampler.set_epoch(engine.state.epoch)
    if engine.state.iteration < EPOCHS * STEPS:  # an engine that is done would begin anew
        engine.run(loader, max_epochs=EPOCHS)
    return model.seen


LIVES: dict[str, Callable[[Case, Path, Reaper], torch.Tensor]] = {
    "lightning": lightning_life,
    "accelerate": accelerate_life,
    "transformers": transformers_life,
    "ignite": ignite_life,
}

CASES = [
    Case("lightning"),
    Case("lightning", every=1, validates=True),
    Case("lightning", workers=2, persistent=True, every=2),
    Case("lightning", validates=True, extra=(("val_check_interval", 3),)),
    Case("lightning", every=2, extra=(("limit_train_batches", 4),)),
    Case("lightning", every=2, extra=(("max_steps", EPOCHS * STEPS),)),
    Case("lightning", validates=True, extra=(("saves", (("every_n_epochs", 1),)),)),
    Case("lightning", "sized stream", workers=2, persistent=True),
    Case("lightning", "stream"),
    Case("lightning", "stream", every=1, validates=True),
    Case("lightning", "stream", workers=2),
    Case("lightning", "stream", workers=2, persistent=True, every=2, state_every=1),
    *(Case("accelerate", workers=workers, extra=(("way", way),)) for way in ("state", "skip") for workers in (0, 2)),
    *(Case("transformers", workers=workers) for workers in (0, 2)),
    *(Case("ignite", workers=workers, extra=(("way", way),)) for way in ("state", "skip") for workers in (0, 2)),
]
"""What `tests/check_resume.py --frameworks` runs: 6 steps an epoch, so a checkpoint falls on the last batch of each."""


def prepare(framework: str) -> None:
    """Import what a life needs, since each is a fork."""
    module = importlib.import_module(framework)
    if framework == "accelerate":
        module.Accelerator(cpu=True)
    if framework == "transformers":
        module.TrainingArguments(tempfile.gettempdir(), report_to=[], use_cpu=True)


def chosen(case: Case, kills: int, dice: random.Random) -> list[Reaper]:
    """Moments: at random, or in the first batch of a life, or in its first or second validation or save."""
    kinds = ["", "", "step", "save"] + ["validation"] * case.validates
    picked = (dice.choice(kinds) for _ in range(kills))
    return [Reaper(dice.randrange(26) if kind == "" else dice.randrange(2), kind) for kind in picked]


# --- Lives ------------------------------------------------------------------------------------------------------------
def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it came from."""
    while error is not None:
        yield error
        error = error.__context__


def _live(case: Case, folder: Path, reaper: Reaper) -> None:
    os.setpgrp()
    torch.set_num_threads(1)
    torch.manual_seed(random.SystemRandom().randrange(1000))
    warnings.simplefilter("ignore")
    with (folder / "output").open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    try:
        answer: dict[str, Any] = {"seen": LIVES[case.framework](case, folder, reaper).tolist()}
    except Exception as error:
        traceback.print_exc()
        refused = [one for one in _chain(error) if isinstance(one, StateMismatchError)]
        first = (refused or [error])[0]  # a framework may fail at its teardown after it
        answer = {"error": f"{type(first).__name__}: {first}\n", "refused": bool(refused)}
    (folder / "answer").write_text(json.dumps(answer))
    os._exit(0)


@dataclass
class Outcome:
    """What became of a training. seen: by epoch and sample. refused: the error says that a state does not fit."""

    kills: int
    lost: int = 0
    repeated: int = 0
    error: str = ""
    refused: bool = False
    seen: list[list[int]] = field(default_factory=list)


def train(case: Case, reapers: list[Reaper]) -> Outcome:
    """Train, in as many lives as there are reapers, and one that is not killed."""
    kills = 0
    with tempfile.TemporaryDirectory(prefix="minidl-kills-") as place:
        folder = Path(place)
        for reaper in [*reapers, Reaper(None)]:
            life = multiprocessing.get_context("fork").Process(target=_live, args=(case, folder, reaper))
            life.start()
            life.join()
            kills += life.exitcode == -signal.SIGKILL
            if (folder / "answer").exists():
                break
        if not (folder / "answer").exists():
            return Outcome(kills, error=(folder / "output").read_text()[-1000:])
        answer = json.loads((folder / "answer").read_text())
        if "error" in answer:
            error = answer["error"] + (folder / "output").read_text()[-1500:]
            return Outcome(kills, error=error, refused=answer["refused"])
    seen = answer["seen"]
    limit = dict(case.extra).get("limit_train_batches")
    if limit is not None:  # any samples, so many an epoch
        wanted = [limit * BATCH] * EPOCHS
        got = [sum(epoch) for epoch in seen]
        got, wanted = got, wanted + [0, 0]
        lost = sum(max(0, w - g) for w, g in zip(wanted, got, strict=True))
        return Outcome(kills, lost, sum(max(0, g - w) for w, g in zip(wanted, got, strict=True)), seen=seen)
    lost = sum(1 - min(1, count) for epoch in seen[:EPOCHS] for count in epoch)
    repeated = sum(max(0, count - 1) for epoch in seen[:EPOCHS] for count in epoch) + sum(map(sum, seen[EPOCHS:]))
    return Outcome(kills, lost, repeated, seen=seen)
