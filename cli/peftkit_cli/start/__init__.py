"""Surveys of data files, and recipes drafted for them."""
