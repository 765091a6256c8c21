"""Lightning, two ranks on the CPU: `ddp` starts rank 1 as a program of its own. Argument: the strategy."""

import sys

import lightning
import torch
from seen import Log, Numbers, loader_class


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.log_of_batches = Log()

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        self.log_of_batches.batch(self.current_epoch, batch)
        return (batch * self.weight).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self) -> None:
        loader = self.trainer.train_dataloader
        self.log_of_batches.write(self.global_rank, sampler=type(loader.sampler).__name__)


def main() -> None:
    lightning.seed_everything(3, workers=True, verbose=False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=sys.argv[1] if len(sys.argv) > 1 else "ddp",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), loader_class()(Numbers(), batch_size=25, shuffle=True, num_workers=1))


if __name__ == "__main__":
    main()
