"""Copies of batches to an accelerator."""
