"""The process that forks cells: `python -m minidl.prove.faults.serve`.

It imports all that a cell needs, reads cells from stdin, and forks a process for each, in a session of its own: so a
cell takes a tenth of a second and not two. The process records the run, writes what happened to `told` in the cell's
folder, and exits as any program does.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from multiprocessing import process
from pathlib import Path

import torch

import minidl
import minidl.loader.driver
import minidl.loader.pin_memory
import minidl.loader.worker
import minidl.mini
from minidl.device import sim
from minidl.prove.faults import threads
from minidl.prove.faults.cells import Cell
from minidl.prove.faults.program import POLL, FaultyTraining, fault_at_fork, inject, small_shm, use_transport

# In spawned workers, too, which import the main module.
for module in (minidl.loader.driver, minidl.mini, minidl.loader.pin_memory, minidl.loader.worker):
    module.MP_STATUS_CHECK_INTERVAL = POLL  # type: ignore[attr-defined]


def run_cell(cell: Cell, folder: Path) -> None:
    """Record the cell's run, and tell what happened."""
    prefix = f"/mp-{os.getpid()}"
    process.current_process()._config["semprefix"] = prefix  # type: ignore[attr-defined]
    use_transport(cell.transport)
    if cell.pin:
        sim.use()
    if cell.name == "shm full" and small_shm():
        (folder / "small").touch()
    if cell.in_threads:
        threads.run_cell(cell, folder)
        return
    told = (folder / "told").open("w")  # now: at the end, no descriptor may be left
    with minidl.trace(folder / "trace"):
        run = FaultyTraining(cell, folder)
        if cell.step == "start":
            fault_at_fork(cell.name)
        if cell.step == "make iterator":
            if cell.name == "shm full" and (folder / "small").exists():
                (Path("/dev/shm") / "filler").write_bytes(bytes(1 << 20))
            else:
                inject(cell.name)
        run()
    json.dump(run.errors, told)
    told.close()


def serve() -> tuple[Cell, Path] | None:
    """Fork a process for each request on stdin: there, return the cell and its folder; at the end of stdin, None."""
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            return Cell(**request["cell"]), Path(request["folder"])
        print(child, flush=True)
        deadline = time.monotonic() + request["bound"]
        code: int | None = None
        while code is None and time.monotonic() < deadline:
            pid, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
            if pid and os.WIFSTOPPED(status):
                os.kill(child, signal.SIGKILL)
            elif pid:
                code = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(0.002)
        try:
            print(json.dumps(code), flush=True)
        finally:  # the reader may be gone
            if code is None:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    return None


def main() -> None:
    """Serve, or be the process of one cell."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores SIGINT for what it starts with &
    gc.freeze()
    request = serve()
    if request is None:
        return
    cell, folder = request
    os.setsid()
    for number, name in enumerate(("/dev/null", f"{folder}/stdout", f"{folder}/stderr")):
        fd = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(fd, number)
        os.close(fd)
    run_cell(cell, folder)


if __name__ == "__main__":
    main()
