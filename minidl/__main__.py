"""`python -m minidl` is `minidl`."""

import sys

from minidl.cli import main

sys.exit(main())
