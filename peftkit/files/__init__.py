"""Files: atomic writes, bounded reads."""
