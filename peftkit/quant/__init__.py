"""Frozen weights in 4 and 8 bits, and the audit of them."""
