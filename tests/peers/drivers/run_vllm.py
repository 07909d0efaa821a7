"""vLLM on a CPU; all adapters of one base in one engine, their requests in one batch."""

import json
import sys

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def main() -> None:
    """Answer; in a function, because the engine's process imports this file again."""
    request = json.load(sys.stdin)
    (base,) = {given["base"] for given in request["models"]}
    has_adapters = "adapter" in request["models"][0]
    lora = {"enable_lora": True, "max_loras": len(request["models"]), "max_lora_rank": 16}
    model = LLM(
        base,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        disable_log_stats=True,
        **(lora if has_adapters else {}),
    )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=request["num_tokens"], logprobs=0, ignore_eos=True
    )
    prompts, adapters = [], []
    for number, given in enumerate(request["models"], 1):
        prompts += [{"prompt_token_ids": ids} for ids in request["prompts"]]
        own = LoRARequest(f"a{number}", number, given["adapter"]) if has_adapters else None
        adapters += [own] * len(request["prompts"])
    made = model.generate(prompts, sampling, lora_request=adapters, use_tqdm=False)
    rows = []
    for each in made:
        out = each.outputs[0]
        told = [step[i].logprob for step, i in zip(out.logprobs, out.token_ids, strict=True)]
        rows.append({"ids": list(out.token_ids), "logprobs": told})
    count = len(request["prompts"])
    answers = [rows[start : start + count] for start in range(0, len(rows), count)]
    print("\n" + json.dumps(answers))


if __name__ == "__main__":
    main()
