"""A batch of everything that a batch can hold, and a description by which batches of two loaders can be compared."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.utils.data

SIZE = 3000
"""Elements of what is too large for a message."""

Point = collections.namedtuple("Point", "x y")


class Sub(torch.Tensor):
    """A tensor of a class of its own."""


@dataclasses.dataclass
class Custom:
    """An object of the program with tensors and arrays."""

    tensor: torch.Tensor
    array: Any


class Everything(torch.utils.data.Dataset[Any]):
    """Each sample is such a batch. file: of SIZE numbers, which is mapped."""

    def __init__(self, file: Any) -> None:
        self.shared = torch.arange(SIZE).share_memory_()
        self.large = torch.arange(1 << 20)
        self.mapped: Any = np.memmap(file, dtype="i4", mode="r", shape=(SIZE,))

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        base = torch.arange(SIZE * 2, dtype=torch.float32).view(2, -1) + index
        small = torch.arange(6.0) + index
        fixed = np.arange(SIZE) + index
        fixed.flags.writeable = False
        plain = fixed.copy()
        masked = base * (base > 100)
        return {
            "views": [base, base, base[1], base[:, ::3], base.t(), base[:, :1].expand(2, SIZE)],
            "small": [small, small[2:], small.view(2, 3).t(), small[:1].expand(5, 1), small[3], torch.tensor(index)],
            "empty": [torch.zeros(0, 3), base[:0], torch.zeros(0, dtype=torch.bool)],
            "dtypes": [base.to(each) for each in (torch.bfloat16, torch.complex64, torch.bool, torch.uint8)],
            "leaves": [(base * 2).requires_grad_(), torch.nn.Parameter(small), base.clone().as_subclass(Sub)],
            "layouts": [masked.to_sparse(), masked.to_sparse_csr(), torch.nested.nested_tensor([base[0], base[1, :9]])],
            "quantized": torch.quantize_per_tensor(base, 0.1, 3, torch.qint8),
            "storages": [base.untyped_storage(), torch.zeros(5)._typed_storage(), torch.zeros(3, device="meta")],
            "dataset": [self.shared, self.shared[5:9], self.large[index:][:10], self.large[index:][:SIZE]],
            "arrays": [fixed, fixed[::2], fixed, np.asfortranarray(fixed.reshape(3, -1)), fixed.reshape(3, -1).T[1:]],
            "kinds": [
                *(fixed.astype(each) for each in ("f2", ">i4", "M8[s]", "U9", "S9", object)),
                np.zeros(SIZE, dtype=[("a", "i4"), ("b", "f8")]),
                np.zeros(SIZE, dtype=[("a", "i4")]).view(np.recarray),
                np.ma.masked_array(np.arange(SIZE), mask=False),
                np.zeros((90, 90)).view(np.matrix),
            ],
            "of arrays": [torch.from_numpy(one) for one in (plain[:9], plain, plain[:500], plain[9:])],
            "shapes": [np.zeros((0, SIZE)), np.float32(index), np.array(7), np.broadcast_to(np.arange(3), (SIZE, 3))],
            "mapped": [self.mapped, self.mapped[3:9]],
            "values": ["x" * index, b"b" * SIZE, bytearray(b"q" * SIZE), "y" * 40_000, None, {1, 2}, 1.5, range(index)],
            "structures": [Point(index, base[0]), Custom(base, fixed), collections.deque([base, small]), (small,)],
            "packed": torch.nn.utils.rnn.pack_padded_sequence(base[:, :5].unsqueeze(2), [5, 3], batch_first=True),
            "words": [torch.float32, torch.Size([1, 2]), torch.device("cpu"), np.dtype("f4")],
        }


def described(batch: Any) -> list[tuple[Any, ...]]:
    """Lines for each leaf, with all that a program can see of it, and one for each memory that several leaves share."""
    homes: list[tuple[int, str]] = []
    lines = list(_lines(batch, "batch", homes))
    shared = collections.defaultdict(list)
    for home, name in homes:
        shared[home].append(name)
    return lines + [("one memory", *names) for names in shared.values() if len(names) > 1]


def _lines(data: Any, name: str, homes: list[tuple[int, str]]) -> Iterator[tuple[Any, ...]]:
    kind = type(data).__name__
    if isinstance(data, torch.Tensor):
        yield name, kind, data.dtype, data.requires_grad, data.is_leaf, data.layout, data.device.type
        if data.device.type == "cpu":
            yield from _tensor(data.detach(), name, homes)
    elif isinstance(data, torch.UntypedStorage):
        homes.append((data.data_ptr(), name))
        yield name, kind, data.nbytes(), _hash(bytes(data))  # type: ignore[call-overload]
    elif isinstance(data, torch.TypedStorage):
        yield from _lines(data._untyped_storage, name, homes)
    elif isinstance(data, np.ndarray):
        homes.append((id(data), name))
        flags = data.flags.writeable, data.flags.owndata, data.flags.aligned
        content = data.tolist()[:9] if data.dtype.hasobject else _hash(data.tobytes())
        yield name, kind, data.dtype, data.shape, data.strides, flags, content
    elif isinstance(data, (dict, list, tuple, collections.deque)):
        yield name, kind, len(data)
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _lines(value, f"{name}.{key}", homes)
    elif isinstance(data, Custom):
        yield from _lines(vars(data), f"{name}.{kind}", homes)
    else:
        yield name, kind, repr(data)


def _tensor(data: torch.Tensor, name: str, homes: list[tuple[int, str]]) -> Iterator[tuple[Any, ...]]:
    if data.layout is torch.strided and not data.is_nested:
        storage = data.untyped_storage()
        yield name, data.shape, data.stride(), data.storage_offset(), storage.nbytes()
        if data.numel():
            homes.append((storage.data_ptr(), name))
    plain = data.int_repr() if data.is_quantized else data.to_padded_tensor(0.0) if data.is_nested else data.to_dense()
    yield name, tuple(plain.shape), _hash(plain.contiguous().flatten().view(torch.uint8).numpy().tobytes())


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
