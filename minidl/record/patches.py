"""Find torch's loading internals that a program has patched, if minidl's loader has its own form of them.

Interface: `patched()` names the first one; None if all are torch's own. minidl's loader calls none of these functions,
so a program that has replaced one gets other data from it than from torch's loader.

A patch from before this module's import shows by the file that its code lies in, a later one by its identity; what
minidl itself puts there is no patch. Not looked at: torch's samplers and datasets, which both loaders use, and the
entries of `default_collate_fn_map`, which minidl's collation honours.
"""

from __future__ import annotations

import builtins
import copyreg
import os
import sys
import types
from collections.abc import Iterator
from multiprocessing import reduction
from typing import Any, Final

import numpy as np
import torch
import torch.multiprocessing.reductions
import torch.utils.data.dataloader
from torch._utils import ExceptionWrapper
from torch.utils.data import _utils
from torch.utils.data._utils import collate, fetch, pin_memory, signal_handling, worker

_MODULES: Final[tuple[types.ModuleType, ...]] = (
    *(torch.utils.data.dataloader, _utils, collate, fetch, pin_memory, signal_handling, worker),
    *(torch.multiprocessing, torch.multiprocessing.reductions),
)
_STATES: Final = {
    "DataLoader",  # `minidl run` replaces it, and torch's loader does not look it up
    *("_worker_info", "python_exit_status", "_SIGCHLD_handler_set", "_persistent_workers_atexit_registered"),
    "_sharing_strategy",
}
"""Names of a module whose value changes without a patch."""

_TORCH, _STDLIB, _MINIDL = (
    os.path.join(os.path.abspath(folder), "")
    for folder in (
        os.path.dirname(torch.__file__),
        os.path.dirname(os.__file__),
        os.path.dirname(os.path.dirname(__file__)),
    )
)
_TRUSTED: Final = {"torch", "builtins", "typing_extensions", *sys.stdlib_module_names}


def _owners() -> Iterator[tuple[str, Any]]:
    for module in _MODULES:
        yield module.__name__, module
        for name, value in vars(module).items():
            if isinstance(value, type) and value.__module__ == module.__name__:
                yield f"{module.__name__}.{name}", value
    yield "torch._utils.ExceptionWrapper", ExceptionWrapper


def _contents(owner: Any) -> dict[str, Any]:
    """What a program may patch: the names of a module, or the attributes of a class and its special methods."""
    special = isinstance(owner, type)
    return {
        name: value
        for name, value in vars(owner).items()
        if name not in _STATES and (not name.startswith("__") or (special and _code(value) is not None))
    }


def _code(value: Any) -> types.CodeType | None:
    """The code of a function, of a property's getter, or of a method as a class holds it."""
    value = getattr(value, "fget", None) or getattr(value, "__func__", value)
    code = getattr(value, "__code__", None)
    return code if isinstance(code, types.CodeType) else None


def _is_torchs(value: Any) -> bool:
    """Whether what is found at the start is torch's or Python's own, and so no patch."""
    code = _code(value)
    if code is not None:
        file = code.co_filename  # "<string>": what `dataclass` generates
        return file.startswith((_TORCH, "<")) or (file.startswith(_STDLIB) and "-packages" not in file)
    if isinstance(value, (type, types.BuiltinFunctionType)):
        return str(value.__module__).partition(".")[0] in _TRUSTED
    binds = hasattr(type(value), "__get__") and type(value).__module__ != "builtins"  # a partialmethod, say
    return not (callable(value) or binds) or type(value).__module__ in (
        "typing",
        "typing_extensions",
        "collections.abc",
    )


def _is_minidls(value: Any) -> bool:
    code = _code(value)
    return type(value).__module__.startswith("minidl.") or (code is not None and code.co_filename.startswith(_MINIDL))


_AT_START: Final = [(name, owner, _contents(owner)) for name, owner in _owners()]
_PATCHED_BEFORE: Final = next(
    (f"{home}.{name}" for home, _, names in _AT_START for name, value in names.items()
     if not _is_torchs(value) and not _is_minidls(value)),
    None,
)  # fmt: skip


def patched() -> str | None:
    """The full name of one of torch's internals that is no longer torch's; None if there is none."""
    if _PATCHED_BEFORE is not None:
        return _PATCHED_BEFORE
    other = patched_pickling()
    if other is not None:
        return other
    return next((f"{home}.{name}" for home, owner, before in _AT_START for name in _changed(owner, before)), None)


def patched_pickling() -> str | None:
    """The same of how tensors, storages and arrays are pickled for another process."""
    for kind, reduce in _REDUCERS_AT_START.items():
        found = _reducer(kind)
        if found is not reduce and not _is_minidls(found):
            return f"how multiprocessing pickles {kind.__module__}.{kind.__qualname__}"
    return None


def _reducer(kind: type) -> Any:
    """What a program has registered, with multiprocessing or for every pickle, for a type; None if nothing."""
    return _REDUCERS.get(kind, copyreg.dispatch_table.get(kind))


_REDUCERS: Final[dict[type, Any]] = reduction.ForkingPickler._extra_reducers  # type: ignore[attr-defined]
_REDUCERS_AT_START: Final = {kind: _reducer(kind) for kind in (*_REDUCERS, np.ndarray)}


def _changed(owner: Any, before: dict[str, Any]) -> Iterator[str]:
    now = vars(owner)
    for name, value in before.items():
        if (found := now.get(name, before)) is not value and not _is_minidls(found):
            yield name
    if now.keys() == _names.get(owner):
        return
    added = _contents(owner).keys() - before.keys()
    hidden = vars(builtins) if isinstance(owner, types.ModuleType) else added  # a module's other names have no effect
    yield from (name for name in added if name in hidden and not _is_minidls(now[name]))
    _names[owner] = set(now)


_names: Final[dict[Any, set[str]]] = {}
"""The names that an owner had when none of them was a patch."""
