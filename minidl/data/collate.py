"""Collation: one batch from a list of samples.

Interface: `default_collate(samples)` stacks tensors, turns arrays and numbers into tensors, and descends into
mappings, sequences and named tuples. `default_convert(sample)` converts one sample, without a batch dimension.
Rules of use: `collate` looks the element's type up in a map from types to functions `fn(batch, *, collate_fn_map)`.
Add your own types to `default_collate_fn_map`. Functions that your code has added to torch's map of the same name are
used too: at each call they override our defaults, and functions that you added to our map override both.
In a worker, `collate_tensor_fn` stacks straight into shared memory, so that sending the batch copies nothing.

Article 4 §collate, article 3 §collate. Upstream: torch/utils/data/_utils/collate.py.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.utils.data
from torch import Tensor
from torch.utils.data._utils import collate as torch_collate

from minidl.data import worker_info

CollateFn: TypeAlias = Callable[..., Any]
CollateFnMap: TypeAlias = dict[type | tuple[type, ...], CollateFn]

np_str_obj_array_pattern = re.compile(r"[SaUO]")  # kinds of NumPy dtype that have no tensor: strings and objects
default_collate_err_msg_format = (
    "default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists; found {}"
)
_UNSTACKABLE_LAYOUTS = {
    torch.sparse_coo, torch.sparse_csr, torch.sparse_bsr, torch.sparse_csc, torch.sparse_bsc
}  # fmt: skip


def default_convert(data: Any) -> Any:
    """Turn every NumPy array and scalar in `data` into a tensor; the nesting stays, but tuples become lists.

    Strings, bytes, numbers and arrays of strings or objects stay as they are. Article 1 §2.1; the loader's default if
    it does not batch.
    """
    if isinstance(data, Tensor):
        return data
    if _is_numpy_value(data):
        return data if _is_string_or_object_array(data) else torch.as_tensor(data)
    if isinstance(data, Mapping):
        return mapping_like(data, {key: default_convert(data[key]) for key in data})
    if is_named(data):
        return tuple_like(data, (default_convert(item) for item in data))
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        return _like_sequence(data, [default_convert(item) for item in data])
    return data


def _is_numpy_value(data: Any) -> bool:
    return type(data).__module__ == "numpy" and type(data).__name__ != "str_"


def _is_string_or_object_array(data: Any) -> bool:
    return type(data).__name__ == "ndarray" and np_str_obj_array_pattern.search(data.dtype.str) is not None


def _like_sequence(model: Sequence[Any], items: list[Any]) -> Any:
    """Rebuild a sequence. A tuple becomes a list, as in torch: programs rely on it."""
    return items if isinstance(model, tuple) else sequence_like(model, items)


def collate(batch: Any, *, collate_fn_map: CollateFnMap | None = None) -> Any:
    """Collate a non-empty list of samples of one kind; the first one decides.

    The element's type is looked up in `collate_fn_map`, exactly and then in order by `isinstance`; failing that,
    mappings, named tuples and sequences are collated member by member.
    RuntimeError if sequences differ in length; TypeError for an element that no rule covers. Article 4 §collate.
    """
    elem = batch[0]
    function = _find_function(elem, collate_fn_map or {})
    if function is not None:
        return function(batch, collate_fn_map=collate_fn_map)
    if isinstance(elem, Mapping):
        fields = {key: collate([sample[key] for sample in batch], collate_fn_map=collate_fn_map) for key in elem}
        return mapping_like(elem, fields)
    if is_named(elem):
        columns = zip(*batch, strict=False)
        return tuple_like(elem, (collate(column, collate_fn_map=collate_fn_map) for column in columns))
    if isinstance(elem, Sequence):
        if any(len(sample) != len(elem) for sample in batch):
            raise RuntimeError("each element in list of batch should be of equal size")
        columns = zip(*batch, strict=True)
        return _like_sequence(elem, [collate(column, collate_fn_map=collate_fn_map) for column in columns])
    raise TypeError(default_collate_err_msg_format.format(type(elem)))


def _find_function(elem: Any, collate_fn_map: CollateFnMap) -> CollateFn | None:
    if type(elem) in collate_fn_map:
        return collate_fn_map[type(elem)]
    return next((function for kind, function in collate_fn_map.items() if isinstance(elem, kind)), None)


def new_shared(elem: Tensor, shape: Sequence[int]) -> Tensor:
    """Return an uninitialised tensor in shared memory, with the dtype and device of `elem`. Article 3 §collate."""
    numel = torch.Size(shape).numel()
    storage = torch.UntypedStorage._new_shared(numel * elem.element_size(), device=elem.device)  # type: ignore[no-untyped-call]
    return elem.new_empty(0).set_(storage, 0, tuple(shape))  # type: ignore[call-overload, no-any-return]


shared_from = 0
"""Bytes from which a worker collates into shared memory. A transport raises it, if it sends small batches otherwise."""


def collate_tensor_fn(batch: Any, *, collate_fn_map: CollateFnMap | None = None) -> Tensor:
    """Stack tensors of shape (...) into (len(batch), ...); in a worker, into shared memory.

    RuntimeError for nested or sparse tensors, or for tensors of different shapes.
    """
    elem = batch[0]
    for kind, refused in (("nested", elem.is_nested), ("sparse", elem.layout in _UNSTACKABLE_LAYOUTS)):
        if refused:
            raise RuntimeError(
                f"Batches of {kind} tensors are not currently supported by the default collate_fn; "
                "please provide a custom collate_fn to handle them appropriately."
            )
    if not worker_info.in_worker_process() or elem.nbytes * len(batch) < shared_from:
        return torch.stack(batch)
    # Room for all elements, not for len(batch) times the first: different shapes then fail as in torch.
    out = new_shared(elem, [sum(tensor.numel() for tensor in batch)]).resize_(len(batch), *elem.size())
    return torch.stack(batch, out=out)


def collate_numpy_array_fn(batch: Any, *, collate_fn_map: CollateFnMap | None = None) -> Any:
    """Collate arrays (also memory maps) as tensors. TypeError for arrays of strings or objects."""
    if np_str_obj_array_pattern.search(batch[0].dtype.str) is not None:
        raise TypeError(default_collate_err_msg_format.format(batch[0].dtype))
    return collate([torch.as_tensor(array) for array in batch], collate_fn_map=collate_fn_map)


def collate_numpy_scalar_fn(batch: Any, *, collate_fn_map: CollateFnMap | None = None) -> Tensor:
    return torch.as_tensor(batch)


def collate_float_fn(batch: Any, *, collate_fn_map: CollateFnMap | None = None) -> Tensor:
    return torch.tensor(batch, dtype=torch.float64)


def collate_int_fn(batch: Any, *, collate_fn_map: CollateFnMap | None = None) -> Tensor:
    return torch.tensor(batch)


def collate_str_fn(batch: Any, *, collate_fn_map: CollateFnMap | None = None) -> Any:
    return batch


default_collate_fn_map: CollateFnMap = {
    Tensor: collate_tensor_fn,
    np.ndarray: collate_numpy_array_fn,
    (np.bool_, np.number, np.object_): collate_numpy_scalar_fn,
    float: collate_float_fn,
    int: collate_int_fn,
    str: collate_str_fn,
    bytes: collate_str_fn,
}


def default_collate(batch: Any) -> Any:
    """Collate with the default functions and all registered ones. Article 4 §collate."""
    return collate(batch, collate_fn_map=_registered())


def ours(collate_fn: CollateFn) -> CollateFn:
    """`collate_fn`, or if it is one of torch's two defaults, ours of the same name, which records and can be read."""
    if collate_fn is _TORCHS_COLLATE:
        return default_collate
    return default_convert if collate_fn is _TORCHS_CONVERT else collate_fn


_TORCHS_COLLATE, _TORCHS_CONVERT = torch_collate.default_collate, torch_collate.default_convert
_TORCHS_MAP: CollateFnMap = dict(torch_collate.default_collate_fn_map)
_DEFAULTS = dict(default_collate_fn_map)
_OURS = {
    getattr(torch_collate, name): function
    for name, function in tuple(globals().items())
    if name.startswith("collate_") and hasattr(torch_collate, name)
}
"""Each of torch's functions -> ours of the same name."""


def _registered() -> CollateFnMap:
    """The functions of both maps: torch's in its order, with ours in place of its own, then what is added to ours."""
    theirs = torch_collate.default_collate_fn_map
    if theirs == _TORCHS_MAP:
        return default_collate_fn_map
    added = {kind: fn for kind, fn in default_collate_fn_map.items() if _DEFAULTS.get(kind) is not fn}
    removed = _DEFAULTS.keys() - default_collate_fn_map.keys()
    return {kind: _OURS.get(fn, fn) for kind, fn in theirs.items() if kind not in removed} | added


# --- Containers: the same type, other items ---------------------------------------------------------------------------
# Used by `pin_memory`, too, with torch's rules, and by `device.nest`, which passes its own `copied`. A container of a
# `copied` type is copied and its items are replaced, so that a subclass keeps its other attributes. Any other is built
# by calling its type with the new items. If either raises TypeError, the plain dict or list of items is the result.
Types = tuple[type, ...]


def mapping_like(model: Mapping[Any, Any], items: dict[Any, Any], copied: Types = (MutableMapping,)) -> Any:
    """Return a mapping of `model`'s type with `items`, or `items` itself."""
    try:
        if not isinstance(model, copied):
            return type(model)(items)  # type: ignore[call-arg]
        clone: Any = copy.copy(model)
        clone.update(items)
        return clone
    except TypeError:
        return items


def sequence_like(model: Any, items: list[Any], copied: Types = (MutableSequence,)) -> Any:
    """Return a sequence of `model`'s type with `items`, or `items` itself."""
    try:
        if not isinstance(model, copied):
            return type(model)(items)
        clone: Any = copy.copy(model)
        for position, item in enumerate(items):
            clone[position] = item
        return clone
    except TypeError:
        return items


def is_named(data: Any) -> bool:
    """Whether `data` is a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_fields")


def tuple_like(model: tuple[Any, ...], items: Iterable[Any]) -> Any:
    """Return a tuple or named tuple of `model`'s type with `items`. TypeError if its type takes other arguments."""
    kind: Any = type(model)
    return kind(*items) if is_named(model) else kind(items)
