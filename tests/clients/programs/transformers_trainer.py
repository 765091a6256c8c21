"""The Trainer of Transformers on a toy model."""

import tempfile

import torch
import transformers
from seen import Log, Numbers


class Model(torch.nn.Module):
    def __init__(self, log: Log, epoch) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.log_of_batches, self.epoch = log, epoch

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict:
        self.log_of_batches.batch(self.epoch(), x)
        return {"loss": (x * self.weight).mean()}


class Named(Numbers):
    def __getitem__(self, index: int):
        return {"x": super().__getitem__(index), "labels": 0}


def main() -> None:
    log = Log()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=25,
            num_train_epochs=2,
            report_to=[],
            use_cpu=True,
            seed=3,
            dataloader_num_workers=1,
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
        )
        holder = []
        model = Model(log, lambda: int(holder[0].state.epoch))
        holder.append(transformers.Trainer(model, arguments, train_dataset=Named()))
        holder[0].train()
    log.write(arguments.process_index, sampler=type(holder[0].get_train_dataloader().sampler).__name__)


if __name__ == "__main__":
    main()
