"""The facts in a manifest and in the lines of side files: JSON, whose types and sizes are checked when read.

Interface: `read_facts(text)` -> `Facts`, the object and the names of what was left out of it; `facts_in(text)` is the
object alone, or {}. `loads` parses any JSON of a trace, `is_long` says whether a value of it is a number that no column
holds, and `time_of_day(manifest)` is what its clock lacks of the time of day.

A fact with the wrong type, or with a number out of range, is left out, as if its writer had not known it. A reader of
facts therefore only tests whether a fact exists. Unknown names are kept unchanged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

LATEST: Final = 1 << 62
"""The largest time (ns of any clock) and size (bytes) in a trace: sums of two still fit 64 bits."""

MOST_RANKS: Final = 1 << 20
"""A larger number of ranks is a damaged record."""

MOST_WORKERS: Final = 1 << 16
MOST_TASKS: Final = 1 << 31

_TIME, _COUNT, _INT64 = range(LATEST), range(MOST_TASKS), range(-(1 << 63), 1 << 63)
_PID, _WORKER, _RANK = range(1 << 32), range(-1, MOST_WORKERS), range(-1, MOST_RANKS + 1)

_TIMES: Final = ("monotonic_ns", "realtime_ns", "start_monotonic_ns", "start_realtime_ns", "at_ns", "error_ns")
NUMBERS: Final = {
    **dict.fromkeys(_TIMES, _TIME),
    **dict.fromkeys(("dataset_length", "arena_bytes", "ring_bytes", "dataloader"), range(LATEST)),
    **dict.fromkeys(("offset_ns", "sampler_seed"), _INT64),
    **dict.fromkeys(("batch_size", "prefetch_factor", "prefetch", "sampler_repeats", "restart", "id"), _COUNT),
    **dict.fromkeys(("cpus", "cpus_allowed"), _COUNT),
    **dict.fromkeys(("pid", "ppid", "tid"), _PID),
    **dict.fromkeys(("worker", "num_workers"), _WORKER),
    **dict.fromkeys(("rank", "local_rank", "world_size"), _RANK),
    "loader": range(1 << 16),
    "ident": range(1 << 64),
    "seed": range(1 << 64),
}
"""Facts that are whole numbers, each with its range."""

_TEXTS: Final = (
    "kind", "role", "name", "text", "error", "why", "iterator", "dataset", "dataset_kind", "sampler", "made_at",
    "collate_fn", "transport", "pin_memory_device", "host", "boot_id", "detail",
)  # fmt: skip
_KINDS: Final[dict[str, type | tuple[type, ...]]] = {
    **dict.fromkeys(_TEXTS, str),
    **dict.fromkeys(("command", "at", "unseen", "lacks", "argv"), list),
    **dict.fromkeys(("versions", "clock", "cpu_time", "explored", "planned"), dict),
    **dict.fromkeys(("timeout_s", "cpu_quota"), (int, float)),
}
_NEVER_NONE: Final = frozenset({*(name for name, kind in _KINDS.items() if kind in (list, dict)), *_TIMES})
"""Facts for which None means unknown; for others the program may have chosen None."""


class Facts(NamedTuple):
    """A JSON object. unsound: the names of the facts that were left out because of invalid values."""

    said: dict[str, Any]
    unsound: list[str]


def read_facts(text: bytes) -> Facts:
    """Read one JSON object. Raises ValueError if it is none; RecursionError if it is nested too deeply."""
    said = loads(text)
    if not isinstance(said, dict):
        raise ValueError(f"a {type(said).__name__} where a JSON object belongs")
    said = {name: value for name, value in said.items() if value is not None or name not in _NEVER_NONE}
    unsound = [name for name, value in said.items() if value is not None and not _is_sound(name, value)]
    return Facts({name: value for name, value in said.items() if name not in unsound}, unsound)


def facts_in(text: bytes | None) -> dict[str, Any]:
    """The facts of one JSON object, such as a manifest; {} if there is none, or if it makes no sense."""
    try:
        return read_facts(text or b"{}").said
    except (ValueError, RecursionError):
        return {}


def time_of_day(manifest: Mapping[str, Any]) -> int:
    """What the clock of a trace lacks of the time of day, ns; 0 = unknown."""
    wall = manifest.get("clock", {}).get("realtime_minus_monotonic_ns")
    return wall if type(wall) is int else 0


def _is_sound(name: str, value: object) -> bool:
    if name in NUMBERS:
        return type(value) is int and value in NUMBERS[name]
    if name in _KINDS:
        return isinstance(value, _KINDS[name]) and not isinstance(value, bool)
    return not is_long(value)


def is_long(value: object) -> bool:
    """Whether this is a whole number of more than 64 bits."""
    return isinstance(value, int) and not -(1 << 63) <= value < 1 << 64


def loads(text: bytes) -> Any:
    """Parse JSON; NaN and Infinity, which strict parsers in viewers refuse, stay texts."""
    return json.loads(text, parse_constant=str, parse_float=_finite)


def _finite(digits: str) -> float | str:
    number = float(digits)
    return number if math.isfinite(number) else digits
