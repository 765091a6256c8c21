"""Run by the interpreters that a program under `minidl run` starts: they go on recording, if they import torch.

`record.handover` puts this folder in front of PYTHONPATH. Python imports `sitecustomize` when it starts. This one runs
the one that it hides, and then waits for torch: once torch is imported, it calls `run.take_over`. Until then nothing
of minidl is imported and nothing is written, so a helper process that needs no torch does what it always does.

Rule of use: an interpreter of any version 3 may import this file, so its syntax is old.
"""

import os
import sys
from typing import Any

VARIABLE = "MINIDL_RUN"


def run_the_hidden_one() -> None:
    """Import the `sitecustomize` that this one hides, as Python would have; this folder leaves `sys.path`."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [place for place in sys.path if os.path.abspath(place) != here]
    own = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", own)


class AfterTorch:
    """A finder of modules that finds none, and has `take_over` called when `torch` has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return torch's own spec, whose loader calls `take_over` at its end; None for any other module."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        finders = (finder.find_spec(name, path, target) for finder in list(sys.meta_path))
        spec = next((found for found in finders if found is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                take_over()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def take_over() -> None:
    """Record this process's loaders in the run's trace. A failure is said on stderr, and the program goes on."""
    try:
        import importlib.util
        import json

        settings = json.loads(os.environ[VARIABLE])
        if importlib.util.find_spec("minidl") is None:
            sys.path.append(settings["package"])
        from minidl.run import take_over

        take_over(settings)
    except Exception as error:
        command = " ".join(getattr(sys, "orig_argv", sys.argv))[:200]
        what = f"PROCESS {os.getpid()} IS NOT RECORDED and uses torch's DataLoader"
        sys.stderr.write(f"minidl: {what}: {type(error).__name__}: {error}\n    its command: {command}\n")


if __name__ == "sitecustomize":  # else it is imported under another name, to be looked at
    run_the_hidden_one()
    if os.environ.get(VARIABLE):
        sys.meta_path.insert(0, AfterTorch())
