"""Nothing is wrong: two workers decode images faster than the accelerator takes them, in training and in validation."""

import io
import os
import time

import numpy as np
from PIL import Image
from torch.utils.data import DataLoader, Dataset

STEP = 0.025 if os.environ.get("FIXED") == "1" else 0.05  # the only remedy: a faster step (a faster accelerator)


class Thumbnails(Dataset):
    def __init__(self, count, flip):
        buffer = io.BytesIO()
        Image.effect_noise((96, 96), 40).convert("RGB").save(buffer, "JPEG")
        self.jpeg, self.count, self.flip = buffer.getvalue(), count, flip

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        pixels = np.asarray(Image.open(io.BytesIO(self.jpeg)))
        return pixels[:, ::-1].copy() if self.flip and index % 2 else pixels.copy()


class Trainer:
    def __init__(self):
        workers = {"batch_size": 8, "num_workers": 2, "persistent_workers": True}
        self.train = DataLoader(Thumbnails(320, flip=True), shuffle=True, **workers)
        self.validation = DataLoader(Thumbnails(80, flip=False), **workers)

    def fit(self, epochs):
        for _ in range(epochs):
            for loader, seconds in ((self.train, STEP), (self.validation, STEP / 2)):
                for _ in loader:
                    time.sleep(seconds)  # waits for the accelerator
        return epochs * (len(self.train) + len(self.validation))


if __name__ == "__main__":
    start = time.perf_counter()
    print("batches_per_s", round(Trainer().fit(epochs=3) / (time.perf_counter() - start), 2))
