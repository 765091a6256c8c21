"""An ordinary Lightning program, with its loggers and checkpoints, whose loader comes from a hook of the module."""

import time
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset[torch.Tensor]):
    """Samples that take 4 ms."""

    def __len__(self) -> int:
        return 600

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.004)
        return torch.full((8,), float(index))


class Module(lightning.LightningModule):
    """A linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: torch.Tensor, _: int) -> Any:
        return self.layer(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.001)

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(Slow(), 4, shuffle=True, num_workers=1)


if __name__ == "__main__":
    lightning.Trainer(max_epochs=3, accelerator="cpu").fit(Module())
