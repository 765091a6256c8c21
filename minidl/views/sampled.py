"""What a watchdog has sampled of the processes, as counters for the page: memory and CPU time.

Interface: `sampled(scene)` -> counters, one of each kind for each slot: the sum over the processes of its iterators. A
process that runs several iterators at the same time counts for the slot of one of them.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from minidl.views.scene import Counter, Scene


def sampled(scene: Scene) -> list[Counter]:
    """Return own memory (bytes; without what is shared) and CPU (percent of one CPU) of each slot, if sampled."""
    slot_of_loader = {number: n for n, slot in enumerate(scene.slots) for number in slot.loaders}
    slot_of = {p.pid: slot_of_loader[p.loader] for p in scene.trace.processes if p.loader in slot_of_loader}
    memory, used = defaultdict[int, dict[int, int]](dict), defaultdict[int, dict[int, int]](dict)
    before: dict[int, tuple[int, int]] = {}
    for sample in scene.trace.watched.samples:
        at = sample.at - scene.start
        for pid, one in sample.processes.items():
            slot = slot_of.get(pid, -1)
            if slot < 0 or not scene.begin <= at <= scene.end:
                continue
            memory[slot][at] = memory[slot].get(at, 0) + 1024 * max(0, one.rss_kib - max(0, one.shm_kib))
            since, spent = before.get(pid, (at, one.cpu_ms))
            if at > since:  # it is drawn from the last sample on, in which it was spent
                used[slot][since] = used[slot].get(since, 0) + 100_000_000 * (one.cpu_ms - spent) // (at - since)
            before[pid] = at, one.cpu_ms
    found = [("own memory", "B", memory), ("CPU", "%", used)]
    return [
        Counter(name, unit, slot, np.array(list(values), np.int64), np.array(list(values.values()), np.int64))
        for name, unit, of in found
        for slot, values in sorted(of.items())
    ]
