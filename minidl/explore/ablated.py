"""The driver without some of its guards, for the explorer and for demonstrations on the running loader.

Each class here is a driver without one guard: it overrides the method that the guard stands in. `ABLATED` maps the
guard's field of `guards.Protocol` to it, and `ablated(guards)` is a driver without several of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Final

from minidl.loader.driver import (
    Driver,
    Effect,
    Evidence,
    Get,
    JoinPin,
    JoinWorkers,
    Plan,
    PutSentinel,
    Simple,
    Terminate,
)
from minidl.wire.messages import Result, ResumeIteration

ENDLESS: Final = 1e6
"""Seconds, 11 days: the timeout of a wait without the guard that bounds it."""


# --- While an epoch runs ----------------------------------------------------------------------------------------------
class _ExhaustedSentinel(Driver):
    def _exhausted(self, result: Result) -> Effect:
        effect = super()._exhausted(result)
        return self.done() if isinstance(effect, PutSentinel) else effect  # not sent, and counts as sent


class _EpochsToldApart(Driver):
    def _acknowledged(self, message: Any) -> Effect:
        if isinstance(message, ResumeIteration):
            message = ResumeIteration(self.epoch, message.worker_id)
        return super()._acknowledged(message)


class _LoaderTimeout(Driver):
    def __init__(self, *arguments: Any, timeout: float = 0, **options: Any) -> None:
        super().__init__(*arguments, timeout=timeout, **options)
        self.get = Get(timeout or ENDLESS)


class _LivenessCheck(Driver):
    def _failed(self, evidence: Evidence) -> list[int]:
        return []


class _LeaversChecked(Driver):
    def leavers(self, dead: Mapping[int, int | None]) -> list[int]:
        return []


class _PinLivenessCheck(Driver):
    def nothing_came(self, evidence: Evidence) -> Effect:
        return super().nothing_came(dataclasses.replace(evidence, pin_alive=True))


# --- In the shutdown --------------------------------------------------------------------------------------------------
class _PinFirst(Driver):
    def _stages(self) -> Plan:
        return (*self._signal(), *self._join(), *self._stop_pin())  # no events of the lifecycle, which forbids it


class _PinDone(Driver):
    def _tell_pin(self) -> Plan:
        return ()


class _PinToldAtLast(Driver):
    def _tell_pin_at_last(self) -> Plan:
        return ()


class _WakePin(Driver):
    def _stop_pin(self) -> Plan:
        return tuple(step for step in super()._stop_pin() if step is not Simple.WAKE_PIN)


class _BoundedPinJoin(Driver):
    def _stop_pin(self) -> Plan:
        return tuple(JoinPin(ENDLESS) if isinstance(step, JoinPin) else step for step in super()._stop_pin())


class _WorkersDone(Driver):
    def _signal(self) -> Plan:
        return tuple(step for step in super()._signal() if step is not Simple.SET_WORKERS_DONE)


class _Sentinel(Driver):
    def _sentinel(self, worker: int, *, again: bool = False) -> Plan:
        return () if self.closed else super()._sentinel(worker, again=again)


class _BoundedJoins(Driver):
    def _join(self) -> Plan:
        return tuple(JoinWorkers(ENDLESS) if isinstance(step, JoinWorkers) else step for step in super()._join())


class _KilledAtLast(Driver):
    def _leftovers(self) -> Plan:
        return tuple(step for step in super()._leftovers() if not (isinstance(step, Terminate) and step.kill))


ABLATED: Final[dict[str, type[Driver]]] = {
    "sentinel": _Sentinel,
    "exhausted_sentinel": _ExhaustedSentinel,
    "wake_pin": _WakePin,
    "workers_done": _WorkersDone,
    "pin_done": _PinDone,
    "pin_told_at_last": _PinToldAtLast,
    "loader_timeout": _LoaderTimeout,
    "liveness_check": _LivenessCheck,
    "pin_liveness_check": _PinLivenessCheck,
    "leavers_checked": _LeaversChecked,
    "pin_first": _PinFirst,
    "bounded_joins": _BoundedJoins,
    "bounded_pin_join": _BoundedPinJoin,
    "killed_at_last": _KilledAtLast,
    "epochs_told_apart": _EpochsToldApart,
}
"""Field of `guards.Protocol` -> a driver without this guard."""


def ablated(guards: Collection[str], driver: type[Driver] = Driver) -> type[Driver]:
    """`driver` without these guards, which are keys of ABLATED."""
    return type("AblatedDriver", (*(ABLATED[guard] for guard in guards), driver), {}) if guards else driver
