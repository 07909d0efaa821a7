"""Runs reported: one HTML file, and a table of runs."""
