"""Make one recording here: `python -m minidl.prove.recordings.one NAME DEVICE WORK` prints the trace's path."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from minidl.prove.recordings.scenes import SCENES
from minidl.prove.recordings.training import Setting

if __name__ == "__main__":
    name, device, work = sys.argv[1:]
    # The trace keeps the command that a reader can repeat, without this machine's paths.
    command = ["python", "-m", "minidl.prove.recordings", "--device", device, "--only", name]
    sys.argv = sys.orig_argv = command
    os.chdir(work)
    place = SCENES[name].record(Setting.of(device, Path(work)), Path(work) / name)
    print(place.absolute())
