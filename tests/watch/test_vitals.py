"""What a sample says of threads, of the machine and of processes beside the run."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest

from minidl.watch import vitals
from minidl.watch.vitals import TICK, VitalSigns

ME = os.getpid()


def _compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_a_thread_that_computes_is_among_the_busiest() -> None:
    tids: list[int] = []
    done = threading.Event()

    def run() -> None:
        tids.append(threading.get_native_id())
        _compute(0.2)
        done.wait()

    signs = VitalSigns()
    first = signs.sample([ME])
    thread = threading.Thread(target=run)
    thread.start()
    for _ in range(1000):  # until the kernel says that it has computed; a busy machine takes its time
        if tids and vitals._used_by(ME, tids[0])[0] >= 200:
            break
        time.sleep(0.02)
    second = signs.sample([ME])
    done.set()
    thread.join()
    assert first.processes[ME].tasks == (), "what they did before is not of this run"
    busiest = second.processes[ME].tasks[0]
    assert (busiest.tid, busiest.cpu_ms >= 190, busiest.wait_ms >= 0) == (tids[0], True, True)
    assert [one.cpu_ms for one in second.processes[ME].tasks] == sorted(
        (one.cpu_ms for one in second.processes[ME].tasks), reverse=True
    )


def test_a_process_with_too_many_threads_tells_none_and_later_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    signs = VitalSigns()
    signs.sample([ME])
    for most, told in ((0, False), (256, False), (256, True)):
        monkeypatch.setattr(vitals, "MOST_THREADS", most)
        _compute(0.05)
        tasks = signs.sample([ME]).processes[ME].tasks
        assert bool(tasks) == told
    assert tasks[0].tid == threading.get_native_id()
    assert 30 < tasks[0].cpu_ms < 5000


def test_memory_and_faults_are_the_process_s() -> None:
    before = VitalSigns().sample([ME])
    kept = bytearray(os.urandom(1)) * (64 << 20)
    after = VitalSigns().sample([ME])
    first, second = before.processes[ME], after.processes[ME]
    assert second.private_kib - first.private_kib > 60_000
    assert second.minor_faults > first.minor_faults
    assert min(second.major_faults, second.swap_kib) >= 0
    assert len(kept) == 64 << 20


def test_the_machine_is_all_processes() -> None:
    signs = VitalSigns()
    first = signs.sample([ME])
    _compute(0.1)
    second = signs.sample([ME])
    assert second.busy_ms - first.busy_ms >= 80
    assert second.stolen_ms >= first.stolen_ms >= 0
    assert second.cpus == os.sysconf("SC_NPROCESSORS_ONLN")
    assert second.shm_size >= second.shm_free > 0


@pytest.mark.parametrize(("processes", "told"), [(20, [(73, 90), (71, 30), (72, 20)]), (501, [])])
def test_the_busiest_others_do_not_record_into_the_trace(
    processes: int, told: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = dict.fromkeys((71, 72, 73, 76, 77, ME), 5)

    def every() -> list[tuple[int, list[str]]]:
        return [(pid, ["S", "1", *"000000000", str(ticks), "0"]) for pid, ticks in used.items()]

    listed, now = os.listdir, [10**9]
    monkeypatch.setattr(vitals, "every_process", every)
    monkeypatch.setattr(vitals, "_name", lambda pid: "name")
    monkeypatch.setattr(vitals.time, "monotonic_ns", lambda: now[0])
    monkeypatch.setattr(
        vitals.os, "listdir", lambda place: [str(n) for n in range(processes)] if place == "/proc" else listed(place)
    )
    signs: Any = VitalSigns()
    assert signs._look_at_others({ME}) == (0, ()), "the first look has none before it"
    for pid, ms in {71: 30, 72: 20, 73: 90, 76: 1, ME: 70}.items():
        used[pid] += ms * TICK // 1000
    assert signs._look_at_others({ME}) == (0, ()), "it is not time"
    now[0] += 2 * 10**9
    over, others = signs._look_at_others({ME})
    assert [(one.pid, one.cpu_ms) for one in others] == told
    assert over == (2000 if told else 0)
