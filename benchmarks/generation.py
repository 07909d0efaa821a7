"""Greedy tokens per second of peftkit compared with PEFT + transformers' generate.

    python -m benchmarks.generation                     # SmolLM2-135M, bf16, PEFT in batches of 8
    python -m benchmarks.generation --quantize nf4
    python -m benchmarks.generation --layers 10 --repeats 3   # quick
    python -m benchmarks.generation --scenario mixed    # answers of 8 to 256 tokens
    python -m benchmarks.generation --scenario forks    # 8 answers to each of 8 prompts of 500
    python -m benchmarks.generation --families          # hybrids, see benchmarks/engines.py

Both sides run in turn in one process: the same adapter (random, on all linear layers), the
quickstart's orders as prompts with its chat template, the same numbers of new tokens. PEFT's side
runs batches (`--batch-size`) until their longest completion ends; peftkit chooses the number of
concurrent completions. Both wall time and processor time are reported; the latter is more stable on
a shared machine. The table also has the share of equal tokens: in bf16, another order of sums
sometimes chooses another token, and all later tokens differ.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from time import perf_counter, process_time
from types import SimpleNamespace
from typing import Any, NamedTuple

import peft
import torch
import transformers

from benchmarks import engines
from benchmarks.limits import Sizes, limits
from benchmarks.orders import make_rows
from benchmarks.report import Spread, table
from peftkit.adapter import attach
from peftkit.base.load import load_base
from peftkit.base.locate import locate
from peftkit.data.pack import padded_rows
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.notes import Provenance
from peftkit.inference.open_engine import open_engine
from peftkit.inference.sampling import Sampling
from peftkit.methods.lora import LoRA

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
NUM_DECODED = 32
"""Tokens of the completion for comparing decoding with the machine's memory bandwidth."""
Answers = list[list[int]]


def prompts_of(tokenizer: Any, number: int, folder: Path) -> list[list[int]]:
    """Return the quickstart's requests, formatted by the chat template."""
    lines = make_rows(folder, number).read_text(encoding="utf-8").splitlines()
    asked = [json.loads(line)["instruction"] for line in lines]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in asked
    ]


def random_adapter(model: Any, rank: int) -> Any:
    """Attach an adapter to all linear layers that changes the output."""
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


class Work(NamedTuple):
    """The work of both sides: the prompt and the number of tokens of each completion."""

    prompts: list[list[int]]
    lengths: list[int]


def work_of(tokenizer: Any, args: argparse.Namespace, folder: Path) -> Work:
    """Return the prompts and lengths of a scenario."""
    prompts = prompts_of(tokenizer, args.prompts, folder)
    if args.scenario == "mixed":
        lengths = [8 * (1 + (7 * n) % 32) for n in range(len(prompts))]
        return Work(prompts, lengths)
    if args.scenario == "forks":
        most, size = args.answers, args.prompt_tokens
        turned = [chain(*prompts[n:], *prompts[:n]) for n in range(args.prompts)]
        joined = [list(islice(prompt, size)) for prompt in turned]
        prompts = [prompt for prompt in joined for _ in range(most)]
    return Work(prompts, [args.new_tokens] * len(prompts))


@torch.no_grad()
def peft_answers(model: Any, work: Work, args: argparse.Namespace) -> Answers:
    """Return new tokens by PEFT, in batches of prompts sorted by length."""
    answers: Answers = [[] for _ in work.prompts]
    order = sorted(range(len(answers)), key=lambda n: (-len(work.prompts[n]), -work.lengths[n]))
    for start in range(0, len(order), args.batch_size):
        chosen = order[start : start + args.batch_size]
        ids, mask = padded_rows([work.prompts[n] for n in chosen], 0, left=True)
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max(work.lengths[n] for n in chosen),
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        for n, new_ids in zip(chosen, out[:, ids.shape[1] :].tolist(), strict=True):
            answers[n] = new_ids[: work.lengths[n]]
    return answers


def our_answers(model: Any, tokenizer: Any, work: Work) -> Answers:
    """Return new tokens, by the engine."""
    settings = [Sampling(max_new_tokens=length) for length in work.lengths]
    with open_engine(model, tokenizer) as engine:
        return [one.ids for (one,) in engine.answers(work.prompts, settings, log_probs=False)]


def shares(
    run: Callable[[Work], Answers],
    prompts: list[list[int]],
    sizes: Sizes,
    dtype: torch.dtype,
    device: str,
) -> str:
    """Return the shares of the machine's limits for prompts and for decoding one completion.

    Prompts are bound by products, with shared prefixes counted once; a token of a single completion
    reads all weights once. The limits are measured before and after.
    """
    prompts = list(map(list, dict.fromkeys(map(tuple, prompts))))
    beginnings = {tuple(prompt[:size]) for prompt in prompts for size in range(1, len(prompt) + 1)}
    best = limits(device)
    _, reading, _ = timed(run, Work(prompts, [1] * len(prompts)))
    _, first, _ = timed(run, Work(prompts[:1], [1]))
    _, whole, _ = timed(run, Work(prompts[:1], [1 + NUM_DECODED]))
    best = best.best(limits(device))
    products = best.bf16 if dtype == torch.bfloat16 else best.fp32
    flop = sizes.prefill_flop([len(prompt) for prompt in prompts], len(beginnings))
    prefill = flop / reading / products
    num_bytes = sizes.decode_bytes(dtype.itemsize)
    decoding = NUM_DECODED * num_bytes / max(whole - first, 1e-9) / best.read
    return (
        f"the machine's limit in this run: {best.show()}; peftkit reads prompts at {prefill:.0%} "
        f"of the products' rate, and decodes one answer at {decoding:.0%} of the bytes a second"
    )


def timed(run: Callable[[Work], Answers], work: Work) -> tuple[Answers, float, float]:
    """Return the completions, wall time and processor time."""
    clock, processor = perf_counter(), process_time()
    answers = run(work)
    return answers, perf_counter() - clock, process_time() - processor


def main() -> int:
    """Measure both sides in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--quantize", choices=("none", "nf4", "fp4"), default="none")
    parser.add_argument("--scenario", choices=("equal", "mixed", "forks"), default="equal")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--answers", type=int, default=8, help="to each prompt, of forks")
    parser.add_argument("--prompt-tokens", type=int, default=500, help="of forks")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, help="only so many blocks")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--families", nargs="*", choices=engines.SHAPES, help="see engines.py")
    args = parser.parse_args()
    if args.families is not None:
        return engines.compare(args, DTYPES[args.dtype], random_adapter)
    base = load_base(args.model, dtype=args.dtype, quantize=args.quantize)
    if args.layers:
        del base.model.model.layers[args.layers :]
        base.model.config.num_hidden_layers = args.layers
    sizes = Sizes.of(base.model, args.rank)
    no_end = SimpleNamespace(eos_token_id=None, pad_token_id=0)
    base.model.generation_config.eos_token_id = None
    with tempfile.TemporaryDirectory() as folder:
        work = work_of(base.tokenizer, args, Path(folder))
        saved = save_adapter(
            random_adapter(base.model, args.rank), Path(folder) / "adapter", Provenance()
        )
        peer = theirs(args, saved)
    sides: dict[str, Callable[[Work], Answers]] = {
        "PEFT": lambda work: peft_answers(peer, work, args),
        "peftkit": lambda work: our_answers(base.model, no_end, work),
    }
    found: dict[str, list[tuple[Answers, float, float]]] = {name: [] for name in sides}
    for run in sides.values():
        run(Work(work.prompts[:2], [2, 2]))  # warm
    for _ in range(args.repeats):
        for name, run in sides.items():
            found[name].append(timed(run, work))
    told = {name: runs[0][0] for name, runs in found.items()}
    tokens = sum(work.lengths)
    rows = []
    for name, runs in found.items():
        clock = Spread.of([tokens / seconds for _, seconds, _ in runs])
        processor = Spread.of([1000 * seconds / tokens for _, _, seconds in runs])
        rows.append((name, clock.show(1), processor.show(2)))
    print(table(("side", "tokens/s", "processor ms a token"), rows))
    runs = list(zip(found["PEFT"], found["peftkit"], strict=True))
    pairs = [
        a == b
        for one, other in zip(told["PEFT"], told["peftkit"], strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    for what, place in (("clock", 1), ("processor time", 2)):
        ratio = Spread.of([one[place] / other[place] for one, other in runs])
        print(f"{what}, PEFT / peftkit: {ratio.show(2)}")
    if args.quantize == "none":
        device = base.model.device.type
        print(shares(sides["peftkit"], work.prompts, sizes, DTYPES[args.dtype], device))
    print(f"tokens that agree: {sum(pairs) / len(pairs):.1%} of {len(pairs)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
