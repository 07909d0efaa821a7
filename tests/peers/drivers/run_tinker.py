"""Train and sample with Tinker's own client, any version; runs in its environment."""

import json
import os
import sys
from typing import Any

import tinker
from tinker import types

request = json.load(sys.stdin)
service = tinker.ServiceClient(base_url=request["url"])
PROMPT = [5, 6, 7, 8]


def made(coming: Any) -> Any:
    """Return a client: newer versions return what it will be."""
    return coming.result() if hasattr(coming, "result") else coming


def datum(ids: list[int], **inputs: list[float]) -> types.Datum:
    given = {"target_tokens": ids[1:], **inputs}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=given)


def log_probs(client: Any, ids: list[int]) -> list[float]:
    found = client.forward([datum(ids)], "cross_entropy").result()
    return list(found.loss_fn_outputs[0]["logprobs"].data)


def learnt(client: Any, steps: int, rows: list[types.Datum]) -> list[float]:
    told = []
    for _ in range(steps):
        loss = client.forward_backward(rows, "cross_entropy")
        step = client.optim_step(types.AdamParams(learning_rate=0.02, grad_clip_norm=5.0))
        told += [loss.result().metrics["loss:sum"], step.result().metrics["grad_norm:mean"]]
    return told


def new(seed: int, rank: int = 4) -> Any:
    return made(service.create_lora_training_client(base_model="base", rank=rank, seed=seed))


answer: dict[str, Any] = {"version": tinker.__version__}
rows = [datum([5, 6, 7, 8, 9, 10]), datum([5, 6, 7, 30, 31], weights=[0.0, 1.0, 1.0, 0.5])]
first = new(1)
answer["info"] = first.get_info().lora_rank
answer["losses"] = learnt(first, 6, rows)[::2]
many = [datum([5 + n, 6 + n, 7 + n]) for n in range(20)]
first.holder._client_config = first.holder._client_config.model_copy(
    update={"fwdbwd_max_chunk_len": 3}
)
whole = first.forward_backward(many, "cross_entropy").result()
answer["chunks"] = [len(whole.loss_fn_outputs), whole.metrics["loss:sum"]]
answer["alone"] = sum(-sum(log_probs(first, [5 + n, 6 + n, 7 + n])) for n in range(20))
first.optim_step(types.AdamParams(learning_rate=0.0)).result()

sampler = made(first.save_weights_and_get_sampling_client())
prompt = types.ModelInput.from_ints(PROMPT)
params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=3)
drawn = sampler.sample(prompt, 3, params, include_prompt_logprobs=True, topk_prompt_logprobs=2)
found = drawn.result()
answer["drawn"] = []
for one in found.sequences:
    known = log_probs(first, PROMPT + list(one.tokens))
    both = [*found.prompt_logprobs[1:], *one.logprobs]
    answer["drawn"].append(
        [one.stop_reason, max(abs(a - b) for a, b in zip(known, both, strict=True))]
    )
rewarded = [
    datum(
        PROMPT + list(one.tokens),
        logprobs=[0.0] * (len(PROMPT) - 1) + list(one.logprobs),
        advantages=[0.0] * (len(PROMPT) - 1) + [float(place - 1)] * len(one.tokens),
    )
    for place, one in enumerate(found.sequences)
]
answer["rewarded"] = {
    loss: first.forward_backward(rewarded, loss).result().metrics["loss:sum"]
    for loss in ("importance_sampling", "ppo", "cispo", "dro")
}
first.optim_step(types.AdamParams(learning_rate=1e-3)).result()

alone = [learnt(new(seed), 3, rows) for seed in (5, 6)]
two = [new(5), new(6)]
mixed: list[list[float]] = [[], []]
for _ in range(3):
    for told, client in zip(mixed, two, strict=True):
        told += learnt(client, 1, rows)
answer["interleaved"] = mixed == alone
saved = two[0].save_state("half-way").result().path
expected = learnt(two[0], 2, rows)
again = made(service.create_training_client_from_state_with_optimizer(saved))
answer["resumed"] = learnt(again, 2, rows) == expected
named = two[0].save_weights_for_sampler("named").result().path
by_name = made(service.create_sampling_client(model_path=named))
answer["named"] = len(by_name.sample(prompt, 1, params).result().sequences[0].tokens)
rest = service.create_rest_client()
listed = rest.list_checkpoints(two[0].model_id).result().checkpoints
answer["listed"] = [one.checkpoint_id for one in listed]
rest.delete_checkpoint_from_tinker_path(named).result()
answer["left"] = len(rest.list_user_checkpoints().result().checkpoints)
try:
    first.forward_backward(rows, "stable_reinforce").result()
except Exception as error:
    answer["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(answer), flush=True)
os._exit(0)  # version 0.25 aborts now and then when the interpreter ends beside its threads
