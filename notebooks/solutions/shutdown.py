"""Solutions of 08_shutdown."""

from typing import Any

from minidl.loader.driver import JoinPin, Simple


def _signal(self: Any) -> tuple[Any, ...]:
    return Simple.SET_WORKERS_DONE, *(step for worker in range(len(self.told)) for step in self._sentinel(worker))


def _stop_pin(self: Any) -> tuple[Any, ...]:
    if not self.pin:
        return ()
    return Simple.SET_PIN_DONE, Simple.WAKE_PIN, JoinPin(10.0), Simple.CLOSE_RESULT_QUEUE
