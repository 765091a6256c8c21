"""A program that patches each of torch's loading internals in turn, and prints what its loaders yield.

    python patched_internals.py [NAME ...]

Each function, method and class of the modules below is replaced by a wrapper that notes its call, and changes what it
returns: a tensor is larger by 1000, a list is reversed. A line of output has the patch's name, whether it was called
(in any process), and the batches of loaders without and with a worker, or their error.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.multiprocessing
import torch.utils.data as data
from torch.utils.data import _utils, dataloader, dataset, distributed, sampler
from torch.utils.data._utils import collate, fetch, pin_memory, signal_handling, worker

INTERNAL = (dataloader, _utils, collate, fetch, pin_memory, signal_handling, worker)
SHARED = (sampler, distributed, dataset)  # torch's in both loaders
LOOKED_UP = (data,)  # names for programs: torch's loader looks some up, to no effect on the data

hit = torch.zeros(1, dtype=torch.int64).share_memory_()


class Numbers(data.Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


class Stream(data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(4.0))


def changed(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
        return value + 1000
    return value[::-1] if type(value) is list else value


def noting(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        hit.fill_(1)
        return changed(function(*args, **kwargs))

    return noted


def patch_of(value: Any) -> Any:
    """The wrapper of a function, a method as a class holds it, or a class; None if it can't have one."""
    if isinstance(value, types.FunctionType):
        return noting(value)
    if isinstance(value, (staticmethod, classmethod)):
        return type(value)(noting(value.__func__))
    if isinstance(value, property) and value.fget is not None:
        return property(noting(value.fget), value.fset)
    if not isinstance(value, type) or value.__flags__ & (1 << 10) == 0:  # Py_TPFLAGS_BASETYPE
        return None
    names = {"__module__": value.__module__, "__qualname__": value.__qualname__, "__init__": noting(value.__init__)}
    return type(value)(value.__name__, (value,), names)


def places() -> Iterator[tuple[str, Any, str]]:
    """What can be patched: the patch's name, its owner and its name there."""
    for module in (*INTERNAL, *SHARED, *LOOKED_UP):
        for name, value in sorted(vars(module).items()):
            if not str(getattr(value, "__module__", "")).startswith("torch.utils.data"):
                continue
            if name == "DataLoader" or not isinstance(value, (type, types.FunctionType)):
                continue
            yield f"{module.__name__}.{name}", module, name
            if isinstance(value, type) and value.__module__ == module.__name__:
                for method, function in sorted(vars(value).items()):
                    if patch_of(function) is not None and not isinstance(function, type):
                        yield f"{module.__name__}.{name}.{method}", value, method


def batches(source: Any, workers: int) -> Any:
    torch.manual_seed(3)
    shuffle = None if isinstance(source, Stream) else True
    try:
        loader = data.DataLoader(source, batch_size=2, num_workers=workers, shuffle=shuffle)
        return [batch.tolist() for batch in loader]
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def main() -> None:
    warnings.simplefilter("ignore")
    for name, owner, key in sorted(places(), key=lambda place: place[0]):
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        plain = vars(owner)[key]
        patch = patch_of(plain)
        if patch is None:
            continue
        hit.zero_()
        setattr(owner, key, patch)
        found = [batches(Numbers(), 0), batches(Numbers(), 1), batches(Stream(), 0)]
        if "Iterable" in name:
            found.append(batches(Stream(), 1))
        gc.collect()
        setattr(owner, key, plain)
        print(name, "-" if owner in LOOKED_UP else int(hit), found, flush=True)


if __name__ == "__main__":
    main()
