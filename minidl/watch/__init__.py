"""A watchdog: a process that watches the processes of a traced run from outside.

It is not a thread of the traced process. A thread can't run while a C call keeps the GIL or the process is stopped. It
would be alive at the fork of each worker, which is itself a cause of hangs (Python 3.12 warns of it). And it would end
with the process, before it could write how the process ended. `record.watchdog` starts it; `watcher` is its main loop.
"""
