"""What a step takes, counted on tensors without data."""
