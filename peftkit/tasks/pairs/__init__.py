"""Preferences and reward models: tasks on pairs of responses."""
