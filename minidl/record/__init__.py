"""What runs inside a traced process."""
