"""MONAI: its DataLoader subclasses torch's and seeds the random transforms of each worker."""

import torch
from monai.data import DataLoader, Dataset
from seen import logged


def main() -> None:
    torch.manual_seed(3)
    loader = DataLoader(Dataset([{"x": float(i)} for i in range(1000)]), batch_size=25, shuffle=True, num_workers=1)
    logged(loader, lambda batch: batch["x"]).write(0)


if __name__ == "__main__":
    main()
