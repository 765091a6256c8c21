"""Plain ports: each makes what an actor needs and notes nothing; a factory can be put in and taken out."""

from __future__ import annotations

from types import SimpleNamespace

from minidl.loader import ports
from minidl.loader.ports import Ports, Transport
from minidl.loader.progress import ProgressBoard
from minidl.wire.messages import Result
from minidl.wire.queues import SharedFlag


def test_pinning_pins_a_results_data() -> None:
    assert Ports().pinning(lambda data: [data, "pinned"], device="sim")(Result(0, 0, 5)) == [5, "pinned"]


def test_a_device_stage_copies_on_the_devices_stream() -> None:
    device = SimpleNamespace(stream=lambda: "a stream")
    assert Ports().device_stream(device, 2, None) == "a stream"  # type: ignore[arg-type, comparison-overlap]


def test_a_factory_is_used_until_its_undo() -> None:
    class Other(Ports): ...

    undo = ports.use(Other)
    try:
        assert type(ports.new_ports()) is Other
    finally:
        undo()
    assert type(ports.new_ports()) is Ports


def test_what_a_worker_gets() -> None:
    ports = Ports()
    flag = Transport().done_event()
    assert (type(flag), ports.done_event("workers", flag)) == (SharedFlag, flag)
    context = SimpleNamespace(Process=lambda **options: options)
    assert ports.worker(context, 1, print, (5,)) == {"target": print, "args": (5,), "daemon": True}
    assert ports.envelope(Result(0, 0, 5)).message == Result(0, 0, 5)
    progress = ports.worker_progress(ProgressBoard(2), 1)
    progress.begin(4, [7])
    assert progress.place().startswith("Task 4 of worker 1")
