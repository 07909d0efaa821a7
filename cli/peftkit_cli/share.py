"""`peftkit merge`."""
