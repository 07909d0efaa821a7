"""Measured side by side with peers, in one run; each prints its table."""
