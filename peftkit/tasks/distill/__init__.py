"""Distillation from a teacher model."""
