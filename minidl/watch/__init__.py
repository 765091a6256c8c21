"""A watchdog: a process that watches the processes of a traced run from outside.

It is no thread of the traced process. A thread can't run while a C call keeps the GIL or the process is stopped, is
alive at the fork of each worker, which Python 3.12 warns of and which is itself a cause of hangs, and ends with the
process before it has written how that ended. `record.watchdog` starts it; `watcher` is its main loop.
"""
