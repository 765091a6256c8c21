"""The part of tracing that runs inside a traced process."""
