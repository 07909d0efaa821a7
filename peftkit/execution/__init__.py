"""The environment of a run: device, processes, plan, state, signals and random numbers."""
