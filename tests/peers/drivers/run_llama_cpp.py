"""llama.cpp, by its bindings xllamacpp.

Its kernels for 4-bit weights round activations to 8 bits, which alone moves log-probabilities by
0.4 and changes every second answer of 30 tokens; those for float32 do not.
"""

import json
import sys

import xllamacpp as llama

request = json.load(sys.stdin)
answers = []
for given in request["models"]:
    params = llama.CommonParams()
    params.model.path = given["base"]
    params.n_ctx, params.n_parallel, params.warmup, params.verbosity = 256, 1, False, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if "adapter" in given:
        params.lora_adapters = [llama.CommonAdapterLoraInfo(given["adapter"], 1.0)]
    server = llama.Server(params)
    found = []
    for prompt in request["prompts"]:
        asked = {"prompt": prompt, "max_tokens": request["num_tokens"], "temperature": 0.0}
        asked |= {"logprobs": 1, "cache_prompt": False}
        tokens = server.handle_completions(asked)["choices"][0]["logprobs"]["content"]
        found.append({"ids": [t["id"] for t in tokens], "logprobs": [t["logprob"] for t in tokens]})
    answers.append(found)
    del server
print(json.dumps(answers))
