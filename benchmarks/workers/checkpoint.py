"""Write a checkpoint of random weights of a released shape, with a tokenizer of its rows' words.

A job has the keys shape, sizes, dtype, device and target (the folder). Needs only torch and
transformers. A block at a time is made on the device; main memory holds the whole model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks import shapes
from benchmarks.workers.meter import device_of, read_job

NUM_WORDS = 296
"""Words of the rows: tokens 5 to 299, so that a few steps lower the loss."""


def write(job: dict[str, Any]) -> None:
    """Write config, tokenizer and weights; the folder appears when all are written."""
    target = Path(job["target"])
    part = target.with_name(f"{target.name}.part")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[job["dtype"]]
    model = shapes.build(
        shapes.SHAPES[job["shape"]],
        dtype=dtype,
        device=device_of(job),
        each_block=lambda block: block.to("cpu"),
        **job.get("sizes", {}),
    )
    model.to("cpu").save_pretrained(part, max_shard_size="4GB")
    shapes.tokenizer(NUM_WORDS).save_pretrained(part)
    part.rename(target)


def main() -> None:
    """Write a job's checkpoint."""
    job = read_job()
    write(job)
    print("\n" + json.dumps({"written": job["target"]}), flush=True)


if __name__ == "__main__":
    main()
