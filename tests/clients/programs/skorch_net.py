"""skorch, which makes its loaders by a class that it is given, `iterator_train`."""

import skorch
import torch
from seen import Log, Numbers, loader_class


class Pairs(Numbers):
    def __getitem__(self, index: int):
        return super().__getitem__(index).reshape(1), torch.zeros(1)


class Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.log_of_batches, self.epoch = Log(), -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log_of_batches.batch(self.epoch, x)
        return x * self.weight


class Epochs(skorch.callbacks.Callback):
    def on_epoch_begin(self, net, **_) -> None:
        net.module_.epoch += 1


def main() -> None:
    torch.manual_seed(3)
    net = skorch.NeuralNetRegressor(
        Linear,
        max_epochs=2,
        batch_size=25,
        train_split=None,
        verbose=0,
        lr=0.0,
        callbacks=[Epochs()],
        iterator_train=loader_class(),
        iterator_train__shuffle=True,
        iterator_train__num_workers=1,
    )
    net.fit(Pairs(), y=None)
    net.module_.log_of_batches.write(0)


if __name__ == "__main__":
    main()
