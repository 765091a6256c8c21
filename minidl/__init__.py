"""minidl: a readable, faithful reimplementation of PyTorch's data loading that records what it does.

`DataLoader`, the datasets and the samplers stand for their namesakes in `torch.utils.data`, and mix with them.
`trace(directory)` records a run, `read_trace(path)` reads it. Start reading at `protocol.py` and `dispatcher.py`.
"""

from minidl.collate import default_collate, default_convert
from minidl.dataloader import DataLoader
from minidl.dataset import (
    ChainDataset,
    ConcatDataset,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    random_split,
)
from minidl.device import DeviceLoader
from minidl.distributed import DistributedRandomSampler, DistributedSampler, DistributedSequentialSampler
from minidl.fetch import _DatasetKind
from minidl.iterators import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter
from minidl.sampler import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from minidl.tracing.instrument import trace, trace_from_environment
from minidl.tracing.observe import observe
from minidl.tracing.page import html
from minidl.tracing.picture import timeline
from minidl.tracing.ranks import align_clocks
from minidl.tracing.reader import Trace, read_trace
from minidl.tracing.recorder import TraceError
from minidl.tracing.spans import span
from minidl.tracing.stepper import replay
from minidl.worker_info import WorkerInfo, get_worker_info

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

trace_from_environment()
