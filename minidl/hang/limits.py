"""The lengths of waits that separate a hang from slow work. Seconds.

`is_long` judges a recorded wait, because the earlier waits of its run are known. The other limits judge evidence.
"""

from __future__ import annotations

from typing import Final

LONG: Final = 5.0
"""A recorded wait of this length is a hang, or a stall. After the same time the loader checks its workers."""

SUDDEN: Final = 1.0
"""A recorded wait of this length in an ended run is a hang if it is ten times the longest earlier wait."""

STILL: Final = 3.0
"""A thread's sleep of this length is a hang if nothing that the doctor has not seen could end it. Two looks that are
compared are this far apart: the first may see the last movement before the hang."""

OPEN: Final = 30.0
"""The same for a wait that may only be slow: a server, a disk, a child, a holder of a lock or another rank may end it.
By a trace it also lasts `ENDLESS_WORK` times as long as the longest wait before."""

ENDLESS: Final = 600.0
"""A sleep whose remaining time is longer is a hang; a thread in a shorter sleep may still answer."""

ENDLESS_WORK: Final = 5
"""Work is a hang if it is long, and lasts this many times as long as the longest earlier wait."""

ENDLESS_COMPUTING: Final = 600.0
"""The same for a thread that computes, or would if it had a CPU: nothing shows how much work one sample is."""

POLLED: Final = 5.3
"""A thread that waits for a task or a batch wakes up every 5 s; a thread that slept longer is in another call."""

JOINED: Final = 5.0
"""The time for which the shutdown of both loaders waits for a worker, and again after each signal that it sends."""

EARLY: Final = 2.0
"""A wait of this length is looked at silently: then a run that is killed before the alarm, or whose loader has a short
timeout, has evidence."""

GROWS: Final = (2.6, 1.8)
"""Factors between the looks of one wait: the second look comes at 2.6 times the first one's moment, each later one at
1.8 times that of the look before it: 2, 5, 9, 17 and 30 s. The second is `STILL` after the first. At 30 s a wait that
may only be slow is `OPEN`: a worker that starts imports for some seconds."""

OLD: Final = 10.0
"""A finding by a look that is this much older than the end of its recording says so."""

LONGER: Final = 3
"""An early look also needs a wait this many times as long as the longest one before: slow work is no hang."""

LOOK: Final = 1.0
"""The duration of a look of the watchdog, and its largest delay: the watchdog reads events once a second."""


def is_long(seconds: float, past: float) -> bool:
    """Whether a wait is a hang by itself and by the longest one before it."""
    return seconds >= max(LONG, 2 * past)
