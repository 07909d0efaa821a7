"""Estimates of the memory, time and disk of a run."""
