"""timm: its MultiEpochsDataLoader, with an endless sampler, and its own collation of images in a PrefetchLoader."""

import numpy as np
import torch
import torchvision_ops  # noqa: F401

# isort: split
import timm.data
from seen import Log, Numbers


class Images(Numbers):
    """An image of each number, which is its label."""

    transform = None

    def __getitem__(self, index: int):
        return np.full((3, 8, 8), index % 256, dtype=np.uint8), int(super().__getitem__(index))


def main() -> None:
    torch.manual_seed(3)
    log = Log()
    for first, prefetches in ((0, False), (2, True)):
        loader = timm.data.create_loader(
            Images(),
            input_size=(3, 8, 8),
            batch_size=25,
            is_training=True,
            num_workers=2,
            use_prefetcher=prefetches,
            device=torch.device("cpu"),
            use_multi_epochs_loader=not prefetches,
        )
        for epoch in range(2):
            for _, labels in loader:
                log.batch(first + epoch, labels)
    log.write(0)


if __name__ == "__main__":
    main()
