"""The arithmetic that must be fast, each beside its plain-torch reference."""
