"""Learning from the model's own answers."""
