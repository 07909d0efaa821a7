"""Learning what a teacher says: the same base with a prompt in front."""
