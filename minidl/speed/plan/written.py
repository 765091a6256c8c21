"""A simulated run as a trace, which every command and view opens beside the recorded one.

Interface: `write(recorded, setting, path)` packs a run of a setting, of so many batches as are simulated. Its manifest
says that it is planned (`"planned"`), and from which recording; views mark all of its steps.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from minidl.loader.dispatcher import Dispatcher
from minidl.loader.protocol import LoaderLifecycle
from minidl.record.decisions import TracedDispatcher
from minidl.record.made_up import LOADER, START, MadeUpRun, Thread
from minidl.speed.plan.loading import MAIN, Loading
from minidl.speed.plan.recorded import Recorded
from minidl.speed.plan.settings import OF_WORKERS, LoaderSetting
from minidl.tracefile.reader import read_trace


class ToldLoading(Loading):
    """A simulated loader whose events are kept."""

    def _deciders(self) -> tuple[LoaderLifecycle, Dispatcher]:
        self.made, setting = MadeUpRun(), self.setting
        shared: Any = SimpleNamespace(emit=self._decided, dispatcher=None, delivered=None)
        workers = max(1, setting.num_workers)
        return LoaderLifecycle(), TracedDispatcher(shared, workers, setting.prefetch_factor, setting.in_order)

    def say(self, thread: Thread, code: int, task: int = -1, worker: int = -1, *own: int) -> None:
        self.made.add(int(self.machine.now), thread, code, (task, worker, *own))

    def _decided(self, code: int, task: int = -1, worker: int = -1, x: int = 0, y: int = 0, z: int = 0) -> None:
        self.say(MAIN, code, task, worker, x, y, z)


def write(recorded: Recorded, setting: LoaderSetting, path: Path) -> Path:
    """Write a setting's simulated run as a packed trace; return its path."""
    run = ToldLoading(recorded.costs(setting), setting, recorded.order(setting)).run()
    names = "dataset dataset_kind sampler collate_fn batch_size made_at dataset_length"
    params = {name: recorded.params[name] for name in names.split() if name in recorded.params}
    params |= {name: getattr(setting, name) for name in ("num_workers", *OF_WORKERS, "pin_memory")}
    params |= {"timeout_s": 0, "transport": "thread" if setting.threads else setting.transport}
    params |= {"batch_size": setting.batch_size} if setting.batch_size else {}
    lines = [{"kind": "loader", "loader": LOADER, **params},
             {"kind": "program_end", "monotonic_ns": START + int(run.machine.now)}]  # fmt: skip
    simulated = {"of": str(recorded.trace.path), "setting": setting.name}
    with tempfile.TemporaryDirectory(prefix="minidl-plan-") as place:
        facts = {"planned": simulated, "cpu_quota": setting.cpus, "command": recorded.trace.manifest.get("command", [])}
        made = run.made.write(Path(place, "run"), lines, facts, host="a simulation, not a machine")
        return read_trace(made).pack(path)
