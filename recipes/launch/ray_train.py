"""A run on a Ray cluster: Ray starts one worker for each GPU, and restarts all after a failure.

    python recipes/launch/ray_train.py recipe.yaml --out /shared/runs/demo --workers 4

A restarted run continues from its newest checkpoint. The output folder is on a file system that all
machines share. Without GPUs: --cpu.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def train_worker(settings: dict[str, Any]) -> None:
    """Train in one worker; Ray has set RANK and WORLD_SIZE, and has joined the processes."""
    import ray.train

    from peftkit import load_recipe, run_recipe

    recipe = load_recipe(settings["recipe"], [f"train.output_dir={settings['out']}"])
    result = run_recipe(recipe, resume="auto")
    metrics = {name: float(value) for name, value in result.metrics.items()}
    ray.train.report({"step": result.step, **metrics})


def train(recipe: Path, out: Path, *, workers: int, cpu: bool = False, restarts: int = 10) -> Any:
    """Run a recipe on `workers` workers of a Ray cluster; return Ray's result."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"recipe": str(recipe.resolve()), "out": str(out.resolve())},
        torch_config=TorchConfig(backend="gloo" if cpu else "nccl"),
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=not cpu),
        run_config=RunConfig(
            name=out.name,
            storage_path=str(out.resolve().parent / "ray"),
            failure_config=FailureConfig(max_failures=restarts),
        ),
    )
    return trainer.fit()


def main() -> None:
    """Read the command line, and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    train(arguments.recipe, arguments.out, workers=arguments.workers, cpu=arguments.cpu)
    print(arguments.out)


if __name__ == "__main__":
    main()
