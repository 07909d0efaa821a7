"""Performance-critical computations, each with a plain torch reference."""
