"""Files: written atomically, read with bounds."""
