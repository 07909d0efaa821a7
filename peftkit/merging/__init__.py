"""Merged models, combinations and comparisons of adapters; adapters from tuned models."""
