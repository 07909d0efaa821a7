"""Adapter files in the formats of other tools."""
