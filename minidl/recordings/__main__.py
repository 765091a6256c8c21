"""Record one scene in this process: `python -m minidl.recordings NAME DEVICE WORK`; prints where the trace is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from minidl.recordings.scenes import SCENES
from minidl.recordings.training import Setting

if __name__ == "__main__":
    name, device, work = sys.argv[1:]
    # What the trace is told was run; not where this machine keeps the package.
    sys.argv = sys.orig_argv = ["minidl", "record-suite", "--device", device, "--only", name]
    os.chdir(work)
    place = SCENES[name].record(Setting.of(device, Path(work)), Path(work) / name)
    print(place.absolute())
