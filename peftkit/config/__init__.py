"""Recipes and configs: strict YAML, validation, and readable errors."""
