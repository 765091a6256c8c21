"""The simulated accelerator: streams, memory, copies and kernels behave as on a device, and its mistakes show.

A stream is held by a sleep that only `wake` ends, so that order is tested without a clock.
"""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import workloads as wl
from hypothesis import given
from hypothesis import strategies as st

from minidl.device import sim
from minidl.device.sim import SimError

FOREVER = 3600 * 10**9
LIMIT = 20.0
"""Seconds that something may take that takes none."""


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The devices, with no work left and with the settings as they were."""
    monkeypatch.setenv(sim.VARIABLE, "1")
    sim.load()
    before = sim.configure(**{name: torch.ops.minidl_sim.setting(name) for name in sim.SETTINGS})
    sim.configure(kernel=0, latency=0)
    yield
    sim.repair()
    sim.configure(**before)
    gc.collect()
    torch.accelerator.empty_cache()


def reached(stream: torch.Stream | None = None) -> torch.Event:
    event = sim.Event()
    event.record(stream or sim.current_stream())
    return event


def nan(tensor: torch.Tensor) -> bool:
    return bool(tensor.isnan().all())


# --- What torch sees --------------------------------------------------------------------------------------------------
def test_it_is_torchs_accelerator_while_the_environment_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.accelerator.device_count() == 2
    assert torch.get_device_module("sim") is sim
    assert sim.get_device_name() == "simulated accelerator"
    monkeypatch.delenv(sim.VARIABLE)
    assert not torch.accelerator.is_available()


def test_each_thread_has_its_device_and_its_streams() -> None:
    side = sim.Stream()
    with side:
        assert sim.current_stream() == side
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append((sim.current_stream(), sim.current_device())))
        thread.start()
        thread.join()
    assert found[0][0].stream_id == 0 != side.stream_id
    with torch.accelerator.device_index(1):
        assert torch.ones(1, device="sim").device == torch.device("sim:1")
    assert torch.ones(1, device="sim").device == torch.device("sim:0")
    assert sim.Stream(1).device == torch.device("sim:1")


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(RuntimeError, match="no device 7: there are 2"):
        torch.ones(1, device="sim:7")


# --- Streams and events -----------------------------------------------------------------------------------------------
def test_the_host_goes_on_while_a_stream_works() -> None:
    tensor = torch.zeros(4, device="sim")
    sim.synchronize()
    sim.sleep(FOREVER)
    tensor += 1
    event = reached()
    assert not event.query()
    assert not sim.current_stream().query()
    sim.wake()
    event.synchronize()
    assert event.query()
    assert tensor.tolist() == [1.0] * 4


def test_streams_are_ordered_by_events_alone() -> None:
    """An event waits for its last record alone."""
    first, second = sim.Stream(), sim.Stream()
    with first:
        sim.sleep(FOREVER)
    event = reached(second)
    event.synchronize()
    second.wait_stream(first)
    event.record(second)
    assert not event.query()
    sim.wake()
    event.synchronize()


def test_synchronize_waits_for_the_work_of_every_stream() -> None:
    with sim.Stream():
        sim.sleep(FOREVER)
    waiting = threading.Thread(target=sim.synchronize)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    sim.wake()
    waiting.join(LIMIT)
    assert not waiting.is_alive()


def test_a_stream_is_asked_whether_it_is_done() -> None:
    stream = sim.Stream()
    assert stream.query()
    with stream:
        sim.sleep(FOREVER)
        assert not stream.query()
        sim.wake()
        stream.synchronize()
        deadline = time.monotonic() + LIMIT
        while not stream.query():
            assert time.monotonic() < deadline
        there = torch.ones(4, device="sim")
        stream.synchronize()
        sim.configure(kernel=FOREVER)
        sim.log(True)
        there.add_(1)
        while not sim.log(True):
            assert time.monotonic() < deadline
        assert not any(stream.query() for _ in range(1000)), "it is computed, but not done in the stream's time"
        sim.log(False)
        event = reached(stream)
    sim.repair()  # ends the stream's time, which is an hour ahead
    event.synchronize()
    assert there.tolist() == [2.0] * 4


def test_time_between_events_is_the_devices_and_its_log_agrees() -> None:
    begin, end = sim.Event(enable_timing=True), sim.Event(enable_timing=True)
    source, target = torch.ones(250_000).pin_memory(), torch.empty(250_000, device="sim")
    sim.configure(pinned=0.1)  # 1 MB in 10 ms
    sim.synchronize()
    sim.log(True)
    begin.record(sim.current_stream())
    target.copy_(source, non_blocking=True)
    end.record(sim.current_stream())
    end.synchronize()
    assert begin.elapsed_time(end) >= 10.0
    ((kind, number, stream, began, ended, size),) = sim.log(False)
    assert (kind, number, stream, size) == ("to device", 0, 0, 1_000_000)
    assert 10_000_000 <= ended - began <= begin.elapsed_time(end) * 1e6


def test_a_streams_time_is_modelled_however_late_its_thread_is() -> None:
    """Three kernels and a copy, enqueued at once: each begins when the one before it ends, to the nanosecond."""
    sim.configure(kernel=2e6, pinned=0.001)  # 4 kB in 4 ms
    source, tensor = torch.ones(1000).pin_memory(), torch.ones(4, device="sim")
    sim.synchronize()
    sim.log(True)
    begin = sim.Event(enable_timing=True)
    begin.record(sim.current_stream())
    sim.sleep(20_000_000)  # meanwhile all of it is enqueued
    for _ in range(3):
        tensor.add_(1)
    there = source.to("sim", non_blocking=True)
    end = sim.Event(enable_timing=True)
    end.record(sim.current_stream())
    end.synchronize()
    slept, *kernels, copied = sim.log(False)
    spans = [(began, ended) for _, _, _, began, ended, _ in (slept, *kernels, copied)]
    assert [began for began, _ in spans[1:]] == [ended for _, ended in spans[:-1]]
    assert all(ended - began >= 2_000_000 for began, ended in spans[1:4])
    assert spans[4][1] - spans[4][0] >= 4_000_000
    assert round(begin.elapsed_time(end) * 1e6) >= spans[4][1] - spans[0][0]
    assert (tensor.tolist(), there.sum().item()) == ([4.0] * 4, 1000.0)


# --- Memory -----------------------------------------------------------------------------------------------------------
def test_the_host_cannot_read_device_memory() -> None:
    tensor = torch.ones(4, device="sim")
    with pytest.raises(TypeError, match="can't convert sim:0 device type tensor to numpy"):
        tensor.numpy()
    with pytest.raises(RuntimeError, match="devices"):
        tensor + torch.ones(4)
    with pytest.raises(RuntimeError, match="devices"):
        tensor + torch.ones(4, device="sim:1")


def test_memory_is_cached_for_the_stream_that_freed_it() -> None:
    side = sim.Stream()
    first = torch.empty(3000, device="sim")
    place = first.data_ptr()
    del first
    with side:
        assert torch.empty(3000, device="sim").data_ptr() != place
    assert torch.empty(3000, device="sim").data_ptr() == place


@pytest.mark.heavy
def test_freed_memory_is_poisoned_after_the_work_that_uses_it() -> None:
    sim.sleep(FOREVER)
    used = torch.ones(100, device="sim")
    result = used + 1
    place = used.data_ptr()
    del used
    again = torch.empty(100, device="sim")
    assert again.data_ptr() == place, "given out at once: later work of this stream comes later"
    sim.wake()
    assert result.tolist() == [2.0] * 100
    assert nan(again)


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.heavy
def test_a_stream_that_is_not_told_of_reads_poison(told: bool) -> None:
    side, consumer = sim.Stream(), sim.current_stream()
    with side:
        batch = torch.ones(100, device="sim")
    consumer.wait_stream(side)
    sim.sleep(FOREVER)
    result = batch * 2
    if told:
        batch.record_stream(consumer)
    held = torch.accelerator.memory_stats()["active_bytes.all.current"]
    del batch
    assert (torch.accelerator.memory_stats()["active_bytes.all.current"] == held) is told
    side.synchronize()
    sim.wake()
    assert nan(result) is not told
    if told:
        assert result.tolist() == [2.0] * 100


def test_memory_is_counted_and_limited() -> None:
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    tensor = torch.empty(1 << 20, dtype=torch.uint8, device="sim")
    assert torch.accelerator.memory_allocated() == before + (1 << 20)
    del tensor
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() == before + (1 << 20)
    torch.accelerator.empty_cache()
    sim.configure(memory=torch.accelerator.memory_reserved() + (1 << 20))
    with pytest.raises(torch.OutOfMemoryError, match="out of memory: 4194304 bytes are asked for"):
        torch.empty(4 << 20, dtype=torch.uint8, device="sim")
    kept = torch.empty(1 << 20, dtype=torch.uint8, device="sim")
    del kept
    with sim.Stream():
        torch.empty(1 << 20, dtype=torch.uint8, device="sim")  # another stream's cache is given up for it


# --- Copies -----------------------------------------------------------------------------------------------------------
def test_a_pinned_copy_leaves_the_host_alone_and_a_pageable_one_blocks_it() -> None:
    pinned, pageable = torch.ones(9).pin_memory(), torch.ones(9)
    assert (pinned.is_pinned(), pinned[3:].is_pinned(), pageable.is_pinned()) == (True, True, False)
    sim.sleep(FOREVER)
    target = pinned.to("sim", non_blocking=True)
    event = reached()
    assert not event.query()
    blocked = threading.Thread(target=lambda: pageable.to("sim", non_blocking=True))
    blocked.start()
    blocked.join(0.05)
    assert blocked.is_alive()
    assert not event.query()
    sim.wake()
    blocked.join(LIMIT)
    assert not blocked.is_alive()
    assert target.tolist() == [1.0] * 9


def test_registered_memory_is_read_when_the_copys_turn_comes_and_not_before() -> None:
    """Nothing but the program keeps it as it is until then."""
    source = torch.arange(2048.0)
    address, size = source.data_ptr(), source.nbytes
    cudart, before = sim.cudart(), sim.registered_bytes()[0]
    assert cudart.cudaHostRegister(address, size, 0) == 0
    try:
        assert (source.is_pinned(), source[7:].is_pinned(), sim.registered_bytes()[0]) == (True, True, before + size)
        assert cudart.cudaHostRegister(address, size, 0) != 0, "it is registered"
        sim.sleep(FOREVER)
        target = source.to("sim", non_blocking=True)
        source.fill_(-1)
        sim.wake()
        assert target.cpu().unique().tolist() == [-1]
    finally:
        assert cudart.cudaHostUnregister(address) == 0
    assert (source.is_pinned(), sim.registered_bytes()[0]) == (False, before)
    assert cudart.cudaHostUnregister(address) != 0


def test_a_pinned_buffer_is_not_given_out_while_it_is_copied_and_poisoned_before() -> None:
    source = torch.ones(5000).pin_memory()
    place = source.data_ptr()
    sim.sleep(FOREVER)
    target = source.to("sim", non_blocking=True)
    del source
    assert torch.zeros(5000).pin_memory().data_ptr() != place
    sim.wake()
    assert target.tolist() == [1.0] * 5000
    buffers = [torch.empty(5000, pin_memory=True) for _ in range(2)]
    (again,) = (buffer for buffer in buffers if buffer.data_ptr() == place)
    assert nan(again)


def test_pinned_memory_is_counted() -> None:
    before, _ = sim.pinned_bytes(reset_peak=True)
    buffers = [torch.empty(1 << 16, dtype=torch.uint8).pin_memory() for _ in range(3)]
    assert sim.pinned_bytes() == (before + (3 << 16), before + (3 << 16))
    del buffers
    assert sim.pinned_bytes() == (before, before + (3 << 16))


TYPES = [torch.float32, torch.uint8, torch.int64, torch.float16]


@given(data=st.data())
def test_any_copy_there_and_back_keeps_the_values(data: st.DataObject) -> None:
    def laid_out(tensor: torch.Tensor) -> torch.Tensor:
        how = data.draw(st.sampled_from(["as is", "transposed", "strided", "expanded"]))
        if how == "transposed":
            return tensor.mT.contiguous().mT
        if how == "strided":
            return torch.stack([tensor, tensor], -1)[..., 0]
        return tensor[:1].expand_as(tensor) if how == "expanded" else tensor

    size = data.draw(st.tuples(st.integers(0, 5), st.integers(1, 5)))
    one = torch.randint(0, 99, size).to(data.draw(st.sampled_from(TYPES)))
    one = laid_out(one.pin_memory() if data.draw(st.booleans()) else one)
    there = one.to("sim", data.draw(st.sampled_from(TYPES)), non_blocking=data.draw(st.booleans()))
    there = laid_out(there)
    number = data.draw(st.integers(0, 1))
    expected = laid_out_like(one, there)
    there = there.to(f"sim:{number}")
    assert there.device == torch.device("sim", number)
    assert torch.equal(there.cpu().to(torch.float64), expected)


def laid_out_like(one: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """The values of `one`; in each row the first row's if `there` was expanded."""
    values = one.to(torch.float64)
    return values[:1].expand_as(values) if there.stride(0) == 0 and one.stride(0) != 0 else values


# --- Kernels ----------------------------------------------------------------------------------------------------------
def train(name: str) -> None:
    """Train the same network on the CPU and on sim; the losses agree, and no operator has fallen back."""
    sim.load()
    sim.configure(kernel=0, latency=0)
    nn, optimiser = torch.nn, getattr(torch.optim, name)
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(4)]
    here = nn.Sequential(*body, nn.Flatten(), nn.Dropout(0.0), nn.Linear(128, 5))
    there = copy.deepcopy(here).to("sim")
    batches = [(torch.randn(6, 3, 16, 16), torch.randint(0, 5, (6,))) for _ in range(3)]
    before = sim.fallbacks()

    def losses(network: torch.nn.Module, where: str) -> list[torch.Tensor]:
        steps = optimiser(network.parameters(), lr=0.01)
        out = []
        for images, labels in batches:
            loss = nn.functional.cross_entropy(network(images.to(where)), labels.to(where))
            steps.zero_grad()
            loss.backward()
            steps.step()
            out.append(loss.detach())
        return out

    ours = losses(there, "sim")
    assert sim.fallbacks() == before, "the host waits for no kernel"
    assert torch.stack(ours).cpu().tolist() == pytest.approx(torch.stack(losses(here, "cpu")).tolist(), rel=1e-4)


ALONE = """
import ctypes, importlib, sys, torch
from minidl.device import sim
sim.use()
memory = torch.ones(9)
assert sim.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0) == 0
print("registered:", memory.is_pinned())
sys.path.insert(0, sys.argv[1])
train = importlib.import_module("test_sim").train  # of this file
for optimiser in ("SGD", "Adam"):
    train(optimiser)
print("trained", flush=True)
ctypes.string_at(torch.ones(4, device="sim").data_ptr(), 4)
"""


@pytest.mark.live
def test_a_program_registers_memory_trains_and_dies_where_it_follows_a_devices_address() -> None:
    """Memory that is registered is pinned though it is the first use of the device; the losses are the CPU's.

    In a process of its own: autograd knows the devices that there were at its first backward, and no later ones.
    """
    done = wl.run(ALONE, Path(__file__).parent)
    assert done.stdout == "registered: True\ntrained\n", done.stderr
    assert done.returncode == -signal.SIGSEGV


LATE = """
import torch
from minidl.device import sim
torch.ones(1, requires_grad=True).sum().backward()
sim.load()
weight = torch.ones(1, device="sim", requires_grad=True)
with torch.no_grad():
    print(float(weight * 2))
weight * 2
"""


@pytest.mark.live
def test_a_device_that_came_after_the_first_backward_pass_is_an_error_where_a_gradient_is_asked_for() -> None:
    done = wl.run(LATE)
    assert done.stdout == "2.0\n"
    assert "it was loaded after the first backward pass of this process" in done.stderr
    assert "call minidl.device.sim.use() earlier" in done.stderr


def test_operators_without_a_shape_run_at_once_and_are_listed() -> None:
    before = sim.fallbacks().get("aten::nonzero", 0)
    assert torch.nonzero(torch.tensor([0, 1, 2], device="sim")).tolist() == [[1], [2]]
    assert sim.fallbacks()["aten::nonzero"] == before + 1


def test_random_numbers_are_the_cpus() -> None:
    torch.manual_seed(5)
    here = torch.randn(4)
    torch.manual_seed(5)
    assert torch.equal(torch.randn(4, device="sim").cpu(), here)


def test_a_wrong_shape_is_an_error_of_the_call() -> None:
    with pytest.raises(RuntimeError, match=r"3|size"):
        torch.ones(3, device="sim") @ torch.ones(4, device="sim")


def test_a_failed_kernel_is_raised_later_and_the_device_stays_failed() -> None:
    tensor = torch.ones(2, device="sim")
    sim.sleep(FOREVER)
    sim.fail("unspecified launch failure")
    event = reached()
    sim.wake()
    with pytest.raises(RuntimeError, match="a kernel has failed: unspecified launch failure"):
        event.synchronize()
    with pytest.raises(RuntimeError, match="a kernel has failed"):
        tensor + 1
    sim.repair()
    assert (tensor + 1).tolist() == [2.0, 2.0]


# --- Processes --------------------------------------------------------------------------------------------------------
def _use(queue: Any, kept: torch.Tensor) -> None:
    assert not torch.ones(1).is_pinned()
    try:
        kept.cpu()
    except RuntimeError as error:
        queue.put(str(error))
    del kept


@pytest.mark.live
def test_a_forked_child_is_told_that_it_cannot_use_the_device() -> None:
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_use, args=(queue, torch.ones(2, device="sim")))
    child.start()
    child.join(LIMIT)
    assert child.exitcode == 0
    assert "this process was forked from one that uses the device" in queue.get()
    queue.close()


# --- The build --------------------------------------------------------------------------------------------------------
def compiler(folder: Path, script: str) -> str:
    path = folder / "g++"
    path.write_text(f"#!{sys.executable}\nimport sys\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.live
def test_it_is_compiled_once_for_each_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = tmp_path / "calls"
    out = "open(sys.argv[sys.argv.index('-o') + 1], 'w').close()"
    monkeypatch.setenv("CXX", compiler(tmp_path, f"open({str(calls)!r}, 'a').write('x'); {out}"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    threads = [threading.Thread(target=sim.built) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    library = sim.built()
    assert calls.read_text() == "x"
    assert library.parent == tmp_path / "cache" / "minidl"
    assert f"compiling the simulated accelerator for torch {torch.__version__}, once" in capsys.readouterr().err
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert sim.built() != library
    assert calls.read_text() == "xx"


@pytest.mark.live
def test_what_is_missing_for_the_build_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SimError, match=r"g\+\+ is not found: install it \(Debian: apt install g\+\+\)"):
        sim.built()
    monkeypatch.setenv("CXX", compiler(tmp_path, "sys.exit('sim.cpp:1: error: no such thing')"))
    with pytest.raises(SimError, match=r"does not compile with this torch:\nsim.cpp:1: error: no such thing"):
        sim.built()
    assert os.listdir(tmp_path / "cache" / "minidl") == ["sim.lock"]
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    with pytest.raises(SimError, match="cannot be written"):
        sim.built()


def test_it_does_not_take_the_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "npu")
    with pytest.raises(SimError, match="'npu' has taken it"):
        sim.load()
