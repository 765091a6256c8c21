"""MONAI: its DataLoader subclasses torch's and seeds the random transforms of each worker."""

import torch
from monai.data import DataLoader, Dataset
from seen import Log


def main() -> None:
    torch.manual_seed(3)
    log = Log()
    loader = DataLoader(Dataset([{"x": float(i)} for i in range(1000)]), batch_size=25, shuffle=True, num_workers=1)
    for epoch in range(2):
        for batch in loader:
            log.batch(epoch, batch["x"])
    log.write(0)


if __name__ == "__main__":
    main()
