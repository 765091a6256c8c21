"""MosaicML Streaming: an iterable dataset of shards, and a loader that keeps count and has a state of its own."""

import tempfile

import torch
import torchvision_ops  # noqa: F401

# isort: split
from seen import Log
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory


def loader(folder: str) -> StreamingDataLoader:
    dataset = StreamingDataset(local=folder, shuffle=True, shuffle_seed=3, batch_size=25, num_canonical_nodes=1)
    return StreamingDataLoader(dataset, batch_size=25, num_workers=2)


def main() -> None:
    torch.manual_seed(3)
    log = Log()
    clean_stale_shared_memory()
    with tempfile.TemporaryDirectory() as folder:
        with MDSWriter(out=folder, columns={"x": "int"}, size_limit=1 << 12) as writer:
            for number in range(1000):
                writer.write({"x": number})
        first = loader(folder)
        for epoch in range(2):
            for number, batch in enumerate(first):
                log.batch(epoch, batch["x"])
                if (epoch, number) == (1, 9):
                    break
        state = first.state_dict()
        del first
        second = loader(folder)
        second.load_state_dict(state)
        for batch in second:
            log.batch(2, batch["x"])
    both = sorted(number for epoch in "12" for batch in log.epochs[epoch] for number in batch)
    log.write(0, resumed=both == list(range(1000)))


if __name__ == "__main__":
    main()
