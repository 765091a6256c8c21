"""Accelerate with the seedable sampler; one process or, under its launcher, several."""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from seen import Numbers, loader_class, logged


def main() -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(3)
    torch.rand(accelerator.process_index)  # ranks whose random states differ, as they do in a real program
    numbers = Numbers(1010)  # which does not divide into as many batches for each rank: the last ones are padded
    loader = accelerator.prepare(loader_class()(numbers, batch_size=25, shuffle=True, num_workers=1))
    log = logged(loader)
    log.write(accelerator.process_index, prepared=type(loader).__name__)
    accelerator.end_training()


if __name__ == "__main__":
    main()
