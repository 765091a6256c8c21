"""Memory and CPU of the processes, as counters of the page."""

from __future__ import annotations

from pathlib import Path

from made_trace import LOADER_PID, START, made
from pages import Read

from minidl.tracefile.watched import Sample, Vitals, Watched
from minidl.views.page import html
from minidl.views.sampled import sampled
from minidl.views.scene import scene_of


def test_memory_and_cpu_are_sums_over_the_processes(tmp_path: Path) -> None:
    """A sample counts memory from then on, and CPU time from the sample before it on; a stranger counts nowhere."""
    trace = made(tmp_path, batches=12, workers=1)

    def at(ms: int, main: tuple[int, int], worker: tuple[int, int]) -> Sample:
        pids = {LOADER_PID: main, LOADER_PID + 100: worker, 77: (9, 9)}
        seen = {pid: Vitals("S", cpu, rss, 10, 1, 1) for pid, (cpu, rss) in pids.items()}
        return Sample(START + ms * 1_000_000, seen)

    trace.watched = Watched(1.0, [at(1, (0, 100), (0, 60)), at(3, (1, 200), (2, 60)), at(900, (9, 900), (9, 900))])
    memory, cpu = sampled(scene_of(trace, until=0.5))
    assert (memory.name, memory.unit, memory.slot) == ("own memory", "B", 0)
    assert (memory.times.tolist(), memory.values.tolist()) == ([1_000_000, 3_000_000], [140 * 1024, 240 * 1024])
    assert (cpu.times.tolist(), cpu.values.tolist()) == ([1_000_000], [150])
    assert [one["name"] for one in Read(html(trace)).words["counters"]][-2:] == ["own memory", "CPU"]


def test_without_samples_there_are_none(tmp_path: Path) -> None:
    assert sampled(scene_of(made(tmp_path, batches=2))) == []
