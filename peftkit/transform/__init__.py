"""Adapters made from adapters and models: combine, compare, extract, convert."""
