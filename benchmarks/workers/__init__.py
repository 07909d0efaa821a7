"""One training run each, in a process of its own, so that peak memory is the run's alone.

A worker reads a job (JSON) from its first argument and prints one line of JSON: what it measured.
"""
