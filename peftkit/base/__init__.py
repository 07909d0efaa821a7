"""The frozen base model: its files, loading, packing and identity."""
