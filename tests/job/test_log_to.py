"""The headline and figures of a job, where experiments are tracked. Tools that are not installed are skipped."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from made_jobs import MadeJob, copied, late_job

from minidl import cli
from minidl.job.log_to import TOOLS, figures, log
from minidl.job.report import JobReport

TRACES = Path(__file__).parent.parent.parent / "traces"
LATE = JobReport(late_job())


def test_the_figures_of_a_job() -> None:
    found = figures(LATE)
    assert (found["ranks"], found["steps"], found["straggler"], found["step_ms"]) == (4, 60, 2, pytest.approx(60.5))
    assert found["waits_for/samples"] == pytest.approx(found["waits_for_batches"]) == pytest.approx(10 / 60.5, rel=0.01)
    assert found["waits_for_a_rank"] == pytest.approx(40 / 60.5, rel=0.01)
    assert "straggler" not in figures(JobReport(MadeJob(4).record()))


def test_tensorboards_event_file_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.chdir(tmp_path)
    log(LATE, "tensorboard", "minidl-job")
    read = events.EventAccumulator(str(tmp_path / "runs" / "minidl-job"))
    read.Reload()
    assert read.Scalars("minidl/straggler")[0].value == 2
    (text,) = read.Tensors("minidl/headline/text_summary")
    assert b"wait for rank 2" in text.tensor_proto.string_val[0]


@pytest.mark.live
def test_mlflow_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file://{tmp_path}/mlruns")
    log(LATE, "mlflow", "minidl-job")
    (run,) = mlflow.MlflowClient().search_runs(["0"])
    assert run.data.metrics["minidl/straggler"] == 2
    assert "wait for rank 2" in run.data.tags["minidl.headline"]
    with mlflow.start_run() as mine:
        log(LATE, "mlflow", "minidl-job")
    assert mlflow.get_run(mine.info.run_id).data.metrics["minidl/ranks"] == 4


class Run(dict[str, Any]):
    """W&B's run as far as it is used: offline it writes a file that only its own program reads."""

    def __init__(self) -> None:
        self.summary, self.finished = self, 0

    def finish(self) -> None:
        self.finished += 1


def test_a_run_of_wandb_that_is_open_takes_them_else_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb, made = types.ModuleType("wandb"), Run()
    wandb.run, wandb.init = None, lambda **given: made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    log(LATE, "wandb", "minidl-job")
    assert (made["minidl/straggler"], made.finished) == (2, 1)
    wandb.run = mine = Run()  # type: ignore[attr-defined]
    log(LATE, "wandb", "minidl-job")
    assert ("wait for rank 2" in mine["minidl/headline"], mine.finished, made.finished) == (True, 0, 1)


def test_a_tool_that_is_not_installed_is_said_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a_mere_folder = importlib.machinery.ModuleSpec("wandb", None, is_package=True)
    for spec in (None, a_mere_folder):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, spec=spec: spec)
        for tool in TOOLS:
            assert cli.main(["summary", str(TRACES / "workers-2.minidl"), "--log-to", tool]) == cli.USAGE
            assert f"{tool} is not installed: pip install {tool}" in capsys.readouterr().err


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """The names and numbers of ranks that are logged to a tool that seems installed."""
    found: list[tuple[str, float]] = []
    spec = importlib.machinery.ModuleSpec("mlflow", None, origin="mlflow/__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    write = {"mlflow": lambda name, text, figures: found.append((name, figures["minidl/ranks"]))}
    monkeypatch.setattr("minidl.job.log_to._WRITE", write)
    return found


PROGRAM = "import torch\nfor _ in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(3))): pass\n"


def run(trace: str) -> int:
    Path("ok.py").write_text(PROGRAM)
    return cli.main(["run", "--hang-after", "off", "--trace", trace, "--log-to", "mlflow", "ok.py"])


@pytest.mark.heavy
def test_the_commands_log_a_trace_and_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[tuple[str, float]]
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (TRACES / "workers-2.minidl", copied(tmp_path / "job", "workers-2", "workers-2")):
        assert cli.main(["summary", str(path), "--log-to", "mlflow"]) == cli.OK
    assert run("trace") == cli.OK
    (tmp_path / "job-1.5").mkdir()
    for rank in ("rank-0.2", "rank-1.2"):  # of ranks that were started again; the first one logs
        monkeypatch.setattr("minidl.record.group.rank_name", lambda rank=rank: rank)
        assert run("job-1.5") == cli.OK
    assert cli.main(["summary", "job-1.5", "--log-to", "mlflow"]) == cli.OK
    runs = [("minidl-workers-2", 1), ("minidl-job", 2), ("minidl-trace", 1)]
    assert logged == [*runs, ("minidl-job-1.5", 1), ("minidl-job-1.5", 2)]


@pytest.mark.usefixtures("logged")
def test_a_tool_that_refuses_spoils_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(*_: object) -> None:
        raise ValueError("\n  it is down\nmore of it")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("minidl.job.log_to._WRITE", {"mlflow": refuses})
    assert run("trace") == cli.OK
    assert "nothing was logged to mlflow: it is down\n" in capsys.readouterr().err
