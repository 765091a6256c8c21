"""Instruments of the project: failures, faults, benchmarks, recordings. Nothing above imports them."""
