"""The arithmetic that must be fast, each with its plain-torch reference."""
