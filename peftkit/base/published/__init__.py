"""Checkpoints that others have quantised: a leaf, imported for a base whose config names one."""
