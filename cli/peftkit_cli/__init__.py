"""The `peftkit` command."""
