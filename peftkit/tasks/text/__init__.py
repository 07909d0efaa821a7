"""Encoder-decoders and masked language models."""
