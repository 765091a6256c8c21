"""JPEG files are decoded in the main process because num_workers is 0, and each step waits for it."""

import io
import os
import time

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

FIXED = os.environ.get("FIXED") == "1"


class Photos(Dataset):
    def __init__(self, count, transform):
        noise = np.random.default_rng(0).integers(0, 255, (60, 80, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(noise).resize((800, 600)).save(buffer, "JPEG", quality=90)
        self.files = [buffer.getvalue()] * count
        self.transform = transform

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return self.transform(Image.open(io.BytesIO(self.files[index])).convert("RGB"))


def to_tensor(image):
    image = image.resize((224, 224), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)


def main():
    loader = DataLoader(Photos(480, to_tensor), batch_size=16, num_workers=2 if FIXED else 0)  # the remedy: workers
    start = time.perf_counter()
    for images in loader:
        time.sleep(0.01 if len(images) else 0)  # the step on the accelerator
    print("batches_per_s", round(len(loader) / (time.perf_counter() - start), 2))


if __name__ == "__main__":
    main()
