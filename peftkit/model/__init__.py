"""A transformer as it stands: its places, roles, names and embeddings."""
