"""The device stage's guards, on `sim`: each one is deleted in turn, and a program that is right with it goes wrong.

A program (a function of a DeviceLoader class) returns whether its results are right. Streams are held by sleeps,
so that the order that a guard forbids happens each time; freed memory is poisoned, so that it shows.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import random
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import workloads as wl

import minidl
from minidl.check import check
from minidl.device import loader as loader_module
from minidl.device import sim
from minidl.device import streams as streams_module
from minidl.device.loader import DeviceLoader
from minidl.tracefile import events as ev
from minidl.tracefile.events import Phase
from minidl.views.summary import summary

FOREVER = 3600 * 10**9
LIMIT = 20.0
"""Seconds that something may take that takes none."""
SOON = 0.1
"""Seconds to wait for what a guard prevents."""
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


def held_up(loaders: type[DeviceLoader], source: Iterator[Any], *options: Any) -> Any:
    """An iterator whose copies are held up until `sim.wake`. options: prefetch, transform."""
    loader: Any = loaders(source, "sim", *options)
    hold(loader._device.side)
    return iter(loader)


def interrupt(*arguments: Any, **options: Any) -> NoReturn:
    """Ctrl-C."""
    raise KeyboardInterrupt


class Interrupting:
    """A part of a batch whose copy is interrupted."""

    to = interrupt


# --- Programs ---------------------------------------------------------------------------------------------------------
def use_at_once(loaders: type[DeviceLoader]) -> bool:
    """The consumer computes with a batch whose copy is held up."""
    result = next(held_up(loaders, batches(1))) * 2
    soon(event_in(sim.current_stream()).query)
    sim.wake()
    return is_full(result, 2)


def drop_early(loaders: type[DeviceLoader]) -> bool:
    """The host drops a batch that the consumer's stream has not read yet."""
    loader = loaders(batches(3), "sim", 2)
    iterator = iter(loader)
    batch = next(iterator)
    hold(sim.current_stream())
    result = batch * 2
    del batch
    next(iterator)
    event_in(loader._device.side).synchronize()  # type: ignore[attr-defined]
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


def interrupt_after_use(loaders: type[DeviceLoader]) -> bool:
    """Ctrl-C twice after a transform: nothing but the device's memory keeps the batch that it has enqueued work on."""
    total = torch.zeros(SIZE, device="sim")

    def source() -> Iterator[torch.Tensor]:
        yield torch.full((SIZE,), 5.0, device="sim")

    def transform(batch: torch.Tensor) -> torch.Tensor:
        sim.sleep(FOREVER)
        return total.add_(batch)

    iterator = iter(loaders(source(), "sim", 1, transform))
    iterator._stream.mark = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    iterator = None  # type: ignore[assignment]
    gc.collect()
    event_in(sim.current_stream()).synchronize()
    sim.wake()
    sim.synchronize()
    return is_full(total, 5)


def interrupt_between_copies(loaders: type[DeviceLoader]) -> bool:
    """The host memory of the copy before lives until that is done, and `close` waits for it."""
    made = next(batches(1))
    alive = weakref.ref(made)
    source = [(made, Interrupting())]
    del made
    iterator = held_up(loaders, (source.pop() for _ in range(1)), 1)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    gc.collect()
    kept = alive() is not None and close_waits(iterator)
    sim.wake()
    return kept and alive() is None


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


def keep_the_source(loaders: type[DeviceLoader], taken: int = 1) -> bool:
    """The host memory of a batch lives until its copy is done, whoever has pinned it."""
    alive: list[weakref.ref[torch.Tensor]] = []

    def made() -> torch.Tensor:
        (batch,) = batches(1)
        alive.append(weakref.ref(batch))
        return batch

    iterator = held_up(loaders, (made() for _ in range(taken)), 1)
    for _ in range(taken):
        next(iterator)
    gc.collect()
    kept = alive[0]() is not None
    sim.wake()
    return kept


def keep_the_source_in_use(loaders: type[DeviceLoader]) -> bool:
    """Also while the next batch is in the consumer's hands."""
    return keep_the_source(loaders, 2)


def keep_the_source_of_another_stream(loaders: type[DeviceLoader]) -> bool:
    """Also if the program changes its stream, so that the one that it asks for the next batch in waits for no copy."""
    made = next(batches(1))
    alive = weakref.ref(made)
    source = [made, *batches(3)]
    del made
    iterator = held_up(loaders, (source.pop(0) for _ in range(4)), 2)
    with sim.Stream():
        next(iterator)
    next(iterator)
    soon(lambda: all(marks[0].done() for marks, _ in iterator._in_use))
    next(iterator)
    gc.collect()
    kept = alive() is not None
    sim.wake()
    return kept


class Blocks(minidl.Dataset[torch.Tensor]):
    """i -> as many i as fill a slab."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((SIZE,), float(index))


def recycle_slabs(loaders: type[DeviceLoader], error: type[BaseException] | None = None) -> bool:
    """The copies are held up while the worker makes more batches: it must not write into the slabs of the first.

    error: the transform raises it, after it has used what is not copied yet.
    """
    total = torch.zeros(40, SIZE, device="sim")

    def transform(batch: torch.Tensor) -> torch.Tensor:
        total[int(next(turns))] = batch[0]
        if error is not None:
            raise error
        return batch

    turns = iter(range(40))
    inner = minidl.DataLoader(Blocks(), num_workers=1, pin_memory=True, transport="arena")
    with loaders(inner, "sim", 9, transform) as loader:
        hold(loader._device.side)  # type: ignore[attr-defined]
        iterator = iter(loader)
        for _ in range(9):
            with contextlib.suppress(ValueError):
                next(iterator)
        sim.wake()
        sim.synchronize()
    return all(is_full(total[number], number) for number in range(9))


def recycle_slabs_of_failed_batches(loaders: type[DeviceLoader]) -> bool:
    """Also where the transform has failed, after it has enqueued work on the copy."""
    return recycle_slabs(loaders, ValueError)


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
    bounded = len(handed_out) == 3  # batch n is begun when batch n - 3 is through
    sim.wake()
    consumer.join(LIMIT)
    return bounded and len(handed_out) == 20


def take_ahead(loaders: type[DeviceLoader]) -> bool:
    """No more batches are taken from the loader than may be in flight, and no fewer, at each moment."""
    for prefetch in (1, 2, 4):
        source = Closable(9)
        ahead = [len(source.made) - handed_out for handed_out, _ in enumerate(loaders(source, "sim", prefetch))]
        if ahead != [min(prefetch, 9 - handed_out) for handed_out in range(9)]:
            return False
    return True


def end_early(loaders: type[DeviceLoader]) -> bool:
    """`close` returns when the copies that it drops no longer read host memory."""
    iterator = held_up(loaders, batches(2), 1)
    next(iterator)
    return close_waits(iterator)


def close_waits(iterator: Any) -> bool:
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
        streams_module, "            tensor.record_stream(self.on.side)", "            pass", interrupt_after_use),
    "the source is kept": (
        loader_module, "_Flight(copied, self._latest, batch,", "_Flight(copied, self._latest, None,",
        keep_the_source),
    "the source is kept while its batch is in use": (
        loader_module, "self._in_use.append(((self._device.mark(), ready), source))",
        "self._in_use.append(((self._device.mark(), ready), None))", keep_the_source_in_use),
    "the source is kept until its copy, whatever stream is current": (
        loader_module, "self._in_use.append(((self._device.mark(), ready), source))",
        "self._in_use.append(((self._device.mark(),), source))", keep_the_source_of_another_stream),
    "a slab is kept until its copy": (
        loader_module, "_Flight(copied, self._latest, batch,", "_Flight(copied, self._latest, None,", recycle_slabs),
    "a slab is kept until its copy, though the transform failed": (
        loader_module, "self._in_use.append(((self._latest,), batch))", "pass", recycle_slabs_of_failed_batches),
    "the source is kept, though a later copy was interrupted": (
        loader_module, "except BaseException as error", "except Exception as error", interrupt_between_copies),
    "the host is bound to the device": (
        loader_module, "len(self._in_use) > self._prefetch or ", "", run_ahead),
    "the batches in flight are limited": (
        loader_module, " or len(self._in_flight) >= self._prefetch", "", take_ahead),
    "the end waits for the copies": (
        loader_module, "is_reached(self._latest, MP_STATUS_CHECK_INTERVAL)", "True", end_early),
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


STARTING = (recycle_slabs, recycle_slabs_of_failed_batches)
"""Programs that start workers."""


@pytest.mark.parametrize(
    "guard", [pytest.param(name, marks=[pytest.mark.live] * (GUARDS[name][-1] in STARTING)) for name in GUARDS]
)
@pytest.mark.heavy
def test_a_program_is_right_with_the_guard_and_wrong_without(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    *where, program = GUARDS[guard]
    assert program(DeviceLoader)
    gc.collect()
    sim.repair()
    monkeypatch.setattr(sys.modules[__name__], "SOON", LIMIT)  # it happens, but the machine may be busy
    assert not program(without(*where))


# --- Any program ------------------------------------------------------------------------------------------------------
class LoaderError(Exception):
    """The loader has no such batch."""


class TransformError(Exception):
    """The transform refuses a batch."""


@dataclasses.dataclass
class Plan:
    """A random iteration: what it yields, where it fails, when it ends, and who uses it."""

    prefetch: int
    sizes: list[int]
    kinds: list[str]
    failing: dict[int, type[Exception]]
    end: int
    how: str
    own_stream: bool
    device: int

    def __len__(self) -> int:
        return len(self.sizes)

    def batch(self, number: int) -> torch.Tensor:
        return torch.arange(self.sizes[number], dtype=torch.float32) + number

    def expected(self) -> list[Any]:
        """What comes out, in order, computed in this thread on the CPU."""
        outcomes = [self.failing.get(number, (self.batch(number) * 2 + 1) * 3) for number in range(len(self))]
        return outcomes[: self.end]


def planned(dice: random.Random) -> Plan:
    count = dice.randrange(1, 60)
    errors = [LoaderError, TransformError]
    return Plan(
        prefetch=dice.randrange(1, 5),
        sizes=[dice.randrange(1, 3000) for _ in range(count)],
        kinds=[dice.choice(["pinned", "pinned", "pageable", "there"]) for _ in range(count)],
        failing={number: dice.choice(errors) for number in range(count) if dice.random() < 0.05},
        end=dice.choice([1, 7, count, count]),
        how=dice.choice(["break", "close"]),
        own_stream=dice.random() < 0.5,
        device=dice.randrange(2),
    )


class Source(Iterator[Any]):
    """The batches of a plan. After an error it goes on."""

    def __init__(self, plan: Plan, pause: Callable[[], None]) -> None:
        self.plan = plan
        self.pause = pause
        self.numbers = iter(range(len(plan)))

    def __next__(self) -> Any:
        number = next(self.numbers)
        if self.plan.failing.get(number) is LoaderError:
            raise LoaderError
        batch, kind = self.plan.batch(number), self.plan.kinds[number]
        if kind == "there":
            self.pause()  # the consumer's stream computes it later
            batch = torch.arange(len(batch), device=f"sim:{self.plan.device}") + float(number)
        return {"x": batch.pin_memory() if kind == "pinned" else batch, "number": number}


class Consumer:
    """Steps through a plan's DeviceLoader, and drops each batch as soon as its use is enqueued."""

    def __init__(self, plan: Plan, dice: random.Random) -> None:
        self.plan, self.dice, self.got = plan, dice, list[Any]()
        self.on = sim.Stream(plan.device, priority=dice.randrange(-1, 1)) if plan.own_stream else None
        self.loader = DeviceLoader(Source(plan, self.pause), f"sim:{plan.device}", plan.prefetch, self.transform)
        with self.current():
            self.iterator = iter(self.loader)

    def current(self) -> Any:
        return self.on or torch.accelerator.device_index(self.plan.device)

    def pause(self) -> None:
        """Keep the current stream busy, or not."""
        if self.dice.random() < 0.5:
            sim.sleep(self.dice.randrange(200_000))

    def transform(self, batch: dict[str, Any]) -> dict[str, Any]:
        self.pause()
        out = {"x": batch["x"] * 2, "number": batch["number"]}
        if self.plan.failing.get(batch["number"]) is TransformError:
            raise TransformError
        self.pause()
        out["x"] += 1
        return out

    def step(self) -> bool:
        """Take a batch; return whether it was the last."""
        with self.current():
            try:
                batch = next(self.iterator)
            except StopIteration:
                return True
            except (LoaderError, TransformError) as error:
                self.got.append(type(error))
            else:
                assert batch["number"] == len(self.got)
                self.pause()
                self.got.append(batch["x"] * 3)
        return len(self.got) == self.plan.end

    def finish(self) -> list[Any]:
        if self.plan.how == "close":
            self.loader.close()
        del self.iterator
        with self.current():
            return [result.cpu() if isinstance(result, torch.Tensor) else result for result in self.got]


@pytest.mark.heavy
def test_values_and_order_are_the_loaders_whatever_takes_how_long() -> None:
    """Random programs against the same in this thread: each byte of each batch, with the collector off.

    Copies and kernels take random times; one or two iterations at once, in random turns, on the default stream or on
    one of their own, on two devices; errors of loader and transform; ends by exhaustion, break and close.
    """
    compared = collections.Counter[str]()
    gc.disable()
    try:
        for seed in range(60):
            compared.update(comparison(seed))
    finally:
        gc.enable()
    assert compared["batches"] > 1200
    assert compared["errors"] > 30


def comparison(seed: int) -> dict[str, int]:
    """Run one or two random plans, and hold them against what is expected; return how much was compared."""
    dice = random.Random(seed)
    slow = dice.choice([0, 0, 30_000])
    sim.configure(latency=slow, kernel=dice.choice([0, slow]), pinned=dice.choice([0.1, 12.0]))
    consumers = [Consumer(planned(dice), dice) for _ in range(dice.choice([1, 2]))]
    running = list(consumers)
    while running:
        consumer = dice.choice(running)
        if consumer.step():
            running.remove(consumer)
    got = [result for consumer in consumers for result in consumer.finish()]
    expected = [outcome for consumer in consumers for outcome in consumer.plan.expected()]
    assert len(got) == len(expected), f"seed {seed}"
    for result, wanted in zip(got, expected, strict=True):
        assert torch.equal(result, wanted) if isinstance(wanted, torch.Tensor) else result is wanted, f"seed {seed}"
    tensors = [wanted for wanted in expected if isinstance(wanted, torch.Tensor)]
    size = sum(tensor.nbytes for tensor in tensors)
    return {"batches": len(tensors), "bytes": size, "errors": len(expected) - len(tensors)}


@pytest.mark.heavy
@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("prefetch", [1, 2, 4])
@pytest.mark.parametrize("end", ["exhausted", "break"])
def test_memory_is_bounded_whether_or_not_the_collector_runs(prefetch: int, end: str, collects: bool) -> None:
    """As many batches as are in flight, as many again in use, a transform's input, and one that is just let go."""
    size, count = 1 << 16, 300
    gc.collect()
    sim.synchronize()
    before, pinned_before = torch.accelerator.memory_allocated(), sim.pinned_bytes(reset_peak=True)[0]
    torch.accelerator.reset_peak_memory_stats()
    if not collects:
        gc.disable()
    try:
        source = (torch.full((size // 4,), float(n)).pin_memory() for n in range(count))
        for number, batch in enumerate(DeviceLoader(source, "sim", prefetch, lambda batch: batch + 1)):
            assert batch.shape == (size // 4,)
            if number % 50 < 25:
                sim.sleep(200_000)  # the device is behind, or ahead
            if end == "break" and number == count // 2:
                break
        del batch
        peak = torch.accelerator.memory_stats()["active_bytes.all.peak"] - before
        pinned = sim.pinned_bytes()[1] - pinned_before
        assert peak <= (2 * prefetch + 2) * size
        assert pinned <= 2 * prefetch * size
    finally:
        gc.enable()


# --- In a trace -------------------------------------------------------------------------------------------------------
@pytest.mark.live
def test_the_traces_times_are_those_of_the_devices_log(tmp_path: Path) -> None:
    """What the trace says of a stream's work encloses it, and nothing before or after it, within the stated error."""
    sim.configure(pinned=0.01, kernel=200_000)  # 4 kB in 0.4 ms
    sim.log(True)
    with minidl.trace(tmp_path / "t"):
        for batch in DeviceLoader(batches(20), "sim", transform=lambda batch: batch * 2):
            with minidl.span("forward", device="sim"):
                batch += 1
    log = sim.log(False)
    trace = minidl.read_trace(tmp_path / "t")
    spans, error = trace.spans(), 2 * int(trace.select("clock_calibration")["y"].max())  # of the two that give the rate
    side = next(stream for kind, _, stream, *_ in log if kind == "to device")
    for code, kind, on_side in (
        (ev.COPY[0], "to device", True),
        (ev.TRANSFORM[0], "kernel", True),
        (ev.DEVICE_COMPUTE[0], "kernel", False),
    ):
        ours = spans[spans["code"] == code]
        stream = [entry for entry in log if (entry[2] == side) == on_side]
        at = [place for place, entry in enumerate(stream) if entry[0] == kind]
        assert len(ours) == len(at) == 20
        for span, place in zip(ours, at, strict=True):
            _, _, _, begin, end, size = stream[place]
            assert span["begin"] <= begin + error
            assert span["end"] >= end - error
            if place:
                assert span["begin"] >= stream[place - 1][4] - error, "not before the stream's work before it ended"
            if place + 1 < len(stream):
                assert span["end"] <= stream[place + 1][3] + error, "not after the stream's next work began"
            assert code != ev.COPY[0] or span["bx"] == size == 4 * SIZE


# --- A device that fails or hangs -------------------------------------------------------------------------------------
class Closable(Iterator[torch.Tensor]):
    """Batches that know that they were closed."""

    def __init__(self, count: int) -> None:
        self.batches = batches(count)
        self.closed = 0
        self.made: list[weakref.ref[torch.Tensor]] = []

    def __next__(self) -> torch.Tensor:
        batch = next(self.batches)
        self.made.append(weakref.ref(batch))
        return batch

    def close(self) -> None:
        self.closed += 1


def assert_kept_until_the_device_has_read(source: Closable) -> None:
    """Its batches, of an iteration that ended while the device hung; the next iteration lets go of them."""
    assert None not in [batch() for batch in source.made]
    sim.wake()
    sim.synchronize()
    list(DeviceLoader([], "sim"))
    assert {batch() for batch in source.made} == {None}


@pytest.mark.live
def test_a_device_that_fails_is_an_error_that_names_it_and_the_trace_has_an_end(tmp_path: Path) -> None:
    """Also for the iteration in hand: it is closed, its loader too. The other device works on."""
    source, other = Closable(9), iter(DeviceLoader(batches(5), "sim:1"))
    with minidl.trace(tmp_path / "t"):
        iterator = iter(DeviceLoader(source, "sim:0", 2))
        next(iterator)
        next(other)
        sim.fail("unspecified launch failure")
        with pytest.raises(RuntimeError, match=r"sim:0: a kernel has failed: unspecified launch failure"):
            print([float(batch[0]) for batch in iterator])
        assert [float(batch[0]) for batch in other] == [2, 3, 4, 5]
        iterator.close()
        assert source.closed == 1
        assert next(iterator, None) is None
    trace = minidl.read_trace(tmp_path / "t")
    assert not check(trace)
    assert len(trace.select("device_end")) == len(trace.select("device_start")) == 1
    assert "it failed: simulated accelerator: sim:0: a kernel has failed: unspecified" in summary(trace).text()


@pytest.mark.parametrize("what", ["kernel", "copy"])
def test_a_device_that_hangs_is_an_error_that_names_it_and_nothing_is_lost(what: str) -> None:
    loader = DeviceLoader(batches(9), "sim:1", 2, timeout=0.05)
    with torch.accelerator.device_index(1):
        iterator = iter(loader)
        values = [next(iterator)[0]]
        hold(sim.current_stream() if what == "kernel" else loader._device.side)  # type: ignore[attr-defined]
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match=r"timed out after 0.05 seconds: sim:1 has not finished .* 3 batches"
            ):
                values.extend(batch[0] for batch in iterator)
        sim.wake()
        iterator._timeout = 0
        values.extend(batch[0] for batch in iterator)
    assert [float(value) for value in values] == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_ctrl_c_while_close_waits_keeps_what_the_device_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the batch in the consumer's hands, and of those in flight."""
    source = Closable(3)
    iterator = held_up(DeviceLoader, source, 2)
    next(iterator)
    monkeypatch.setattr(loader_module, "is_reached", interrupt)
    with pytest.raises(KeyboardInterrupt):
        iterator.close()
    assert (source.closed, len(source.made)) == (1, 2)
    del iterator
    gc.collect()
    assert_kept_until_the_device_has_read(source)


def test_a_wait_that_ctrl_c_has_interrupted_is_done_again_and_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    iterator = iter(DeviceLoader(batches(1), "sim", 1))
    iterator._fill()
    really, asked = loader_module.is_reached, list[Any]()

    def once_interrupted(*arguments: Any) -> bool:
        asked.append(arguments)
        return really(*arguments) if len(asked) > 1 else interrupt()

    monkeypatch.setattr(loader_module, "is_reached", once_interrupted)
    with pytest.raises(KeyboardInterrupt):
        iterator.close()
    assert (len(asked), loader_module._unread) == (2, {})


def test_an_end_while_another_lets_go_keeps_what_the_device_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may end it at any moment, or another thread."""
    monkeypatch.setattr(loader_module, "is_reached", lambda *arguments: False)
    source = Closable(1)
    ended, others = iter(DeviceLoader(batches(1), "sim", 1)), [held_up(DeviceLoader, source, 1)]
    for iterator in (ended, *others):
        iterator._fill()
    del iterator

    def done() -> bool:
        while others:
            others.pop().close()
        return True

    monkeypatch.setattr(ended._latest, "done", done)
    ended.close()
    gc.collect()
    assert source.closed == 1
    assert_kept_until_the_device_has_read(source)


HUNG = """
import sys, torch, minidl
from minidl.device import loader, sim
from minidl.record import device_clock

loader.MP_STATUS_CHECK_INTERVAL = device_clock.FLUSH = 0.1
device_clock.SOONEST = device_clock.LATEST = 0  # each copy calibrates
sim.load()
batches = [torch.full((9,), float(number)).pin_memory() for number in range(9)]
with minidl.trace(sys.argv[1]), minidl.DeviceLoader(batches, "sim", timeout=0.5) as device_loader:
    for number, batch in enumerate(device_loader):
        if number == 1:
            for stream in (sim.current_stream(), device_loader._device.side, device_loader._device._idle):
                with stream:
                    sim.sleep(3600 * 10**9)
        batch + 1
"""


@pytest.mark.live
def test_a_program_ends_whose_device_does_not(tmp_path: Path) -> None:
    done = wl.run(HUNG, tmp_path / "t")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("RuntimeError: DeviceLoader timed out after 0.5 seconds: sim:0")
    trace = minidl.read_trace(tmp_path / "t")
    assert not check(trace)
    assert len(trace.select("device_end")) == 1
    assert len(trace.select("host_wait", Phase.BEGIN)) == len(trace.select("host_wait", Phase.END)) >= 1
    assert "it failed: it has done nothing for 0.1 s" in summary(trace).text()
