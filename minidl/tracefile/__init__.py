"""The trace: its events, its files, reading them, and the causal order of the events."""
