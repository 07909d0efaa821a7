"""Encoded rows: the encoder's protocol, the cache, worker processes, Arrow columns."""
