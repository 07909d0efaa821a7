"""`peftkit chat` with several adapters: named, switched, compared."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from peftkit.adapter import attach
from peftkit.base.load import load_base
from peftkit.data.generation import default_style
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.load import read_adapter
from peftkit.formats.peft.notes import Provenance
from peftkit.inference.bank import open_bank
from peftkit.inference.generate import generate
from peftkit.methods.lora import LoRA
from tests.helpers.adapters import perturb
from tests.helpers.command_line import typed

ASKED = "what is the lazy?"


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> dict[str, Path]:
    """Two adapters that say something else than the base, and than each other."""
    base, folder = load_base(str(model_folder), dtype="fp32"), tmp_path_factory.mktemp("two")
    paths = {}
    for seed, name in enumerate(("json", "sql")):
        adapter = attach(base.model, LoRA(rank=2, targets=("q", "o", "down")), seed=seed)
        torch.manual_seed(seed)
        perturb(adapter.parameters(), 0.3)
        provenance = Provenance(
            base=base.name,
            fingerprint=base.fingerprint,
            loading={"dtype": "fp32"},
            prompt_style=default_style(base.tokenizer),
        )
        paths[name] = save_adapter(adapter, folder / name, provenance)
        adapter.detach()
    return paths


@pytest.fixture
def options(two: dict[str, Path]) -> list[str]:
    named = [part for name, path in two.items() for part in ("--adapter", f"{name}={path}")]
    return [*named, "--max-new-tokens", "5"]


@pytest.fixture
def answers(two: dict[str, Path]) -> dict[str, str]:
    """What each says to ASKED, asked alone."""
    bank = open_bank(two)
    texts = {}
    for name in (*bank.names, None):
        with bank.use(name):
            (texts[name or "base"],) = generate(
                bank.base.model, bank.base.tokenizer, ASKED, max_new_tokens=5
            )
    assert len(set(texts.values())) == 3
    return texts


def test_adapters_are_switched_by_name(peftkit, options, answers, monkeypatch):
    typed(
        monkeypatch,
        *(ASKED, "/adapter sql", ASKED, "/base", ASKED, "/reset"),  # each with its own history
        *("/adapter", ASKED, "/reset", "/adapter jsn", ASKED, "/base x", "/quit", ASKED),
    )
    done = peftkit("chat", *options).succeeded()
    replies = [answers[name] for name in ("json", "sql", "base", "sql", "sql")]
    assert done.out == "".join(f"{text}\n" for text in replies)
    assert "There is no adapter jsn. Did you mean 'json'?" in done.err
    assert "/base takes no text" in done.err


def test_compare_lets_all_answer(peftkit, options, answers, monkeypatch):
    typed(monkeypatch, "/compare", f"/compare {ASKED}", "/reset", ASKED, "/compare")
    done = peftkit("chat", *options).succeeded()
    each = "".join(f"[{name}] {text}\n" for name, text in answers.items())
    assert done.out == each + f"{answers['json']}\n" + each
    assert "nothing to compare" in done.err


def test_each_conversation_continues_from_its_own_replies(two, answers, capsys):
    from peftkit_cli.conversation import Conversation

    talk = Conversation(open_bank(two), max_new_tokens=5, temperature=0.0, seed=None)
    talk.take("/adapter sql")
    talk.take(f"/compare {ASKED}")
    assert [m["content"] for m in talk.history] == [ASKED, answers["sql"]]
    talk.take("/compare")
    assert len(talk.history) == 2
    talk.take("/base")
    assert [m["content"] for m in talk.history] == [ASKED, answers["base"]]
    assert capsys.readouterr().out.count("[json]") == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "Give one as `peftkit chat ADAPTER`"),
        (["{json}", "--adapter", "a={json}"], "both ADAPTER and --adapter are given"),
        (["--adapter", "a="], "a= names no adapter"),
        (["--adapter", "base={json}"], "'base' is reserved for the base"),
        (["--adapter", "a={json}", "--adapter", "a={sql}"], "two adapters would be named 'a'"),
        (["--adapter", "a/b={json}"], "a/b="),
        (["--adapter", "a b={json}"], "'a b' is not allowed as the name"),
        (["--adapter", "..={json}"], "'..' is not allowed as the name"),
        (["--adapter", "a={json}x"], "Did you mean 'json'?"),
    ],
)
def test_wrong_usage_exits_with_2(args, message, two, peftkit):
    assert message in peftkit("chat", *(arg.format(**two) for arg in args)).refusal()


def test_tokens_that_a_bank_splits_are_told(peftkit, two, tmp_path, monkeypatch):
    """An adapter as TRL saves it: with a tokenizer of its own, and no row for a new token."""
    one = Path(shutil.copytree(two["json"], tmp_path / "json"))
    tokenizer = AutoTokenizer.from_pretrained(read_adapter(one).provenance.base)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(one)
    typed(monkeypatch, ASKED)
    both = ("--adapter", one, "--adapter", two["sql"])
    done = peftkit("chat", *both, "--max-new-tokens", "5").succeeded()
    told = " ".join(done.err.split())
    assert "'json' was trained with tokens that its base lacks: <tool>." in told
    assert "'sql' was trained" not in told
    (one / "tokenizer.json").write_text("{")
    typed(monkeypatch, ASKED)
    done = peftkit("chat", "--adapter", one, "--max-new-tokens", "5").succeeded()
    assert "cannot read" in done.err
