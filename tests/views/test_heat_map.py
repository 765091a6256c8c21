"""The pictures of a job: who is late in which step, as cells of colour and as characters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from made_jobs import STEP_TAKES, MadeJob, copied, late_job

from minidl import cli
from minidl.job.report import JobReport
from minidl.job.step_table import CAUSES
from minidl.speed.wall_clock import Cause
from minidl.views.heat_map import MOST_COLUMNS, MOST_ROWS, averaged, heat_map, in_text

pytest.importorskip("matplotlib")

TRACES = Path(__file__).parent.parent.parent / "traces"


def late(ranks: int, steps: int = 40) -> JobReport:
    """Rank 2 is late in every second step from the 20th on."""
    return JobReport(late_job(ranks, steps, lambda step: step >= 20 and step % 2 == 1))


@pytest.mark.parametrize(("ranks", "panels"), [(4, 3), (100, 4)])
def test_the_map_shows_each_rank_and_marks_the_last_one(ranks: int, panels: int) -> None:
    figure = heat_map(late(ranks))
    assert len(figure.axes) == panels  # of many ranks, those that are late are drawn once more
    cells = figure.axes[0]
    (image,) = cells.images
    colours = np.asarray(image.get_array())
    assert colours.shape == (ranks, 40, 3)
    assert (colours[:, 20] == 1).all()  # nobody waits
    assert (colours[2, 21] != colours[1, 21]).any()
    assert (colours[1, 21] == colours[3, 21]).all()
    marks = np.asarray(cells.collections[0].get_offsets())
    assert marks.tolist() == [[step, 2] for step in range(21, 40, 2)]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "waits for samples", "waits for other ranks", "its own step", "above: a longer step of its own",
        "the last rank of a step",
    ]  # fmt: skip


def test_the_critical_path_says_why_the_last_rank_was_late() -> None:
    why = late(4).meetings.why()
    samples, own = why[CAUSES.index(Cause.SAMPLES)], why[-1]
    assert samples[1:].tolist() == [40_000 * (step >= 20 and step % 2) for step in range(1, 40)]
    assert not own[1:].any()
    works = JobReport(MadeJob(4, step=lambda rank, step: STEP_TAKES * (1 + (rank == 1))).record()).meetings.why()
    assert (works[-1] == STEP_TAKES).all()
    assert not works[:-1].any()


def test_a_node_whose_name_is_not_utf_8_is_drawn(tmp_path: Path) -> None:
    report = JobReport(late_job(4, 8, nodes=lambda rank: f"\udcff{rank}"))
    heat_map(report).savefig(tmp_path / "job.png")
    assert "\udcff" not in in_text(report, 60)


def test_more_steps_and_ranks_than_pixels_areaveraged(tmp_path: Path) -> None:
    values = np.arange(10, dtype=float).reshape(5, 2)
    assert averaged(values, 2, 0).tolist() == [[1.0, 2.0], [6.0, 7.0]]
    assert averaged(values, 9, 0) is values
    figure = heat_map(late(4, MOST_COLUMNS + 100))
    assert np.asarray(figure.axes[0].images[0].get_array()).shape[1] == MOST_COLUMNS < MOST_ROWS + 1
    figure.savefig(tmp_path / "job.png")


def test_a_job_as_characters() -> None:
    lines = in_text(late(4), 60).splitlines()
    assert lines[1:5] == [
        f"rank {rank}    " + "." * 20 + (".#" if rank == 2 else ".-") * 10 for rank in range(4)
    ]  # fmt: skip
    assert len(in_text(late(4, 4000), 60).splitlines()[3]) <= 60
    assert in_text(JobReport(MadeJob(4, 0).record()), 60).startswith("fine: ")


@pytest.mark.heavy
def test_the_command_draws_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = str(copied(tmp_path / "job", "workers-4", "workers-1"))
    assert cli.main(["timeline", job]) == cli.OK
    assert "\nrank 1    " in capsys.readouterr().out
    assert cli.main(["timeline", job, "-o", str(tmp_path / "job.png")]) == cli.OK
    assert (tmp_path / "job.png").stat().st_size > 10_000
    assert cli.main(["timeline", job, "--rank", "1", "--until", "0.1"]) == cli.OK
    assert cli.main(["timeline", str(TRACES / "ranks-4-one-gpu.minidl"), "--ranks"]) == cli.OK
    assert "\nrank 3    " in capsys.readouterr().out


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("options", "said"),
    [(["-o", "x.html"], "is a job"), (["--since", "1"], "need --rank N"), (["-o", "x"], "no suffix")],
)
def test_the_command_refuses_what_a_job_has_not(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["timeline", str(copied(tmp_path, "workers-4", "workers-1")), *options]) == cli.USAGE
    assert said in capsys.readouterr().err
    assert cli.main(["timeline", str(TRACES / "workers-2.minidl"), "--ranks"]) == cli.USAGE
    assert "has one rank" in capsys.readouterr().err
