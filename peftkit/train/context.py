"""Whether a run's processes can hold its rows together, asked before anything is loaded."""

from __future__ import annotations

from peftkit.errors import ConfigError
from peftkit.execution.environment import world_size
from peftkit.train.config import TrainConfig


def check_context(config: TrainConfig) -> None:
    """Make sure that the processes can be divided into groups that each hold rows together.

    Raises:
        ConfigError: They cannot, or a setting does not go with it.
    """
    number, world = config.context_parallel, world_size()
    if number == 1:
        return
    asked = f"train.context_parallel: {number}"
    if world % number:
        raise ConfigError(
            f"{asked} takes groups of {number} processes",
            found="There is one process." if world == 1 else f"There are {world} processes.",
            fix=f"accelerate launch --num_processes {number} -m peftkit_cli train RECIPE.yaml",
        )
    if config.sample_every or config.eval_generate:
        raise ConfigError(
            f"{asked} does not go with text that is generated while it trains",
            found="train.sample_every or train.eval_generate is set.",
            fix="Leave it out; peftkit generate and eval do it afterwards.",
        )
