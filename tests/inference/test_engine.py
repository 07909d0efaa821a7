"""Answers made beside each other are those made alone: whatever joins, leaves, shares or forks."""

from itertools import product
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from peftkit.adapter import attach
from peftkit.data.tokens import num_common
from peftkit.inference.bank import AdapterBank
from peftkit.inference.cache import worth_sharing
from peftkit.inference.cached_engine import CachedEngine
from peftkit.inference.engine import Completion, Limits, Request
from peftkit.inference.open_engine import open_engine, why_plain
from peftkit.inference.sampling import Sampling
from peftkit.methods.lora import LoRA
from peftkit.methods.prefix import PrefixTuning
from tests.helpers.bank import tiny_base, write_adapter
from tests.helpers.families import FAMILIES
from tests.helpers.generation import MODELS, TOKENIZER, greedy_tokens
from tests.simulated_gpu.simulation import simulated

Tokenizer = PreTrainedTokenizerFast
COMMON = [11 + 5 * n for n in range(35)]
PROMPTS = [
    [9, 41, 77, 130],
    [55],
    [201, 33, 8, 99, 120, 61, 340],
    *([*COMMON, 60 + n, 7] for n in range(4)),
    *([*COMMON, 60, 7] for _ in range(4)),
]
LIMITS = {
    "all at once": Limits(),
    "three at a time, prompts in chunks": Limits(rows=3, prefill=5, prefix_tokens=100),
}
CACHED = [
    *("llama", "mistral_swa", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "mixtral", "gpt_oss"),
    *("qwen3", "qwen3_moe", "opt", "gemma3n", "deepseek_v3"),
]
PLAIN = {
    "jamba": "Its states and attention computed other logits",
    "mamba2": "Mamba2ForCausalLM.forward has no argument",
    "bloom": "BloomForCausalLM.forward has no argument",
    "falcon_new": "does not support other implementations of attention",
}


def answers(model: Any, tokenizer: Any, limits: Limits, **how: Any) -> list[list[Completion]]:
    with open_engine(model, tokenizer, limits) as engine:
        return engine.answers(PROMPTS, **{"sampling": Sampling(max_new_tokens=9), **how})


FAST = ("llama", "mistral_swa", "gemma2", "gpt_oss", "jamba", "deepseek_v3")


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in (*CACHED, *PLAIN)]
)
def test_greedy_answers_are_those_of_full_passes(name, tokenizer, monkeypatch):
    model: Any = MODELS[name]().eval()
    why = why_plain(model, tokenizer)
    assert why is None if name in CACHED else PLAIN[name] in str(why)
    runs: list[list[list[int]]] = []
    for limits, read in product(LIMITS.values(), (1, 1 << 30)):
        # what is in common is read where it is by all, or each has a copy
        monkeypatch.setattr("peftkit.inference.cached_engine.MIN_READ", read)
        runs.append([one.ids for (one,) in answers(model, tokenizer, limits)])
        if name in PLAIN:
            break  # it shares nothing
    pairs = zip(PROMPTS, runs[0], strict=True)
    assert runs == [[greedy_tokens(model, prompt, ids, 9) for prompt, ids in pairs]] * len(runs)


def test_virtual_tokens_go_the_plain_way(tokenizer):
    model: Any = FAMILIES["llama"]().eval()
    attach(model, PrefixTuning(num_virtual_tokens=3))
    assert "virtual tokens" in str(why_plain(model, tokenizer))


def test_each_row_keeps_its_adapter(llama, tokenizer, tmp_path):
    paths = {
        name: write_adapter(llama, LoRA(rank=rank, alpha=64), tmp_path / name, rank)
        for name, rank in (("one", 4), ("two", 2))
    }
    bank = AdapterBank(tiny_base(llama, tokenizer), paths)
    names = [("one", None, "two")[n % 3] for n in range(len(PROMPTS))]
    runs = []
    for limits in LIMITS.values():
        with bank.engine(limits) as engine:
            groups = engine.answers(PROMPTS, Sampling(max_new_tokens=9), adapters=names)
        runs.append([one.ids for (one,) in groups])
    expected = []
    for prompt, name, ids in zip(PROMPTS, names, runs[0], strict=True):
        with bank.use(name):
            expected.append(greedy_tokens(llama, prompt, ids, 9))
    assert len(set(map(tuple, expected))) > 7
    assert runs == [expected] * 2


def test_samples_depend_on_the_seed_not_on_the_batch(llama, tokenizer):
    sampling = Sampling(max_new_tokens=9, temperature=1.5, top_p=0.9, top_k=50)
    seeds = [[100 * n + k for k in range(3)] for n in range(len(PROMPTS))]
    first, again = (
        answers(llama, tokenizer, limits, sampling=sampling, n=3, seeds=seeds)
        for limits in LIMITS.values()
    )
    assert [[one.ids for one in of] for of in first] == [[one.ids for one in of] for of in again]
    assert all(len({tuple(one.ids) for one in of_prompt}) == 3 for of_prompt in first)


def test_log_probs_match_a_full_pass_and_name_the_stop(llama, tokenizer):
    sampling = Sampling(max_new_tokens=40, temperature=2.0, seed=5, stops=tuple(range(300, 384)))
    completions = [
        one for of in answers(llama, tokenizer, Limits(), sampling=sampling, n=2) for one in of
    ]
    assert {one.ended_by for one in completions} == {"stop", "length"} or all(
        one.ended_by == "stop" for one in completions
    )
    for answer, prompt in zip(completions, [p for p in PROMPTS for _ in range(2)], strict=True):
        tokens = [*answer.ids, *([] if answer.end is None else [answer.end])]
        assert len(tokens) == len(answer.log_probs)
        assert (answer.end is not None) == (answer.ended_by == "stop")
        with torch.no_grad():
            logits = llama(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        right = (logits / 2.0).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer.log_probs), right, atol=1e-4, rtol=0)


def test_a_prompt_is_computed_once_for_all_its_answers(llama, tokenizer):
    rows: list[int] = []
    assert why_plain(llama, tokenizer) is None
    watch = llama.register_forward_pre_hook(
        lambda module, args, named: rows.append(named["input_ids"].numel()), with_kwargs=True
    )
    with CachedEngine(llama, tokenizer) as engine:
        engine.answers([list(range(5, 205))], Sampling(max_new_tokens=3), n=8)
    watch.remove()
    assert rows == [199, 8, 8, 8]


def test_a_cancelled_row_leaves_at_the_next_token(llama, tokenizer):
    def stop(completion: Completion) -> None:
        if len(completion.ids) == 3:
            completion.finish()

    with CachedEngine(llama, tokenizer, Limits(rows=1)) as engine:
        gone = engine.submit(Request([7, 8], Sampling(max_new_tokens=90), on_token=stop))
        never = engine.submit(Request([7, 8]))
        stays = engine.submit(Request([9, 41], Sampling(max_new_tokens=4)))
        never.finish()
        engine.run()
    assert (gone.ended_by, len(gone.ids)) == ("cancelled", 3)
    assert (never.ended_by, never.ids) == ("cancelled", [])
    assert stays.ended_by == "length"
    assert engine.num_passes == 2 + 3 + 4  # two prompts, and their tokens


def test_tokens_of_a_batch_are_bounded_larger_rows_run_alone(llama, tokenizer):
    with CachedEngine(llama, tokenizer, Limits(tokens=70)) as engine:
        completions = [
            engine.submit(Request([7, 8], Sampling(max_new_tokens=10))) for _ in range(5)
        ]
        completions.append(large := engine.submit(Request([7], Sampling(max_new_tokens=60))))
        most = 0
        while not engine.is_idle:
            engine.step()
            most = max(most, engine.num_running)
            assert not large.ids or all(one.ended_by is not None for one in completions[:5])
    assert most == 2
    assert all(one.ended_by is not None for one in completions)


def test_what_prompts_have_in_common():
    assert num_common([3, 4, 5], [3, 4, 6, 7]) == 2
    assert num_common([3], [4]) == num_common([], [4]) == 0
    long = list(range(100))
    assert worth_sharing(long, [[*range(70), 1], [*range(80), 1, 2]]) == (70, 2)
    assert worth_sharing(long, [list(range(90))]) == (0, 0)  # spares less than a pass costs


@pytest.mark.parametrize("sampling", [Sampling(12), Sampling(12, 1.0, 0.9, seed=1)])
def test_all_rows_wait_for_the_device_once_a_token(sampling):
    with simulated() as card:
        model = FAMILIES["llama"]().eval().to("cuda")
        with open_engine(model, TOKENIZER) as engine:
            assert isinstance(engine, CachedEngine)
            for prompt in PROMPTS:
                engine.submit(Request(prompt, sampling))
            engine.step()
            waits = []
            while not engine.is_idle:
                before, batch = len(card.waits), engine.graphs._batch
                engine.step()
                if engine.graphs._batch is batch:  # else its rows are told of to the device
                    waits.append([w.where for w in card.waits[before:] if "graph" not in w.why])
    assert len(waits) > 5
    assert all(len(one) == 1 for one in waits), waits


def test_completions_continue_when_the_engine_is_entered_again(tokenizer):
    model = MODELS["llama"]().eval()
    requests = [Request([5 + n, 6, 7], Sampling(max_new_tokens=6)) for n in range(3)]
    with CachedEngine(model, tokenizer) as engine:
        expected = [engine.submit(request) for request in requests]
        engine.run()
    with CachedEngine(model, tokenizer).turn() as engine:
        found = [engine.submit(request) for request in requests]
        engine.step()
        engine.step()
    assert engine.num_running == len(requests)
    with engine:  # a server leaves it for an operation between two tokens
        engine.run()
    assert [one.ids for one in found] == [one.ids for one in expected]
    assert all(len(one.ids) == 6 or one.end is not None for one in found)
