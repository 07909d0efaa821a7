"""Adapter files, as other tools write and read them."""
