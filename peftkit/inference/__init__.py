"""Generation, evaluation and several adapters on one base."""
