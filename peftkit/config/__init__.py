"""Recipes and configs: strict YAML, validation, errors in words."""
