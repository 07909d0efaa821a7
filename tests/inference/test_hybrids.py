"""Hybrids in the engine: rows with states join, leave, share and continue as rows with keys do."""

import re
from typing import Any

import pytest
import torch
from transformers import BltConfig, GenerationConfig

from peftkit.adapter import attach
from peftkit.events import Fallback
from peftkit.inference.bank import AdapterBank
from peftkit.inference.cached_engine import CachedEngine
from peftkit.inference.engine import Completion, Limits, Request
from peftkit.inference.generate import ModelSampler
from peftkit.inference.open_engine import (
    cache_footprint,
    estimated_footprint,
    generation_fallbacks,
    open_engine,
    tokens_that_fit,
    why_plain,
)
from peftkit.inference.sampling import Sampling
from peftkit.inference.states import SlotStates, StateKey, has_states
from peftkit.methods.lora import LoRA
from tests.helpers.adapters import perturb
from tests.helpers.bank import tiny_base, write_adapter
from tests.helpers.families import VOCAB
from tests.helpers.generation import MODELS, TOKENIZER, most_allocated
from tests.helpers.hybrids import HYBRIDS, RECENT, small

FAST = ("qwen3_5", "lfm2", "granitemoehybrid", "kimi_linear")
SERVED = (
    *FAST,
    *("qwen3_next", "qwen3_5_moe", "olmo_hybrid", "bailing_hybrid", "nemotron_h", "falcon_h1"),
    *("granitehybrid_dense", "bamba", "zamba2", "lfm2_moe", "lfm3", "zaya"),
    *("mistral4", "longcat_flash", "deepseek_v3", "gemma4", "gemma4_moe", "minimax_m2", "hy_v3"),
    *("mimo_v2_flash", "afmoe", "exaone_moe"),
)
PLAIN = {
    "jamba": "Its states and attention computed other logits over the engine's cache.",
    "zamba": "Its states and attention computed other logits over the engine's cache.",
    "recurrent_gemma": "Its states and attention computed other logits over the engine's cache.",
    "minimax": "failed over the engine's cache: ValueError: MiniMax uses cache of its own",
    "inkling": "attention has unsupported arguments: ['position_bias']",
    "qwen4_exp": "Its cache has DynamicIndexedLayer.",
    "glm_moe_dsa": "Its cache has DynamicIndexedLayer.",
    "hy_v4": "Its cache has DynamicIndexedLayer.",
    "mamba": "MambaForCausalLM.forward has no argument position_ids",
    "mamba2": "Mamba2ForCausalLM.forward has no argument position_ids",
    "falcon_mamba": "FalconMambaForCausalLM.forward has no argument position_ids",
    "rwkv": "RwkvForCausalLM.forward has no arguments position_ids, cache",
}
NUM_NEW = 8


def prompt(size: int, kind: int) -> list[int]:
    return [(3 + index * (7 + kind)) % VOCAB for index in range(size)]


COMMON = prompt(140, 2)
PROMPTS = [
    *(prompt(9, 0), prompt(33, 1), prompt(4, 3), prompt(1, 5), prompt(13, 4), prompt(2, 8)),
    *([*COMMON, *prompt(size, size)] for size in (7, 11, 8, 5)),
]
ADAPTERS = ("one", "two", None, "one", "two", None, "one", "one", None, None)


def built(name: str) -> Any:
    torch.manual_seed(0)
    model: Any = MODELS[name]().eval().requires_grad_(False)
    return model


def num_new(index: int) -> int:
    return NUM_NEW // (1 + index % 2)


def generated(bank: AdapterBank, index: int) -> tuple[list[int], list[float]]:
    """Return the completion of a prompt alone, and its log-probabilities, by transformers."""
    model: Any = bank.base.model
    before, model.generation_config = model.generation_config, GenerationConfig()
    ids = PROMPTS[index]
    how: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True}
    how |= {"pad_token_id": 0, "eos_token_id": None, "max_new_tokens": num_new(index)}
    try:
        with bank.use(ADAPTERS[index]):
            out = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                generation_config=GenerationConfig(do_sample=False, **how),
            )
    finally:
        model.generation_config = before
    new = out.sequences[0, len(ids) :]
    log_probs = torch.cat(out.logits).log_softmax(-1).gather(1, new[:, None])[:, 0]
    return new.tolist(), log_probs.tolist()


def completed(engine: Any) -> list[Completion]:
    """Submit the last prompts, and then the others; rows leave after a half of their tokens."""
    engine.ends = frozenset()
    answers: dict[int, Completion] = {}
    for index in (*range(6, 10), *range(6)):
        sampling = Sampling(max_new_tokens=num_new(index))
        request = Request(PROMPTS[index], sampling, adapter=ADAPTERS[index], log_probs=True)
        answers[index] = engine.submit(request)
        if index < 6:
            engine.step()
    engine.run()
    return [answers[index] for index in range(len(PROMPTS))]


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in SERVED]
)
def test_greedy_completions_are_those_of_generate(name, tmp_path, monkeypatch):
    model = built(name)
    paths = [site.path for site in LoRA(rank=2).sites(model) if not site.parameter]
    # the bank takes no adapter whose names would also select stacks of experts
    layers = tuple(
        path
        for path in paths
        if not re.search("mlp|feed_forward|expert|(gate|up|down)_proj$", path)
    )
    folders = {
        key: write_adapter(model, LoRA(rank=rank, targets=layers), tmp_path / key, rank)
        for key, rank in (("one", 3), ("two", 2))
    }
    bank = AdapterBank(tiny_base(model, TOKENIZER), folders)
    assert why_plain(model, TOKENIZER) is None
    expected = [generated(bank, index) for index in range(len(PROMPTS))]
    assert len({tuple(ids) for ids, _ in expected}) > 6
    pieces = Limits(rows=4, pass_tokens=24, prefill=48, prefix_tokens=200)
    for limits, read in ((Limits(), 1), (pieces, 1 << 30)):
        monkeypatch.setattr("peftkit.inference.cached_engine.MIN_READ", read)
        with bank.engine(limits) as engine:
            assert isinstance(engine, CachedEngine)
            answers = completed(engine)
        for answer, (ids, log_probs) in zip(answers, expected, strict=True):
            assert answer.ids == ids
            # sums of float32 in another order; a lost state changes more
            assert answer.log_probs == pytest.approx(log_probs, abs=1e-3)


def test_a_completion_continues_from_its_kept_states():
    model = built("qwen3_5")
    assert why_plain(model, TOKENIZER) is None
    computed: list[int] = []
    with CachedEngine(model, TOKENIZER) as engine:
        engine.ends = frozenset()
        free = engine.submit(Request(prompt(40, 1), Sampling(5)))
        engine.run()
        end = free.ids[2]
        first = Request(prompt(40, 1), Sampling(5), keeps=True, ends=frozenset([end]))
        before = engine.submit(first)
        engine.run()
        longer = [*prompt(40, 1), *before.ids, end, 77]
        watch = model.register_forward_pre_hook(
            lambda _, args, named: computed.append(named["input_ids"].numel()), with_kwargs=True
        )
        continued = engine.submit(Request(longer, Sampling(3), after=before, log_probs=True))
        engine.run()
        watch.remove()
        alone = engine.submit(Request(longer, Sampling(3), log_probs=True))
        engine.run()
    assert sum(computed) < 9
    assert continued.ids == alone.ids
    assert continued.log_probs == pytest.approx(alone.log_probs, abs=1e-4)


def test_rollouts_of_a_model_in_training_depend_on_the_seed_alone():
    model = built("granitemoehybrid")
    adapter = attach(model, LoRA(rank=3))
    perturb(adapter.parameters(), seed=1)
    model.train()
    prompts, seeds = PROMPTS[6:9], [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    runs = [
        ModelSampler(model, TOKENIZER, rows).answers(prompts, seeds, max_new_tokens=6, stops=())
        for rows in (2, 9)
    ]
    assert runs[0] == runs[1]
    assert len({answer.ids for answers in runs[0] for answer in answers}) == 9
    assert model.training


def test_a_slot_forgets_the_states_of_its_last_row():
    key, states = StateKey("conv", 0, 0), SlotStates()
    states.resize(2, 0)
    states.put(0, {key: torch.ones(1, 3, 2)})
    states.put(1, {key: 2 * torch.ones(1, 3, 2)})
    states.move(1, 0)
    assert states.of(0)[key].unique().tolist() == [2]
    states.put(1, {})  # a prompt of one token
    assert states.of(1)[key].unique().tolist() == [0]
    states.resize(5, 1)
    assert states.first(key, 5, states.of(0)[key])[:, 0, 0].tolist() == [2, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "name",
    [n if n in ("jamba", "qwen4_exp") else pytest.param(n, marks=pytest.mark.slow) for n in PLAIN],
)
def test_other_mixers_fall_back_and_say_why_in_a_line(name):
    model = built(name)
    (fallback,) = generation_fallbacks(model, TOKENIZER)
    assert isinstance(fallback, Fallback)
    assert PLAIN[name] in fallback.cause
    assert "\n" not in fallback.cause
    with open_engine(model, TOKENIZER) as engine:
        assert not isinstance(engine, CachedEngine)


def test_layers_that_read_the_keys_of_others_fall_back():
    model: Any = small(
        "Gemma3nForCausalLM",
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        intermediate_size=64,
        activation_sparsity_pattern=[0.0] * 4,
    )()
    assert "reads keys that its layer has not given" in str(why_plain(model, TOKENIZER))


def most_of(engine: CachedEngine) -> int:
    engine.ends = frozenset()
    pairs = [(prompt(3 + 7 * (n % 4), n), Sampling(9 + 5 * (n % 3))) for n in range(12)]
    return most_allocated(engine, [Request(*pair) for pair in pairs])[0]


def test_states_count_within_the_memory_limit(monkeypatch):
    model = built("falcon_h1")
    size = cache_footprint(model, TOKENIZER)
    assert size is not None
    assert size.state_tokens == 19
    # one layer of two counts twice while it grows
    most = 300 * size.token * 2 // 3
    with CachedEngine(model, TOKENIZER, Limits(tokens=300)) as engine:
        assert 0.5 * most < most_of(engine) <= most + 300 * size.token // 3
    monkeypatch.setattr(type(size), "state_tokens", 0)
    with CachedEngine(model, TOKENIZER, Limits(tokens=300)) as engine:
        assert most_of(engine) > most + 300 * size.token // 3


def test_memory_is_counted_as_it_is_allocated():
    sizes = {}
    for name in ("llama", "gemma4", "kimi_linear", "lfm2"):
        model = built(name)
        assert tokens_that_fit(model, TOKENIZER) is not None
        sizes[name] = cache_footprint(model, TOKENIZER)
    bytes_of = 4
    assert sizes["llama"] == (2 * 3 * 2 * 8 * bytes_of, 0)
    config = MODELS["gemma4"]().config
    heads = [2 * one.num_key_value_heads * one.head_dim for one in config.per_layer_config]
    assert sizes["gemma4"] == ((sum(heads) + max(heads)) * bytes_of, 0)
    # expanded keys of 12 + 8 and values of 16 numbers for each head, instead of a latent of 16 + 8
    assert sizes["kimi_linear"].token == 2 * 4 * (12 + 8 + 16) * bytes_of
    assert sizes["lfm2"].row == 32 * 3 * bytes_of
    states = small("BambaForCausalLM")()  # without attention
    assert tokens_that_fit(states, TOKENIZER) is not None
    assert estimated_footprint(BltConfig(), torch.float32) is None  # of several models


def test_tables_are_complete():
    assert {*SERVED, *PLAIN} >= {*HYBRIDS, *RECENT} - {"gpt_oss", "deepseek_v4"}
    assert all(has_states(HYBRIDS[n]().config) == (n not in ("rwkv",)) for n in HYBRIDS)
