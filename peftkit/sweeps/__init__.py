"""Several adapters trained over one base in one pass."""
