"""`DataLoader(pin_memory=True)` on `sim` against torch's own loader on `sim`: the same programs on both.

Compared are the batches' values, their order, the types of all containers, which tensors are pinned or share memory,
warnings, generators, and errors: their type, their first line, and the exceptions that their text names. torch's loader
takes the device in everything that a loader does with one: it asks torch.accelerator for the device, pins by
`Tensor.pin_memory`, and sets the thread's device.

Left out, because torch's loader waits for ever or ends its pin thread there, and ours does not
(docs/explanation/differences.md): a batch that cannot be sent or rebuilt, a worker that is killed while it writes, a
`pin_memory` that never returns.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import threading
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import workloads as wl
from differential import TORCH, agree, epochs, grid
from torch.nn.utils.rnn import pack_sequence

import minidl
from minidl.device import sim

pytestmark = [
    pytest.mark.live,
    pytest.mark.usefixtures("simulate"),
    pytest.mark.filterwarnings("ignore:.*:pytest.PytestUnhandledThreadExceptionWarning"),
]


# --- What is observed -------------------------------------------------------------------------------------------------
def looked_at(data: Any, memory: dict[int, int] | None = None) -> Any:
    """Types, values, pinned or not, which tensors share memory; of an object: its attributes."""
    memory = {} if memory is None else memory
    if isinstance(data, torch.Tensor):
        shared = memory.setdefault(data.data_ptr(), len(memory))
        return type(data), data.dtype, data.stride(), data.device, data.is_pinned(), shared, data.tolist()
    if isinstance(data, Mapping):
        return type(data), {key: looked_at(value, memory) for key, value in data.items()}, attributes(data)
    if isinstance(data, (Sequence, collections.deque)) and not isinstance(data, (str, bytes, bytearray, range)):
        return type(data), [looked_at(item, memory) for item in data], attributes(data)
    if isinstance(data, (np.ndarray, str, bytes, bytearray, range, int, float, set, type(None))):
        return data
    return type(data), {name: looked_at(value, memory) for name, value in vars(data).items()}


def attributes(data: Any) -> dict[str, Any]:
    """Those that are no items: `pin_memory` may lose them."""
    return {name: value for name, value in getattr(data, "__dict__", {}).items() if isinstance(value, (int, str))}


def error_of(error: Exception) -> tuple[Any, ...]:
    """Its type and first line, without numbers of processes, and the exceptions that its text quotes."""
    first, *rest = str(error).split("\n")
    named = re.findall(r"^(?:\w+\.)*(\w+(?:Error|Exit)): (.*)$", "\n".join(rest), re.MULTILINE)
    return type(error), re.sub(r"\d{3,}", "N", first), named


def epoch(loader: Any, limit: int = 40) -> list[Any]:
    """What an epoch gives, in order; an error stands in its batch's place."""
    iterator, seen = iter(loader), list[Any]()
    for _ in range(limit):
        try:
            seen.append(looked_at(next(iterator)))
        except StopIteration:
            break
        except Exception as error:
            seen.append(error_of(error))
            if type(error) is RuntimeError and "pid" in str(error):
                break
    end(iterator)
    return seen


def end(iterator: Any) -> None:
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()  # not left to the garbage collector, with which torch takes 5 s a worker


def pinned_in(seen: Any) -> list[bool]:
    """Which of the tensors that were looked at are pinned."""
    if isinstance(seen, tuple) and len(seen) == 7 and isinstance(seen[1], torch.dtype):
        return [seen[4]]
    items = seen.values() if isinstance(seen, Mapping) else seen if isinstance(seen, (tuple, list)) else ()
    return [pinned for item in items for pinned in pinned_in(item)]


# --- Structures -------------------------------------------------------------------------------------------------------
class Tagged(dict[str, Any]):
    tag = 0


class Row(list[Any]):
    tag = 0


class TwoArguments(wl.ReadOnly):
    def __init__(self, items: dict[str, Any], other: int) -> None:
        super().__init__(items)


class PairOf(tuple[Any, ...]):
    """A tuple that is not built from its items."""

    def __new__(cls, one: Any, other: Any) -> PairOf:
        return super().__new__(cls, (one, other))

    def __reduce__(self) -> Any:
        return PairOf, tuple(self)


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    name: str


class Own:
    """An object that pins itself, and says how it was asked: arguments, thread, device."""

    def __init__(self, image: torch.Tensor) -> None:
        self.image = image
        self.asked: list[Any] = []

    def pin_memory(self, *arguments: Any) -> Own:
        new = Own(self.image.pin_memory())
        here = threading.current_thread() is threading.main_thread()
        new.asked = [*self.asked, list(arguments), here, torch.accelerator.current_device_index()]
        return new


class OwnList(list[Any]):
    """A container that pins itself: nobody looks inside."""

    def pin_memory(self) -> str:
        return f"{len(self)} pinned"


class Refuses:
    def pin_memory(self) -> Any:
        raise wl.SimpleError("this one stays")


class NoMethod:
    pin_memory = 3


class Marked(torch.Tensor):
    """A subclass of Tensor."""


def one() -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3)


def tagged(container: Any) -> Any:
    container.tag = 5
    return container


KINDS: dict[str, Callable[[], Any]] = {
    "tensor": one,
    "transposed": lambda: one().T,
    "strided": lambda: torch.arange(9)[::2],
    "scalar": lambda: torch.tensor(3),
    "empty": lambda: torch.empty(0, 3),
    "boolean": lambda: torch.tensor([True, False]),
    "half": lambda: one().half(),
    "subclass": lambda: one().as_subclass(Marked),  # type: ignore[arg-type]
    "twice the same": lambda: [t := one(), t],
    "two views": lambda: [t := one(), t[1:]],
    "list": lambda: [one(), "text", b"bytes", None, 3, 2.5, {1, 2}],
    "tuple": lambda: (one(), ("deeper", [one()])),
    "named": lambda: wl.Point(3, one()),
    "dict": lambda: {"a": one(), "b": {"c": [one()], 3: "d"}},
    "ordered": lambda: collections.OrderedDict(b=one(), a=1),
    "default": lambda: collections.defaultdict(list, a=one()),
    "user's dict": lambda: collections.UserDict(a=one()),
    "tagged dict": lambda: tagged(Tagged(a=one())),
    "tagged list": lambda: tagged(Row([one(), 2])),
    "frozen": lambda: wl.ReadOnly({"a": one()}),
    "two arguments": lambda: TwoArguments({"a": one()}, 2),
    "deque": lambda: collections.deque([one()], maxlen=3),
    "tuple that is not rebuilt": lambda: PairOf(one(), 1),
    "range": lambda: range(3),
    "size": lambda: torch.Size([2, 3]),
    "bytearray": lambda: bytearray(b"abc"),
    "array": lambda: np.arange(3),
    "dataclass": lambda: Sample(one(), "name"),
    "own": lambda: [Own(one()), {"a": Own(one())}],
    "own list": lambda: OwnList([one()]),
    "refuses": lambda: [one(), Refuses()],
    "no method": NoMethod,
    "packed": lambda: pack_sequence([torch.ones(3), torch.ones(2)]),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "none": lambda: None,
}
HERE: dict[str, Callable[[], Any]] = {
    "pinned already": lambda: one().pin_memory(),
    "on the device": lambda: [one(), one().to("sim")],
    "gradient": lambda: one().requires_grad_() * 2,
    "view of a mapping": lambda: types.MappingProxyType({"a": one()}),
}
"""What cannot be sent by a worker."""


class Kinds(wl.Numbers):
    """i -> the structure of the i-th kind."""

    def __init__(self, kinds: dict[str, Callable[[], Any]]) -> None:
        super().__init__(len(kinds))
        self.kinds = list(kinds.values())

    def __getitem__(self, index: int) -> Any:
        return self.kinds[index]()


def as_it_is(sample: Any) -> Any:
    return sample


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pin", [False, True])
def test_every_kind_of_batch_is_pinned_as_torch_does_it(workers: int, pin: bool) -> None:
    kinds = KINDS if workers else KINDS | HERE
    options = {"batch_size": None, "num_workers": workers, "collate_fn": as_it_is, "pin_memory": pin}

    def program(lib: Any) -> Any:
        warnings.filterwarnings("ignore", "Sparse invariant checks")  # said once in a process
        return dict(zip(kinds, epoch(lib.DataLoader(Kinds(kinds), **options)), strict=True))

    seen = agree(program)
    assert pinned_in(seen["tensor"]) == [pin]
    assert pinned_in(seen["dict"]) == [pin] * 2
    assert pinned_in(seen["dataclass"]) == [False], "nobody looks into it"
    assert seen["own list"] == "1 pinned" or not pin
    assert (seen["refuses"][0] is wl.SimpleError) == pin
    assert not workers or not pin or seen["no method"][1] == "Caught TypeError in pin memory thread for device 0."


@pytest.mark.parametrize("workers", [0, 2])
def test_collated_samples_of_every_type_come_pinned(workers: int) -> None:
    seen = agree(lambda lib: epoch(lib.DataLoader(wl.Mixed(7), 2, num_workers=workers, pin_memory=True)))
    assert len(seen) == 4
    assert pinned_in(seen) == [True] * len(pinned_in(seen))


# --- Options ----------------------------------------------------------------------------------------------------------
CASES = [case for case in grid(2) if case["in_order"]][::4]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: "-".join(getattr(v, "__name__", str(v)) for v in case.values())
)
def test_batches_order_seeds_and_draws_are_torchs(case: dict[str, Any]) -> None:
    agree(lambda lib: epochs(lib, case | {"pin_memory": True}), what=case)


def test_persistent_workers_keep_one_thread_and_a_broken_epoch_leaves_nothing_in_the_next() -> None:
    def program(lib: Any) -> Any:
        loader = lib.DataLoader(wl.Tensors(9), 2, num_workers=2, pin_memory=True, persistent_workers=True)
        first = [looked_at(batch) for batch, _ in zip(loader, range(2), strict=False)]
        thread = loader._iterator._pin_memory_thread
        second = [looked_at(batch) for batch in loader]
        same = loader._iterator._pin_memory_thread is thread, thread.is_alive()
        end(loader._iterator)
        return first, second, same, thread.is_alive()

    first, second, same, alive = agree(program)
    assert (len(first), len(second), same, alive) == (2, 5, (True, True), False)
    assert all(pinned_in([first, second]))


@pytest.mark.parametrize("workers", [0, 1])
def test_the_device_is_the_current_one_whatever_pin_memory_device_says(workers: int) -> None:
    def program(lib: Any) -> Any:
        warnings.filterwarnings("ignore", "pin_memory_device is deprecated")  # torch blames a line of its own for it
        with torch.accelerator.device_index(1):
            kinds = Kinds({"a": one, "b": Refuses, "c": lambda: Own(one())})
            options = {"collate_fn": as_it_is, "pin_memory": True, "pin_memory_device": "cuda:3"}
            return epoch(lib.DataLoader(kinds, None, num_workers=workers, **options))

    batch, error, (_, own) = agree(program)
    assert pinned_in(batch) == [True]
    assert own["asked"][1][-1] == 1
    assert not workers or error[1] == "Caught SimpleError in pin memory thread for device 1."


def test_pinned_memory_is_bounded_as_torchs() -> None:
    """All that is in flight is pinned at most: what the workers may have sent, the thread's batch, the consumer's."""
    size, workers, ahead = 1 << 14, 2, 2
    for lib in (TORCH, minidl):
        before = sim.pinned_bytes(reset_peak=True)[0]
        loader = lib.DataLoader(
            wl.Tensors(40, size // 4), None, num_workers=workers, pin_memory=True, prefetch_factor=ahead
        )
        iterator = iter(loader)
        for batch in iterator:
            assert batch.is_pinned()
        del batch
        end(iterator)
        now, peak = sim.pinned_bytes()
        assert peak - before <= (workers * ahead + 2) * size, lib
        assert now == before, lib


# --- Errors -----------------------------------------------------------------------------------------------------------
FAILURES: dict[str, dict[str, Any]] = {
    "a sample": {"dataset": wl.Failing(8, wl.SimpleError("no such sample")), "collate_fn": wl.as_list},
    "a key": {"dataset": wl.Failing(8, KeyError("no such key"), (0, 7))},
    "collate_fn": {"dataset": wl.Numbers(8), "collate_fn": wl.failing_collate},
    "default_collate": {"dataset": Kinds({"a": one, "b": lambda: one()[:1], "c": one, "d": one})},
    "worker_init_fn": {"dataset": wl.Numbers(4), "worker_init_fn": wl.failing_init},
    "the stream": {"dataset": wl.FailingStream(8, "next"), "collate_fn": wl.as_list},
    "the sampler": {"dataset": wl.Numbers(20), "sampler": wl.FailingSampler([*range(13)])},
}


@pytest.mark.parametrize("what", FAILURES)
@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_comes_in_its_batchs_place_and_the_others_are_pinned(what: str, workers: int) -> None:
    options = {"batch_size": 2, "num_workers": workers, "pin_memory": True}
    agree(lambda lib: epoch(lib.DataLoader(**options, **FAILURES[what])), what=what)


@pytest.mark.parametrize("death", [wl.kill_myself, wl.exit_at_once])
def test_a_workers_death_ends_the_epoch_and_the_thread(death: Callable[[], None], tmp_path: Path) -> None:
    """It dies in its first sample, so that it holds no lock and the thread reads nothing of what it has sent."""

    def program(lib: Any) -> Any:
        told = tmp_path / lib.__name__
        iterator, seen = (
            iter(lib.DataLoader(wl.Gate(9, told, 2, death), 2, num_workers=2, pin_memory=True)),
            list[Any](),
        )
        try:
            for batch in iterator:
                seen.append(looked_at(batch))
                told.touch()
        except RuntimeError as error:
            seen.append(re.sub(r"\d{3,}", "N", str(error))[: len("DataLoader worker (pid N) is killed by signal")])
        end(iterator)
        return seen, iterator._pin_memory_thread.is_alive()

    seen, alive = agree(program)
    assert (len(seen), alive) == (2, False)


class Ends:
    """Ends the thread that pins it."""

    def pin_memory(self) -> Any:
        raise SystemExit


def test_the_threads_death_is_an_error_of_the_next_batch() -> None:
    """Ours adds the reason: what ended the thread."""

    def program(lib: Any) -> Any:
        iterator = iter(lib.DataLoader(Kinds({"a": Ends, "b": one}), None, num_workers=1, pin_memory=True,
                                       collate_fn=as_it_is))  # fmt: skip
        iterator._pin_memory_thread.join(60)
        with pytest.raises(RuntimeError) as raised:
            next(iterator)
        end(iterator)
        return str(raised.value)[: len("Pin memory thread exited unexpectedly")]

    assert agree(program) == "Pin memory thread exited unexpectedly"
