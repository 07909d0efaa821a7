"""CTranslate2: a merged model, converted by its own converter, in float32."""

import json
import sys
import tempfile

import ctranslate2
import transformers
from ctranslate2.converters import TransformersConverter

request = json.load(sys.stdin)
answers = []
for given in request["models"]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(given["base"])
    with tempfile.TemporaryDirectory() as folder:
        TransformersConverter(given["base"]).convert(folder, quantization="float32", force=True)
        model = ctranslate2.Generator(folder, device="cpu", intra_threads=1)
        prompts = [tokenizer.convert_ids_to_tokens(ids) for ids in request["prompts"]]
        made = model.generate_batch(
            prompts,
            max_batch_size=1,
            max_length=request["num_tokens"],
            sampling_topk=1,
            include_prompt_in_result=False,
            end_token=[],
        )
        ids = [result.sequences_ids[0] for result in made]
        rows = [
            prompt + tokenizer.convert_ids_to_tokens(own)
            for prompt, own in zip(prompts, ids, strict=True)
        ]
        scored = model.score_batch(rows, max_batch_size=1)
        found = [
            {"ids": own, "logprobs": list(score.log_probs)[-len(own) :]}
            for own, score in zip(ids, scored, strict=True)
        ]
    answers.append(found)
print(json.dumps(answers))
