"""Classification of sequences and tokens."""
