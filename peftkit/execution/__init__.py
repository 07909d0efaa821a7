"""What a run has to work with, and how it runs: decided once, handed down."""
