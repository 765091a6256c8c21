"""Programs that hold batches in every way, over a loader with the transport "arena"; every byte is compared.

`soak(batches, seed)` draws what to do with each batch: keep, drop, slice, view, change, pickle, send to a thread, to
another process, fork. Each holder has the same made in this process, without workers, and what is done to the one is
done to the other. A batch that is written again while it is held differs; so does one that a change of another
batch has reached.

The ways differ in who iterates: in an "alarmed" one, a signal's handler raises KeyboardInterrupt again and again while
a message is read, and the loop goes on; in the "crowded" one, no descriptor can be sent, if the process has no
capability to go beyond the limit.

`python tests/support/arena_soak.py --minutes 5` goes on with new seeds and says how much it compared. With
`--unprivileged` it does so as another user without capabilities.
"""

from __future__ import annotations

import argparse
import array
import collections
import contextlib
import gc
import itertools
import os
import pickle
import queue
import random
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_sharer
from types import FrameType
from typing import Any

import numpy as np
import programs
import torch
import torch.multiprocessing as mp

import minidl
from minidl.arena.arena import FREE, KEPT
from minidl.arena.arena_queue import ArenaQueue
from minidl.arena.packets import Readable

BOUND = 60.0
WAYS = ("plain", "persistent", "unordered", "tee", "thread", "list", "alarmed", "alarmed unordered", "crowded")


class Records(minidl.Dataset[Any]):
    """Records of an index: tensors and arrays from nothing to a MB, small leaves, and a part that is not changed."""

    def __init__(self, length: int, seed: int) -> None:
        self.length = length
        self.seed = seed

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        size = random.Random(index * 1000 + self.seed).choice((0, 1, 9, 300, 4000, 40_000, 250_000))
        base = torch.arange(size, dtype=torch.int32) + index
        return {
            "number": index,
            "base": base,
            "parts": [base[size // 3 :], base[::2]],
            "array": np.arange(size // 2, dtype=np.int16) - index,
            "words": [str(index), {"name": "x" * (index % 50)}],
            "fixed": torch.full((1000,), index, dtype=torch.int64),
        }


class Collate:
    """Stacks the fixed part, and looks at those that it has stacked before: the worker keeps some, too."""

    def __init__(self) -> None:
        self.kept: collections.deque[tuple[torch.Tensor, torch.Tensor]] = collections.deque(maxlen=3)

    def __call__(self, samples: list[Any]) -> Any:
        for kept, wanted in self.kept:
            if not torch.equal(kept, wanted):
                raise AssertionError("a batch that the worker keeps has changed")
        fixed = minidl.default_collate([sample["fixed"] for sample in samples])
        if samples[0]["number"] % 3 == 0:
            self.kept.append((fixed, fixed.clone()))
        return {"samples": samples, "fixed": fixed, "bases": [sample["base"] for sample in samples]}


# --- What is compared -------------------------------------------------------------------------------------------------
def same(one: Any, other: Any) -> int:
    """Bytes compared; raises AssertionError if they differ."""
    if isinstance(other, torch.Tensor):
        assert one.dtype == other.dtype, (one.dtype, other.dtype)
        assert torch.equal(one, other), "a tensor has changed"
        return other.nbytes
    if isinstance(other, np.ndarray):
        assert one.dtype == other.dtype, (one.dtype, other.dtype)
        assert np.array_equal(one, other), "an array has changed"
        return other.nbytes
    if isinstance(other, dict):
        assert one.keys() == other.keys()
        return sum(same(one[key], other[key]) for key in other)
    if isinstance(other, (list, tuple)):
        assert len(one) == len(other)
        return sum(map(same, one, other))
    assert one == other, (one, other)
    return len(str(other))


def leaves(data: Any) -> Iterator[Any]:
    """The tensors and arrays that may be changed."""
    if isinstance(data, (torch.Tensor, np.ndarray)):
        yield data
    elif isinstance(data, dict):
        for key, value in data.items():
            if key != "fixed":
                yield from leaves(value)
    elif isinstance(data, (list, tuple)):
        for value in data:
            yield from leaves(value)


def change(data: Any, value: int) -> None:
    """Write to each of them."""
    for leaf in leaves(data):
        leaf += value


def a_part(data: Any, pick: int) -> Any:
    """A view of one of them: sliced, of another shape, an array of a tensor, a tensor of an array, a graph's input."""
    found = list(leaves(data))
    if not found:
        return data
    leaf = found[pick % len(found)]
    if isinstance(leaf, np.ndarray):
        return torch.from_numpy(leaf) if pick % 2 else leaf[len(leaf) // 2 :]
    views: list[Callable[[torch.Tensor], Any]] = [
        lambda tensor: tensor[len(tensor) // 2 :],
        lambda tensor: tensor[::3],
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.view(torch.int16) if tensor.is_contiguous() and tensor.dtype == torch.int32 else tensor,
        lambda tensor: memoryview(tensor.numpy()).cast("B") if tensor.is_contiguous() and tensor.numel() else tensor,
    ]
    return views[pick % len(views)](leaf)


@dataclass
class Volume:
    """What was done and compared."""

    batches: int = 0
    bytes: int = 0
    slabs: int = 0
    forks: int = 0
    sent: int = 0
    shared: int = 0
    alarms: int = 0

    def __iadd__(self, other: Volume) -> Volume:
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self

    def __str__(self) -> str:
        return ", ".join(f"{value:,} {name}" for name, value in vars(self).items())


# --- A second process, and a thread -----------------------------------------------------------------------------------
def _remember(inbox: Any, outbox: Any) -> None:
    """Keep the last few messages, and look at all of them when a new one comes."""
    torch.set_num_threads(1)
    kept: collections.deque[tuple[Any, bytes]] = collections.deque(maxlen=4)
    while (message := inbox.get(timeout=BOUND)) is not None:
        kept.append((message, _bytes(message)))
        for held, wanted in kept:
            if _bytes(held) != wanted:
                outbox.put("what another process holds has changed")
                return
        outbox.put(kept[-1][1])
    kept.clear()
    outbox.put(b"end")


def _bytes(data: Any) -> bytes:
    return b"".join(leaf.contiguous().numpy().tobytes() for leaf in leaves(data) if isinstance(leaf, torch.Tensor))


class Neighbour:
    """A second process, to which tensors are sent through a queue."""

    def __init__(self) -> None:
        context = mp.get_context("fork")
        self.inbox, self.outbox = context.Queue(), context.Queue()
        self.process = context.Process(target=_remember, args=(self.inbox, self.outbox), daemon=True)
        self.process.start()

    def send(self, data: Any) -> int:
        """Send it; bytes that it has answered, and that are the same."""
        wanted = _bytes(data)
        self.inbox.put(data)
        answer = self.outbox.get(timeout=BOUND)
        assert answer == wanted, answer if isinstance(answer, str) else "another process got other bytes"
        return len(wanted)

    def end(self) -> None:
        self.inbox.put(None)
        self.outbox.get(timeout=BOUND)
        self.process.join(BOUND)
        for each in (self.inbox, self.outbox):
            each.close()
            each.join_thread()
        resource_sharer.stop(timeout=10)


def _by_thread(loader: Any) -> Iterator[Any]:
    """The loader's batches, from a thread that fetches ahead."""
    ready: queue.Queue[Any] = queue.Queue(3)

    def fetch() -> None:
        try:
            for batch in loader:
                ready.put(batch)
                del batch
            ready.put(StopIteration())
        except BaseException as error:
            ready.put(error)

    thread = threading.Thread(target=fetch, daemon=True)  # a failure leaves it waiting for room
    thread.start()
    while not isinstance(batch := ready.get(timeout=BOUND), BaseException):
        yield batch
        del batch
    thread.join()
    if not isinstance(batch, StopIteration):
        raise batch


def _alarmed(loader: Any, draw: random.Random, volume: Volume) -> Iterator[Any]:
    """The loader's batches, though a signal's handler raises KeyboardInterrupt at any moment in which one is read.

    Not in the instructions after that, which hand the message over: there it would be lost, as any function's result.
    """

    def handler(signum: int, frame: FrameType | None) -> None:
        if frame is None or not frame.f_globals["__name__"].startswith("minidl."):
            return  # what watches a test, as coverage does, would keep its locks for ever
        waits = False
        while frame is not None and frame.f_code is not ArenaQueue.get.__code__:
            waits |= frame.f_code is Readable.wait.__code__
            frame = frame.f_back
        if frame is not None and (waits or frame.f_locals["self"]._arrived):
            volume.alarms += 1
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handler)
    try:
        iterator, tries = iter(loader), 0
        while True:
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 1e-3) * 2**tries)  # some time it goes on
            try:
                batch = next(iterator, None)
            except KeyboardInterrupt:
                tries += 1
                continue
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            if batch is None:
                return
            tries = 0
            yield batch
            del batch
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _crowded() -> Iterator[None]:
    """More descriptors on their way than this user may have: only who has a capability can send one."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(200, before[1]), before[1]))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        with contextlib.suppress(OSError):  # too many
            for _ in range(3):
                receiver, sender = (stack.enter_context(end) for end in socket.socketpair())
                packet = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [receiver.fileno()] * 250))]
                sender.sendmsg([b"x"], packet)
        yield


def _in_the_way(loader: Any, way: str, draw: random.Random, volume: Volume) -> Iterator[Any]:
    if way == "thread":
        yield from _by_thread(loader)
    elif way.startswith("alarmed"):
        yield from _alarmed(loader, draw, volume)
    elif way == "tee":
        first, second = itertools.tee(loader, 2)
        ahead = collections.deque(itertools.islice(second, 3))
        for batch in first:
            yield batch
            ahead.append(next(second, None))
            ahead.popleft()
            del batch
    elif way == "list":
        yield from list(loader)
    else:
        yield from loader


def _forked(held: list[tuple[Any, Any]]) -> tuple[int, int]:
    """A forked process, and the pipe's end that tells it to look at all that it has inherited."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        torch.set_num_threads(1)  # there are no other ones after a fork
        try:
            os.close(writing)
            os.read(reading, 1)
            for one, other in held:
                same(one, other)
            code = 0
        finally:
            os._exit(code)
    os.close(reading)
    return child, writing


# --- The program ------------------------------------------------------------------------------------------------------
def soak(batches: int, seed: int, way: str = "plain", workers: int = 2, context: str = "fork") -> Volume:
    """Run one program of about so many batches; AssertionError if a byte differs, or a slab stays in use."""
    draw, volume = random.Random(seed), Volume()
    epochs = max(2, batches // 60) if way == "persistent" else 1
    dataset = Records(2 * batches // epochs, seed)
    neighbour = Neighbour()
    loader: Any = minidl.DataLoader(
        dataset, 2, collate_fn=Collate(), num_workers=workers, transport="arena", multiprocessing_context=context,
        persistent_workers=epochs > 1, in_order="unordered" not in way,
    )  # fmt: skip
    held: list[tuple[Any, Any]] = []
    children: list[tuple[int, int]] = []
    collate = Collate()
    iterator: Any = None
    slabs = 0
    crowd = contextlib.ExitStack()
    try:
        if way == "crowded":
            crowd.enter_context(_crowded())
        for _ in range(epochs):
            iterator = iter(loader)
            for place, batch in enumerate(_in_the_way(iterator, way, draw, volume)):
                first = batch["samples"][0]["number"]
                if "unordered" not in way:
                    assert first == 2 * place
                wanted = collate([dataset[index] for index in range(first, min(first + 2, len(dataset)))])
                volume.batches += 1
                slabs = max(slabs, _mapped(iterator))
                volume.bytes += same(batch, wanted)
                _act(draw, batch, wanted, held, volume, None if way == "crowded" else neighbour)
                if draw.random() < 0.02:
                    children.append(_forked(held))
                    volume.forks += 1
                    held.clear()  # as with torch, the child would see what is changed here
                if len(children) > 2 or (children and draw.random() < 0.02):
                    _end(children.pop(0))
                volume.bytes += sum(same(one, other) for one, other in held[-3:])
                del batch, wanted
            volume.bytes += sum(same(one, other) for one, other in held)
        held.clear()
        gc.collect()
        volume.slabs += slabs
        _all_free(iterator)
    finally:
        while children:
            _end(children.pop())
        neighbour.end()
        if iterator is not None:
            iterator.close()
        crowd.close()
    return volume


def _act(
    draw: random.Random,
    batch: Any,
    wanted: Any,
    held: list[tuple[Any, Any]],
    volume: Volume,
    neighbour: Neighbour | None,
) -> None:
    """Do something with a batch, or with what is held."""
    what, pick = draw.randrange(9), draw.randrange(1000)
    if what == 0:
        held.append((batch, wanted))
    elif what in (1, 2):
        held.append((a_part(batch, pick), a_part(wanted, pick)))
    elif what == 3:
        change(batch, pick)
        change(wanted, pick)
        held.append((batch["samples"], wanted["samples"]))
    elif what == 4:
        held.append((pickle.loads(pickle.dumps(batch)), pickle.loads(pickle.dumps(wanted))))
        change(batch, 1)
    elif what == 5 and neighbour is not None:  # torch's queue can't send a descriptor in the crowd either
        part = batch["bases"][0]
        array = part.numpy()
        volume.bytes += neighbour.send([part, batch["fixed"]])
        volume.sent += 1
        held.append(([part, array], [wanted["bases"][0], wanted["bases"][0].numpy()]))
    elif what == 8 and len(batch["bases"][0]):
        held += _moved(batch["bases"][0], wanted["bases"][0], pick)
        volume.shared += 1
    elif held:
        one, other = held.pop(draw.randrange(len(held)))
        if what == 6:
            change(one, pick)
            change(other, pick)
            volume.bytes += same(one, other)
            held.append((one, other))
    if len(held) > 25:
        del held[: draw.randrange(25)]


def _moved(tensor: torch.Tensor, wanted: torch.Tensor, pick: int) -> list[tuple[Any, Any]]:
    """What sees a tensor before and after it is moved into shared memory, while a thread reads it."""
    sums: list[int] = []
    array, flat = tensor.numpy(), tensor.data
    thread = threading.Thread(target=lambda: sums.extend(int(flat.sum()) for _ in range(3)))
    thread.start()
    holder = torch.nn.Module()
    holder.register_buffer("batch", tensor)
    calls: list[Callable[[], object]] = [
        tensor.share_memory_, holder.share_memory, tensor.untyped_storage().share_memory_, tensor[1:].share_memory_,
    ]  # fmt: skip
    calls[pick % len(calls)]()
    thread.join()
    assert sums == [int(wanted.sum())] * 3, "a tensor that a thread reads has changed"
    return [(tensor, wanted.clone()), (array, wanted.numpy().copy())]


def _mapped(iterator: Any) -> int:
    """How many slabs the loader has mapped; after its end, only those with batches in view."""
    return sum(max(len(each._memory), each.visible) for each in iterator._worker_result_queue._mappings)


def _all_free(iterator: Any) -> None:
    """Raises AssertionError if a slab is still in use."""
    for each in iterator._worker_result_queue._mappings:
        assert each.visible == 0, "a slab stays in use"
        assert set(bytes(each._states)) <= {FREE, KEPT}, bytes(each._states)


def _end(child: tuple[int, int]) -> None:
    pid, writing = child
    os.write(writing, b"!")
    os.close(writing)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "what a forked process has inherited has changed"


def main() -> None:
    """Programs one after the other, with new seeds."""
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--minutes", type=float, default=1.0)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--batches", type=int, default=600, help="of each program")
    command.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    command.add_argument("--unprivileged", action="store_true", help="as another user, without capabilities")
    chosen = command.parse_args()
    if chosen.unprivileged:
        given = [argument for argument in sys.argv[1:] if argument != "--unprivileged"]
        done = programs.unprivileged("import arena_soak; arena_soak.main()", *given, seconds=60 * chosen.minutes + 300)
        sys.exit(done.stdout + done.stderr if done.returncode else print(done.stdout, end=""))
    end, volume, seed = time.monotonic() + 60 * chosen.minutes, Volume(), chosen.seed
    while time.monotonic() < end:
        way = chosen.ways[seed % len(chosen.ways)]
        try:
            volume += soak(chosen.batches, seed, way, workers=1 + seed % 3)
        except BaseException:
            print(f"seed {seed}, {way}")
            raise
        seed += 1
    print(f"seeds {chosen.seed} to {seed - 1}: {volume}")


if __name__ == "__main__":
    main()
