"""Reports of runs: one HTML file, and a table of runs."""
