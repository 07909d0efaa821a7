"""What a run writes for `peftkit prove`, and honest targets of several families and precisions."""

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from peftkit.adapter import attach
from peftkit.base.load import load_base
from peftkit.errors import ConfigError
from peftkit.events import Notice
from peftkit.formats.open_adapter import open_adapter
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.notes import Provenance
from peftkit.merging.merge import merge
from peftkit.methods.lora import LoRA
from peftkit.methods.table import METHODS as METHODS_BY_NAME
from peftkit.proof.files import prove_files
from peftkit.proof.record import is_provable, prove, read_proof, record, save_proof, write_proof
from peftkit.run import run
from peftkit.tasks.pairs.preference import PreferenceConfig
from peftkit.tasks.rewards.grpo_config import GRPOConfig
from peftkit.tasks.tokens import CausalLMConfig
from tests.helpers.adapters import perturb
from tests.helpers.bank import tiny_base
from tests.helpers.distill_cases import settings as distill_settings
from tests.helpers.distill_cases import write_questions
from tests.helpers.families import ARCHITECTURES, tiny_tokenizer
from tests.helpers.pair_cases import moved_adapter, task_on, write_pairs, write_verdicts
from tests.helpers.small_run import small_recipe

FAMILIES = ("llama", "qwen3", "gemma2", "phi3", "gpt2")


@pytest.mark.parametrize(
    ("proof", "num_prompts", "num_of_rows"),
    [("auto", 4, 2), (("what is 7?",), 1, 0), ("off", 0, 0)],
)
def test_a_run_writes_a_proof_of_its_own_adapter(
    model_folder, tmp_path, proof, num_prompts, num_of_rows
):
    notices: list[str] = []
    recipe = small_recipe(tmp_path, model_folder, proof=proof, learning_rate=0.05)

    def listen(event: Any) -> None:
        if isinstance(event, Notice):
            notices.append(event.text)

    run(recipe, on_event=listen)
    folder = tmp_path / "run"
    assert (folder / "proof.json").is_file() == (num_prompts > 0)
    told = [text for text in notices if text.startswith("proof.json has")]
    assert len(told) == (num_of_rows > 0)
    if not num_prompts:
        return
    found = read_proof(folder)
    assert len(found.prompts) == num_prompts
    assert sum(prompt.is_of_rows for prompt in found.prompts) == num_of_rows
    assert all(f"{num_prompts} prompts, {num_of_rows} of them" in text for text in told)
    assert "Is it applied?" in (folder / "README.md").read_text()
    verdict = prove_files(folder)
    assert verdict.is_applied, verdict


ROWS = {
    "causal_lm": (CausalLMConfig(), write_questions, 2),
    "preference": (PreferenceConfig(), lambda folder: write_pairs(folder / "rows.jsonl"), 2),
    "kto": (PreferenceConfig(loss="kto"), lambda folder: write_verdicts(folder / "rows.jsonl"), 2),
    "grpo": (GRPOConfig(rewards=({"use": "exact_match"},), max_new_tokens=4), write_questions, 2),
    "distill": (distill_settings, write_questions, 2),
    "distill, generated": (
        lambda folder: distill_settings(folder, answers="teacher", max_new_tokens=6),
        write_questions,
        0,
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_every_task_that_answers_prompts_give_prompts(llama, tokenizer, tmp_path, name):
    config, write, number = ROWS[name]
    config = config(tmp_path) if callable(config) else config
    base = tiny_base(llama, tokenizer)
    adapter = moved_adapter(llama)
    task, rows = task_on(llama, tokenizer, config, write(tmp_path))
    assert is_provable(config)
    proof = record(base, adapter, task.rows.style, rows=rows)
    assert sum(prompt.is_of_rows for prompt in proof.prompts) == number
    assert prove(base.model, proof).is_applied


def test_a_proof_has_one_to_four_given_prompts(llama, tokenizer, tmp_path):
    """None would be the prompts of private rows, and a server is sent only so many requests."""
    base, adapter = tiny_base(llama, tokenizer), moved_adapter(llama)
    for given in ([], [*"abcde"]):
        with pytest.raises(ConfigError, match=r"train\.proof"):
            small_recipe(tmp_path, "base", proof=given)
    assert len(small_recipe(tmp_path, "base", proof=[*"abcd"]).train.proof) == 4
    assert len(record(base, adapter, prompts=[*"abcd"]).prompts) == 4
    with pytest.raises(ConfigError, match="5 are given"):
        record(base, adapter, prompts=[*"abcde"])


METHODS = [
    {"type": "lora", "rank": 4, "alpha": 16, "targets": ["q", "v"], "rslora": True},
    {"type": "lora", "rank": 1, "targets": ["q", "v"]},
    {"type": "dora", "rank": 4, "targets": ["q", "down"]},
    {"type": "ia3"},
    {"type": "prompt_tuning", "num_virtual_tokens": 3},
    {"type": "prefix_tuning", "num_virtual_tokens": 3},
    {"type": "vera", "rank": 4, "targets": ["q", "v"]},
]


@pytest.mark.parametrize("settings", METHODS, ids=lambda settings: settings["type"])
def test_adapters_of_every_method_are_proved(llama, tokenizer, settings):
    method = METHODS_BY_NAME[settings["type"]](**settings)
    base = tiny_base(llama, tokenizer)
    adapter = attach(base.model, method)
    perturb(adapter.parameters(), 0.5, seed=3)
    proof = record(base, adapter)
    verdict = prove(base.model, proof)
    assert verdict.is_applied, verdict
    assert verdict.is_certain, verdict
    with adapter.disabled():
        assert prove(partial(plain_logits, base.model), proof).kind == "not_applied"


@torch.no_grad()
def plain_logits(model: Any, ids: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([ids])).logits[0]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for family in FAMILIES:
        folders[family] = tmp_path_factory.mktemp(family)
        torch.manual_seed(0)
        ARCHITECTURES[family]().save_pretrained(folders[family])
        tiny_tokenizer().save_pretrained(folders[family])
    return folders


LOADINGS = [
    {"dtype": "fp32"},
    {"dtype": "bf16"},
    {"dtype": "bf16", "quantize": "nf4"},
    {"dtype": "fp32", "quantize": "int8"},
]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_no_honest_target_is_accused(bases, family, tmp_path):
    """Each precision of a target is judged by the proof of each other one: undecided at worst.

    Quantised tiny models differ from their originals by much more than large ones.
    """
    made = {}
    for number, loading in enumerate(LOADINGS):
        base = load_base(str(bases[family]), device="cpu", **loading)
        adapter = attach(base.model, LoRA(rank=4, targets="all-linear"))
        perturb(adapter.parameters(), 0.1, seed=3)
        made[number] = base, adapter, record(base, adapter)
    kinds = {}
    for target, proof in itertools.product(made, made):
        base, _, _ = made[target]
        kinds[target, proof] = prove(base.model, made[proof][2], tokenizer=base.tokenizer).kind
    assert {*kinds.values()} <= {"applied", "undecided"}, kinds
    assert list(kinds.values()).count("applied") >= 0.8 * len(kinds), kinds


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_merged_honest_model_is_proved(bases, family, dtype, tmp_path):
    base = load_base(str(bases[family]), device="cpu")
    adapter = attach(base.model, LoRA(rank=4, targets="all-linear"))
    perturb(adapter.parameters(), 0.1, seed=3)
    origin = Provenance(base=str(bases[family]), fingerprint=base.fingerprint)
    folder = save_adapter(adapter, tmp_path / "adapter", origin)
    write_proof(open_adapter(folder, device="cpu"))
    merged = merge(folder, tmp_path / "merged", dtype=dtype)
    assert merged.agreement is not None
    assert merged.agreement.proved is not None
    assert merged.agreement.proved.is_applied
    assert prove_files(tmp_path / "merged").is_applied


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q5_1"])
def test_an_adapter_over_a_gguf_base_is_proved(bases, kind, tmp_path):
    gguf = pytest.importorskip("gguf")
    from tests.helpers.gguf_files import write_gguf

    base = load_base(str(bases["llama"]), device="cpu")
    number = gguf.GGMLQuantizationType[kind]

    def packed(name: str, tensor: torch.Tensor) -> tuple[Any, Any]:
        values = tensor.numpy()
        return (
            (values, None) if tensor.ndim == 1 else (gguf.quants.quantize(values, number), number)
        )

    write_gguf(tmp_path / "base.gguf", base.model, packed)
    adapter = attach(base.model, LoRA(rank=4, targets="all-linear"))
    perturb(adapter.parameters(), 0.1, seed=3)
    proof, folder = record(base, adapter), save_adapter(adapter, tmp_path / "adapter")
    opened = open_adapter(folder, str(tmp_path / "base.gguf"), force=True, device="cpu")
    assert prove(opened.base.model, proof, tokenizer=opened.base.tokenizer).is_applied
    save_proof(proof, folder)
    assert prove_files(tmp_path / "base.gguf", folder).kind == "not_applied"
