"""Adapter folders in PEFT's format."""
