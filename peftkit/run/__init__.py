"""What a recipe says, and what comes before and after its training."""
