"""Plain ports: each makes what an actor needs and notes nothing; a factory can be put in and taken out."""

from __future__ import annotations

from types import SimpleNamespace

from minidl.loader import ports
from minidl.loader.ports import Ports
from minidl.wire.messages import Result


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
