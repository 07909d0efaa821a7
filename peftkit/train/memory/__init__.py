"""How much of a step is in memory at once."""
