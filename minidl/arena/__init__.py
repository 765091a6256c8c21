"""Transport "arena": batches in slabs of memory that are used again."""
