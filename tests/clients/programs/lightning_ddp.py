"""Lightning, two ranks on the CPU: `ddp` starts rank 1 as a program of its own. Argument: the strategy."""

import sys

import lightning
from lightning_trained import Noting, trainer
from seen import Numbers, loader_class


class Module(Noting):
    def on_train_end(self) -> None:
        loader = self.trainer.train_dataloader
        self.log_of_batches.write(self.global_rank, sampler=type(loader.sampler).__name__)


def main() -> None:
    lightning.seed_everything(3, workers=True, verbose=False)
    loader = loader_class()(Numbers(), batch_size=25, shuffle=True, num_workers=1)
    trainer(devices=2, strategy=sys.argv[1] if len(sys.argv) > 1 else "ddp", max_epochs=2).fit(Module(), loader)


if __name__ == "__main__":
    main()
