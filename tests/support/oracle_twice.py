"""The same program twice: once with minidl's names, once with torch's, and then what came of it compared.

`agree(program)` calls `program(lib)` for both and fails unless both returned the same, or raised the same exception
with the same words. Values are compared with their types, all the way down; the libraries' own classes count as the
same when their names are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.utils.data
import torch.utils.data._utils.collate

import minidl.data.collate
import minidl.data.dataset
import minidl.data.distributed
import minidl.data.sampler
import minidl.data.worker_info

MODULES = (
    minidl.data.dataset, minidl.data.sampler, minidl.data.distributed, minidl.data.collate, minidl.data.worker_info,
)  # fmt: skip
MINIDL = SimpleNamespace(**{name: value for module in MODULES for name, value in vars(module).items()})
TORCH = SimpleNamespace(**(vars(torch.utils.data._utils.collate) | vars(torch.utils.data)))
Program = Callable[[Any], Any]


def agree(program: Program) -> Any:
    """Run `program` with both libraries; return what it returned, or the exception that it raised, with minidl's."""
    torchs, ours = outcome(program, TORCH), outcome(program, MINIDL)
    difference = different(torchs, ours)
    assert difference is None, f"torch: {torchs!r}\nminidl: {ours!r}\ndiffer in {difference}"
    return ours


def outcome(program: Program, lib: Any) -> Any:
    """What the program returned or raised, and the warnings that it caused as (category, text, file) at the end."""
    torch.default_generator.manual_seed(12345)  # torch.manual_seed formats a stack for each kind of device
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            value = program(lib)
        except Exception as error:
            value = error
    if not caught:
        return value
    return [value, [(warning.category, str(warning.message), warning.filename) for warning in caught]]


def different(a: Any, b: Any, where: str = "value") -> str | None:
    """The first place where two values differ in type or content, or None."""
    if a is b:
        return None
    if type(a) is not type(b) and not _same_class_of_both_libraries(type(a), type(b)):
        return f"{where}: {type(a)} and {type(b)}"
    if isinstance(a, torch.Tensor):
        return _different_tensors(a, b, where)
    if isinstance(a, np.ndarray):
        return None if np.array_equal(a, b) else where
    if isinstance(a, Exception):
        return None if str(a) == str(b) else f"{where}: {str(a)!r} and {str(b)!r}"
    if isinstance(a, Mapping):
        if list(a) != list(b):
            return f"{where}: keys {list(a)} and {list(b)}"
        return _first(different(a[key], b[key], f"{where}[{key!r}]") for key in a)
    if isinstance(a, Sequence) and not isinstance(a, (str, bytes, range)):
        if len(a) != len(b):
            return f"{where}: {len(a)} and {len(b)} items"
        return _first(different(x, y, f"{where}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True)))
    if _same_class_of_both_libraries(type(a), type(b)):
        return None
    return None if a == b else where


def _same_class_of_both_libraries(a: type, b: type) -> bool:
    return a.__name__ == b.__name__ and a.__module__.startswith("torch.") and b.__module__.startswith("minidl.")


def _different_tensors(a: torch.Tensor, b: torch.Tensor, where: str) -> str | None:
    def looks(tensor: torch.Tensor) -> tuple[Any, ...]:
        return tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.is_shared(), tensor.requires_grad

    if looks(a) != looks(b):
        return f"{where}: {looks(a)} and {looks(b)}"
    return None if torch.equal(a.nan_to_num(), b.nan_to_num()) else where


def _first(differences: Any) -> str | None:
    return next((difference for difference in differences if difference is not None), None)
