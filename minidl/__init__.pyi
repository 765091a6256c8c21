"""The public names of minidl, each with its module: for type checkers, and for `__init__.py`, which imports them."""

from minidl.data.collate import default_collate as default_collate, default_convert as default_convert
from minidl.data.dataset import (
    ChainDataset as ChainDataset,
    ConcatDataset as ConcatDataset,
    Dataset as Dataset,
    IterableDataset as IterableDataset,
    StackDataset as StackDataset,
    Subset as Subset,
    TensorDataset as TensorDataset,
    random_split as random_split,
)
from minidl.data.distributed import (
    DistributedRandomSampler as DistributedRandomSampler,
    DistributedSampler as DistributedSampler,
    DistributedSequentialSampler as DistributedSequentialSampler,
)
from minidl.data.fetch import _DatasetKind as _DatasetKind
from minidl.data.sampler import (
    BatchSampler as BatchSampler,
    RandomSampler as RandomSampler,
    Sampler as Sampler,
    SequentialSampler as SequentialSampler,
    SubsetRandomSampler as SubsetRandomSampler,
    WeightedRandomSampler as WeightedRandomSampler,
)
from minidl.data.worker_info import WorkerInfo as WorkerInfo, get_worker_info as get_worker_info
from minidl.dataloader import DataLoader as DataLoader
from minidl.device.loader import DeviceLoader as DeviceLoader
from minidl.hardening import Hardened as Hardened, harden as harden
from minidl.loader.iterators import (
    _BaseDataLoaderIter as _BaseDataLoaderIter,
    _MultiProcessingDataLoaderIter as _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter as _SingleProcessDataLoaderIter,
)
from minidl.record.clocks import align_clocks as align_clocks
from minidl.record.observe import observe as observe
from minidl.record.session import trace as trace
from minidl.record.spans import span as span
from minidl.prediction import plan as plan
from minidl.tracefile.format import TraceError as TraceError
from minidl.tracefile.reader import Trace as Trace, read_trace as read_trace
from minidl.views.page import html as html
from minidl.views.picture import timeline as timeline
from minidl.views.replay_page import replay as replay

__version__: str
__all__: list[str]
