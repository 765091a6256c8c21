"""The headline and the figures of a run or a job, written to the tool that tracks its experiments.

Interface: `log(report, tool, name)`; `check(tool)` tells before a run whether that is possible; `figures(report)`.

Rules of use: TensorBoard's events go to runs/NAME, MLflow's where its own settings say, W&B's to a directory that
`wandb sync` sends, unless WANDB_MODE says otherwise. A run of theirs that is open in this process takes the figures;
else one is made with this name.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import Any, Final

from minidl.job.report import JobReport
from minidl.job.step_table import CAUSES

Figures = Mapping[str, float]


def figures(report: JobReport) -> dict[str, float]:
    """Name -> value: shares from 0 to 1, times in ms. straggler: a rank; absent = there is none."""
    meetings = report.meetings
    shares = report.waited / max(1.0, report.waited.sum() + report.own)
    found = {
        "ranks": len(report.tables),
        "steps": len(meetings.keys),
        "step_ms": meetings.usual / 1000,
        "waits_for_batches": float(shares.sum()),
        "waits_for_a_rank": meetings.lost,
        "steps_that_wait_for_a_rank": meetings.share,
    }
    found |= {f"waits_for/{cause.value.replace(' ', '_')}": float(of) for cause, of in zip(CAUSES, shares, strict=True)}
    if report.straggler is not None and report.straggler.ranks:
        found["straggler"] = report.facts[report.straggler.ranks[0]].rank
    return found


def log(report: JobReport, tool: str, name: str) -> None:
    """Write what the report says to a tool of TOOLS. name: of the run there."""
    headline = "\n\n".join(report.finding.lines())
    _WRITE[tool](name, headline, {f"minidl/{key}": value for key, value in figures(report).items()})


def check(tool: str) -> None:
    """Raise ImportError, with the remedy, if a tool of TOOLS is not installed."""
    spec = importlib.util.find_spec(tool)
    if spec is None or spec.origin is None:  # without an origin, it is a mere directory of that name
        raise ImportError(f"--log-to {tool}: {tool} is not installed: pip install {tool}")


def _tensorboard(name: str, headline: str, found: Figures) -> None:
    torch: Any = importlib.import_module("torch.utils.tensorboard")
    with torch.SummaryWriter(f"runs/{name}") as writer:
        writer.add_text("minidl/headline", headline)
        for key, value in found.items():
            writer.add_scalar(key, value)


def _wandb(name: str, headline: str, found: Figures) -> None:
    wandb: Any = importlib.import_module("wandb")
    is_open, mode = wandb.run is not None, os.environ.get("WANDB_MODE", "offline")
    run = wandb.run if is_open else wandb.init(project="minidl", name=name, mode=mode)
    run.summary.update({"minidl/headline": headline, **found})
    if not is_open:
        run.finish()


def _mlflow(name: str, headline: str, found: Figures) -> None:
    mlflow: Any = importlib.import_module("mlflow")
    with contextlib.nullcontext() if mlflow.active_run() else mlflow.start_run(run_name=name):
        mlflow.set_tag("minidl.headline", headline)
        mlflow.log_metrics(dict(found))


_WRITE: Final[dict[str, Callable[[str, str, Figures], None]]] = {
    "tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow,
}  # fmt: skip
TOOLS: Final = tuple(_WRITE)
