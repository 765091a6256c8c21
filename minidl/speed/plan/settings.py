"""The settings of a loader, of its machine and of its program that a plan compares.

Interface: `LoaderSetting` is one combination; `checked(setting)` refuses what the loader refuses; `choices` lists
the combinations of several values.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields, replace
from typing import Any, Final

from minidl.tracefile.format import TraceError
from minidl.tracefile.words import counted

TRANSPORTS: Final = ("upstream", "arena")
WORKER_METHODS: Final = ("multiprocessing", "thread")

WORKERS: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""The numbers of workers that are compared."""

CLOSE: Final = 0.03
"""Settings that differ by a smaller share are equal."""

MOST_WORKERS: Final = 1024
"""More workers than any machine runs: a larger number is a mistake."""


MOST_AHEAD: Final = 2048
"""More batches in advance than the memory of a machine holds."""


OF_WORKERS: Final = ("prefetch_factor", "transport", "in_order", "persistent_workers", "worker_method")
"""Fields of a LoaderSetting that say nothing without workers."""

OPTIONS: Final = ("batch_size", *OF_WORKERS, "pin_memory", "cpus")
"""Fields in which settings of as many workers may differ."""


class PlanError(TraceError):
    """Nothing can be predicted. The message says why, and what to record or to ask for instead."""


@dataclass(frozen=True, slots=True)
class LoaderSetting:
    """One combination. samples, consumer: how long a sample and a step of the training loop take, as a multiple of the
    recorded time. batch_size: 0 = as recorded. cpus: of the machine that the program may use."""

    num_workers: int
    prefetch_factor: int = 2
    transport: str = "upstream"
    in_order: bool = True
    persistent_workers: bool = False
    pin_memory: bool = False
    worker_method: str = "multiprocessing"
    batch_size: int = 0
    cpus: float = 1.0
    samples: float = 1.0
    consumer: float = 1.0

    @property
    def capacity(self) -> int:
        """Batches that may be ahead of the training loop."""
        return self.num_workers * self.prefetch_factor

    @property
    def way(self) -> str:
        """How batches come to the training loop: by a transport, or "alone", without any, as from threads."""
        return self.transport if self.num_workers and not self.threads else "alone"

    @property
    def threads(self) -> bool:
        """Whether workers are threads of the training loop's process."""
        return self.num_workers > 0 and self.worker_method == "thread"

    @property
    def options(self) -> dict[str, Any]:
        """Those of the OPTIONS that say something."""
        idle = OF_WORKERS if not self.num_workers else ("transport",) if self.threads else ()
        return {name: getattr(self, name) for name in OPTIONS if name not in idle}

    @property
    def name(self) -> str:
        """Return "6 workers", with the loader's options that are not its default."""
        usual = LoaderSetting(1, cpus=self.cpus)
        given = [f"{name}={value}" for name, value in self.options.items() if value != getattr(usual, name)]
        return ", ".join([counted(self.num_workers, "worker") if self.num_workers else "no workers", *given])


FIELDS: Final = tuple(field.name for field in fields(LoaderSetting))
_LEAST: Final = {"num_workers": 0, "prefetch_factor": 1, "batch_size": 0}


def checked(setting: LoaderSetting) -> LoaderSetting:
    """Return the setting. Raises PlanError for one that the loader refuses, or that no machine has."""
    for name, usual in zip(FIELDS, astuple(LoaderSetting(1)), strict=True):
        if type(value := getattr(setting, name)) not in ((int, float) if type(usual) is float else (type(usual),)):
            raise PlanError(f"{name}={value!r}: give a value such as {usual!r}")
    for name, least in _LEAST.items():
        if getattr(setting, name) < least:
            raise PlanError(f"{name}={getattr(setting, name)} is refused by the loader: give {least} or more")
    if setting.num_workers > MOST_WORKERS:
        raise PlanError(f"num_workers={setting.num_workers}: at most {MOST_WORKERS} are simulated")
    if setting.capacity > MOST_AHEAD:
        raise PlanError(f"{setting.num_workers} workers with prefetch_factor={setting.prefetch_factor}: at most "
                        f"{MOST_AHEAD} batches in advance are simulated")  # fmt: skip
    for name, known in (("transport", TRANSPORTS), ("worker_method", WORKER_METHODS)):
        if (value := getattr(setting, name)) not in known:
            raise PlanError(f"{name}={value!r} is refused by the loader: choose from {', '.join(known)}")
    for name in ("cpus", "samples", "consumer"):
        if not 0 < getattr(setting, name) < float("inf"):
            raise PlanError(f"{name}={getattr(setting, name):g}: give a number above 0")
    return setting


def sensible_workers(cpus: float, workers: int) -> list[int]:
    """The numbers to compare: up to twice the CPUs, and twice the recorded workers."""
    return sorted({*(n for n in WORKERS if n <= max(2 * cpus, 2 * workers, 8)), workers})


def choices(base: LoaderSetting, values: Mapping[str, Any]) -> list[LoaderSetting]:
    """Return every combination of these values, checked; what is not asked for is as recorded, or a sensible range.

    values: one, or several, by the name of a LoaderSetting's field. Without workers there is one setting, whatever the
    options of workers are. Raises PlanError.
    """
    asked = {name: value if isinstance(value, (list, tuple, range)) else [value] for name, value in values.items()}
    for name, some in asked.items():
        if name not in FIELDS or not some:
            raise PlanError(f"{name}={some}: give values of {', '.join(FIELDS)}")
    cpus = max((one for one in asked.get("cpus", ()) if isinstance(one, (int, float))), default=base.cpus)
    asked.setdefault("num_workers", sensible_workers(cpus, base.num_workers))
    if not set(values) - {"num_workers", "worker_method", "cpus", "samples", "consumer"}:
        asked["transport"] = TRANSPORTS
    made = [checked(replace(base, **dict(zip(asked, own, strict=True)))) for own in itertools.product(*asked.values())]
    return list(dict.fromkeys(replace(one, **{n: getattr(base, n) for n in OPTIONS} | one.options) for one in made))
