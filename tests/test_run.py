"""`minidl run`: an unmodified script behaves as under plain Python, with our loader in torch's place, recorded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.utils.data
import torch.utils.data.dataloader
from programs import ROOT, python, write
from torch.distributed.checkpoint.stateful import Stateful
from workloads import kill_group
from workloads import run as run_python

import minidl
from minidl import run
from minidl.check import check
from minidl.tracefile.reader import read_trace

TRAIN = """
    import os
    import sys
    import torch
    from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

    class Squares(Dataset):
        def __len__(self):
            return 10

        def __getitem__(self, index):
            return index * index

    class Shards(IterableDataset):
        def __iter__(self):
            info = get_worker_info()
            return iter(range(info.id, 8, info.num_workers))

    def doubled(samples):
        return 2 * torch.tensor(samples)

    if __name__ == "__main__":
        method = sys.argv[1]
        torch.manual_seed(3)
        loader = DataLoader(Squares(), batch_size=3, shuffle=True, num_workers=2, collate_fn=doubled,
                            multiprocessing_context=method, persistent_workers=True)
        for epoch in range(2):
            print(epoch, [batch.tolist() for batch in loader])
        shards = DataLoader(Shards(), batch_size=2, num_workers=2, multiprocessing_context=method)
        print([batch.tolist() for batch in shards])
        print(__name__, os.path.isabs(__file__), os.path.basename(__file__), sys.argv, torch.rand(1).item())
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the script prints under plain Python with torch's own loader."""
    place = tmp_path_factory.mktemp("plain")
    write(place / "train.py", TRAIN)
    done = python("train.py", "fork", cwd=place)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.live
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_script_does_what_it_does_under_plain_python(tmp_path: Path, plain: str, method: str) -> None:
    write(tmp_path / "train.py", TRAIN)
    ours = python("-m", "minidl", "run", "--trace", "trace", "train.py", method, cwd=tmp_path)
    assert (ours.returncode, ours.stdout) == (0, plain.replace("'fork'", f"'{method}'"))
    assert "minidl summary trace" in ours.stderr
    trace = read_trace(tmp_path / "trace")
    assert len(trace.select("yield")) == 4 + 4 + 4
    assert check(trace) == []


@pytest.mark.live
@pytest.mark.parametrize("observe", [[], ["--observe"]])
def test_a_run_may_choose_the_transport(tmp_path: Path, plain: str, observe: list[str]) -> None:
    write(tmp_path / "train.py", TRAIN)
    options = "run", "--transport", "arena", *observe, "--trace", "trace", "train.py", "fork"
    ours = python("-m", "minidl", *options, cwd=tmp_path)
    assert (ours.returncode, ours.stdout) == (0, plain)
    trace = read_trace(tmp_path / "trace")
    assert check(trace) == []
    assert {int(row["tid"]) for row in trace.select("result_put")} == {
        int(row["tid"]) for row in trace.select("result_write")
    }, "a worker's own thread writes its results"


@pytest.mark.live
def test_functions_are_recorded_when_asked_for(tmp_path: Path, plain: str) -> None:
    write(tmp_path / "train.py", TRAIN)
    options = ("--functions", "--functions-main", "--functions-min-us", "0", "--trace", "trace")
    ours = python("-m", "minidl", "run", *options, "train.py", "fork", cwd=tmp_path)
    assert (ours.returncode, ours.stdout) == (0, plain)
    trace = read_trace(tmp_path / "trace")
    assert check(trace) == []
    assert sorted(one.about["loader"] for one in trace.attachments) == [0, 1, 1, 2, 2]
    own = {0: {"RandomSampler.__iter__"}, 1: {"Squares.__getitem__", "doubled"}, 2: {"Shards.__iter__"}}
    for one in trace.attachments:
        assert own[one.about["loader"]] <= {name.name for name in one.slices.names}
        assert {track.pid for track in one.slices.tracks} == {one.about["pid"]}
        assert one.problems == []


@pytest.mark.live
def test_a_module_and_its_relative_imports(tmp_path: Path) -> None:
    write(tmp_path / "job" / "__init__.py", "")
    write(tmp_path / "job" / "data.py", "numbers = list(range(6))\n")
    write(
        tmp_path / "job" / "__main__.py",
        """
        import sys
        from torch.utils.data import DataLoader
        from .data import numbers
        print(__name__, __package__, __spec__.name, sys.argv[1:], DataLoader.__module__)
        print([batch.tolist() for batch in DataLoader(numbers, batch_size=4)])
        """,
    )
    done = python("-m", "minidl", "run", "-m", "job", "--lr", "3", cwd=tmp_path)
    assert done.stdout == "__main__ job job.__main__ ['--lr', '3'] minidl.dataloader\n[[0, 1, 2, 3], [4, 5]]\n"
    assert done.returncode == 0
    assert len(read_trace(tmp_path / "minidl-traces" / "run-1").select("yield")) == 2


ENDINGS = {
    "raise SystemExit": (0, ""),
    "raise SystemExit(3)": (3, ""),
    "import sys; sys.exit('no data')": (1, "no data\n"),
    "raise KeyboardInterrupt": (130, "KeyboardInterrupt"),
    "def inner():\n    raise KeyError('lost')\ninner()": (1, "in inner\n    raise KeyError('lost')\n"),
}


@pytest.mark.live
@pytest.mark.parametrize("program", ENDINGS)
def test_the_exit_code_is_the_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str], program: str) -> None:
    code, said = ENDINGS[program]
    script = write(tmp_path / "end.py", program)
    assert run.run_script([str(script)], module=False, trace=tmp_path / "trace") == code
    assert said in capsys.readouterr().err
    assert (tmp_path / "trace" / "manifest.json").is_file()


INTERRUPTED = """
    import signal
    import time
    from torch.utils.data import DataLoader, Dataset

    class Stuck(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            if index == 17:
                signal.pause()
            return index

    def interrupt(*_):
        raise KeyboardInterrupt

    if __name__ == "__main__":
        signal.signal(signal.SIGALRM, interrupt)
        for number, _ in enumerate(DataLoader(Stuck(), batch_size=4, num_workers=2)):
            if number == 3:
                signal.setitimer(signal.ITIMER_REAL, 0.5)
"""


@pytest.mark.live
def test_a_run_that_is_interrupted_says_what_it_waited_for(tmp_path: Path) -> None:
    write(tmp_path / "train.py", INTERRUPTED)
    done = python("-m", "minidl", "run", "--trace", "trace", "train.py", cwd=tmp_path)
    *_, sentence, where = done.stderr.splitlines()
    assert done.returncode == 130
    assert sentence.startswith("minidl: ")
    assert "waiting for worker 0" in sentence
    assert "in sample 17 (task 4)" in sentence
    assert where == "minidl: recorded in trace; next: minidl summary trace"


@pytest.mark.live
def test_a_traceback_begins_in_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = write(tmp_path / "wrong.py", "1 / 0\n")
    run.run_script([str(script)], module=False, trace=tmp_path / "trace")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["Traceback (most recent call last):", f'  File "{script}", line 1, in <module>']


@pytest.mark.live
def test_everything_is_put_back(tmp_path: Path) -> None:
    before = sys.argv, sys.path[:], sys.modules["__main__"], torch.utils.data.DataLoader
    script = write(tmp_path / "look.py", "import sys; sys.argv.append(1); sys.path.append('/nowhere')\n")
    run.run_script([str(script), "a"], module=False, trace=tmp_path / "trace")
    assert before == (sys.argv, sys.path[:], sys.modules["__main__"], torch.utils.data.DataLoader)


def test_both_names_of_torchs_loader_are_replaced_and_put_back() -> None:
    torchs = torch.utils.data.DataLoader
    with run.replaced():
        ours = torch.utils.data.DataLoader
        assert issubclass(ours, minidl.DataLoader)
        assert torch.utils.data.dataloader.DataLoader is ours
        assert not isinstance(ours([1]), Stateful), "frameworks would save and load states that torch's loader has not"
    assert torch.utils.data.DataLoader is torchs
    assert torch.utils.data.dataloader.DataLoader is torchs


@pytest.mark.live
def test_a_script_trains_on_the_simulated_accelerator_if_the_environment_asks_for_it(
    tmp_path: Path, simulate: None
) -> None:
    """Although its first backward pass is on the CPU: autograd would not know an accelerator that came after it."""
    program = """
        import torch
        torch.ones(1, requires_grad=True).sum().backward()
        device = torch.accelerator.current_accelerator()
        weight = torch.ones(2, device=device, requires_grad=True)
        (weight * 2).sum().backward()
        print(device, weight.grad.tolist())
    """
    starts = "import sys; from minidl import cli; sys.exit(cli.main(['run', '--trace', *sys.argv[1:]]))"
    done = run_python(starts, tmp_path / "trace", write(tmp_path / "trains.py", program), MINIDL_SIMULATE_DEVICE="1")
    assert done.stdout == "sim [2.0, 2.0]\n", done.stderr


@pytest.mark.live
def test_persistent_workers_that_the_script_leaves_are_ended_and_recorded(tmp_path: Path) -> None:
    program = """
        from torch.utils.data import DataLoader
        loader = DataLoader(range(8), batch_size=2, num_workers=2, persistent_workers=True)
        assert len(list(loader)) == 4
        def keeps_the_globals_alive(): ...
    """
    script = write(tmp_path / "leaves.py", program)
    assert run.run_script([str(script)], module=False, trace=tmp_path / "trace") == 0
    trace = read_trace(tmp_path / "trace")
    assert len(trace.select("worker_exit")) == 2
    assert check(trace) == []


@pytest.mark.live
def test_torchs_persistent_workers_leave_by_themselves_when_the_script_ends(tmp_path: Path) -> None:
    program = """
        from torch.utils.data import DataLoader, Dataset
        class Numbers(Dataset):  # its methods hold the globals in a cycle
            def __len__(self): return 8
            def __getitem__(self, index): return index
        loader = DataLoader(Numbers(), batch_size=2, num_workers=2, persistent_workers=True)
        iterator = iter(loader)
        next(iterator)
    """
    script = write(tmp_path / "leaves.py", program)
    assert run.run_script([str(script)], module=False, trace=tmp_path / "trace", observe=True) == 0
    trace = read_trace(tmp_path / "trace")
    assert trace.select("worker_gone")["y"].tolist() == [0, 0]
    assert not len(trace.select("terminate"))


@pytest.mark.live
def test_a_thread_that_outlives_the_script_is_recorded_to_its_end(tmp_path: Path) -> None:
    program = """
        import threading
        from torch.utils.data import DataLoader
        go_on = threading.Event()
        def train():
            go_on.wait(30)
            assert len(list(DataLoader(range(8), batch_size=2))) == 4
        threading.Thread(target=train).start()
        threading.Timer(0.05, go_on.set).start()
    """
    script = write(tmp_path / "thread.py", program)
    assert run.run_script([str(script)], module=False, trace=tmp_path / "trace") == 0
    assert len(read_trace(tmp_path / "trace").select("yield")) == 4


@pytest.mark.live
def test_a_script_that_hangs_and_is_killed_leaves_its_trace(tmp_path: Path) -> None:
    program = """
        import os
        from torch.utils.data import DataLoader, Dataset

        class Hangs(Dataset):
            def __len__(self):
                return 8

            def __getitem__(self, index):
                if index == 5:
                    os.write(1, b"stuck")
                    os.read(os.pipe()[0], 1)
                return index

        list(DataLoader(Hangs(), num_workers=2))
    """
    script = write(tmp_path / "hangs.py", program)
    command = [sys.executable, "-m", "minidl", "run", "--trace", "trace", str(script)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, start_new_session=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.read(5) == b"stuck"
        kill_group(running)
    trace = read_trace(tmp_path / "trace")
    assert check(trace) == []
    begun, ended = (trace.select("sample", phase)["y"].tolist() for phase in phases())
    assert 5 in begun
    assert 5 not in ended


def phases() -> tuple[object, object]:
    from minidl.tracefile.events import Phase

    return Phase.BEGIN, Phase.END


UNUSABLE = {
    "no/such.py": "cannot read the script no/such.py: No such file or directory",
    "broken.py": "broken.py is not a Python script",
}


@pytest.mark.parametrize("script", UNUSABLE)
def test_a_script_that_cannot_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "broken.py", "def f(:\n")
    with pytest.raises(run.RunError, match=UNUSABLE[script]):
        run.run_script([script], module=False, trace=tmp_path / "trace")
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("module", ["no_such_module", "no_such.module", "json", "sys"])
def test_a_module_that_cannot_run_is_refused(tmp_path: Path, module: str) -> None:
    with pytest.raises(run.RunError, match=module):
        run.run_script([module], module=True, trace=tmp_path / "trace")


def test_a_second_run_takes_the_next_directory(tmp_path: Path) -> None:
    assert [run.free_directory(tmp_path, "trace").name for _ in range(3)] == ["trace-1", "trace-2", "trace-3"]
