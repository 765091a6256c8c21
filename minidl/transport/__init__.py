"""How messages and tensors cross from one process to another (article 3 §queue)."""
