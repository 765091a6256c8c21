"""What the rows cover: events and functions of torch.utils.data, and why some of them have no row.

Interface: `events_of(entry)`, `missing_events()`, `missing_functions()`, `without_row()`, `sections_covered()`;
`purposes(guard)`, what a guard is for, and `meanings(event)`, what an event means, in each language.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterator, Mapping
from typing import Final

from minidl.articles import ARTICLES, sections
from minidl.companion.rows import Entry, entries, read
from minidl.explore.guards import Guard
from minidl.references import names_in, source_of
from minidl.tracefile.events import DEVICE_PART, EVENTS, PARTS, VALIDATION, Event

UPSTREAM_FILES: Final = (
    *("dataloader", "dataset", "distributed", "sampler", "_utils.collate", "_utils.fetch", "_utils.pin_memory"),
    *("_utils.signal_handling", "_utils.worker", "multiprocessing.queue", "multiprocessing.reductions"),
)
"""The files of torch of which each function has a row, or a reason here."""

COMPILED: Final = {
    "torch._C:_error_if_any_worker_fails",
    "torch._C:_set_worker_signal_handlers",
    "torch._C:_set_worker_pids",
    "torch._C:_remove_worker_pids",
}
"""Functions of torch whose source is C++ that a wheel does not hold."""

FUNCTIONS_WITHOUT_ROW: Final = {
    "dataloader:_get_distributed_settings": "DataPipes, which are not implemented here",
    "dataloader:_sharding_worker_init_fn": "DataPipes, which are not implemented here",
    "dataloader:_share_dist_seed": "DataPipes, which are not implemented here",
    "_utils.worker:_RNG*": "random state of worker threads, of which this torch has only the container",
    "multiprocessing.reductions:*cuda*": "tensors on a GPU: a loader's workers send CPU tensors",
    "multiprocessing.reductions:*event*": "CUDA events: a loader's workers send CPU tensors",
    "multiprocessing.reductions:*nested*": "nested tensors, which go the way of the tensors they hold",
    "multiprocessing.reductions:*sparse*": "sparse tensors, which go the way of the tensors they hold",
    "multiprocessing.reductions:*meta*": "meta tensors, which have no memory",
    "multiprocessing.reductions:*typed_storage*": "the older typed storages, which wrap an untyped one",
    "multiprocessing.queue:SimpleQueue*": "the loader uses Queue",
}
"""Pattern of "module:name" -> why it has no row."""

EVENTS_WITHOUT_ROW: Final = {
    "clock_calibration": "a measurement of the recorder, no step of the loader",
    "gc": "a step of the interpreter, none of the loader",
    "workers_chosen": "torch's loader does not choose, nor do the articles",
    **dict.fromkeys(
        (EVENTS[span[0]].name for span in (*PARTS, VALIDATION, DEVICE_PART)),
        "a part of the training step, which is no step of the loader",
    ),
}
"""Event -> why it has no row."""


def events_of(entry: Entry) -> list[str]:
    """Return the names of the events that show a row: those that the table assigns to its section, and its own."""
    mine = [] if entry.topic else [e.name for e in EVENTS.values() if entry.section in sections(e.article)]
    return list(dict.fromkeys([*mine, *entry.events]))


def missing_events() -> list[str]:
    """Return the events without a row and without a reason."""
    shown = {name for entry in entries().values() for name in events_of(entry)}
    return sorted({event.name for event in EVENTS.values()} - shown - EVENTS_WITHOUT_ROW.keys())


def purposes(guard: Guard) -> Mapping[str, str]:
    """Return what the guard is for, in each language."""
    return {"en": guard.purpose, **_translations("guards.ini")[guard.name]}


def meanings(event: Event) -> Mapping[str, str]:
    """Return what the event means, in each language."""
    return {"en": event.meaning, **_translations("events.ini")[event.name]}


@functools.cache
def _translations(name: str) -> Mapping[str, Mapping[str, str]]:
    return read(name)


def sections_covered() -> dict[int, tuple[int, int]]:
    """Return for each article how many of its sections have a row, and how many there are."""
    rows = {entry.section for entry in entries().values() if not entry.topic}
    return {n: (sum(s in rows for s in article.sections), len(article.sections)) for n, article in ARTICLES.items()}


def _upstream_names() -> Iterator[str]:
    for module in UPSTREAM_FILES:
        path = source_of(module, "torch")
        if path is not None:
            yield from (f"{module}:{name}" for name in names_in(path))


def _covered() -> set[str]:
    return {reference for entry in entries().values() for reference in entry.upstream}


def without_row() -> Iterator[tuple[str, str]]:
    """Yield each function of the installed torch that has no row, and why."""
    covered = _covered()
    for name in _upstream_names():
        if name in covered or any(name.startswith(f"{each}.") for each in covered):
            continue
        if any(each.startswith(f"{name}.") for each in covered):
            continue  # a class whose methods have rows
        why = next((why for pattern, why in FUNCTIONS_WITHOUT_ROW.items() if fnmatch.fnmatch(name, pattern)), "")
        yield name, why


def missing_functions() -> list[str]:
    """Return the functions of the installed torch without a row and without a reason."""
    return [name for name, why in without_row() if not why]
