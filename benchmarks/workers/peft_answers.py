"""Complete a job's batches of prompts with transformers' generate over PEFT; print tokens/s.

Runs in a separate environment (peft); imports nothing of peftkit. Further keys of the job: prompts
(batches of rows of equal length) and new_tokens.
"""

from __future__ import annotations

import json
import time

import torch

from benchmarks.workers.meter import device_of, read_job, telling_of_memory
from benchmarks.workers.peer_model import peft_model


@torch.no_grad()
def main() -> None:
    """Time each batch, in the second of two calls."""
    job = read_job()
    with telling_of_memory():
        device = device_of(job)
        model = peft_model(job, device).eval()
        new, speeds = job["new_tokens"], []
        for prompts in job["prompts"]:
            ids = torch.tensor(prompts, device=device)
            for _ in range(2):
                began = time.perf_counter()
                out = model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=new,
                    min_new_tokens=new,
                    do_sample=False,
                    pad_token_id=0,
                )
                made = out[:, ids.shape[1] :].tolist()  # synchronises
                seconds = time.perf_counter() - began
            speeds.append(sum(map(len, made)) / seconds)
        print("\n" + json.dumps({"speeds": speeds}), flush=True)


if __name__ == "__main__":
    main()
