"""The pin-memory thread's loop, driven by queues of this process; a GPU and its calls are simulated."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minidl.device import sim
from minidl.loader import pin_memory as pinning
from minidl.loader.pin_memory import PinMemoryThread, _pin_memory_loop, accelerator_type, pin_memory
from minidl.loader.ports import Ports
from minidl.loader.protocol import PinLifecycle, PinState
from minidl.wire.messages import Result, Sentinel, WorkerExhausted


@pytest.fixture(autouse=True)
def simulated(simulate: None) -> None:
    """Every test of this file has an accelerator."""


class Loop:
    """The loop in a thread of its own, as the loader runs it."""

    def __init__(self, device: str = sim.NAME, ports: Ports | None = None) -> None:
        self.results: Any = queue.Queue()
        self.ready: Any = queue.Queue()
        self.done = threading.Event()
        arguments = (self.results, self.ready, 0, self.done, device, ports or Ports())
        self.thread = PinMemoryThread(_pin_memory_loop, arguments, PinLifecycle())

    def run(self, *messages: Any) -> list[Any]:
        """Let the loop take the messages and end; what it has handed on."""
        for message in messages:
            self.results.put(message)
        self.thread.start()
        handed_on = [self.ready.get(timeout=60) for message in messages if not isinstance(message, Sentinel)]
        self.done.set()
        self.results.put(Sentinel())
        self.thread.join(60)
        return handed_on


def test_results_are_pinned_and_other_messages_handed_on() -> None:
    loop = Loop()
    ended = WorkerExhausted(1)
    result, other = loop.run(Result(0, 0, torch.arange(3)), ended)
    assert (result.idx, result.data.tolist(), other) == (0, [0, 1, 2], ended)
    assert loop.thread.failure is None


def test_the_ports_make_what_pins_for_the_device() -> None:
    class Noting(Ports):
        def pinning(self, pin_memory: Any, device: str) -> Any:
            return lambda result: (pin_memory(result.data), device)

    (result,) = Loop("a device", Noting()).run(Result(0, 0, 7))
    assert result.data == (7, "a device")


def test_a_sentinel_wakes_it_and_is_not_handed_on() -> None:
    loop = Loop()
    (result,) = loop.run(Sentinel(), Result(0, 0, 7))
    assert (result.data, loop.ready.qsize()) == (7, 0)


def test_it_looks_for_its_done_event_when_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "MP_STATUS_CHECK_INTERVAL", 0.01)
    loop = Loop()
    loop.thread.start()
    loop.done.set()
    loop.thread.join(60)
    assert not loop.thread.is_alive()
    assert loop.thread.failure is None


class SetsDone:
    """Sets the loop's done event while it is pinned."""

    def __init__(self, done: threading.Event) -> None:
        self.done = done

    def pin_memory(self) -> SetsDone:
        self.done.set()
        return self


def test_after_the_done_event_nothing_is_handed_on() -> None:
    loop = Loop()
    loop.results.put(Result(0, 0, SetsDone(loop.done)))
    loop.thread.start()
    loop.thread.join(60)
    assert loop.ready.empty()
    assert not loop.thread.is_alive()


class SetsDoneWhenRead(queue.Queue):  # type: ignore[type-arg]
    """Sets the done event as its first message is read."""

    done: threading.Event

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        message = super().get(block, timeout)
        self.done.set()
        return message


def test_a_result_that_comes_with_the_done_event_is_not_pinned() -> None:
    loop = Loop()
    results = SetsDoneWhenRead()
    results.done = loop.done
    arguments = (results, loop.ready, 0, loop.done, sim.NAME, Ports())
    thread = PinMemoryThread(_pin_memory_loop, arguments, PinLifecycle())
    results.put(Result(0, 0, torch.arange(3)))
    thread.start()
    thread.join(60)
    assert loop.ready.empty()
    assert thread.failure is None


class Refuses:
    def pin_memory(self) -> None:
        raise ValueError("not this one")


def test_another_error_ends_the_thread_which_keeps_it() -> None:
    loop = Loop()
    loop.results.get = SimpleNamespace()  # what it reads from is broken
    loop.thread.start()
    loop.thread.join(60)
    assert isinstance(loop.thread.failure, TypeError)
    assert loop.thread.lifecycle.state is PinState.ENDED


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """An accelerator that is available; the devices that were chosen."""
    chosen: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    return chosen


def test_the_thread_works_for_its_loaders_device(accelerator: list[Any]) -> None:
    (result,) = Loop("cuda").run(Result(0, 0, "text needs no pinning"))
    assert result.data == "text needs no pinning"
    assert accelerator == [0]


def test_the_accelerators_type(accelerator: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert accelerator_type() == "cuda"
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert accelerator_type() is None


def test_without_an_accelerator_one_can_be_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    sim.load_if_wanted()
    assert accelerator_type() == sim.NAME
    monkeypatch.delenv("MINIDL_SIMULATE_DEVICE")
    assert accelerator_type() is None


def test_what_holds_no_tensor_stays_as_it_is() -> None:
    thing = object()
    assert pin_memory(thing, sim.NAME) is thing


class Pinnable:
    def pin_memory(self) -> str:
        return "pinned"


@pytest.mark.parametrize("data", [Pinnable(), Refuses()])
def test_a_result_stays_its_tasks_and_the_loop_goes_on(data: Any) -> None:
    result, second = Loop().run(Result(4, 1, data, (2, b"state")), Result(1, 0, 5))
    assert (result.idx, result.worker_id, result.state, second.data) == (4, 1, (2, b"state"), 5)
    if isinstance(data, Pinnable):
        assert result.data == "pinned"
        return
    assert (result.data.where, result.data.place) == ("in pin memory thread for device 0", "Task 4: pinning.")
    with pytest.raises(ValueError, match="not this one"):
        result.data.reraise()


def test_the_thread_names_itself_and_takes_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(torch, "set_num_threads", called.append)
    monkeypatch.setattr(pinning.torch.multiprocessing, "_set_thread_name", called.append)
    loop = Loop()
    assert (loop.thread.name, loop.thread.daemon) == ("pin_memory", True)
    loop.run()
    assert called == [1, "pt_data_pin"]
