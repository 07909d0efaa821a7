"""The frozen base model: found, loaded, identified."""
