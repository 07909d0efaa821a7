"""Tasks with images, sound or video."""
