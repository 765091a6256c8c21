"""SIGUSR1 says that the job's time is nearly up. Its handler takes a lock that the interrupted code holds already."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from torch.utils.data import DataLoader

from minidl.prove.lab.case import LabCase, LabOptions, Pictures, Truth, step

CASE = LabCase(
    theme="the program's own code",
    title="a signal handler waits for the code that it interrupted",
    users_see="Jobs that get the scheduler's warning hang until they are killed, and write no checkpoint.",
    fix="Let the handler set a flag, and look at the flag in the loop; or use an RLock.",
    truth=lambda o: Truth("loop", -1, -1, ("signal-handler",), ("lock-held-by-itself",)),
    simulated="the program sends itself the scheduler's signal",
)

STATE_LOCK = threading.Lock()
STATE: dict[str, int] = {}


def save_checkpoint() -> None:
    """Write the state down."""
    with STATE_LOCK:
        print("checkpoint of step", STATE.get("step"), flush=True)


def main(options: LabOptions) -> None:
    wanted = threading.Event()

    def on_warning(signum: int, frame: Any) -> None:
        if options.fixed:
            wanted.set()
        else:
            save_checkpoint()

    signal.signal(signal.SIGUSR1, on_warning)
    for number, _ in enumerate(DataLoader(Pictures(options), **options.loading)):
        with STATE_LOCK:
            STATE["step"] = number
            if number == 4:
                os.kill(os.getpid(), signal.SIGUSR1)
        step(number)
        if wanted.is_set():
            wanted.clear()
            save_checkpoint()
