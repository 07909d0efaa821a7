"""GRPO: rollouts, rewards, graders, losses."""
