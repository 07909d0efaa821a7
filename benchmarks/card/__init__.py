"""Checks and measurements on a GPU: `python -m benchmarks.card`."""
