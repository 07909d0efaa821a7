"""The training loop, its optimizers and its checkpoints; knows no method and no screen."""
