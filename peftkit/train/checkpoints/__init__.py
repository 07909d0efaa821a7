"""Checkpoints: written whole, proven valid, compared before a resume."""
