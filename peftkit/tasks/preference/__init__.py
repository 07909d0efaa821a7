"""Learning from comparisons of answers."""
