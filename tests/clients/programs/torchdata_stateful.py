"""torchdata's StatefulDataLoader: a subclass of torch's loader with an iterator of its own."""

import torch
from seen import Numbers, logged
from torchdata.stateful_dataloader import StatefulDataLoader


def main() -> None:
    torch.manual_seed(3)
    loader = StatefulDataLoader(Numbers(), batch_size=25, shuffle=True, num_workers=2)
    logged(loader).write(0)


if __name__ == "__main__":
    main()
