"""The parts of combining: which adapters belong together, and what becomes of one layer."""
