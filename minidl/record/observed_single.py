"""torch's iterator without workers, followed in its own process.

It asks no context for anything, so its `_next_data` is wrapped; what that does is reported to the same traced lifecycle
and the same traced sampler that minidl's own iterator has.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from minidl.loader.protocol import LoaderEvent, LoaderLifecycle
from minidl.record.harmless import without_a_place
from minidl.record.observed_worker import Announced, Announcer
from minidl.record.ports import TracedPorts, facts


def follow(iterator: Any, loader: Any, ports: TracedPorts, unseen: Iterable[str]) -> None:
    """Record an iterator that has just been made. unseen: names of the events that its trace lacks."""
    ports.describe(observed=True, unseen=sorted(unseen), **facts(iterator, loader))
    lifecycle: LoaderLifecycle = ports.decider(LoaderLifecycle)
    progress: Any = ports.progress()
    sampler_iter, fetcher = iterator._sampler_iter, iterator._dataset_fetcher
    samples_of = Announcer(progress, iterator._dataset_kind, iterator._auto_collation, fetcher.dataset)
    samples_of.fetches = True
    drawn = ports.sampler_iter(iterator._index_sampler, lambda _: sampler_iter)
    iterator._sampler_iter = map(samples_of.taken, drawn)
    fetcher.collate_fn = Announced(fetcher.collate_fn, samples_of.collates)
    for event in (LoaderEvent.START, LoaderEvent.EPOCH_BEGIN, LoaderEvent.PRIMED):
        lifecycle.handle(event)
    known, next_data = weakref.ref(iterator), type(iterator)._next_data

    @without_a_place
    def _next_data() -> Any:
        lifecycle.handle(LoaderEvent.NEXT)
        try:
            data = next_data(known())
        except StopIteration:
            lifecycle.handle(LoaderEvent.EPOCH_END)
            raise
        except BaseException:
            lifecycle.handle(LoaderEvent.RAISE)
            raise
        lifecycle.handle(LoaderEvent.YIELD)
        return data

    iterator._next_data = _next_data
