"""Use of the device: bytes, copy time, how much of it was hidden behind compute, and waiting times.

Interface: `device_use(trace, loader)` -> `DeviceUse`, None if the loader's batches went to no device. All durations
are by the device's clock, except the host's waiting. Rule of use: copy and transform time is hidden if the consumer's
stream did not wait for it; only `minidl.span` can show whether that stream computed meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minidl.speed.stages import covered
from minidl.tracefile import events as ev
from minidl.tracefile.arrays import Rows
from minidl.tracefile.spans import total
from minidl.tracefile.words import duration, percent, plain, size

if TYPE_CHECKING:
    from minidl.tracefile.reader import Trace


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """One loader's device stage. Times in ns. pageable: the part of `bytes` that came from pageable memory.

    hidden: copy and transform time that no stream waited for. stalled: waiting of the consumer's stream for batches.
    host_wait: waiting of the host for the device. computed, idle: the time from the first to the last marked span on
    the device, within such spans and outside; both 0 without any. error: the clock's largest. failed: why the device
    failed or hung, if it did.
    """

    batches: int
    bytes: int
    pageable: int
    copy: int
    transform: int
    hidden: int
    stalled: int
    host_wait: int
    computed: int
    idle: int
    error: int
    simulated: bool
    failed: str = ""

    @property
    def hidden_share(self) -> float:
        """The hidden share of copy and transform time; 1 if there was none."""
        return self.hidden / max(1, self.copy + self.transform) if self.copy + self.transform else 1.0

    @property
    def idle_share(self) -> float:
        """The idle share of the time from the first marked span on the device to the last; 0 without any."""
        return self.idle / max(1, self.computed + self.idle)

    def text(self) -> str:
        """The figures in one line."""
        memory = f", {size(self.pageable)} of it pageable" if self.pageable else ""
        parts = [
            f"{self.batches} copied, {size(self.bytes)}{memory}, in {duration(self.copy)}",
            *([f"transform {duration(self.transform)}"] if self.transform else []),
            f"{percent(self.hidden_share)} of that hidden",
            f"its stream waited {duration(self.stalled)}, the host {duration(self.host_wait)}",
            *([f"idle {percent(self.idle_share)} of its time"] if self.computed else []),
            f"clock ± {duration(self.error)}",
            *([f"it failed: {plain(self.failed)}"] if self.failed else []),
        ]
        return f"device{' (simulated)' * self.simulated}: " + ", ".join(parts)


def device_use(trace: Trace, loader: int, spans: Rows | None = None) -> DeviceUse | None:
    """Sum up the device stage of `loader`; spans: the trace's, if they are known already."""
    spans = trace.spans() if spans is None else spans
    spans = spans[(spans["loader"] == loader) & (spans["end"] >= 0)]
    enqueued, copies, transforms, waits, host, marked = (
        spans[spans["code"] == span[0]]
        for span in (ev.H2D, ev.COPY, ev.TRANSFORM, ev.DEVICE_WAIT, ev.HOST_WAIT, ev.DEVICE_COMPUTE)
    )
    if not len(enqueued):
        return None
    aside = np.concatenate([copies, transforms])
    computed, whole = covered(marked)
    calibrations = trace.events[(trace.events["code"] == ev.CLOCK_CALIBRATION) & (trace.events["loader"] == loader)]
    return DeviceUse(
        batches=len(copies),
        bytes=int(copies["bx"].sum()),
        pageable=int(enqueued["by"].sum()),
        copy=total(copies),
        transform=total(transforms),
        hidden=total(aside) - _overlap(aside, waits),
        stalled=total(waits),
        host_wait=total(host),
        computed=computed,
        idle=whole - computed,
        error=int(calibrations["y"].max(initial=0)),
        simulated=bool(enqueued["ez"].any()),
        failed=trace.device_failure(loader),
    )


def _overlap(spans: Rows, others: Rows) -> int:
    """The overlap in ns of the spans with others that follow each other."""
    if not len(others):
        return 0
    edges = np.stack([others["begin"], others["end"]], axis=1).ravel()
    sums = np.stack([np.zeros(len(others), np.int64), others["end"] - others["begin"]], axis=1).ravel().cumsum()
    start = edges[0]  # floats can hold the ns of a trace, but not those since boot
    until, since = (np.interp((spans[name] - start).astype(float), edges - start, sums) for name in ("end", "begin"))
    return round(float((until - since).sum()))
