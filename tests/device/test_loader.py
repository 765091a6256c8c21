"""The device stage's guards, on `sim`: each one is deleted in turn, and a program that is right with it goes wrong.

A program (a function of a DeviceLoader class) returns whether its results are right. Streams are held by sleeps,
so that the order that a guard forbids happens each time; freed memory is poisoned, so that it shows.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minidl.device import loader as loader_module
from minidl.device import sim
from minidl.device import streams as streams_module
from minidl.device.loader import DeviceLoader

FOREVER = 3600 * 10**9
LIMIT = 20.0
"""Seconds that something may take that takes none."""
SOON = 0.2
"""Seconds in which a device does what nothing keeps it from doing."""
SIZE = 1000


@pytest.fixture(autouse=True)
def simulated(simulate: None) -> Iterator[None]:
    """The accelerator, with no time lost in it."""
    before = sim.configure(kernel=0, latency=0)
    yield
    sim.configure(**before)


def hold(stream: torch.Stream) -> None:
    with stream:
        sim.sleep(FOREVER)


def event_in(stream: torch.Stream) -> torch.Event:
    event = sim.Event()
    event.record(stream)
    return event


def soon(happens: Callable[[], bool]) -> bool:
    """Whether it happens within the time that it takes if nothing prevents it."""
    deadline = time.monotonic() + SOON
    while not (happened := happens()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return happened


def batches(count: int) -> Iterator[torch.Tensor]:
    for number in range(1, count + 1):
        yield torch.full((SIZE,), float(number)).pin_memory()


def is_full(tensor: torch.Tensor, value: float) -> bool:
    return bool((tensor.cpu() == value).all())


# --- Programs ---------------------------------------------------------------------------------------------------------
def use_at_once(loaders: type[DeviceLoader]) -> bool:
    """The consumer computes with a batch whose copy is held up."""
    loader = loaders(batches(1), "sim")
    hold(loader._device.side)  # type: ignore[attr-defined]
    result = next(iter(loader)) * 2
    soon(event_in(sim.current_stream()).query)
    sim.wake()
    return is_full(result, 2)


def drop_early(loaders: type[DeviceLoader]) -> bool:
    """The host drops a batch that the consumer's stream has not read yet."""
    iterator = iter(loaders(batches(3), "sim", 2))
    batch = next(iterator)
    hold(sim.current_stream())
    result = batch * 2
    del batch
    next(iterator)
    soon(lambda: False)
    sim.wake()
    return is_full(result, 2)


def late_tensors(loaders: type[DeviceLoader]) -> bool:
    """The loader yields tensors that the consumer's stream has not computed yet."""

    def source() -> Iterator[torch.Tensor]:
        there = torch.zeros(SIZE, device="sim")
        sim.synchronize()
        hold(sim.current_stream())
        there += 3
        yield there

    iterator = iter(loaders(source(), "sim", 1, lambda batch: batch + 1))
    iterator._fill()
    soon(iterator._in_flight[0].ready.done)  # type: ignore[union-attr]
    sim.wake()
    return is_full(next(iterator), 4)


def fail_after_use(loaders: type[DeviceLoader]) -> bool:
    """A transform that has enqueued work on a batch raises: nothing but the device's memory keeps the batch."""
    total = torch.zeros(SIZE, device="sim")

    def source() -> Iterator[torch.Tensor]:
        yield torch.full((SIZE,), 5.0, device="sim")

    def transform(batch: torch.Tensor) -> torch.Tensor:
        sim.sleep(FOREVER)
        total.add_(batch)
        raise ValueError("no batch")

    iterator = iter(loaders(source(), "sim", 1, transform))
    with pytest.raises(ValueError, match="no batch"):
        next(iterator)
    iterator = None  # type: ignore[assignment]
    gc.collect()
    soon(lambda: False)
    sim.wake()
    sim.synchronize()
    return is_full(total, 5)


def use_new_weights(loaders: type[DeviceLoader]) -> bool:
    """The transform uses a tensor that the consumer's stream has not computed yet."""
    weights = torch.zeros(SIZE, device="sim")
    sim.synchronize()
    hold(sim.current_stream())
    weights += 7
    iterator = iter(loaders(batches(1), "sim", 1, lambda batch: batch * weights))
    iterator._fill()
    soon(iterator._in_flight[0].ready.done)  # type: ignore[union-attr]
    sim.wake()
    return is_full(next(iterator), 7)


def keep_the_source(loaders: type[DeviceLoader]) -> bool:
    """The host memory of a batch lives until its copy is done, whoever has pinned it."""
    alive: list[weakref.ref[torch.Tensor]] = []

    def made() -> torch.Tensor:
        (batch,) = batches(1)
        alive.append(weakref.ref(batch))
        return batch

    loader = loaders((made() for _ in range(1)), "sim", 1)
    hold(loader._device.side)  # type: ignore[attr-defined]
    iterator = iter(loader)
    next(iterator)
    gc.collect()
    kept = alive[0]() is not None
    sim.wake()
    return kept


def run_ahead(loaders: type[DeviceLoader]) -> bool:
    """The host does not enqueue a whole epoch before the device has done a step of it."""
    handed_out: list[int] = []
    hold(sim.current_stream())
    iterator = iter(loaders(batches(20), "sim", 2))

    def consume() -> None:
        for _ in iterator:
            handed_out.append(1)

    consumer = threading.Thread(target=consume)
    consumer.start()
    soon(lambda: len(handed_out) > 3)
    bounded = len(handed_out) <= 3
    sim.wake()
    consumer.join(LIMIT)
    return bounded and len(handed_out) == 20


def take_ahead(loaders: type[DeviceLoader]) -> bool:
    """No more batches are taken from the loader than may be in flight."""
    taken: list[int] = []

    def source() -> Iterator[torch.Tensor]:
        for batch in batches(20):
            taken.append(1)
            yield batch

    next(iter(loaders(source(), "sim", 2)))
    return len(taken) == 2


def end_early(loaders: type[DeviceLoader]) -> bool:
    """`close` returns when the copies that it drops no longer read host memory."""
    loader = loaders(batches(2), "sim", 1)
    hold(loader._device.side)  # type: ignore[attr-defined]
    iterator = iter(loader)
    next(iterator)
    closing = threading.Thread(target=iterator.close)
    closing.start()
    waited = not soon(lambda: not closing.is_alive())
    sim.wake()
    closing.join(LIMIT)
    return waited and not closing.is_alive()


# --- Guards -----------------------------------------------------------------------------------------------------------
FOLLOW = "            self.on.side.wait_stream(self.on.module.current_stream(self.on.device))\n"
GUARDS: dict[str, tuple[types.ModuleType, str, str, Callable[[type[DeviceLoader]], bool]]] = {
    "the consumer's stream waits for the copy": (
        streams_module, "        consumer.wait_event(ready.event)\n", "", use_at_once),
    "the consumer's stream is recorded": (
        streams_module, "tensor.record_stream(consumer)", "pass", drop_early),
    "the side stream waits for the consumer's at the begin": (
        streams_module, "        device.side.wait_stream(device.module.current_stream(device.device))\n", "",
        use_new_weights),
    "the side stream waits for tensors that are there": (
        streams_module, FOLLOW, "            pass\n", late_tensors),
    "the side stream is recorded": (
        streams_module, "            tensor.record_stream(self.on.side)", "            pass", fail_after_use),
    "the source is kept": (
        loader_module, "_Flight(copied, self._stream.mark(), batch,", "_Flight(copied, self._stream.mark(), None,",
        keep_the_source),
    "the host is bound to the device": (
        loader_module, "len(self._in_use) > self._prefetch or ", "", run_ahead),
    "the batches in flight are limited": (
        loader_module, " or len(self._in_flight) >= self._prefetch", "", take_ahead),
    "the end waits for the copies": (
        loader_module, "            time.sleep(POLL)\n", "            break\n", end_early),
}  # fmt: skip
"""Each guard: its module, its text, what is there without it, and the program that needs it."""


def without(module: types.ModuleType, text: str, instead: str) -> type[DeviceLoader]:
    """Return DeviceLoader as it is if `text` in the module's source is replaced."""
    assert module.__file__
    with open(module.__file__) as file:
        source = file.read()
    assert source.count(text) == 1, f"the guard has moved: {text!r}"
    changed = types.ModuleType(f"{module.__name__}_without_a_guard")
    sys.modules[changed.__name__] = changed  # dataclasses look their module up
    try:
        exec(compile(source.replace(text, instead), module.__file__, "exec"), changed.__dict__)
    finally:
        del sys.modules[changed.__name__]
    if module is loader_module:
        mutant: type[DeviceLoader] = changed.DeviceLoader
        return mutant

    class WithOtherStreams(DeviceLoader):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._device = changed.AcceleratorDevice(self._device.device)

    return WithOtherStreams


@pytest.mark.parametrize("guard", GUARDS)
def test_a_program_is_right_with_the_guard_and_wrong_without(guard: str) -> None:
    *where, program = GUARDS[guard]
    assert program(DeviceLoader)
    gc.collect()
    sim.repair()
    assert not program(without(*where))


# --- Any program ------------------------------------------------------------------------------------------------------
@settings(max_examples=40)
@given(
    prefetch=st.integers(1, 4),
    pinned=st.booleans(),
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=25),
    failing=st.sets(st.integers(0, 24), max_size=2),
    two=st.booleans(),
    own_stream=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_values_and_order_are_the_loaders_whatever_takes_how_long(
    prefetch: int, pinned: bool, sizes: list[int], failing: set[int], two: bool, own_stream: bool, seed: int
) -> None:
    """Copies and kernels of random length; one iteration or two at once; on the default stream or another."""
    dice = random.Random(seed)

    def pause() -> None:
        if dice.random() < 0.5:
            sim.sleep(dice.randrange(300_000))

    def source() -> Iterator[torch.Tensor]:
        for number, size in enumerate(sizes):
            batch = torch.full((size,), float(number + 1))
            yield batch.pin_memory() if pinned else batch

    def transform(batch: torch.Tensor) -> torch.Tensor:
        pause()
        if dice.random() < 0.5:
            pause()
        return batch * 2

    def failing_transform(batch: torch.Tensor) -> torch.Tensor:
        out = transform(batch)
        if next(turns) in failing:
            raise KeyError("this one")
        return out

    turns = iter(range(1000))
    iterators = [iter(DeviceLoader(source(), "sim", prefetch, failing_transform if not two else transform))]
    if two:
        iterators.append(iter(DeviceLoader(source(), "sim", prefetch, transform)))
    got: list[list[torch.Tensor | None]] = [[] for _ in iterators]
    with sim.Stream() if own_stream else sim.current_stream():
        for number in range(len(sizes)):
            for iterator, results in zip(iterators, got, strict=True):
                try:
                    batch = next(iterator)
                except KeyError:
                    results.append(None)
                    continue
                pause()
                results.append(batch.sum() / sizes[number])
        for iterator in iterators:
            assert next(iterator, None) is None
        for results in got:
            expected = [None if n in failing and not two else 2.0 * (n + 1) for n in range(len(sizes))]
            values = [None if result is None else round(float(result), 3) for result in results]
            assert values == expected


@pytest.mark.parametrize("prefetch", [1, 2, 4])
@pytest.mark.parametrize("end", ["exhausted", "break"])
def test_memory_is_bounded_though_nothing_is_collected(prefetch: int, end: str) -> None:
    """As much as is in flight, as much again in use, the batch in the consumer's hands, and a transform's input."""
    size = 1 << 16
    gc.collect()
    sim.synchronize()
    before, pinned_before = torch.accelerator.memory_allocated(), sim.pinned_bytes(reset_peak=True)[0]
    torch.accelerator.reset_peak_memory_stats()
    gc.disable()
    try:
        source = (torch.full((size // 4,), float(n)).pin_memory() for n in range(300))
        for number, batch in enumerate(DeviceLoader(source, "sim", prefetch, lambda batch: batch + 1)):
            assert batch.shape == (size // 4,)
            if end == "break" and number == 150:
                break
        del batch
        peak = torch.accelerator.memory_stats()["active_bytes.all.peak"] - before
        pinned = sim.pinned_bytes()[1] - pinned_before
        assert peak <= (2 * prefetch + 2) * 2 * size
        assert pinned <= (2 * prefetch + 2) * size
    finally:
        gc.enable()


@pytest.mark.live
def test_the_traces_copies_are_those_of_the_devices_log(tmp_path: Any) -> None:
    """A copy begins and ends in the trace when it does on the device, within the error that the trace states."""
    import minidl
    from minidl.tracefile import events as ev

    sim.configure(pinned=0.01)  # 4 kB in 0.4 ms
    sim.log(True)
    with minidl.trace(tmp_path / "t"):
        for _ in DeviceLoader(batches(20), "sim"):
            pass
    theirs = [entry for entry in sim.log(False) if entry[0] == "to device"]
    trace = minidl.read_trace(tmp_path / "t")
    spans = trace.spans()
    ours = spans[spans["code"] == ev.COPY[0]]
    assert len(ours) == len(theirs) == 20
    error = int(trace.select("clock_calibration")["y"].max())
    for span, (_, _, _, begin, end, size) in zip(ours, theirs, strict=True):
        assert span["bx"] == size == 4 * SIZE
        assert span["begin"] <= begin + error
        assert span["end"] >= end - error


def test_a_device_that_fails_is_an_error_and_not_a_hang() -> None:
    iterator = iter(DeviceLoader(batches(9), "sim", 2))
    next(iterator)
    sim.fail("out of order")
    with pytest.raises(RuntimeError, match="a kernel has failed: out of order"):
        print([float(batch[0]) for batch in iterator])
    sim.repair()
    iterator.close()


def test_a_consumer_on_the_second_device() -> None:
    first, second = (iter(DeviceLoader(batches(5), f"sim:{number}", 2)) for number in (0, 1))
    sums = [(one.sum(), other.sum()) for one, other in zip(first, second, strict=True)]
    assert {(one.device.index, other.device.index) for one, other in sums} == {(0, 1)}
    assert [float(other) for _, other in sums] == [SIZE * n for n in range(1, 6)]
