"""How long is long: the lengths of waits by which a hang is told from what is slow. Seconds.

`is_long` is asked of a recorded wait, whose run's earlier waits are known; the rest is for what is looked at.
"""

from __future__ import annotations

from typing import Final

LONG: Final = 5.0
"""From which on a recorded wait is a hang, or a stall. After as many the loader looks whether its workers live."""

SUDDEN: Final = 1.0
"""From which on a recorded wait of an ended run is a hang, if it is ten times the longest one before."""

STILL: Final = 3.0
"""From which on a thread's sleep is a hang of a run without a trace: nothing is known of the waits before it. As far
apart are two looks that are compared: the first may see what moves for the last time."""

SLOW: Final = 10.0
"""The same, in waits for what may only be slow: a server, a disk, a child."""

ENDLESS: Final = 60.0
"""A sleep that lasts longer from now on is a hang; who sleeps for less may still answer."""

OWN_CODE: Final = 30.0
"""The same of a wait in the loop's own code, which may upload, evaluate or save between two batches as it likes."""

ENDLESS_WORK: Final = 5
"""A computation is called a hang if it has lasted so many times as long as the longest wait before, and long."""

POLLED: Final = 5.3
"""Who waits for a task or a batch wakes up every 5 s, so one that slept for longer is in something else."""

JOINED: Final = 5.0
"""For so long a shutdown waits for its workers, and again for each that it has sent a signal; of both loaders."""

LOOK: Final = 1.0
"""So long a look of the watchdog takes, and so late it may be: it reads events once a second."""


def is_long(seconds: float, past: float) -> bool:
    """Whether a wait is a hang by itself and by the longest one before it."""
    return seconds >= max(LONG, 2 * past)
