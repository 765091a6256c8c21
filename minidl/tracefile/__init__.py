"""What a trace is: the events, the files, reading them, and what happened before what."""
