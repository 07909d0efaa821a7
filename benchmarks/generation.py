"""How fast are answers? Greedy tokens a second of peftkit beside PEFT + transformers' generate.

    python -m benchmarks.generation                     # SmolLM2-135M, bf16, batches of 8
    python -m benchmarks.generation --quantize nf4
    python -m benchmarks.generation --layers 10 --repeats 3   # quick

Both sides run in turn in one process: the same adapter (random, on all linear layers), the
quickstart's orders as prompts with its chat template, the same number of new tokens. Seconds are of
the clock and of the processor: on a shared machine the latter says more. Also told: how many of the
tokens agree (in bf16 sums in another order choose another token here and there, and all after it
are others).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from types import SimpleNamespace
from typing import Any

import peft
import torch
import transformers

from benchmarks.orders import make_rows
from benchmarks.report import Spread, table
from peftkit.adapter import attach
from peftkit.base.load import load_base
from peftkit.base.locate import locate
from peftkit.formats.peft.folder import Provenance, save_adapter
from peftkit.inference.generate import generate_ids
from peftkit.inference.plain import left_padded
from peftkit.methods.lora import LoRA

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Answers = list[list[int]]


def prompts_of(tokenizer: Any, number: int, folder: Path) -> list[list[int]]:
    """Return the quickstart's requests as its chat template asks them."""
    lines = make_rows(folder, number).read_text(encoding="utf-8").splitlines()
    asked = [json.loads(line)["instruction"] for line in lines]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in asked
    ]


def random_adapter(model: Any, rank: int) -> Any:
    """Put an adapter on all linear layers that changes what the model says."""
    adapter = attach(model, LoRA(rank=rank, alpha=2 * rank))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in adapter.modules.values():
            module.lora_B.copy_(0.02 * torch.randn(module.lora_B.shape, generator=generator))
    return adapter


def theirs(args: argparse.Namespace, folder: Path) -> Any:
    """Return the model with transformers and bitsandbytes, and the adapter with PEFT."""
    config = None
    if args.quantize != "none":
        config = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=args.quantize,
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=DTYPES[args.dtype],
        )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        locate(args.model).source, dtype=DTYPES[args.dtype], quantization_config=config
    )
    if args.layers:
        del model.model.layers[args.layers :]
    return peft.PeftModel.from_pretrained(model, folder).eval()


@torch.no_grad()
def peft_answers(model: Any, prompts: list[list[int]], args: argparse.Namespace) -> Answers:
    """Return new tokens, some prompts at a time, sorted by length as ours are."""
    answers: Answers = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda n: -len(prompts[n]))
    for start in range(0, len(order), args.batch_size):
        chosen = order[start : start + args.batch_size]
        batch = left_padded([prompts[n] for n in chosen], 0)
        out = model.generate(
            **batch,
            max_new_tokens=args.new_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        for n, ids in zip(chosen, out[:, batch["input_ids"].shape[1] :].tolist(), strict=True):
            answers[n] = ids
    return answers


def timed(run: Callable[[], Answers]) -> tuple[Answers, float, float]:
    """Return the answers, and seconds of the clock and of the processor."""
    clock, processor = perf_counter(), process_time()
    answers = run()
    return answers, perf_counter() - clock, process_time() - processor


def main() -> int:
    """Measure both sides in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--quantize", choices=("none", "nf4", "fp4"), default="none")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, help="only so many blocks")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    base = load_base(args.model, dtype=args.dtype, quantize=args.quantize)
    if args.layers:
        del base.model.model.layers[args.layers :]
    no_end = SimpleNamespace(eos_token_id=None, pad_token_id=0)
    base.model.generation_config.eos_token_id = None
    with tempfile.TemporaryDirectory() as folder:
        prompts = prompts_of(base.tokenizer, args.prompts, Path(folder))
        saved = save_adapter(
            random_adapter(base.model, args.rank), Path(folder) / "adapter", Provenance()
        )
        peer = theirs(args, saved)
    sides: dict[str, Callable[[], Answers]] = {
        "PEFT": lambda: peft_answers(peer, prompts, args),
        "peftkit": lambda: generate_ids(
            base.model,
            no_end,  # type: ignore[arg-type]
            prompts,
            max_new_tokens=args.new_tokens,
            batch_size=args.batch_size,
        ),
    }
    found = {name: [timed(run) for _ in range(1)] for name, run in sides.items()}  # warm
    told: Any = {name: answers for name, [(answers, _, _)] in found.items()}
    found = {name: [] for name in sides}
    for _ in range(args.repeats):
        for name, run in sides.items():
            found[name].append(timed(run))
    tokens = args.prompts * args.new_tokens
    rows = []
    for name, runs in found.items():
        clock = Spread.of([tokens / seconds for _, seconds, _ in runs])
        processor = Spread.of([1000 * seconds / tokens for _, _, seconds in runs])
        rows.append((name, clock.show(1), processor.show(2)))
    print(table(("side", "tokens/s", "processor ms a token"), rows))
    ratio = [a[2] / b[2] for a, b in zip(found["PEFT"], found["peftkit"], strict=True)]
    pairs = [
        a == b
        for one, other in zip(told["PEFT"], told["peftkit"], strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    print(f"processor time, PEFT / peftkit: {Spread.of(ratio).show(2)}")
    print(f"tokens that agree: {sum(pairs) / len(pairs):.1%} of {len(pairs)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
