"""The device stage: order, depth, errors, ends, and what its trace says; on `sim`, and on a GPU if there is one.

What needs a GPU is marked `gpu` and skipped without one. `test_loader` proves the guards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.utils.data
from made_trace import Process
from made_trace import write as write_trace
from recorded import EVERY_STEP
from sizes import slow
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import minidl
from minidl.check import check
from minidl.device import loader as device_module
from minidl.device import sim
from minidl.device.augment import Augment
from minidl.device.loader import DeviceLoader, open_device
from minidl.device.nest import tensors_in
from minidl.device.streams import AcceleratorDevice, AcceleratorMark
from minidl.record import step_parts
from minidl.record.device_clock import DeviceClock
from minidl.record.recorder import active
from minidl.speed.device_use import device_use
from minidl.speed.ledger import Copy, Why, ledger
from minidl.tracefile import events as ev
from minidl.tracefile.events import Phase
from minidl.views.chrome import to_chrome
from minidl.views.layout import LaneKind
from minidl.views.scene import scene_of
from minidl.views.summary import summary

SIMULATED = "sim"
FOREVER = 3600 * 10**9
"""ns that a stream sleeps until it is woken."""


@pytest.fixture(autouse=True)
def simulated(request: pytest.FixtureRequest) -> None:
    """Every test of this file that asks for no GPU has the simulated accelerator."""
    if not any(mark is _without.mark for mark in request.node.iter_markers("skipif")):
        request.getfixturevalue("simulate")


def hold(stream: torch.Stream) -> None:
    """Keep a stream busy until `sim.wake`."""
    with stream:
        sim.sleep(FOREVER)


def event_in(stream: torch.Stream) -> torch.Event:
    event = sim.Event()
    event.record(stream)
    return event


def side_of(loader: DeviceLoader) -> torch.Stream:
    """The stream of its copies."""
    device = loader._device
    assert isinstance(device, AcceleratorDevice)
    side = device.side
    assert isinstance(side, torch.Stream)
    return side


_without = pytest.mark.skipif(os.environ.get("MINIDL_TEST_GPU") != "1", reason="needs a GPU, and MINIDL_TEST_GPU=1")


def gpu(test: Any) -> Any:
    """Mark a test that needs a GPU; most start workers."""
    return _without(pytest.mark.live(test))


class Tensors(minidl.Dataset[torch.Tensor]):
    """i -> tensor of 8 times i; the indices in `bad` fail."""

    def __init__(self, n: int, bad: tuple[int, ...] = ()) -> None:
        self.n = n
        self.bad = bad

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.bad:
            raise KeyError(index)
        return torch.full((8,), float(index))


def numbers(batches: Any) -> list[float]:
    return [float(batch.flatten()[0]) for batch in batches]


def pinned(count: int) -> Iterator[torch.Tensor]:
    """As `ones`, in pinned memory: copies of others block the host."""
    return (batch.pin_memory() for batch in ones(count))


def ones(count: int) -> Iterator[torch.Tensor]:
    """Batches full of 0, 1, 2, ..."""
    for number in range(count):
        yield torch.full((4,), float(number))


class Blocks(minidl.Dataset[torch.Tensor]):
    """i -> as many i as fill a slab."""

    SLAB = 1 << 18

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((50_000,), float(index))


# --- Batches ----------------------------------------------------------------------------------------------------------
class Pair(NamedTuple):
    a: torch.Tensor
    b: str


class Thing:
    """Knows by itself how to go to a device, and not how to do it without blocking."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: Any) -> Thing:
        return Thing(self.x.to(device) + 1)


@pytest.mark.live
@pytest.mark.parametrize("pin", [True, False])
def test_a_slab_is_not_written_again_before_it_was_copied(pin: bool) -> None:
    """The consumer drops each batch at once, and the device copies what is pinned only when it is woken."""
    copies = []
    if pin:
        hold(sim.current_stream())
    for batch in minidl.DataLoader(Blocks(30), 1, num_workers=2, pin_memory=pin, transport="arena"):
        copies.append(batch.to(SIMULATED, non_blocking=True))
        del batch
    sim.wake()
    assert [copy.cpu().unique().tolist() for copy in copies] == [[number] for number in range(30)]


def in_slabs(count: int, **options: Any) -> minidl.DataLoader[Any]:
    """A loader of `count` batches, n full of n, that two workers write into slabs which may be page-locked."""
    return minidl.DataLoader(Blocks(count), 1, **{"num_workers": 2, "transport": "arena", "pin_memory": True} | options)


def values(batches: Any) -> list[list[float]]:
    """The values in each batch, which is dropped once it is copied on the device."""
    copies = [batch * 1 for batch in batches]
    return [copy.unique().tolist() for copy in copies]


@pytest.mark.live
@pytest.mark.parametrize("start_method", ["fork", *slow("spawn")])
def test_slabs_are_page_locked_once_and_no_thread_pins(start_method: str) -> None:
    """A worker gets a slab again only after the copy: the device is slow, and there are more batches than slabs."""
    gc.collect()
    before, times = sim.registered_bytes()
    settings = sim.configure(latency=1e6)
    try:
        inner = in_slabs(30, multiprocessing_context=start_method, persistent_workers=True)
        with DeviceLoader(inner, SIMULATED) as loader:
            for _ in range(2):
                iterator = iter(loader)
                first = next(iterator)
                assert "pin_memory" not in {thread.name for thread in threading.enumerate()}
                source = iterator._yielded[1]  # type: ignore[index]
                assert source.is_pinned()
                assert values([first, *iterator]) == [[float(number)] for number in range(30)]
                del source, iterator, first
            now, locked = sim.registered_bytes()
            assert 0 < locked - times < 20, "for 60 batches"
            assert now - before == (locked - times) * Blocks.SLAB
    finally:
        sim.configure(**settings)
    del inner, loader
    gc.collect()
    assert sim.registered_bytes()[0] == before


@pytest.mark.live
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_only_who_knows_the_copies_end_gets_locked_slabs() -> None:
    """A plain loop over the same loader has the pin thread, and new workers; so has a subclass that yields its own."""

    class Own(minidl.DataLoader[Any]):
        def __iter__(self) -> Any:
            return iter([batch.clone() for batch in super().__iter__()])

    gc.collect()
    before = sim.registered_bytes()
    with in_slabs(6, persistent_workers=True) as inner:
        pids = []
        for slabs_locked in (False, True, True, False):
            batches = DeviceLoader(inner, SIMULATED) if slabs_locked else inner
            assert values(batches) == [[float(number)] for number in range(6)]
            pinned = any(thread.name == "pin_memory" for thread in threading.enumerate())
            assert pinned is not slabs_locked
            pids.append([worker.pid for worker in inner._iterator._workers])  # type: ignore[union-attr]
            if not pids[1:]:
                assert sim.registered_bytes() == before
        assert pids[1] == pids[2]
        assert len({*map(tuple, pids)}) == 3
    times = sim.registered_bytes()[1]
    own = Own(Blocks(4), 1, num_workers=1, pin_memory=True, transport="arena")
    for other in (own, in_slabs(4, pin_memory=False), in_slabs(4, transport="upstream")):
        assert values(DeviceLoader(other, SIMULATED)) == [[float(number)] for number in range(4)]
    assert sim.registered_bytes()[1] == times
    del inner, own, other, batches
    gc.collect()


@pytest.mark.live
def test_where_memory_cannot_be_locked_the_copies_block_and_are_right() -> None:
    gc.collect()
    settings = sim.configure(lockable=sim.registered_bytes()[0] + Blocks.SLAB)
    try:
        with pytest.warns(RuntimeWarning, match="sim:0 cannot page-lock .*: cudaHostRegister of .* bytes: more memory"):
            assert values(DeviceLoader(in_slabs(30), SIMULATED)) == [[float(number)] for number in range(30)]
    finally:
        sim.configure(**settings)


@pytest.mark.parametrize(("status", "kernels"), [(0, 0), (1, 1)])
def test_a_failed_unlock_leaves_no_error_behind(status: int, kernels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA keeps the error of a call, and the next kernel raises it: one of the device's own has to."""
    monkeypatch.setattr(sim.cudart, "cudaHostUnregister", staticmethod(lambda address: status))
    device = open_device("sim")
    sim.log(True)
    try:
        device.unlock(0)
        sim.synchronize()
    finally:
        log = sim.log(False)
    assert [kind for kind, *_ in log].count("kernel") == kernels


@pytest.mark.live
def test_a_locked_slab_is_in_the_trace_and_called_simulated(tmp_path: Path) -> None:
    trace = traced(tmp_path / "t", in_slabs(12))
    assert check(trace) == []
    locked = trace.select("slab_lock")
    new = trace.select("slab_map")
    assert locked["x"].tolist() == new["y"][new["z"] == 1].tolist() == [Blocks.SLAB] * len(locked)
    assert set(locked["z"].tolist()) == {1}
    (number,) = set(locked["loader"].tolist())
    assert (trace.loaders[number]["slabs_locked"], trace.loaders[number]["pin_memory"]) == (True, False)
    found = ledger(trace)
    assert Copy.PIN not in found.copies["kind"]
    assert found.batches["avoidable"].sum() == 0, "no copy to the device is from pageable memory"
    assert f"{len(locked)} slabs page-locked" in found.text()
    assert "so no pin copy (simulated)" in found.text()


def test_torchs_loader_and_plain_iterables_are_taken() -> None:
    loader = DeviceLoader(torch.utils.data.DataLoader(Tensors(6), 2), SIMULATED)
    assert (len(loader), numbers(loader)) == (3, [0, 2, 4])
    assert numbers(DeviceLoader(ones(3), SIMULATED, 50)) == [0, 1, 2]
    with pytest.raises(TypeError):
        len(DeviceLoader(ones(3), SIMULATED))


def test_what_is_no_tensor_passes_and_objects_go_by_their_own_method() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    given = {"name": "a", "packed": packed, "thing": Thing(torch.ones(1)), "none": None, "array": np.ones(2)}
    (batch,) = DeviceLoader([given], SIMULATED)
    assert isinstance(batch["packed"], PackedSequence)
    assert batch["thing"].x.item() == 2
    assert batch["array"] is given["array"]
    assert (batch["name"], batch["none"]) == ("a", None)


def test_augmentation_is_the_same_on_the_side_stream_as_on_the_cpu() -> None:
    images = [torch.randint(0, 256, (4, 20, 24, 3), dtype=torch.uint8) for _ in range(3)]
    there = list(DeviceLoader([(image, n) for n, image in enumerate(images)], SIMULATED, transform=Augment(16, seed=3)))
    here = Augment(16, seed=3)
    for number, (image, (batch, label)) in enumerate(zip(images, there, strict=True)):
        assert label == number
        assert torch.equal(batch.cpu(), here(image))
    assert not torch.equal(there[0][0].cpu(), Augment(16, seed=4)(images[0]))


# --- Depth and order --------------------------------------------------------------------------------------------------
class Counted:
    """Batches that count how many were taken."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.taken = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for batch in ones(self.count):
            self.taken += 1
            yield batch


def test_copies_run_while_the_consumer_computes() -> None:
    """Batch 1 is on the device before the consumer's stream has come back from batch 0."""
    iterator = iter(DeviceLoader(pinned(3), SIMULATED))
    next(iterator)
    hold(sim.current_stream())
    use = event_in(sim.current_stream())
    (flight,) = iterator._in_flight
    assert isinstance(flight, device_module._Flight)
    flight.ready.wait()
    assert not use.query()
    sim.wake()
    assert numbers(iterator) == [1, 2]


# --- Errors -----------------------------------------------------------------------------------------------------------
@pytest.mark.live
def test_an_interrupted_wait_loses_no_batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wait, interrupts = AcceleratorMark.wait, [KeyboardInterrupt()]

    def interrupted(mark: AcceleratorMark) -> None:
        if interrupts:
            raise interrupts.pop()
        wait(mark)

    with minidl.trace(tmp_path / "t"):
        iterator = iter(DeviceLoader(pinned(4), SIMULATED, 1))
        hold(sim.current_stream())
        batches = [next(iterator), next(iterator)]
        monkeypatch.setattr(AcceleratorMark, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        sim.wake()
        assert numbers([*batches, *iterator]) == [0, 1, 2, 3]
    assert check(minidl.read_trace(tmp_path / "t")) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prefetch": 0}, "prefetch=0: choose 1 batch or more"),
        ({"prefetch": -1}, "prefetch=-1: choose 1 batch or more"),
        ({"timeout": -1}, "timeout=-1: choose seconds, or 0 for no limit"),
    ],
)
def test_what_is_no_depth_and_no_time_is_refused(options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DeviceLoader([], SIMULATED, **options)


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_device(SIMULATED).simulated
    assert open_device(1).name == "sim:1"
    with pytest.raises(ValueError, match="'cuda': the accelerator of this machine is 'sim'"):
        open_device("cuda")
    monkeypatch.setattr(device_module, "accelerator_type", lambda: None)
    assert open_device("sim:1").name == "sim:1", "named, it is there, whatever the environment says"
    with pytest.raises(RuntimeError, match=r"'cuda': this machine has no accelerator .*MINIDL_SIMULATE_DEVICE=1"):
        DeviceLoader([], "cuda")
    monkeypatch.setattr(device_module, "accelerator_type", lambda: "cuda")
    with pytest.raises(ValueError, match="'cpu': the accelerator of this machine is 'cuda'"):
        open_device("cpu")


# --- Ends -------------------------------------------------------------------------------------------------------------
def test_close_ends_what_iterates_and_closes_it_and_the_loader() -> None:
    """Each once, also if others hold it."""

    class Closable(Counted):
        closed = 0

        def __iter__(self) -> Iterator[torch.Tensor]:
            self.batches = super().__iter__()
            return self  # type: ignore[return-value]

        def __next__(self) -> torch.Tensor:
            return next(self.batches)

        def close(self) -> None:
            self.closed += 1

    source = Closable(9)
    with DeviceLoader(source, SIMULATED, 3) as loader:
        first, second = iter(loader), iter(loader)
        next(first)
        first.close()
        assert (source.closed, list(first)) == (1, [])
        first.close()
        assert source.closed == 1
        next(second)
    assert (source.closed, list(second)) == (3, [])


@pytest.mark.live
@pytest.mark.parametrize("persistent", [False, True])
def test_a_consumer_that_breaks_leaves_no_workers_but_persistent_ones(persistent: bool) -> None:
    inner = minidl.DataLoader(Tensors(8), 2, num_workers=2, persistent_workers=persistent)
    with DeviceLoader(inner, SIMULATED, 3) as loader:
        for _ in loader:
            break
        pids = [worker.pid for worker in inner._iterator._workers] if persistent else []  # type: ignore[attr-defined]
        gc.collect()
        for _ in range(2):
            assert numbers(loader) == [0, 2, 4, 6]
        if persistent:
            assert [worker.pid for worker in inner._iterator._workers] == pids  # type: ignore[attr-defined]


def test_an_iterator_cannot_be_pickled() -> None:
    with contextlib.closing(iter(DeviceLoader(ones(1), SIMULATED))) as iterator, pytest.raises(NotImplementedError):
        iterator.__reduce_ex__(2)


def test_its_repr_says_where_and_how_deep() -> None:
    assert repr(DeviceLoader([], SIMULATED, 3)) == "<DeviceLoader: to sim:0, prefetch 3; 0 live iterations; of []>"


# --- The stream -------------------------------------------------------------------------------------------------------
def test_the_side_stream_is_the_same_for_every_epoch() -> None:
    """What one stream's memory pool has cached is lost to another stream."""
    loader = DeviceLoader([torch.ones(2)], SIMULATED)
    sides = [side_of(loader) for _ in range(2) for _ in loader]
    assert sides[0] is sides[1]


def test_a_device_module_without_streams_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: object())
    with pytest.raises(RuntimeError, match=r"torch\.meta has no streams"):
        AcceleratorDevice(torch.device("meta"))


# --- In a trace -------------------------------------------------------------------------------------------------------
def traced(directory: Path, source: Any, **options: Any) -> minidl.Trace:
    with minidl.trace(directory), DeviceLoader(source, SIMULATED, **options) as loader:
        for batch in loader:
            with minidl.span("forward", device=SIMULATED):
                assert batch is not None
    return minidl.read_trace(directory)


@pytest.fixture(scope="module")
def of_workers(tmp_path_factory: pytest.TempPathFactory) -> minidl.Trace:
    """Two workers' pinned batches on the device, transformed and used; no test changes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(sim.VARIABLE, "1")
        sim.load()
        source = minidl.DataLoader(Tensors(12), 2, num_workers=2, pin_memory=True)
        return traced(tmp_path_factory.mktemp("workers") / "t", source, transform=lambda batch: batch * 2)


@pytest.fixture(scope="module")
def of_a_list(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of six pageable batches of 1 KiB on the device."""
    directory = tmp_path_factory.mktemp("list") / "t"
    traced(directory, [{"a": torch.ones(252), "b": [torch.ones(2, dtype=torch.int64), "s"]}] * 6)
    return directory


def of(trace: minidl.Trace, name: str) -> np.ndarray:
    spans = trace.spans()
    return spans[np.isin(spans["code"], [code for code, event in ev.EVENTS.items() if event.name == name])]


@pytest.mark.live
@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_is_followed_from_its_worker_to_its_use(tmp_path: Path, of_workers: minidl.Trace, workers: int) -> None:
    trace = of_workers
    if not workers:
        trace = traced(tmp_path / "t", minidl.DataLoader(Tensors(12), 2), transform=lambda batch: batch * 2)
    assert check(trace) == []
    assert of(trace, "h2d")["by"].tolist() == [0 if workers else 64] * 6, "bytes from pageable memory"
    steps = {name: of(trace, name) for name in ("h2d", "copy", "transform", "device_wait", "device_compute", "compute")}
    loader = set(trace.select("yield")["loader"].tolist())
    for name, spans in steps.items():
        assert spans["task"].tolist() == list(range(6)), name
        assert (spans["end"] >= spans["begin"]).all(), name
        assert set(spans["loader"].tolist()) == loader, name
    given = trace.select("yield")
    in_order = [given["time"], *(steps[name]["begin"] for name in ("h2d", "copy", "transform"))]
    in_order += [steps["transform"]["end"], steps["device_wait"]["end"], steps["device_compute"]["begin"]]
    calibration = trace.select("clock_calibration")
    assert (calibration["y"] > 0).all(), "the error is stated"
    error = int(calibration["y"].max())
    for earlier, later in itertools.pairwise(in_order):
        assert (later - earlier >= -2 * error).all()


@pytest.mark.live
def test_a_foreign_loaders_bytes_are_told_and_all_of_it_is_called_simulated(of_a_list: Path) -> None:
    """It has a number of its own, and running tasks."""
    trace = minidl.read_trace(of_a_list)
    begins, ends = (trace.select("h2d", phase) for phase in (Phase.BEGIN, Phase.END))
    assert begins[["task", "x", "y", "z"]].tolist() == [(task, 0, 1024, 2) for task in range(6)]
    assert of(trace, "copy")["bx"].tolist() == [1024] * 6
    assert ends["z"].tolist() == [1] * 6
    (number,) = set(begins["loader"].tolist())
    assert trace.loaders[number]["dataset"] == "list"
    assert trace.described("device")[0] | {"process": 0} == {
        "kind": "device", "process": 0, "loader": number, "device": "sim:0", "prefetch": 2, "simulated": True,
    }  # fmt: skip
    assert "the device is simulated" in ledger(trace).text()
    assert ledger(trace).batches["avoidable"].sum() == 6 * 1024, "pageable, as on a GPU"
    assert "device (simulated): 6 copied, 6.0 KiB" in summary(trace).text()
    for name in ("copy", "transform", "device_wait", "device_compute", "hand_over", "device_start", "device_end"):
        for row in trace.select(name):
            fields = [field.name for field in ev.EVENTS[int(row["code"])].fields]
            assert row["xyz"[fields.index("simulated")]] == 1
    assert {name for name in trace.threads.values() if name.startswith(SIMULATED)} == {
        "sim:0 copies",
        "sim:0 compute",
    }


@pytest.mark.live
def test_each_enqueued_batch_leaves_or_is_accounted_for(tmp_path: Path) -> None:
    with minidl.trace(tmp_path / "t"):
        iterator = iter(DeviceLoader(ones(9), SIMULATED, 3))
        next(iterator)
        iterator.close()
    trace = minidl.read_trace(tmp_path / "t")
    (end,) = trace.select("device_end")
    assert (end["x"], end["y"]) == (1, 2)
    assert len(of(trace, "h2d")) == 3
    assert (of(trace, "copy")["end"] > 0).sum() == 3
    assert trace.select("h2d", Phase.END)["x"].tolist() == [1, 2, 3], "never more than the depth"


@pytest.mark.live
def test_an_error_is_raised_in_its_batchs_place_and_the_others_keep_their_tasks_numbers(tmp_path: Path) -> None:
    """An error of the loader; `test_loader` has any errors of loaders and transforms, in random places."""
    got: list[Any] = []
    with minidl.trace(tmp_path / "t"):
        iterator = iter(DeviceLoader(minidl.DataLoader(Tensors(8, bad=(3,)), 2, num_workers=2), SIMULATED, 3))
        for _ in range(4):
            try:
                got += numbers([next(iterator)])
            except KeyError:
                got.append(KeyError)
        assert list(iterator) == []
    assert got == [0, KeyError, 4, 6]
    trace = minidl.read_trace(tmp_path / "t")
    assert of(trace, "h2d")["task"].tolist() == [0, 2, 3]


@pytest.mark.live
def test_what_is_under_way_when_a_trace_ends_is_in_it(tmp_path: Path) -> None:
    loader = DeviceLoader(pinned(3), SIMULATED, 3, lambda batch: batch + 1)
    with minidl.trace(tmp_path / "t"):
        hold(side_of(loader))
        iterator = iter(loader)
        next(iterator)
        threading.Timer(0.05, sim.wake).start()
    trace = minidl.read_trace(tmp_path / "t")
    iterator.close()
    assert (of(trace, "transform")["end"] > 0).sum() == 3


@pytest.mark.live
def test_an_error_leaves_the_stage_when_it_is_raised_there(tmp_path: Path) -> None:
    """The transform is called at once; its error keeps its place all the same, and nothing is taken beyond it."""

    def transform(batch: torch.Tensor) -> torch.Tensor:
        raise ValueError("cannot")

    source = Counted(3)
    with minidl.trace(tmp_path / "t"):
        iterator = iter(DeviceLoader(source, SIMULATED, 3, transform))
        for number in range(1, 4):
            with pytest.raises(ValueError, match="cannot"):
                next(iterator)
            assert source.taken == number
        assert list(iterator) == []
    trace = minidl.read_trace(tmp_path / "t")
    assert check(trace) == []
    assert trace.select("hand_over")["x"].tolist() == [ev.Outcome.ERROR] * 3
    assert trace.select("device_end")[["x", "y"]].tolist() == [(3, 0)]
    assert trace.select("h2d", Phase.BEGIN)["y"].tolist() == [16] * 3


@pytest.mark.live
@pytest.mark.parametrize("where", ["loader", "transform"])
def test_an_interrupt_loses_no_batch(where: str, tmp_path: Path) -> None:
    """What it has interrupted is taken again, or copied and transformed again."""
    interrupts, calls = [KeyboardInterrupt()], itertools.count()

    def interrupted(name: str, number: int) -> None:
        if (name, number) == (where, 1) and interrupts:
            raise interrupts.pop()

    class Source(Iterator[torch.Tensor]):
        taken = 0

        def __next__(self) -> torch.Tensor:
            if self.taken == 4:
                raise StopIteration
            interrupted("loader", self.taken)
            self.taken += 1
            return torch.full((4,), float(self.taken))

    def transform(batch: torch.Tensor) -> torch.Tensor:
        interrupted("transform", next(calls))
        return batch * 2

    with minidl.trace(tmp_path / "t"):
        iterator = iter(DeviceLoader(Source(), SIMULATED, 2, transform))
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        assert numbers(iterator) == [2, 4, 6, 8]
    trace = minidl.read_trace(tmp_path / "t")
    assert check(trace) == []
    assert trace.select("h2d", Phase.BEGIN)["y"].tolist() == [16] * (5 if where == "transform" else 4)


@pytest.mark.live
def test_waiting_for_the_device_is_told(tmp_path: Path) -> None:
    with minidl.trace(tmp_path / "t"):
        for _ in DeviceLoader(ones(5), SIMULATED, 2):
            sim.sleep(50_000_000)
    assert len(of(minidl.read_trace(tmp_path / "t"), "host_wait")) == 5 - 2


@pytest.mark.live
def test_spans_of_the_user_nest_and_carry_their_names(tmp_path: Path) -> None:
    with minidl.trace(tmp_path / "t"):
        for _ in minidl.DataLoader(Tensors(2)):
            with minidl.span("step"), minidl.span("<b>", device="nonsense"):
                pass
    trace = minidl.read_trace(tmp_path / "t")
    spans = of(trace, "compute")
    texts = [trace.text(row) for row in trace.select("compute", Phase.BEGIN)]
    assert texts == ["step", "<b>"] * 2
    assert spans["task"].tolist() == [0, 0, 1, 1]
    assert (spans["end"][0::2] >= spans["end"][1::2]).all()
    assert len(of(trace, "device_compute")) == 0, "there is no such device"
    assert check(trace) == []


def test_a_span_outside_of_traces_does_nothing() -> None:
    assert active() is None
    with minidl.span("forward", device="cuda") as one, minidl.span("backward") as other:
        assert one is other, "nothing is made for it"


@pytest.mark.live
def test_the_export_names_spans_and_leads_a_batch_to_the_device(of_workers: minidl.Trace) -> None:
    document = to_chrome(of_workers)["traceEvents"]
    slices = [event for event in document if event["ph"] == "X"]
    for number in (0, 1):
        names = [f"{name} {number}" for name in ("forward", "forward (simulated)", "device copy (simulated)")]
        assert [sum(event["name"] == name for event in slices) for name in names] == [1, 1, 1]
        flow = sorted((e for e in document if e.get("cat") == "batch" and e.get("id") == number), key=lambda e: e["ts"])
        last = flow[-1]
        inside = [
            s["name"] for s in slices
            if (s["pid"], s["tid"]) == (last["pid"], last["tid"]) and s["ts"] <= last["ts"] <= s["ts"] + s["dur"] + 1e-3
        ]  # fmt: skip
        assert f"device wait (simulated) {number}" in inside
        assert [event["ph"] for event in flow] == ["s", *"t" * (len(flow) - 2), "f"]


@pytest.mark.live
def test_the_picture_has_a_lane_for_each_stream_below_the_consumer(of_workers: minidl.Trace) -> None:
    drawn = scene_of(of_workers)
    titles = [lane.title for lane in drawn.lanes]
    at = titles.index("consumer")
    assert titles[at : at + 3] == ["consumer", "sim:0 copies", "sim:0 compute"]
    lanes = [number for number, lane in enumerate(drawn.lanes) if lane.kind is LaneKind.DEVICE]
    bars = drawn.bars[np.isin(drawn.bars["lane"], lanes)]
    assert len(bars) == 6 * 4, "copy, transform, wait and use"
    assert bars["simulated"].all()
    way = [ev.EVENTS[int(code)].name for code in drawn.stops[drawn.stops["batch"] == 0]["code"]]
    assert way[-4:] == ["h2d", "copy", "transform", "device_wait"]


# --- What is made of it -----------------------------------------------------------------------------------------------
def without(code: int, *numbers: int) -> Callable[[np.ndarray], np.ndarray]:
    """Leave out the events of this code, or those of them that have these places among them."""

    def change(events: np.ndarray) -> np.ndarray:
        rows = np.flatnonzero(events["code"] == code)
        return np.delete(events, rows[list(numbers)] if numbers else rows)

    return change


def used_early(events: np.ndarray) -> np.ndarray:
    """The consumer's stream goes on with its second batch before the copy is done, by more than the clocks' error."""
    error = int(events["y"][events["code"] == ev.CLOCK_CALIBRATION].max(initial=0))  # on a busy machine, of ms
    used, done = (np.flatnonzero(events["code"] == code)[1] for code in (ev.DEVICE_WAIT[1], ev.COPY[1]))
    events["time"][used] = events["time"][done] - 2 * error - 1_000_000
    return events[np.argsort(events["time"], kind="stable")]


def miscounted(events: np.ndarray) -> np.ndarray:
    events["y"][events["code"] == ev.DEVICE_END] += 1
    return events


@pytest.mark.live
@pytest.mark.parametrize(
    ("change", "rules"),
    [
        (lambda events: events, set()),
        (without(ev.HAND_OVER, 0), {"device-depth", "device-end"}),
        (without(ev.H2D[0], 0), {"device-depth"}),
        (without(ev.COPY[1], 2), {"device-end"}),
        (used_early, {"device-order"}),
        (miscounted, {"device-end"}),
    ],
)
def test_the_rules_on_devices_find_what_breaks_them(
    of_a_list: Path, change: Callable[[np.ndarray], np.ndarray], rules: set[str]
) -> None:
    trace = minidl.read_trace(of_a_list)
    trace.events = change(trace.events.copy())
    assert {violation.rule for violation in check(trace) if violation.rule.startswith("device-")} == rules


def imagined(directory: Path, *spans: tuple[tuple[int, int], int, int, tuple[int, ...]]) -> minidl.Trace:
    """A trace of loader 1 with these spans: codes, begin, end, and the begin's fields, which the end has, too."""
    process = Process(1000, "loader", loader=1, threads={1000: "MainThread"})
    for codes, begin, end, fields in spans:
        tid = 1000 if codes[0] in (ev.H2D[0], ev.HOST_WAIT[0]) else ev.DEVICE_TID + (codes[0] in ON_CONSUMERS)
        process.emit(begin, tid, codes[0], 0, -1, fields)
        process.emit(end, tid, codes[1], 0, -1, (0,) * 3)
    write_trace(directory)
    process.write(directory)
    return minidl.read_trace(directory)


ON_CONSUMERS = (ev.DEVICE_WAIT[0], ev.DEVICE_COMPUTE[0])


def test_what_the_stage_came_to_is_told_to_the_nanosecond(tmp_path: Path) -> None:
    trace = imagined(
        tmp_path / "t",
        (ev.H2D, 0, 10, (600, 400, 2)),
        (ev.COPY, 100, 300, (1000, 7, 0)),
        (ev.TRANSFORM, 300, 350, (0, 0)),
        (ev.DEVICE_WAIT, 50, 330, (0, 0)),
        (ev.DEVICE_COMPUTE, 340, 1340, (0, 0)),
        (ev.DEVICE_COMPUTE, 440, 540, (0, 0)),
        (ev.H2D, 400, 410, (1000, 0, 1)),
        (ev.COPY, 500, 700, (1000, 7, 0)),
        (ev.DEVICE_WAIT, 1340, 1341, (1, 0)),
        (ev.HOST_WAIT, 1400, 1450, (0,)),
        (ev.DEVICE_COMPUTE, 1640, 1740, (0, 0)),
    )
    use = device_use(trace, 1)
    assert (use.batches, use.bytes, use.pageable, use.simulated) == (2, 2000, 400, False)
    assert (use.copy, use.transform, use.stalled, use.host_wait) == (400, 50, 281, 50)
    assert use.hidden == 450 - (330 - 100), "of copy and transform, 230 ns were waited for"
    assert (use.computed, use.idle) == (1100, 300)
    assert "2 copied, 2.0 KiB, 400 B of it pageable" in use.text()
    assert dataclasses.replace(use, simulated=True).text() == use.text().replace("device:", "device (simulated):")
    assert device_use(trace, 2) is None


def test_the_ledger_calls_a_pageable_source_avoidable(tmp_path: Path) -> None:
    trace = imagined(tmp_path / "t", (ev.H2D, 0, 10, (600, 400, 2)), (ev.H2D, 20, 30, (500, 0, 1)))
    found = ledger(trace)
    rows = [(row["bytes"], row["tensors"], Why(row["why"])) for row in found.copies if row["kind"] == Copy.H2D]
    assert sorted(rows) == [(400, 0, Why.PAGEABLE), (500, 1, Why.NEEDED), (600, 2, Why.NEEDED)]
    assert "use pin_memory=True: from pageable memory" in " ".join(found.text().split())


class Collects(minidl.Dataset[int]):
    """Each sample collects the garbage."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        gc.collect()
        return index


class Leaves:
    """Says in a file which process has collected it."""

    def __init__(self, path: Path) -> None:
        self.path, self.itself = path, self

    def __del__(self) -> None:
        with open(self.path, "a") as file:
            print(os.getpid(), file=file)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """The test's garbage stays until it is over."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.live
@pytest.mark.usefixtures("uncollected")
def test_a_worker_does_not_collect_the_garbage_of_its_parent(tmp_path: Path) -> None:
    """A device's event in a cycle would be destroyed in the worker, and abort it."""
    open_device("sim")
    Leaves(tmp_path / "collected")
    assert list(minidl.DataLoader(Collects(), None, num_workers=2)) == [*range(4)]
    assert not (tmp_path / "collected").exists()
    gc.collect()
    assert (tmp_path / "collected").read_text().split() == [str(os.getpid())]


# --- On a GPU ---------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def cuda() -> torch.device:
    """The GPU, with all that its first use opens and keeps."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.ones(8, 8, device=device) @ torch.ones(8, 8).pin_memory().to(device, non_blocking=True)
    torch.cuda.synchronize()
    return device


def busy(device: torch.device, times: int = 8) -> torch.Tensor:
    """Keep the current stream busy for some milliseconds."""
    factor = torch.ones(4096, 4096, device=device) / 4096
    product = factor
    for _ in range(times):
        product = product @ factor
    return product


def filled(count: int, size: int, pin: bool = True) -> list[torch.Tensor]:
    """Batches of `size` float32, all of batch n being n."""
    batches = [torch.full((size,), float(number)) for number in range(count)]
    return [batch.pin_memory() for batch in batches] if pin else batches


@gpu
@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_gpu_batches_are_the_loaders_own(cuda: torch.device, pin: bool, workers: int) -> None:
    inner = minidl.DataLoader(Tensors(20), 2, num_workers=workers, pin_memory=pin)
    with DeviceLoader(inner, "cuda", transform=lambda batch: batch + 1) as loader:
        for _ in range(2):
            batches = list(loader)
            assert {batch.device for batch in batches} == {cuda}
            assert numbers(batches) == [2.0 * n + 1 for n in range(10)]


@gpu
@pytest.mark.parametrize("pin", [True, False])
def test_gpu_a_slab_is_not_written_again_before_it_was_copied(cuda: torch.device, pin: bool) -> None:
    """In a plain loop slabs are not page-locked: a copy from one has read it when it returns."""
    copies = []
    for batch in minidl.DataLoader(Blocks(200), 1, num_workers=2, pin_memory=pin, transport="arena"):
        busy(cuda, 1)
        copies.append(batch.to(cuda, non_blocking=True))
        del batch
    assert [copy.unique().tolist() for copy in copies] == [[number] for number in range(200)]


@gpu
def test_gpu_slabs_are_page_locked_and_copied_while_the_host_goes_on(
    cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each once, and unlocked at the end; no thread pins."""
    gc.collect()
    calls: dict[str, list[int]] = {"lock": [], "unlock": []}
    for name, noted in calls.items():
        real = getattr(AcceleratorDevice, name)

        def call(device: Any, address: int, *size: int, noted: list[int] = noted, real: Any = real) -> None:
            real(device, address, *size)
            noted.append(address)

        monkeypatch.setattr(AcceleratorDevice, name, call)
    busy(cuda)
    with DeviceLoader(in_slabs(60), "cuda") as loader:
        iterator = iter(loader)
        first = next(iterator)
        source = iterator._yielded[1]  # type: ignore[index]
        assert "pin_memory" not in {thread.name for thread in threading.enumerate()}
        assert source.is_pinned()
        with torch.cuda.stream(side_of(loader)):
            busy(cuda, 64)
            there = source.to(cuda, non_blocking=True)
            end = torch.cuda.Event()
            end.record()
            assert not end.query(), "the host has not waited for the copy, nor for what was before it"
        end.synchronize()
        assert torch.equal(there.cpu(), source)
        assert values([first, *iterator]) == [[float(number)] for number in range(60)]
    del source, iterator, loader, first
    gc.collect()
    assert 0 < len(calls["lock"]) < 20
    assert sorted(calls["lock"]) == sorted(calls["unlock"])


class Sizes(Blocks):
    """As Blocks; one in ten is large."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((50_000 if index % 10 else 5_000_000,), float(index))


@gpu
def test_gpu_a_locked_slab_is_written_again_only_after_its_copy_and_keeps_its_pages(cuda: torch.device) -> None:
    """The device is behind, and each batch is dropped at once; after a large batch the slab's pages stay."""
    inner = minidl.DataLoader(Sizes(300), 1, num_workers=2, pin_memory=True, transport="arena")
    sums = []
    for batch in DeviceLoader(inner, "cuda", transform=lambda batch: (busy(cuda, 1), batch * 1)[1]):
        sums.append(torch.stack([batch.min(), batch.max()]))
        del batch
    assert [each.tolist() for each in sums] == [[number, number] for number in range(300)]


@gpu
def test_gpu_memory_that_cannot_be_locked_is_an_error_and_the_device_works_on(cuda: torch.device) -> None:
    memory = torch.zeros(1 << 16)
    device = open_device("cuda")
    device.lock(memory.data_ptr(), memory.nbytes)
    try:
        with pytest.raises(OSError, match=r"cudaHostRegister of 262144 bytes: .*already"):
            device.lock(memory.data_ptr(), memory.nbytes)
        assert (torch.ones(3, device=cuda) + 1).tolist() == [2, 2, 2]
    finally:
        device.unlock(memory.data_ptr())
    assert not memory.is_pinned()
    device.unlock(memory.data_ptr())
    assert (torch.ones(3, device=cuda) + 1).tolist() == [2, 2, 2]


@gpu
def test_gpu_nests_of_every_kind(cuda: torch.device) -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    sparse = torch.eye(3).to_sparse()
    there = torch.full((2,), 7.0, device=cuda)
    given = {
        "packed": packed,
        "sparse": sparse,
        "pair": Pair(torch.ones(2), "b"),
        "there": there,
        "thing": Thing(there),
    }
    (batch,) = DeviceLoader([given], "cuda")
    assert {tensor.device for tensor in tensors_in(batch) if tensor is not batch["packed"].batch_sizes} == {cuda}
    assert torch.equal(batch["sparse"].to_dense().cpu(), torch.eye(3))
    assert (float(batch["there"][0]), float(batch["thing"].x[0]), batch["pair"].b) == (7.0, 8.0, "b")


@gpu
@pytest.mark.parametrize("transform", [None, lambda batch: batch * 1])
def test_gpu_a_batch_is_used_after_its_copy_and_kept_while_it_is_used(cuda: torch.device, transform: Any) -> None:
    """The consumer's stream is busy, and each batch is dropped at once: its memory must not go to the next copy."""
    source = filled(4, 8 << 20) * 16
    sums = []
    for batch in DeviceLoader(source, "cuda", transform=transform):
        busy(cuda, 2)
        sums.append(batch.double().mean())
        del batch
    assert [float(value) for value in sums] == [float(number) for number in range(4)] * 16


@gpu
def test_gpu_the_stream_that_is_current_at_next_is_the_one_that_waits(cuda: torch.device) -> None:
    sums, mine = [], torch.cuda.Stream()
    with torch.cuda.stream(mine):
        for batch in DeviceLoader(filled(4, 8 << 20) * 4, "cuda"):
            sums.append(batch.double().mean())
    torch.cuda.synchronize()
    assert [float(value) for value in sums] == [0, 1, 2, 3] * 4


@gpu
def test_gpu_tensors_made_there_just_now_are_waited_for(cuda: torch.device) -> None:
    def source() -> Iterator[torch.Tensor]:
        for _ in range(8):
            yield busy(cuda, 8)[:1024, :1024].clone()

    for batch in DeviceLoader(source(), "cuda", transform=lambda batch: batch * 2):
        assert torch.allclose(batch, torch.full_like(batch, 2 / 4096))


@gpu
@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_gpu_memory_is_bounded_by_the_depth(cuda: torch.device, prefetch: int) -> None:
    size = 32 << 20
    source = [torch.ones(size // 4).pin_memory()] * 40
    busy(cuda, 1)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    work = 4 * 4096 * 4096 * 4
    for batch in DeviceLoader(source, "cuda", prefetch):
        busy(cuda, 4)
        del batch
    torch.cuda.synchronize()
    grown = torch.cuda.memory_stats()["active_bytes.all.peak"] - before
    assert grown <= (2 * prefetch + 2) * size + work


@gpu
def test_gpu_breaking_off_with_copies_under_way_is_safe(cuda: torch.device) -> None:
    for _ in range(20):
        for batch in DeviceLoader(filled(4, 4 << 20), "cuda", 3):
            busy(cuda, 1)
            kept = batch
            break
        gc.collect()
        assert float(kept.double().mean()) == 0
    torch.cuda.synchronize()


@pytest.mark.live
def test_the_parts_of_a_step_are_also_timed_by_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of the first step, whose device is unknown when it begins, nor while a graph is captured, nor those of
    a validation: `eval()` begins one. An evaluation in training mode is none."""
    net, captured = torch.nn.Linear(8, 2).requires_grad_(False).to(SIMULATED), 4
    with EVERY_STEP, minidl.trace(tmp_path / "t"), step_parts.step_parts_recorded():
        for task, batch in enumerate(minidl.DataLoader(Tensors(12), 2)):
            captures = task == captured
            monkeypatch.setattr(sim, "is_current_stream_capturing", lambda now=captures: now, raising=False)
            sim.sleep(50_000_000)  # ns: the device falls behind
            net(batch.to(SIMULATED))
            with torch.no_grad():
                if task == 2:
                    net(batch.to(SIMULATED))
                net.eval()
                net(batch.to(SIMULATED))
                net.train()
    trace = minidl.read_trace(tmp_path / "t")
    assert check(trace) == []
    timed, calls = of(trace, "device_part"), of(trace, "forward")
    texts = [trace.text(row) for row in trace.select("device_part", Phase.BEGIN)]
    assert [texts.count(text) for text in ("forward", "evaluation")] == [4, 1]
    timed = timed[np.array(texts) == "forward"]
    assert timed["task"].tolist() == [task for task in range(1, 6) if task != captured]
    assert timed["ez"].all(), "it is marked as simulated"
    calls = calls[timed["task"]]
    late, error = timed["ey"] > 0, int(trace.select("clock_calibration")["y"].max())
    assert late.any()
    asked = (timed["end"] - timed["ey"])[late]
    assert ((calls["begin"][late] <= asked) & (asked <= calls["end"][late])).all()
    assert (timed["begin"] >= calls["begin"] - 2 * error).all()


@gpu
def test_gpu_augmentation_is_that_of_the_cpu(cuda: torch.device) -> None:
    images = [torch.randint(0, 256, (16, 40, 44, 3), dtype=torch.uint8).pin_memory() for _ in range(4)]
    here = Augment(32, seed=5)
    for image, batch in zip(images, DeviceLoader(images, "cuda", transform=Augment(32, seed=5)), strict=True):
        assert batch.device == cuda
        assert torch.allclose(batch.cpu(), here(image), atol=1e-5)


@gpu
def test_gpu_the_trace_has_the_copies_on_the_devices_clock(cuda: torch.device, tmp_path: Path) -> None:
    busy(cuda)
    with minidl.trace(tmp_path / "t"):
        inner = minidl.DataLoader(Tensors(64), 4, num_workers=2, pin_memory=True)
        for _ in DeviceLoader(inner, "cuda", transform=lambda batch: batch * 2):
            with minidl.span("forward", device="cuda"):
                busy(cuda, 8)
    trace = minidl.read_trace(tmp_path / "t")
    assert check(trace) == []
    steps = {name: of(trace, name) for name in ("h2d", "copy", "transform", "device_wait", "device_compute")}
    assert all(spans["task"].tolist() == list(range(16)) for spans in steps.values())
    assert steps["h2d"]["by"].sum() == 0, "all of it was pinned"
    assert steps["copy"]["bx"].tolist() == [4 * 8 * 4] * 16
    calibrations = trace.select("clock_calibration")
    error = int(calibrations["y"].max())
    assert 0 < error < 200_000
    assert (steps["copy"]["begin"] >= steps["h2d"]["begin"] - 2 * error).all()
    assert (steps["device_compute"]["begin"] >= steps["device_wait"]["end"] - 2 * error).all()
    use = device_use(trace, int(steps["copy"]["loader"][0]))
    assert not use.simulated
    assert not any("simulated" in name for name in trace.threads.values())


@gpu
def test_gpu_copies_are_hidden_behind_compute_that_is_long_enough(cuda: torch.device, tmp_path: Path) -> None:
    source = filled(4, 4 << 20) * 10
    list(DeviceLoader(source, "cuda"))
    busy(cuda)
    with minidl.trace(tmp_path / "t"):
        for _ in DeviceLoader(source, "cuda"):
            with minidl.span("compute", device="cuda"):
                busy(cuda, 8)
    trace = minidl.read_trace(tmp_path / "t")
    use = device_use(trace, int(trace.select("h2d")["loader"][0]))
    assert use.hidden_share > 0.9
    assert trace.select("host_wait").size > 0, "the host was held back"


@gpu
def test_gpu_a_calibrated_clock_keeps_time(cuda: torch.device) -> None:
    """A mark that is placed and waited for lies between two looks at the host's clock, wherever it is placed."""
    clock = DeviceClock(open_device("cuda"), mock.Mock())
    for _ in range(50):
        before = time.monotonic_ns()
        mark = clock.device.mark(True)
        mark.wait()
        after = time.monotonic_ns()
        at = clock.calibration.host_time(mark)
        assert before - 2 * clock.calibration.error - 5_000 <= at <= after + 2 * clock.calibration.error + 5_000
        time.sleep(0.002)
        clock.keep_time()


@gpu
def test_gpu_an_accelerator_is_asked_for_by_name_number_or_device(cuda: torch.device) -> None:
    assert open_device("cuda").device == open_device(cuda.index).device == open_device(cuda).device == cuda
    with pytest.raises(ValueError, match="'cpu': the accelerator of this machine is 'cuda'"):
        open_device("cpu")


# --- A state ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.live)])
def test_a_state_counts_what_was_handed_out_not_what_is_in_flight(workers: int) -> None:
    loader = DeviceLoader(minidl.DataLoader(Tensors(9, bad=(4,)), 1, num_workers=workers), SIMULATED, 3)
    iterator = iter(loader)
    state = loader.state_dict()
    for at in range(9):
        if at == 4:
            with pytest.raises(KeyError):
                next(iterator)
        else:
            assert numbers([next(iterator)]) == [at]
        state = loader.state_dict()
        assert (state["yielded"], state["ended"]) == (at + 1, False)
        if at == 5:
            other = DeviceLoader(minidl.DataLoader(Tensors(9), 1, num_workers=workers), SIMULATED, 2)
            other.load_state_dict(state)
            assert numbers(other) == [6, 7, 8]
    assert list(iterator) == []
    assert loader.state_dict()["ended"]
    loader.load_state_dict(state)
    assert list(loader) == [], "it was saved at the last batch"
    loader.close()


def test_the_state_of_another_loader_is_refused() -> None:
    loader = DeviceLoader([torch.ones(2)], SIMULATED)
    for call in (loader.state_dict, lambda: loader.load_state_dict({})):
        with pytest.raises(
            TypeError, match="the state of a list counts batches in flight as handed out: wrap a minidl"
        ):
            call()


@gpu
@pytest.mark.usefixtures("uncollected")
def test_gpu_an_event_in_a_cycle_does_not_abort_workers(cuda: torch.device) -> None:
    device = open_device(cuda)
    marks: list[Any] = [device.mark(), device.mark(timed=True)]
    marks.append(marks)
    del marks
    assert list(minidl.DataLoader(Collects(), None, num_workers=2)) == [*range(4)]
