"""How messages, tensors, errors and signals travel between processes."""
