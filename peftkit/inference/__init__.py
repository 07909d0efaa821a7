"""Generation, evaluation and many adapters at once."""
