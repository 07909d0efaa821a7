"""The parts of a merge: the maths, the two ways to write it, and the check."""
