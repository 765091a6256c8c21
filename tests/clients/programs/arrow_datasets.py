"""An Arrow dataset (Hugging Face datasets), which fetches a whole batch by `__getitems__`."""

import datasets
import torch
from seen import loader_class, logged


def main() -> None:
    torch.manual_seed(3)
    dataset = datasets.Dataset.from_dict({"x": [float(i) for i in range(1000)]}).with_format("torch")
    loader = loader_class()(dataset, batch_size=25, shuffle=True, num_workers=2)
    logged(loader, lambda batch: batch["x"]).write(0)


if __name__ == "__main__":
    main()
