"""Merging an adapter into its base: the maths, two ways to write the model, and the check."""
