"""What a live transformer is made of: weights, their roles, targets, blocks."""
