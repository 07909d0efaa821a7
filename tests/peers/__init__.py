"""Other programs, each in an environment of its own, given what peftkit writes."""
