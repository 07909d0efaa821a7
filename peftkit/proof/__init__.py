"""Proofs that a model computes with an adapter."""
