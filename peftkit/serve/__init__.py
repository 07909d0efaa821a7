"""Adapters behind OpenAI's HTTP interface, for trying things out on one machine."""
