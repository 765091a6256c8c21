"""The fingerprint of a dataset's content, by which the audit compares the ranks' datasets.

In subsets of a dataset, or in parts that each rank has made itself, equal indices are different samples. The
fingerprint covers the begin and the end of the dataset's attributes, so it costs the same for any size. Equal
fingerprints do not prove equal datasets; different ones prove different content.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch

_ENDS: Final = 8
"""The number of elements that it reads from each end of a sequence."""

_DEEP: Final = 5
_MOST: Final = 2000
"""The largest number of values that it reads."""


def fingerprint(dataset: Any) -> str:
    """Return the dataset's own fingerprint, as Arrow datasets have one, or one of what it holds; "" = unknown."""
    try:
        own = getattr(dataset, "_fingerprint", None)
        if own:
            return str(own)
        words = "\n".join(itertools.islice(_words(dataset, _DEEP), _MOST))
        return hashlib.blake2b(words.encode("utf-8", "backslashreplace"), digest_size=8).hexdigest()
    except Exception:  # of the user's classes; the run goes on
        return ""


def _words(value: Any, deep: int) -> Iterator[str]:
    """Describe a value: of what has no value of its own, the type."""
    yield type(value).__qualname__
    if isinstance(value, (int, float, complex, str, bytes, range, type(None))):
        yield repr(value)
    elif isinstance(value, (torch.Tensor, np.ndarray)):
        yield from _of_array(value)
    elif isinstance(value, (list, tuple)):
        yield str(len(value))
        for one in itertools.chain(value[:_ENDS], value[_ENDS:][-_ENDS:]) if deep else ():
            yield from _words(one, deep - 1)
    elif deep:
        held = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        yield str(len(held))
        for name, one in itertools.islice(held.items(), 4 * _ENDS):
            yield str(name) if isinstance(name, (str, int)) else type(name).__qualname__
            yield from _words(one, deep - 1)


def _of_array(array: Any) -> Iterator[str]:
    """The array's shape and type, and its first and last values where these can be read without a copy of all."""
    yield f"{tuple(array.shape)} {array.dtype}"
    if isinstance(array, torch.Tensor) and (array.device.type != "cpu" or array.layout is not torch.strided):
        return
    if array.ndim and len(array):
        for end in (array[0], array[-1]):
            yield str(end.reshape(-1)[:_ENDS].tolist())
        yield str(array[:_ENDS].reshape(-1)[:_ENDS].tolist())
        yield str(array[-_ENDS:].reshape(-1)[-_ENDS:].tolist())
