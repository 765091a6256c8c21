"""Solutions of 10_bottleneck."""

from collections.abc import Mapping

import minidl
from minidl.tracefile.events import CONSUMER, NEXT


def share_of_waiting(trace: minidl.Trace) -> float:
    spans = trace.spans()
    waiting, own = (spans[spans["code"] == code[0]] for code in (NEXT, CONSUMER))
    waited = int((waiting["end"] - waiting["begin"]).sum())
    return waited / (waited + int((own["end"] - own["begin"]).sum()))


def rule(causes: Mapping[str, int], consumer: int) -> str:
    steady = sum(causes.values()) - causes["starting and ending workers"] - causes["the first batch"]
    if steady < 0.1 * (steady + consumer):
        return "not input-bound"
    supply = causes["samples"] + causes["collation"] + causes["pickling and sending"]
    return "head-of-line blocking" if causes["one batch while later ones are ready"] > supply else "supply-bound"
