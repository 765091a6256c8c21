"""An Arrow dataset (Hugging Face datasets), which fetches a whole batch by `__getitems__`."""

import datasets
import torch
from seen import Log, loader_class


def main() -> None:
    torch.manual_seed(3)
    dataset = datasets.Dataset.from_dict({"x": [float(i) for i in range(1000)]}).with_format("torch")
    log = Log()
    loader = loader_class()(dataset, batch_size=25, shuffle=True, num_workers=2)
    for epoch in range(2):
        for batch in loader:
            log.batch(epoch, batch["x"])
    log.write(0)


if __name__ == "__main__":
    main()
