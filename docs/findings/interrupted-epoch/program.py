"""Ctrl-C while an epoch of persistent workers begins: the next epoch takes an old answer for a batch."""

from torch.utils.data import DataLoader


def interrupt(timeout):
    raise KeyboardInterrupt


if __name__ == "__main__":
    loader = DataLoader(range(8), num_workers=2, persistent_workers=True)
    list(loader)
    queue = loader._iterator._data_queue
    queue.get = interrupt  # the fault: Ctrl-C comes while the loader waits for the workers' answers
    try:
        iter(loader)
    except KeyboardInterrupt:
        print("Ctrl-C")
    del queue.get
    try:
        print(f"healed: {len(list(loader))} batches")
    except (KeyError, AssertionError) as error:
        print("hole:", repr(error))
