"""Maintenance of the recordings in `traces/`: one command makes, checks, packs and lists them.

`python -m minidl.prove.recordings` (in `__main__`) is the command; `scenes` are the recorded programs, `suite` records
them, `table` lists the result in a README. It needs only torch and NumPy.
"""
