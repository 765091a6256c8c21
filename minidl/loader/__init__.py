"""The loader: who gets which task, whose batch is next, and how it ends."""
