"""Patches of torch's loading internals: each is noticed, by whatever means it came, and minidl's own are none."""

from __future__ import annotations

import copyreg
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import patched_internals
import pytest
import torch
from programs import python, write
from sizes import slow
from torch.utils.data import _utils, dataloader

from minidl.record.observe import observed_iterators
from minidl.record.patches import patched
from minidl.run import replaced
from minidl.wire.tensors import reduce_storage

INTERNAL = [
    (name, owner, key)
    for name, owner, key in patched_internals.places()
    if name.startswith(tuple(f"{module.__name__}." for module in patched_internals.INTERNAL))
]


def test_each_of_torchs_internals_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = 0
    for name, owner, key in INTERNAL:
        patch = patched_internals.patch_of(vars(owner)[key])
        if patch is None:
            continue
        with monkeypatch.context() as patching:
            patching.setattr(owner, key, patch)
            found = patched()
        assert found is not None, name
        assert found.endswith(f".{key}"), name
        seen += 1
    assert seen > 100
    assert patched() is None


def test_a_method_that_a_class_only_inherits_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    kind: Any = dataloader._SingleProcessDataLoaderIter
    monkeypatch.setattr(kind, "__next__", lambda self: 7, raising=False)
    assert patched() == "torch.utils.data.dataloader._SingleProcessDataLoaderIter.__next__"


def test_another_text_of_a_workers_error_is_a_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._utils.ExceptionWrapper, "reraise", lambda self: None)
    assert patched() == "torch._utils.ExceptionWrapper.reraise"


def test_a_name_that_nothing_of_torchs_looks_up_is_no_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_utils.fetch, "a_helper_of_the_program", reversed, raising=False)
    assert patched() is None


def test_a_name_that_hides_a_builtin_one_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_utils.fetch, "iter", reversed, raising=False)
    assert patched() == "torch.utils.data._utils.fetch.iter"


def test_another_pickling_of_torchs_types_or_arrays_is_a_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: Any = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    with monkeypatch.context() as patching:
        patching.setitem(registered, torch.Tensor, lambda tensor: (torch.zeros, (2,)))
        assert patched() == "how multiprocessing pickles torch.Tensor"
    with monkeypatch.context() as patching:
        patching.setitem(copyreg.dispatch_table, np.ndarray, lambda array: (np.zeros, (2,)))
        assert patched() == "how multiprocessing pickles numpy.ndarray"
    assert patched() is None


def test_what_minidl_puts_there_is_no_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    with replaced(), observed_iterators():
        assert patched() is None
    monkeypatch.setitem(ForkingPickler._extra_reducers, torch.UntypedStorage, reduce_storage)  # type: ignore[attr-defined]
    assert patched() is None, "as a process does that reads slabs"


@pytest.mark.live
@pytest.mark.parametrize(
    ("patch", "name"),
    [
        ("collate.default_collate = lambda batch: 7", "collate.default_collate"),
        *slow(
            ("collate.collate = functools.wraps(collate.collate)(lambda *a, **k: 7)", "collate.collate"),
            ("fetch._MapDatasetFetcher.fetch = functools.partialmethod(int)", "fetch._MapDatasetFetcher.fetch"),
        ),
        ("worker.random = 7; worker._worker_loop = functools.partial(print)", "worker._worker_loop"),
    ],
)
def test_a_patch_from_before_minidl_is_noticed(tmp_path: Path, patch: str, name: str) -> None:
    program = f"""
        import functools
        from torch.utils.data._utils import collate, fetch, worker
        {patch}
        from minidl.record.patches import patched
        print(patched())
    """
    done = python(write(tmp_path / "patches.py", program), cwd=tmp_path)
    assert done.stdout == f"torch.utils.data._utils.{name}\n", done.stderr
