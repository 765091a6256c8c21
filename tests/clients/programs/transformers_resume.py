"""The Trainer of Transformers on two ranks, under torchrun: saves in the middle of an epoch, and goes on from there."""

import os
from pathlib import Path

import torch
import transformers
from seen import Log
from transformers_trainer import Model, Named

EPOCHS, STOP = 2, 13


def train(folder: Path, log: Log, resumes: bool) -> int:
    """Train, from the checkpoint if there is one to resume from; return the rank."""
    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=25,
        num_train_epochs=EPOCHS,
        report_to=[],
        use_cpu=True,
        seed=3,
        dataloader_num_workers=1,
        save_strategy="steps",
        save_steps=STOP,
        disable_tqdm=True,
        logging_strategy="no",
    )
    holder: list[transformers.Trainer] = []
    first = EPOCHS if resumes else 0
    model = Model(log, lambda: first + int(holder[0].state.epoch + 1e-6))
    holder.append(transformers.Trainer(model, arguments, train_dataset=Named()))
    holder[0].train(resume_from_checkpoint=str(folder / f"checkpoint-{STOP}") if resumes else None)
    return arguments.process_index


def main() -> None:
    log = Log()
    folder = Path(os.environ["SEEN"]) / "checkpoints"
    train(folder, log, False)
    rank = train(folder, log, True)
    log.write(rank, resumed=log.epochs["2"] == log.epochs["0"][STOP:] and log.epochs["3"] == log.epochs["1"])
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
