"""Advice: each row of the table is given for a loader that it helps, and for no other."""

from __future__ import annotations

from typing import Any

import pytest
from made_waits import waited

from minidl.speed import advice
from minidl.speed.cpu_use import CpuUse
from minidl.speed.verdict import judge
from minidl.speed.wall_clock import Bound

COMPUTES, LACKS, WAITS = (CpuUse(100, cpu, no_cpu, 100, True) for cpu, no_cpu in ((90, 2), (40, 50), (10, 2)))


SAMPLES, COLLATE, IPC, START = ({cause: 50} for cause in ("samples", "collate", "ipc", "start_up"))
AGAIN, LINE = {"start_up": 50, "alike": 3}, {"head_of_line": 60, "task": 3, "worker": 1, "sample": 12}
READ = {"rebuild": 60}
BUSY = READ | {"workers": 4, "payload": 250, "tensors": 1, "busy": 0.66}
OTHERS = CpuUse(400, 30, 300, 100, True)
PERSISTENT, ARENA, OWN = {"persistent_workers": True}, {"transport": "arena"}, {"collate_fn": "sleepy_collate"}

ADVISED: dict[str, tuple[dict[str, Any], dict[str, Any], float | None, str]] = {
    "the loader keeps up": ({"consumer": 901, "samples": 99}, {}, None, "make the training step faster"),
    "too few batches": ({"batches": 1, "samples": 50}, {}, None, ""),
    "a loader whose waits are not seen": (START, {"unseen": ["next"]}, None, "record it again"),
    "a slow sampler": ({"sampler": 50}, {}, None, "make the sampler faster"),
    "small batches": ({"overhead": 50}, {}, None, "use larger batches: each batch costs"),
    "a slow sample": (LINE, {}, None, "set in_order=False if the order does not matter; otherwise spread slow samples"),
    # A worker that is always slower is overtaken however much is prefetched.
    "a worker that is always slow": (LINE | {"lasting": 0.9}, {}, None, "find out why worker 1 is slower than the"),
    "no workers": ({"workers": 0, "samples": 50}, {}, 8, "use num_workers=1 or more"),
    "uneven shards": (SAMPLES | {"uneven": 40, "out": 1}, {}, None, "make the shards even: worker 1 ran out"),
    "nearly even shards": (SAMPLES | {"uneven": 10, "out": 1}, {}, None, "use more workers if CPUs are idle"),
    "short epochs": (SAMPLES | {"first": 40}, {}, None, "make epochs longer"),
    "sending in segments": (IPC, {}, None, 'see `minidl ledger`; or use transport="arena", without segments'),
    "sending in slabs": (IPC, ARENA, None, "send fewer bytes in fewer tensors; see `minidl ledger`"),
    "a waiting collation": (COLLATE | {"cpu": WAITS}, {}, None, "find what collation waits for"),
    "a collation of one's own": (COLLATE, OWN, None, "make collation cheaper: default_collate, unlike your own"),
    "torch's collation": (COLLATE, {"collate_fn": "default_collate"}, None, "cheaper: use fewer and larger tensors"),
    "small tensors": (COLLATE | {"shared": 3000.0, "tensors": 1.0}, {}, None, "use fewer and larger tensors per"),
    "large tensors": (COLLATE | {"shared": 32e6, "tensors": 1.0}, {}, None, "use fewer bytes per sample (uint8"),
    "samples, and unknown CPUs": (SAMPLES, {}, None, "use more workers if CPUs are idle, or make samples cheaper"),
    "samples, and idle CPUs": (SAMPLES, {}, 8, "use more workers (2 for 8 CPUs), or make samples cheaper"),
    "samples, and no idle CPU": (SAMPLES, {}, 2, "2 workers for 2 CPUs, so more workers help only if samples wait"),
    "computing, and idle CPUs": (SAMPLES | {"cpu": COMPUTES}, {}, 8, "use more workers (2 for 8 CPUs)"),
    "computing, and no idle CPU": (SAMPLES | {"cpu": COMPUTES}, {}, 2, "more workers do not help samples that compute"),
    "waiting for a CPU": (SAMPLES | {"cpu": LACKS}, {}, 8, "or use more CPUs: they are short (8 CPUs for 2 workers)"),
    "waiting for one of one's own": (
        SAMPLES | {"cpu": CpuUse(400, 100, 300, 100, True), "workers": 4}, {}, 2,
        "they are short (2 CPUs for 4 workers), so more workers do not help",
    ),
    "others have the CPUs": (
        SAMPLES | {"cpu": OTHERS, "workers": 4}, {}, 2,
        "do not help; other work uses most of them: fetching used 0.3 on average",
    ),
    "waiting for a disk": (SAMPLES | {"cpu": WAITS}, {}, 2, "use more workers, which wait together; or let samples"),
    "pinning": ({"pin": 60}, {}, None, "send fewer bytes per batch, or do not pin"),
    "pickled data": (READ | {"payload": 3e6}, {}, None, "send the data as tensors"),
    "many tensors": (READ | {"payload": 25e3, "tensors": 400}, {}, None, "join the tensors of a batch: it has 400"),
    "many tensors, a large message": (READ | {"payload": 100e3, "tensors": 600}, {}, None, "join the tensors"),
    "one tensor": (READ | {"payload": 250, "tensors": 1}, {}, None, "use larger batches: rebuilding costs the same"),
    "a reader with a CPU": (BUSY, {}, 8, "use larger batches: rebuilding costs the same"),
    "a reader without a CPU": (BUSY, {}, 2, "cheaper: 2.6 workers on average were busy and shared 2 CPUs with the"),
    "a reader, computing workers": (BUSY | {"cpu": COMPUTES}, {}, 2, "make samples cheaper: 2.6 workers on average"),
    "a reader, waiting workers": (BUSY | {"cpu": WAITS}, {}, 2, "use larger batches: rebuilding costs the same"),
    "a start that is paid once": (
        {"consumer": 100, "start_up": 200, "samples": 50}, {}, None,
        "make the start cheaper: fewer workers, less work in worker_init_fn, and with spawn fewer imports and a small "
        "pickled dataset; it happens once",
    ),
    "a start in each epoch": (AGAIN, {}, None, "use persistent_workers=True, which starts workers once"),
    "starts of persistent workers": (AGAIN, PERSISTENT, None, "make the start cheaper"),
    "a slow end": (START | {"ending": 30}, {}, None, "find what delays a worker's end"),
    "a slow end in each epoch": (AGAIN | {"ending": 30}, {}, None, "use persistent_workers=True, which ends workers"),
}  # fmt: skip
"""A loader -> what it waited for, its parameters, its CPUs, and a part of the advice."""


@pytest.mark.parametrize("name", ADVISED)
def test_what_helps_is_advised(name: str) -> None:
    found, params, cpus, text = ADVISED[name]
    step = judge(waited(**found), params, cpus).next_step
    assert text in step
    assert bool(text) == bool(step)
    assert "prefetch_factor" not in step or name == "a slow sample"


def test_each_row_has_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    assert advice.ADVICE.keys() == set(Bound)
    named = {kind: tuple((holds, f"{kind.name} {n}") for n, (holds, _) in enumerate(rows))
             for kind, rows in advice.ADVICE.items()}  # fmt: skip
    monkeypatch.setattr(advice, "ADVICE", named)
    given = {judge(waited(**found), params, cpus).next_step for found, params, cpus, _ in ADVISED.values()}
    assert given - {""} == {name for rows in named.values() for _, name in rows}
