"""webdataset: an iterable dataset whose shards are split by worker, and its own loader on top of torch's."""

import io
import tarfile
import tempfile
from pathlib import Path

import torch
import webdataset
from seen import logged


def shard(path: Path, numbers: range) -> None:
    with tarfile.open(path, "w") as tar:
        for number in numbers:
            data = str(number).encode()
            info = tarfile.TarInfo(f"{number:06d}.txt")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def main() -> None:
    torch.manual_seed(3)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(4):
            shard(Path(folder) / f"{number}.tar", range(number * 100, number * 100 + 100))
        urls = f"file:{folder}/{{0..3}}.tar"
        dataset = webdataset.WebDataset(urls, shardshuffle=False).decode().map(lambda sample: float(sample["txt"]))
        loader = webdataset.WebLoader(dataset, batch_size=25, num_workers=2)
        logged(loader).write(0)


if __name__ == "__main__":
    main()
