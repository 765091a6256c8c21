"""Runs scripts under `minidl run`, each in a fork of this process, which has imported torch: that takes seconds.

Each line of stdin is a script's arguments, its folder and the files that its output goes to, as JSON; each line of
stdout is its exit status, as `subprocess` gives it. The fork's command line runs at this file's end, as in a process of
its own.
"""

import json
import os
import sys

import torch.utils.data  # noqa: F401

import minidl.run  # noqa: F401
from minidl.cli import main
from minidl.hang.headline import headline  # noqa: F401

for line in sys.stdin:
    arguments, folder, out, err = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
os.chdir(folder)
for number, path in enumerate((os.devnull, out, err)):
    os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
sys.argv = ["minidl", "run", "--hang-after", "off", "--trace", f"{out}.trace", *arguments]
sys.exit(main())
