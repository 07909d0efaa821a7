"""Replacements for parts of transformers' forward pass: attention, batches, loss, blocks."""
