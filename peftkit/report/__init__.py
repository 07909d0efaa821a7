"""What a run did, to look at: one HTML file, a PNG, a table of runs."""
