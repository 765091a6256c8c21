"""torch's iterator without workers, followed in its own process.

It asks no context for anything, so its `_next_data` is wrapped; what that does is reported to the same traced lifecycle
and the same traced sampler that minidl's own iterator has.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from minidl.loader.protocol import LoaderEvent, LoaderLifecycle
from minidl.record.observed_worker import Announced, Announcer
from minidl.record.ports import TracedPorts, facts

_lifecycles: weakref.WeakKeyDictionary[Any, LoaderLifecycle] = weakref.WeakKeyDictionary()


def follow(iterator: Any, loader: Any, ports: TracedPorts, unseen: Iterable[str]) -> None:
    """Record an iterator that has just been made. unseen: names of the events that its trace lacks."""
    ports.describe(observed=True, unseen=sorted(unseen), **facts(iterator, loader))
    lifecycle: LoaderLifecycle = ports.decider(LoaderLifecycle)
    progress: Any = ports.progress()
    sampler_iter, fetcher = iterator._sampler_iter, iterator._dataset_fetcher
    samples_of = Announcer(progress, iterator._dataset_kind, iterator._auto_collation, fetcher.dataset)
    drawn = ports.sampler_iter(iterator._index_sampler, lambda _: sampler_iter)
    iterator._sampler_iter = map(samples_of.taken, drawn)
    fetcher.collate_fn = Announced(fetcher.collate_fn, samples_of.collates)
    for event in (LoaderEvent.START, LoaderEvent.EPOCH_BEGIN, LoaderEvent.PRIMED):
        lifecycle.handle(event)
    _lifecycles[iterator] = lifecycle


def followed(next_data: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """torch's `_next_data`, with what it does reported to the iterator's lifecycle, if it has one."""

    @functools.wraps(next_data)
    def following(iterator: Any) -> Any:
        lifecycle = _lifecycles.get(iterator)
        if lifecycle is None:
            return next_data(iterator)
        lifecycle.handle(LoaderEvent.NEXT)
        try:
            data = next_data(iterator)
        except StopIteration:
            lifecycle.handle(LoaderEvent.EPOCH_END)
            raise
        except BaseException:
            lifecycle.handle(LoaderEvent.RAISE)
            raise
        lifecycle.handle(LoaderEvent.YIELD)
        return data

    return following
