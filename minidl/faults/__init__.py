"""Faults that are injected into a running loader: what it does about each, step by step of the protocol.

`matrix` lists the cells and runs each in a process group of its own; `program` is what runs there.
"""
