"""mlx-lm, on the CPU."""

import json
import sys
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model

request = json.load(sys.stdin)
mx.set_default_device(mx.cpu)
answers = []
for asked in request["models"]:
    folder = Path(asked["base"])
    config = json.loads((folder / "config.json").read_text())
    # where transformers 5 no longer writes it, and mlx-lm looks for it
    theta = (config.get("rope_parameters") or {}).get("rope_theta")
    model, _ = load_model(folder, model_config={"rope_theta": theta} if theta else {})
    model.set_dtype(mx.float32)
    if "adapter" in asked:
        model = load_adapters(model, asked["adapter"])
    model.eval()
    found = []
    for prompt in request["prompts"]:
        ids, logprobs, given, cache = [], [], prompt, make_prompt_cache(model)
        for _ in range(request["num_tokens"]):
            row = model(mx.array([given]), cache=cache)[0, -1].astype(mx.float32)
            row = row - mx.logsumexp(row)
            given = [int(mx.argmax(row))]
            ids += given
            logprobs.append(float(row[given[0]]))
        found.append({"ids": ids, "logprobs": logprobs})
    answers.append(found)
print(json.dumps(answers))
