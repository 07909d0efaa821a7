"""Run a recipe of Tinker's cookbook as it is; its data and tokenizer are this machine's."""

import importlib
import json
import sys
from typing import Any

import datasets
from tinker_cookbook import tokenizer_utils
from transformers import AutoTokenizer

request = json.load(sys.stdin)
NAME = request["name"]
tokenizer_utils.register_tokenizer(NAME, lambda: AutoTokenizer.from_pretrained(request["folder"]))
QUESTIONS = [f"Tom has {n} apples and buys {n} more. How many has he?" for n in range(1, 17)]
rows: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": f"the lazy {n}"},
        ],
        "question": question,
        "answer": f"#### {n}",
    }
    for n, question in enumerate(QUESTIONS)
]
datasets.load_dataset = lambda *args, **named: datasets.DatasetDict(
    train=datasets.Dataset.from_list(rows)
)
recipe = importlib.import_module(f"tinker_cookbook.recipes.{request['recipe']}")
if request["recipe"] == "rl_loop":  # a random model gets no sum right
    recipe.get_reward = lambda response, answer: float(len(response) % 3)
config = recipe.Config(
    base_url=request["url"], model_name=NAME, log_path=request["log"], **request["settings"]
)
recipe.main(config)
with open(f"{request['log']}/metrics.jsonl") as file:
    metrics = [json.loads(line) for line in file]
with open(f"{request['log']}/checkpoints.jsonl") as file:
    checkpoints = [json.loads(line) for line in file]
print(json.dumps({"metrics": metrics, "checkpoints": checkpoints}))
