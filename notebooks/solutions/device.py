"""Solutions of 07_device."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import minidl
from minidl.tracefile.events import COPY, DEVICE_COMPUTE

NONE = object()


def ahead(batches: Iterable[Any], copy: Callable[[Any], Any]) -> Iterator[Any]:
    before = NONE
    for batch in batches:
        following = copy(batch)
        if before is not NONE:
            yield before
        before = following
    if before is not NONE:
        yield before


def overlapped(trace: minidl.Trace) -> int:
    spans = trace.spans()
    copies, steps = (spans[spans["code"] == code[0]] for code in (COPY, DEVICE_COMPUTE))
    hidden = 0
    for copy in copies:
        for step in steps:
            hidden += max(0, int(min(copy["end"], step["end"])) - int(max(copy["begin"], step["begin"])))
    return hidden
