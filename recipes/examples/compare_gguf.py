"""Compare an exported GGUF file with its adapter: tokens of prompts, then greedy answers.

    llama-server -m demo.gguf --jinja
    python recipes/examples/compare_gguf.py runs/demo

The tokens show what most exports get wrong: the chat template, a second BOS token, the system
prompt. Answers of a quantised file may differ although all prompts are equal.

Needs: the adapter, its base, and a running llama-server with the file. Takes about a minute.
Gives: the number of equal prompts and answers, and each difference.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from pathlib import Path
from typing import Any

from peftkit import Opened, generate, open_adapter

QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "What is 2+2?",
    "Write one sentence about the sea.",
    "Translate 'good morning' into Spanish.",
    "Is water wet?",
)
NUM_TOKENS = 64


def compare(opened: Opened, prompts: list[str], url: str) -> tuple[int, int, list[str]]:
    """Return the number of prompts with equal tokens, of equal answers, and the differences.

    Args:
        url: Address of a server of llama.cpp.
    """
    tokenizer, style = opened.base.tokenizer, opened.style
    num_prompts, num_answers, differences = 0, 0, []
    for prompt in prompts:
        text = prompt
        if style.kind == "chat":
            turns = style.opened([{"role": "user", "content": prompt}])
            text = tokenizer.apply_chat_template(
                turns,
                chat_template=style.chat_template,
                add_generation_prompt=True,
                tokenize=False,
            )
        ours = tokenizer(text, add_special_tokens=style.kind != "chat")["input_ids"]
        theirs, answer = by_llama_cpp(url, prompt, style.kind == "chat")
        if ours == theirs:
            num_prompts += 1
        else:
            pairs = enumerate(zip(ours, theirs, strict=False))
            at = next((n for n, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
            here, there = (tokenizer.decode(ids[at : at + 8]) for ids in (ours, theirs))
            differences.append(f"{prompt}: from token {at}, {here!r} in training, {there!r} here")
        settings: dict[str, Any] = {"style": style, "max_new_tokens": NUM_TOKENS}
        (expected,) = generate(opened.base.model, tokenizer, prompt, **settings)
        if expected.strip() == answer.strip():
            num_answers += 1
        else:
            differences.append(f"{prompt}: peftkit answers {expected!r}, llama.cpp {answer!r}")
    return num_prompts, num_answers, differences


def by_llama_cpp(url: str, prompt: str, is_chat: bool) -> tuple[list[int], str]:
    """Return the tokens of a prompt, as the server renders it, and the greedy answer."""
    settings = {"temperature": 0, "max_tokens": NUM_TOKENS, "cache_prompt": False}
    text = prompt
    if is_chat:
        messages = {"messages": [{"role": "user", "content": prompt}]}
        text = post(f"{url}/apply-template", messages)["prompt"]
        body = messages | settings | {"reasoning_format": "none"}
        answer = post(f"{url}/v1/chat/completions", body)["choices"][0]["message"]["content"]
    else:
        answer = post(f"{url}/v1/completions", settings | {"prompt": prompt})["choices"][0]["text"]
    # as the server tokenizes a rendered prompt: BOS if the file's flag requires it
    body = {"content": text, "add_special": True, "parse_special": True}
    return post(f"{url}/tokenize", body)["tokens"], answer or ""


def post(url: str, body: dict[str, Any]) -> Any:
    """Return the server's reply to a request, as JSON."""
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(url, json.dumps(body).encode(), headers)
    ) as r:
        return json.load(r)


def main() -> None:
    """Compare the adapter with the server, and print the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("adapter", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="address of llama-server")
    parser.add_argument("--prompts", type=Path, help="a text file with one prompt a line")
    given = parser.parse_args()
    prompts = given.prompts.read_text("utf-8").splitlines() if given.prompts else list(QUESTIONS)
    num_prompts, num_answers, differences = compare(open_adapter(given.adapter), prompts, given.url)
    print(f"prompts with equal tokens: {num_prompts} of {len(prompts)}")
    print(f"equal answers: {num_answers} of {len(prompts)}")
    for difference in differences:
        print(difference)


if __name__ == "__main__":
    main()
