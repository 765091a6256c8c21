"""Evidence of processes, as the kernel knows them: collected without changing them, and kept as plain values.

Interface: `collect.collect(main)` -> `model.RunEvidence`, with `to_json()` and `from_json()`. `waits.waits(evidence)`
says who waits for whom across pipes, sockets, locks, semaphores, threads and children.

Rules of use: it imports nothing of the loader, and needs neither py-spy nor any privilege: what it could not read is
listed in `not_seen`, with the reason. Processes that end while they are read are normal.
"""
