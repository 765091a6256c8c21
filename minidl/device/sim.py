"""`sim`, a simulated accelerator for torch: the device path runs on a machine without a GPU, through the same code.

    from minidl.device import sim
    sim.load()                                    # compiles sim.cpp once for each torch; needs g++
    batch = torch.ones(8).pin_memory().to("sim", non_blocking=True)

`load` makes the devices "sim:0" and "sim:1" known to torch: with streams, events, pinned memory and a caching
allocator, reached by torch.accelerator, torch.Stream, torch.Event and this module, which is then also `torch.sim`.
sim.cpp describes how they work. torch.accelerator offers them while MINIDL_SIMULATE_DEVICE=1. Load it before the first
backward pass of the process: torch's autograd knows only the devices that there were then.

What is simulated, and how far:

| of an accelerator | here |
|---|---|
| operators | torch's CPU operators, later, in a stream's thread; several take as long as one processor core needs |
| operators with data-dependent shapes, random numbers | at once, with copies; the host waits; `fallbacks` lists them |
| convolution, views, copies, `item` | operators of our own |
| random numbers | the CPU's generator: equal seeds give the CPU's numbers |
| priorities of streams | taken, without effect |
| time of copies and kernels | what `configure` sets, or as long as the processor takes, if that is longer |
| pinned memory | the allocator's own, and what is registered (`cudart`); its pages are not locked |
| autocast, torch.profiler, graphs, peer access, memory pools | none |
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch

NAME: Final = "sim"
"""The devices' type."""

VARIABLE: Final = "MINIDL_SIMULATE_DEVICE"

SOURCE: Final = Path(__file__).with_suffix(".cpp")
FLAGS: Final = ("-std=c++20", "-O1", "-fPIC", "-shared", "-w", "-DAT_PER_OPERATOR_HEADERS")

SETTINGS: Final = {
    "pinned": "GB/s", "pageable": "GB/s", "device": "GB/s", "latency": "ns", "kernel": "ns", "memory": "bytes",
    "lockable": "bytes",
}  # fmt: skip
"""What `configure` sets, and its units."""


class SimError(RuntimeError):
    """The simulated accelerator cannot be built or loaded."""


class NoCompilerError(SimError):
    """There is no C++ compiler to build it with."""


def is_wanted() -> bool:
    """Whether the environment asks for the simulated accelerator."""
    return os.environ.get(VARIABLE) == "1"


def load_if_wanted() -> None:
    """Load it if the environment asks for it; SimError if it cannot be built."""
    if is_wanted():
        load()


def load() -> None:
    """Make the devices known to torch; compile them first if that was not done. SimError says what is missing."""
    if is_loaded():
        return
    taken = torch._C._get_privateuse1_backend_name()
    if taken != "privateuseone":
        raise SimError(f"simulated accelerator: torch has room for one such device, and {taken!r} has taken it")
    torch.ops.load_library(str(built()))  # type: ignore[no-untyped-call]
    torch.utils.rename_privateuse1_backend(NAME)  # type: ignore[attr-defined]
    torch._register_device_module(NAME, sys.modules[__name__])  # type: ignore[no-untyped-call]
    atexit.register(_end)


def use() -> None:
    """`load`, and let torch.accelerator offer the devices, in this process and in those that it starts."""
    os.environ[VARIABLE] = "1"
    load()


def is_loaded() -> bool:
    """Whether this process knows the devices."""
    return torch._C._get_privateuse1_backend_name() == NAME


# --- The library ------------------------------------------------------------------------------------------------------
def built() -> Path:
    """Return the library for the installed torch, compiled at the first call on this machine.

    It lies in $XDG_CACHE_HOME/minidl, or ~/.cache/minidl. Processes that ask at the same time wait for one of them.
    """
    about = SOURCE.read_bytes() + repr((torch.__version__, FLAGS, os.environ.get("CXX"))).encode()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minidl"
    library = cache / f"sim-torch-{torch.__version__}-{hashlib.sha256(about).hexdigest()[:12]}.so"
    if not library.is_file():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with _locked(cache / "sim.lock"):
                if not library.is_file():
                    _compile(library)
        except OSError as error:
            raise SimError(f"simulated accelerator: {cache} cannot be written: {error}: set XDG_CACHE_HOME") from error
    return library


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(library: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None or shutil.which(compiler) is None:
        raise NoCompilerError(
            f"simulated accelerator: it is compiled once, and {compiler or 'g++'} is not found: install it "
            f"(Debian: apt install g++), name another in CXX, or do without {VARIABLE}"
        )
    draft = library.with_suffix(f".{os.getpid()}")
    root = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    command = [compiler, *FLAGS, abi, f"-I{root / 'include'}", str(SOURCE), "-o", str(draft)]
    print(f"minidl: compiling the simulated accelerator for torch {torch.__version__}, once ...", file=sys.stderr)
    start = time.monotonic()
    done = subprocess.run([*command, f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"], capture_output=True, text=True)
    if done.returncode:
        draft.unlink(missing_ok=True)
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise SimError("simulated accelerator: it does not compile with this torch:\n" + "\n".join(errors[:10]))
    draft.rename(library)
    print(f"minidl: compiled in {time.monotonic() - start:.0f} s: {library}", file=sys.stderr)


def _end() -> None:
    if not forked():
        repair()  # a stream's thread must not run while the process takes torch apart


# --- For torch: its module for a type of device -----------------------------------------------------------------------
def _lazy_init() -> None:
    """Do nothing. torch 2.11 calls it before it lets `torch.accelerator.synchronize` wait for a device."""


def is_available() -> bool:
    """Whether torch.accelerator offers the devices: while the environment asks for them."""
    return is_wanted()


def device_count() -> int:
    """Return the number of devices."""
    return 2


def current_device() -> int:
    """Return the number of the device that this thread uses if none is named."""
    return torch.accelerator.current_device_index()


def set_device(device: int | str | torch.device) -> None:
    """Set it."""
    torch.accelerator.set_device_index(device)


def get_device_name(device: object = None) -> str:
    """Return what is shown as the device's name."""
    return "simulated accelerator"


def Stream(device: int | str | torch.device | None = None, priority: int = 0) -> torch.Stream:  # noqa: N802
    """Return a new stream."""
    return torch.Stream(
        device=torch.device(NAME, device) if isinstance(device, int) else device or NAME, priority=priority
    )


def Event(enable_timing: bool = False) -> torch.Event:  # noqa: N802
    """Return a new event."""
    return torch.Event(NAME, enable_timing=enable_timing)


def current_stream(device: int | str | torch.device | None = None) -> torch.Stream:
    """Return the stream that this thread's work for `device` goes to."""
    return torch.accelerator.current_stream(device)


def stream(stream: torch.Stream) -> torch.Stream:
    """Return a context in which `stream` is the current one."""
    return stream


def synchronize(device: int | str | torch.device | None = None) -> None:
    """Wait for all work of a device."""
    torch.accelerator.synchronize(device)


class cudart:  # noqa: N801  # as torch.cuda's: called, it is the runtime
    """What `torch.cuda.cudart()` offers for memory of the program's own. 0 is success."""

    @staticmethod
    def cudaHostRegister(address: int, size: int, flags: int) -> int:  # noqa: N802
        """Let the devices read host memory by themselves: the program keeps it as it is until they have."""
        return 0 if _ops().register_memory(address, size) else 2

    @staticmethod
    def cudaHostUnregister(address: int) -> int:  # noqa: N802
        """Undo it. No device may still read from there."""
        return 0 if _ops().unregister_memory(address) else 1

    @staticmethod
    def cudaGetErrorString(status: int) -> str:  # noqa: N802
        """Say what a status means."""
        return ("no error", "it is not registered", "more memory than may be locked")[status]


def manual_seed_all(seed: int) -> None:
    """Do nothing: the random numbers are the CPU's."""


def _is_in_bad_fork() -> bool:
    return forked()


# --- What only a simulation can do ------------------------------------------------------------------------------------
def configure(**settings: float) -> dict[str, float]:
    """Change the model; return the values before.

    pinned, pageable: GB/s of copies between host and device. device: GB/s of copies inside a device. latency: ns of
    any copy. kernel: ns of any kernel, at least. memory: bytes of a device. lockable: bytes that may be registered.
    """
    before = {name: value for name, value in model().items() if name in settings}
    for name, value in settings.items():
        _ops().configure(name, float(value))
    return before


def model() -> dict[str, float]:
    """Return all that `configure` sets, as it is."""
    return {name: float(_ops().setting(name)) for name in SETTINGS}


def sleep(ns: int) -> None:
    """Keep the current stream busy for so long, or until `wake`."""
    _ops().sleep(ns)


def wake() -> None:
    """End all sleeps that are enqueued."""
    _ops().wake()


def fail(why: str) -> None:
    """Let the next kernel of the current stream fail: the device is unusable from then on."""
    _ops().fail(why)


def repair() -> None:
    """Drop all work, and make failed devices usable again."""
    _ops().repair()


def log(on: bool = True) -> list[tuple[str, int, int, int, int, int]]:
    """Return and forget what the devices have done: kind, device, stream, begin, end (CLOCK_MONOTONIC ns), bytes.

    on: whether they note it from now on. kind: "kernel", "to device", "to host", "on device" or "sleep".
    """
    kinds = ("kernel", "to device", "to host", "on device", "sleep")
    return [(kinds[kind], *rest) for kind, *rest in _ops().log(on).tolist()]


def pinned_bytes(reset_peak: bool = False) -> tuple[int, int]:
    """Return the bytes of pinned memory that are in use, now and at the peak."""
    now, peak = _ops().pinned_bytes(reset_peak)
    return now, peak


def registered_bytes() -> tuple[int, int]:
    """Return the bytes of memory that are registered now, and how often memory was."""
    now, times = _ops().registered_bytes()
    return now, times


def fallbacks() -> dict[str, int]:
    """Return the operators that ran on the CPU while the host waited, and how often."""
    return dict(_ops().fallbacks())


def forked() -> bool:
    """Whether this process was forked from one that uses the devices, and so cannot use them."""
    return bool(_ops().forked())


def _ops() -> Any:
    return torch.ops.minidl_sim
