"""One meaning of a conversation: chat and its like send what rows were learnt with."""

import json
from pathlib import Path
from typing import Any

import pytest

from peftkit.adapter import attach
from peftkit.base.load import load_base
from peftkit.data.generation import prompt_ids
from peftkit.data.style import Style
from peftkit.formats.open_adapter import Opened, open_adapter
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.notes import Provenance
from peftkit.inference.bank import open_bank
from peftkit.methods.lora import LoRA
from peftkit.settings import DataConfig
from peftkit.tasks.tokens import CausalLM, CausalLMConfig
from peftkit_cli.conversation import Conversation
from tests.helpers.chat_templates import TEMPLATES
from tests.helpers.command_line import typed
from tests.helpers.folders import write_rows

SYSTEM = 'You sell "foxes" 🦊.\nBe short.'
QUESTIONS = ("what is the fox?", "and the dog?", "who jumps?")


def conversation(question: str, system: str | None = SYSTEM) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "the dog"}]
    first = [] if system is None else [{"role": "system", "content": system}]
    return {"messages": [*first, *turns]}


def learnt(folder: Path, model_folder: Path, template: str | None, *files: list[Any]) -> Any:
    """Encode the rows of files, the last one for evaluation; save an adapter of their task."""
    base = load_base(str(model_folder), dtype="fp32")
    names = []
    for number, rows in enumerate(files):
        write_rows(folder / f"{number}.jsonl", rows)
        names.append(str(folder / f"{number}.jsonl"))
    data = DataConfig.model_validate(
        {
            "train": [{"path": name} for name in names[:-1]],
            "eval": names[-1],
            "chat_template": template,
            "max_length": 256,
            "packing": False,
        }
    )
    task = CausalLM(base.model, base.tokenizer, data)
    rows, _ = task.rows.load_splits(data)
    adapter = attach(base.model, LoRA(rank=2, targets=("q",)), seed=0)
    provenance = Provenance(
        base=base.name,
        fingerprint=base.fingerprint,
        loading={"dtype": "fp32"},
        prompt_style=task.rows.style,
        task=CausalLMConfig().saved(),
    )
    save_adapter(adapter, folder / "adapter", provenance)
    adapter.detach()
    return rows


def opened(folder: Path) -> Opened:
    return open_adapter(folder / "adapter")


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "opens_think"])
def test_chat_sends_the_common_prompt(name, tmp_path, model_folder):
    (tmp_path / "mine.jinja").write_text(TEMPLATES[name], encoding="utf-8")
    rows = [conversation(question) for question in QUESTIONS]
    template = str(tmp_path / "mine.jinja")
    encoded = learnt(tmp_path, model_folder, template, rows, [conversation("x", None)])
    talk = Conversation(source := opened(tmp_path), max_new_tokens=1)
    assert source.style.system == SYSTEM
    for row, question in zip(encoded, QUESTIONS, strict=True):
        ids = talk.prompt([{"role": "user", "content": question}], source.style)
        assert list(row.input_ids[: len(ids)]) == ids
        assert row.labels[len(ids)] != -100


def test_differing_system_prompts_are_not_stored(tmp_path, model_folder):
    same, other = [conversation("a b")], [conversation("c d", "Be long.")]
    (tmp_path / "one").mkdir()
    learnt(tmp_path / "one", model_folder, "chatml", [*same, *other], same)
    assert opened(tmp_path / "one").style.system is None
    (tmp_path / "two").mkdir()
    learnt(tmp_path / "two", model_folder, "chatml", same, other, same)
    assert opened(tmp_path / "two").style.system is None


@pytest.fixture
def adapter(tmp_path: Path, model_folder: Path) -> Path:
    """An adapter whose rows all had SYSTEM."""
    rows = [conversation(question) for question in QUESTIONS]
    learnt(tmp_path, model_folder, None, rows, rows)
    return tmp_path / "adapter"


def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the prompt of each answer in a chat, as text."""
    prompts: list[str] = []

    def stream(model: Any, tokenizer: Any, prompt: Any, **settings: Any) -> list[str]:
        prompts.append(tokenizer.decode(prompt))
        return ["yes"]

    monkeypatch.setattr("peftkit_cli.conversation.stream", stream)
    return prompts


TURN = "<|im_start|>system\n"


def test_chat_starts_with_the_training_prompt(adapter, peftkit, monkeypatch):
    prompts = sent(monkeypatch)
    typed(monkeypatch, "a", "/system Be long.", "b", '/system ""', "c", "/system", "/base", "d")
    done = peftkit("chat", adapter).succeeded()
    first, second, third, of_base = prompts
    assert first.startswith(f"{TURN}{SYSTEM}<|im_end|>")
    assert second.startswith(f"{TURN}Be long.<|im_end|>")
    assert "system" not in third + of_base
    assert 'System prompt, as in training: "You sell "foxes" 🦊. Be short."' in done.err
    assert 'System prompt: "Be long."\nSystem prompt: none\nSystem prompt: none\n' in done.err

    typed(monkeypatch, "a")
    done = peftkit("chat", adapter, "--system", "Be kind.")
    assert prompts[-1].startswith(f"{TURN}Be kind.<|im_end|>")
    assert "as in training" not in done.err


def test_generate_reports_its_system_prompt(adapter, peftkit, monkeypatch):
    styles = []

    def generate(model: Any, tokenizer: Any, prompt: str, *, style: Style, **settings: Any) -> Any:
        styles.append(style)
        return ["yes"]

    monkeypatch.setattr("peftkit.inference.generate.generate", generate)
    done = peftkit("generate", adapter, "--prompt", "a")
    assert done.out == "yes\n"
    assert "System prompt, as in training:" in done.err
    assert "System prompt" not in peftkit("generate", adapter, "--prompt", "a", "--system", "").err
    assert [style.system for style in styles] == [SYSTEM, None]


def test_an_unused_prompt_is_refused(tmp_path, model_folder, peftkit):
    rows = [conversation("a", None)]
    (tmp_path / "deaf.jinja").write_text(
        TEMPLATES["chatml"].replace(
            "{% for m in messages %}", "{% for m in messages if m.role != 's' + 'ystem' %}"
        ),
        encoding="utf-8",
    )
    learnt(tmp_path, model_folder, str(tmp_path / "deaf.jinja"), rows, rows)
    done = peftkit("generate", tmp_path / "adapter", "--prompt", "a", "--system", "Be kind.")
    assert done.code == 2
    assert "The chat template omits it" in done.err


def test_eval_fills_in_the_training_prompt(adapter, tmp_path, peftkit):
    write_rows(tmp_path / "with.jsonl", [conversation("what?")])
    write_rows(tmp_path / "without.jsonl", [conversation("what?", None)])
    told, bare = (
        peftkit("eval", adapter, "--data", tmp_path / f"{name}.jsonl", "--json")
        for name in ("with", "without")
    )
    assert json.loads(told.out) == json.loads(bare.out)
    assert "Rows without a system turn use the system prompt of training" in bare.err


def test_a_banks_prompts_begin_with_the_system_prompt_of_training(adapter):
    bank = open_bank({"foxes": adapter})
    tokenizer, style = bank.base.tokenizer, bank.style("foxes")
    ids = prompt_ids(tokenizer, [{"role": "user", "content": "a"}], style)
    assert tokenizer.decode(ids).startswith(f"{TURN}{SYSTEM}<|im_end|>")
    turns = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "a"}]
    assert SYSTEM not in tokenizer.decode(prompt_ids(tokenizer, turns, style))


def test_several_lines_are_one_message_and_a_conversation_is_saved_as_a_row(
    adapter, tmp_path, peftkit, monkeypatch
):
    prompts = sent(monkeypatch)
    lines = ["/save a.jsonl", '"""/one', "", 'two"""', "/save", "/save no/a.jsonl"]
    typed(monkeypatch, *lines, "/save a.jsonl", "three", "/save a.jsonl")
    done = peftkit("chat", adapter).succeeded()
    assert len(prompts) == 2
    assert "user\n/one\n\ntwo<|im_end|>" in prompts[0]
    assert "There is no conversation yet" in done.err
    assert "Cannot write no/a.jsonl: No such file or directory." in done.err
    first, second = map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())
    assert [turn["role"] for turn in first["messages"]] == ["system", "user", "assistant"]
    assert second["messages"][1:] == [
        {"role": "user", "content": "/one\n\ntwo"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "yes"},
    ]


def test_help_fits_80_columns(adapter, peftkit, monkeypatch):
    typed(monkeypatch, "/help")
    err = peftkit("chat", adapter).err
    assert "/save FILE" in err
    _, told = err.split(str(adapter))
    assert max(map(len, told.splitlines())) < 80
