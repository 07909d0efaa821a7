"""What is made of adapters: merged models, combinations, comparisons; adapters of tuned models."""
