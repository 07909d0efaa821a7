"""Embedding models and rerankers."""
