"""transformers, with PEFT where there is an adapter."""

import json
import sys

import torch
import transformers

request = json.load(sys.stdin)
torch.set_num_threads(1)
answers = []
for given in request["models"]:
    model = transformers.AutoModelForCausalLM.from_pretrained(given["base"], dtype=torch.float32)
    if "adapter" in given:
        import peft

        model = peft.PeftModel.from_pretrained(model, given["adapter"])
    model.eval()
    found = []
    for prompt in request["prompts"]:
        made = model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=request["num_tokens"],
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        ids = made.sequences[0, len(prompt) :].tolist()
        rows = [torch.log_softmax(row[0].float(), -1) for row in made.logits]
        found.append(
            {"ids": ids, "logprobs": [row[i].item() for row, i in zip(rows, ids, strict=True)]}
        )
    answers.append(found)
print(json.dumps(answers))
