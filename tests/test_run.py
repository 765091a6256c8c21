"""`minidl run`: an unmodified script behaves as under plain Python, with our loader in torch's place, recorded."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.utils.data
import torch.utils.data.dataloader
from programs import ROOT, python, write
from sizes import slow
from workloads import kill_group
from workloads import run as run_python

from minidl import cli, run
from minidl.check import check
from minidl.dataloader import LoaderWithoutState
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
@pytest.mark.parametrize("method", ["fork", *slow("spawn", "forkserver")])
def test_a_script_does_what_it_does_under_plain_python(tmp_path: Path, plain: str, method: str) -> None:
    write(tmp_path / "train.py", TRAIN)
    ours = python("-m", "minidl", "run", "--trace", "trace", "train.py", method, cwd=tmp_path)
    assert (ours.returncode, ours.stdout) == (0, plain.replace("'fork'", f"'{method}'"))
    assert "minidl summary trace" in ours.stderr
    trace = read_trace(tmp_path / "trace")
    assert len(trace.select("yield")) == 4 + 4 + 4
    assert check(trace) == []


@pytest.mark.live
@pytest.mark.parametrize("observe", [[], *slow(["--observe"])])
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
def test_a_run_may_choose_the_numbers_of_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of map datasets; also after the program has patched torch's internals, which leaves its loader to torch."""
    (tmp_path / "train.py").write_text("""
import torch
import torch.utils.data.dataloader as loaders
import time

class Waits(torch.utils.data.Dataset):
    __len__ = lambda self: 60
    def __getitem__(self, index):
        time.sleep(0.04)
        return index

class Stream(torch.utils.data.IterableDataset):
    __iter__ = lambda self: iter(range(4))

if __name__ == "__main__":
    waits, stream = loaders.DataLoader(Waits()), loaders.DataLoader(Stream(), num_workers=1)
    late = loaders.DataLoader(Waits(), num_workers=0)
    assert [int(batch) for batch in waits] == list(range(60))
    print("workers", type(waits.num_workers).__name__, waits.num_workers > 1, stream.num_workers, len(list(stream)))
    loaders._utils.worker._worker_loop = lambda *args: None
    print("late", type(late.num_workers).__name__, len(list(late)), late.num_workers, late.prefetch_factor)
""")
    command = [sys.executable, "-m", "minidl", "run", "--auto", "--trace", "trace", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["workers ChosenWorkers True 1 4", "late ChosenWorkers 60 0 None"]
    assert 'num_workers="auto" (made at train.py:' in done.stderr
    (chosen,) = read_trace(tmp_path / "trace").select("workers_chosen")
    assert chosen["x"] > chosen["y"] == 1
    assert cli.main(["run", "--auto", "--observe", "train.py"]) == cli.USAGE
    assert "--observe keeps torch's: leave one of them out" in capsys.readouterr().err


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
    if sys.version_info < (3, 11):  # code knows no class
        own = {loader: {name.rpartition(".")[2] for name in names} for loader, names in own.items()}
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
    assert done.stdout == "__main__ job job.__main__ ['--lr', '3'] minidl.record.stand_in\n[[0, 1, 2, 3], [4, 5]]\n"
    assert done.returncode == 0
    assert len(read_trace(tmp_path / "minidl-traces" / "run-1").select("yield")) == 2


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
    assert done.returncode == -signal.SIGINT
    assert sentence.startswith("minidl: ")
    assert "waiting for worker 0" in sentence
    assert "in sample 17 (task 4)" in sentence
    assert where == "minidl: recorded in trace; next: minidl doctor trace"


@pytest.mark.live
def test_everything_is_put_back(tmp_path: Path) -> None:
    before = sys.argv, sys.path[:], sys.modules["__main__"], torch.utils.data.DataLoader
    script = write(tmp_path / "look.py", "import sys; sys.argv.append(1); sys.path.append('/nowhere')\n")
    run.run_script([str(script), "a"], module=False, trace=tmp_path / "trace")
    assert before == (sys.argv, sys.path[:], sys.modules["__main__"], torch.utils.data.DataLoader)


def test_both_names_of_torchs_loader_are_replaced_and_put_back() -> None:
    from torch.distributed.checkpoint.stateful import Stateful  # takes seconds

    torchs = torch.utils.data.DataLoader
    with run.replaced():
        ours = torch.utils.data.DataLoader
        assert issubclass(ours, LoaderWithoutState)
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
    "empty": "empty holds no __main__.py to run",
}


@pytest.mark.parametrize("script", UNUSABLE)
def test_a_script_that_cannot_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(run.RunError, match=UNUSABLE[script]):
        run.run_script([script], module=False, trace=tmp_path / "trace")
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("module", ["no_such_module", "no_such.module", "json", "sys"])
def test_a_module_that_cannot_run_is_refused(tmp_path: Path, module: str) -> None:
    with pytest.raises(run.RunError, match=module):
        run.run_script([module], module=True, trace=tmp_path / "trace")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MINIDL_TRANSPORT", "shm", "transport='shm' (from MINIDL_TRANSPORT): give one of 'upstream', 'arena'"),
        ("MINIDL_ARENA_BYTES", "much", "MINIDL_ARENA_BYTES='much': give the bytes of slabs"),
    ],
)
def test_a_transport_that_no_loader_could_have_is_refused_before_the_script_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    write(tmp_path / "train.py", "open('begun', 'w')")
    monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(run.RunError, match=re.escape(message)):
        run.run_script(["train.py"], module=False, trace=tmp_path / "t")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"], "neither the script nor a trace has begun"


def test_a_second_run_takes_the_next_directory(tmp_path: Path) -> None:
    assert [run.free_directory(tmp_path, "trace").name for _ in range(3)] == ["trace-1", "trace-2", "trace-3"]


# --- The same script under Python and under `minidl run` --------------------------------------------------------------
ALIKE = {
    "its module": """
        '''Words.'''
        import sys
        import __main__
        names = {name: value for name, value in globals().items() if name not in ("sys", "__main__", "names")}
        print({name: value for name, value in sorted(names.items()) if name not in ("__loader__", "__builtins__")})
        print(type(__loader__).__name__, __loader__.name, __loader__.path, type(__builtins__).__name__)
        print(vars(__main__) is globals(), sys.argv, sys.path[0], sys.flags, sys.stdout.errors, sys.stderr.errors)
    """,
    "its source": """
        import inspect, pickle, warnings
        class Point:
            '''A class of the script.'''
        def f():
            return 1
        print(inspect.getsource(f), pickle.dumps(Point()), type(pickle.loads(pickle.dumps(Point()))) is Point)
        warnings.warn("here")
        print(sorted(inspect.signature(f).parameters), f.__module__, Point.__module__)
    """,
    "a spawned process": """
        import multiprocessing, sys
        class Point:
            def __repr__(self):
                return "a point of " + type(self).__module__
        def tell(point):
            print(point, __name__)
            sys.exit(3)
        if __name__ == "__main__":
            child = multiprocessing.get_context("spawn").Process(target=tell, args=(Point(),))
            child.start()
            child.join()
            print(child.exitcode)
    """,
    "threads and exit handlers": """
        import atexit, threading, time
        atexit.register(print, "handler 1")
        atexit.register(print, "handler 2")
        after = threading.Event()
        def late():
            after.wait()
            print("thread")
        threading.Thread(target=late).start()
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        threading.Thread(target=lambda: 1 / 0).start()
        threading.main_thread().name = "still here"
        after.set()
    """,
    "an error": "def inner():\n    raise ValueError('lost')\n\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    inner()",
    "a group of errors": "raise ExceptionGroup('several', [ValueError(1), KeyError(2)])",
    "its own BaseException": "class Own(BaseException):\n    pass\ndef f():\n    raise Own('stop')\nf()",
    "GeneratorExit": "raise GeneratorExit('end')",
    "KeyboardInterrupt": "def f():\n    raise KeyboardInterrupt\nf()",
    "SIGINT": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nprint('not reached')",
    "SIGTERM": "import os, signal\nprint('lost', flush=True)\nos.kill(os.getpid(), signal.SIGTERM)",
    "no Python": "print('not reached')\ndef f(:\n    pass",
    "no Python in a module": "import wrong",
    "no text": "x = '\\x00'",
    "its own hook": "import sys\nsys.excepthook = lambda kind, *_: print('mine', kind.__name__)\n1 / 0",
    "a hook that fails": "import sys\ndef hook(*_):\n    raise KeyError('hook')\nsys.excepthook = hook\n1 / 0",
    "stdout closed": "import sys\nprint('said')\nsys.stdout.close()",
    "stdout gone": "import sys\nsys.stdout = None\nprint('nothing')",
    "descriptor closed": "import os\nprint('lost')\nos.close(1)",
    "stderr closed": "import sys\nsys.stderr.close()\nprint('said')",
    "stderr gone": "import sys\nsys.stderr = None\nsys.exit('nothing')",
    "stdout replaced": "import io, sys\nsys.stdout = io.StringIO()\nprint('kept')",
    **{
        f"exit {code}": f"import sys\nprint('said')\nsys.exit({code})"
        for code in ("", "None", "0", "3", "259", "-1", "True", "'why'", "''", "(1, 2)", "1.5", "1 << 100", "-1 << 100")
    },
}  # fmt: skip
"""Scripts by what they are about. What they print, say and end with is the same."""

if sys.version_info < (3, 11):
    del ALIKE["a group of errors"]


OF_THE_INTERPRETER = ("Exception ignored on threading shutdown:", "OverflowError: Python int too large to convert")
"""From 3.12 on Python does not clear the error of an exit code that fits no C long, and some later step prints it."""


def alike(text: str) -> str:
    """What a program has said, without our own lines, without the interpreter's slip and without addresses."""
    lines = [line for line in text.splitlines() if not line.startswith(("minidl: ", *OF_THE_INTERPRETER))]
    return re.sub(r"0x[0-9a-f]+", "0x", "\n".join(lines))


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests" / "support" / "run_forks.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as forks:
        yield forks


def both(forks: subprocess.Popen[str], place: Path, *script: str) -> list[tuple[int, str, str]]:
    """How a script ends under Python and under `minidl run`, and what it prints and says."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with (place / "out").open("w") as out, (place / "err").open("w") as err:
        command = [sys.executable, *script]
        code = subprocess.run(command, cwd=place, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment)
    forks.stdin.write(json.dumps([list(script), str(place), str(place / "out2"), str(place / "err2")]) + "\n")
    forks.stdin.flush()
    codes = {"": code.returncode, "2": int(forks.stdout.readline())}
    files = [[place / f"{name}{number}" for name in ("out", "err")] for number in codes]
    return [
        (code, *(alike(file.read_text()) for file in mine)) for code, mine in zip(codes.values(), files, strict=True)
    ]


USUAL = {
    "its own BaseException", "KeyboardInterrupt", "SIGINT", "SIGTERM", "no Python", "a hook that fails",
    "stdout closed", "descriptor closed", "stdout replaced", "exit ", "exit 3", "exit 'why'", "an error",
    "threads and exit handlers", "a spawned process",
}  # fmt: skip


@pytest.mark.live
@pytest.mark.parametrize(
    "about", [pytest.param(about, marks=() if about in USUAL else pytest.mark.slow) for about in ALIKE]
)
def test_a_script_ends_as_under_python(tmp_path: Path, forks: subprocess.Popen[str], about: str) -> None:
    write(tmp_path / "program.py", ALIKE[about])
    write(tmp_path / "wrong.py", "def f(:\n")
    python, ours = both(forks, tmp_path, "program.py", "a", "-b")
    assert ours == python


@pytest.mark.live
@pytest.mark.parametrize("kind", ["a zip file", "a package", *slow("a directory", "a link", "a module")])
def test_a_program_of_another_kind_is_run_as_by_python(tmp_path: Path, forks: subprocess.Popen[str], kind: str) -> None:
    text = "import sys\nprint(__name__, __package__, __file__, __spec__, sys.argv, sys.path[0])\nsys.exit(4)"
    write(tmp_path / "job" / "__main__.py", text)
    with zipfile.ZipFile(tmp_path / "job.zip", "w") as zipped:
        zipped.write(tmp_path / "job" / "__main__.py", "__main__.py")
    (tmp_path / "link.py").symlink_to(tmp_path / "job" / "__main__.py")
    write(tmp_path / "single.py", text)
    script = {"a directory": ["job"], "a zip file": ["job.zip"], "a link": ["link.py"], "a module": ["-m", "single"]}
    python, ours = both(forks, tmp_path, *script.get(kind, ["-m", "job"]), "a")
    assert ours == python
    assert ours[0] == 4
