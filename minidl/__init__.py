"""minidl: a readable, faithful reimplementation of PyTorch's data loading that records what it does.

`DataLoader`, the datasets and the samplers stand for their namesakes in `torch.utils.data`, and mix with them.
`trace(directory)` records a run, `read_trace(path)` reads it. Start reading at `mini.py`.

Each name is imported when it is first used. A training program loads the loader and nothing that reads or draws
traces, and `minidl --help` loads neither torch nor NumPy.
"""

import importlib.util
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minidl.data.collate import default_collate, default_convert
    from minidl.data.dataset import (
        ChainDataset,
        ConcatDataset,
        Dataset,
        IterableDataset,
        StackDataset,
        Subset,
        TensorDataset,
        random_split,
    )
    from minidl.data.distributed import DistributedRandomSampler, DistributedSampler, DistributedSequentialSampler
    from minidl.data.fetch import _DatasetKind
    from minidl.data.sampler import (
        BatchSampler,
        RandomSampler,
        Sampler,
        SequentialSampler,
        SubsetRandomSampler,
        WeightedRandomSampler,
    )
    from minidl.data.worker_info import WorkerInfo, get_worker_info
    from minidl.dataloader import DataLoader
    from minidl.device.loader import DeviceLoader
    from minidl.loader.iterators import (
        _BaseDataLoaderIter,
        _MultiProcessingDataLoaderIter,
        _SingleProcessDataLoaderIter,
    )
    from minidl.record.clocks import align_clocks
    from minidl.record.observe import observe
    from minidl.record.session import trace
    from minidl.record.spans import span
    from minidl.tracefile.format import TraceError
    from minidl.tracefile.reader import Trace, read_trace
    from minidl.views.page import html
    from minidl.views.picture import timeline
    from minidl.views.replay_page import replay

__version__ = "0.1.0"

__all__ = [
    "BatchSampler",
    "ChainDataset",
    "ConcatDataset",
    "DataLoader",
    "Dataset",
    "DeviceLoader",
    "DistributedRandomSampler",
    "DistributedSampler",
    "DistributedSequentialSampler",
    "IterableDataset",
    "RandomSampler",
    "Sampler",
    "SequentialSampler",
    "StackDataset",
    "Subset",
    "SubsetRandomSampler",
    "TensorDataset",
    "Trace",
    "TraceError",
    "WeightedRandomSampler",
    "WorkerInfo",
    "align_clocks",
    "_BaseDataLoaderIter",
    "_DatasetKind",
    "_MultiProcessingDataLoaderIter",
    "_SingleProcessDataLoaderIter",
    "default_collate",
    "default_convert",
    "get_worker_info",
    "html",
    "observe",
    "random_split",
    "read_trace",
    "span",
    "replay",
    "timeline",
    "trace",
]

_NAMES_OF = {
    "data.collate": "default_collate default_convert",
    "data.dataset": "ChainDataset ConcatDataset Dataset IterableDataset StackDataset Subset TensorDataset random_split",
    "data.distributed": "DistributedRandomSampler DistributedSampler DistributedSequentialSampler",
    "data.fetch": "_DatasetKind",
    "data.sampler": "BatchSampler RandomSampler Sampler SequentialSampler SubsetRandomSampler WeightedRandomSampler",
    "device.loader": "DeviceLoader",
    "loader.iterators": "_BaseDataLoaderIter _MultiProcessingDataLoaderIter _SingleProcessDataLoaderIter",
    "dataloader": "DataLoader",
    "data.worker_info": "WorkerInfo get_worker_info",
    "record.clocks": "align_clocks",
    "record.observe": "observe",
    "record.session": "trace",
    "record.spans": "span",
    "tracefile.format": "TraceError",
    "tracefile.reader": "Trace read_trace",
    "views.page": "html",
    "views.picture": "timeline",
    "views.replay_page": "replay",
}
"""The public names of each module. The imports above say the same to type checkers; a test compares the two."""

_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names.split()}

if not TYPE_CHECKING:  # else a misspelt name would have a type

    def __getattr__(name: str) -> object:
        """Import a public name's module, or the module `name`, at its first use."""
        if name in _MODULE_OF:
            value = getattr(importlib.import_module(f"minidl.{_MODULE_OF[name]}"), name)
            globals()[name] = value  # the next use finds it here
            return value
        if name.startswith("__") or importlib.util.find_spec(f"minidl.{name}") is None:
            raise AttributeError(f"module 'minidl' has no attribute {name!r}")
        return importlib.import_module(f"minidl.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if os.environ.get("MINIDL_TRACE"):
    from minidl.record.session import trace_from_environment

    trace_from_environment()
