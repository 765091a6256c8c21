"""Each of four workers sets 16 threads for its tensor operations, far more than there are CPUs."""

import os
import time

import torch
from torch.utils.data import DataLoader, Dataset


class Noised(Dataset):
    """Latents to which noise is added in forty rounds, as a diffusion model is trained with."""

    def __init__(self, count):
        self.latents = torch.rand(8, 3, 128, 128)
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        latent = self.latents[index % 8]
        noise = torch.randn_like(latent)
        for _ in range(40):
            latent = (latent * 0.98).add_(noise, alpha=0.02).clamp_(-1, 1)
        return latent, noise


def set_threads(worker_id):
    torch.set_num_threads(1 if os.environ.get("FIXED") == "1" else 16)  # the remedy: one thread in each worker


def main():
    loader = DataLoader(Noised(480), batch_size=8, num_workers=4, worker_init_fn=set_threads)
    start = time.perf_counter()
    steps = 0
    for latents, noise in loader:
        (latents - noise)[:, :, 0].square().mean()
        steps += 1
    print("batches_per_s", round(steps / (time.perf_counter() - start), 2))


if __name__ == "__main__":
    main()
