"""Stack samples: a thread that looks at where another one is, without signals, and is not there at a fork."""

from __future__ import annotations

import inspect
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from programs import python
from torch.utils.data import Dataset

import minidl
from minidl.process_stat import SAMPLER_NAME
from minidl.record import recorder, stack_samples
from minidl.record.step_parts import step_parts_recorded
from minidl.tracefile import events as ev
from minidl.tracefile.reader import Trace, read_trace
from minidl.tracefile.stack_samples import CodeLine, frames_of, library, read, text_of


def names_of_threads() -> list[str]:
    tasks = Path("/proc/self/task")
    return [(tasks / tid / "comm").read_text().strip() for tid in os.listdir(tasks)]


@pytest.fixture
def recording(tmp_path: Path) -> Iterator[recorder.Recorder]:
    recording = recorder.start(recorder.TraceConfig(str(recorder.create(tmp_path / "trace"))))
    recording.role("loader")
    yield recording
    stack_samples.end()
    recorder.stop()


def sampled(recording: recorder.Recorder, seconds: float) -> Trace:
    stack_samples.begin(recording)
    time.sleep(seconds)  # the line that is found
    stack_samples.end()
    return read_trace(recording.config.directory)


def test_the_line_of_the_thread_that_began_is_found(recording: recorder.Recorder) -> None:
    looks = sampled(recording, 0.6).stack_samples
    assert len(looks) >= 3
    own = [frame for number in looks.stack.tolist() for frame in looks.stacks[number] if frame.file == __file__]
    assert {(frame.function, frame.source) for frame in own} >= {
        ("sampled", "time.sleep(seconds)  # the line that is found")
    }
    assert set(looks.tid.tolist()) == {threading.get_native_id()}
    assert 0 <= looks.cpu[looks.since > 0].sum() < looks.since[looks.since > 0].sum(), "it sleeps"


def test_the_code_around_a_recorded_module_is_found(recording: recorder.Recorder) -> None:
    """What stands in the place of torch's call is no part of a loader."""

    class Sleeps(torch.nn.Module):
        def forward(self, seconds: float) -> Trace:
            return sampled(recording, seconds)

    with step_parts_recorded():
        looks = Sleeps()(0.4).stack_samples
    found = [[frame.function for frame in looks.stacks[number]] for number in looks.stack.tolist()]
    here = inspect.currentframe().f_code.co_name  # type: ignore[union-attr]
    assert any(any(name.endswith(here) for name in names) for names in found)


@pytest.mark.live
def test_the_sampling_thread_is_not_there_at_a_fork(recording: recorder.Recorder) -> None:
    stack_samples.begin(recording)
    time.sleep(0.1)
    assert SAMPLER_NAME in names_of_threads()
    assert all(thread.name != SAMPLER_NAME for thread in threading.enumerate())
    ended = os.fork()
    if not ended:
        os._exit(stack_samples.is_on() or SAMPLER_NAME in names_of_threads())
    assert os.waitpid(ended, 0)[1] == 0, "nor in the child"
    time.sleep(0.1)
    assert SAMPLER_NAME in names_of_threads(), "it goes on in the parent"
    stack_samples.end()
    assert SAMPLER_NAME not in names_of_threads()


class Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.05)  # a slow sample
        return torch.zeros(1)


@pytest.mark.live
@pytest.mark.parametrize("workers", [0, 2])
def test_workers_and_the_loop_are_sampled_in_a_trace_with_a_watchdog(workers: int, tmp_path: Path) -> None:
    with minidl.trace(tmp_path / "trace", hang_after=60):
        for _ in minidl.DataLoader(Slow(), batch_size=2, num_workers=workers):
            pass
    trace = read_trace(tmp_path / "trace")
    spans = trace.spans()
    looks = trace.stack_samples
    inside = looks.inside(spans[spans["code"] == ev.SAMPLE[0]])
    found = [looks.stacks[number][-1].source for number in looks.stack[inside].tolist()]
    assert found.count("time.sleep(0.05)  # a slow sample") > 0.8 * len(found) > 3
    assert len({trace.processes[one].worker for one in looks.process[inside].tolist()}) == max(1, workers)
    assert not trace.problems
    assert SAMPLER_NAME not in names_of_threads()


@pytest.mark.live
def test_nothing_is_sampled_without_a_watchdog_or_if_stacks_are_off(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import minidl, sys, os\n"
        "for name, after in (('plain', 0), ('off', 60)):\n"
        "    with minidl.trace(name, hang_after=after):\n"
        "        assert 'minidl-sampler' not in [open(f'/proc/self/task/{tid}/comm').read().strip()\n"
        "                                        for tid in os.listdir('/proc/self/task')]\n"
    )
    ran = python("program.py", cwd=tmp_path, MINIDL_HANG_STACKS="off")
    assert ran.returncode == 0, ran.stderr


def test_damaged_lines_are_left_out() -> None:
    frame = CodeLine("/home/a.py", 3, "f", "x = 1")
    strings = {(0, 1): text_of([frame]), (0, 2): "no JSON", (0, 3): '[["a", "b"]]'}
    good = {"process": 0, "tid": 7, "monotonic_ns": 1000, "looks": [[0, 1, -1], [50, 2, 10], [99, 3, 5], [100, 9, 5]]}
    bad = [{}, {**good, "looks": [[1]]}, {**good, "looks": 3}, {**good, "tid": "x"}]
    looks = read([*bad, good], strings)
    assert [looks.stacks[number] for number in looks.stack.tolist()] == [(frame,), (), (), ()]
    assert looks.at.tolist() == [1000, 51_000, 100_000, 101_000]
    assert (looks.cpu.tolist(), looks.since.tolist()) == ([-1, 10_000, 5000, 5000], [-1, 50_000, 49_000, 1000])
    assert not len(read([], {}))
    assert frames_of(text_of([CodeLine("a\x1b.py", 1, "g", "\x07")])) == (CodeLine("a\\x1b.py", 1, "g", "\\x07"),)


def test_what_belongs_to_libraries() -> None:
    assert library("/usr/lib/python3.11/gzip.py")
    assert library("<frozen importlib._bootstrap>")
    assert not library("/home/me/train.py")
