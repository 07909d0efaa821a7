"""`peftkit chat --tool`: calls are shown, allowed or not, run, and the model goes on."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from peftkit.data.chat_template import CHATML
from peftkit.data.style import Style
from peftkit.errors import ConfigError
from peftkit.inference.bank import AdapterBank
from peftkit.methods.lora import LoRA
from peftkit_cli.chat_tools import ChatTools
from peftkit_cli.conversation import MAX_TURNS, Conversation
from tests.helpers.bank import tiny_base, write_adapter

CALL = '<tool_call>\n{"name": "double", "arguments": {"number": 21}}\n</tool_call>'

TOOL = '''
def double(number: int) -> int:
    """Double a number.

    Args:
        number: The number.
    """
    if number < 0:
        raise ValueError("too small")
    return 2 * number
'''


class Told:
    """A conversation whose model says given texts; it keeps the prompts that it saw."""

    def __init__(self, bank: AdapterBank, patch: pytest.MonkeyPatch, tools: ChatTools) -> None:
        self.prompts: list[str] = []
        self.texts: list[str] = []
        self.decode = bank.base.tokenizer.decode
        patch.setattr("peftkit_cli.conversation.stream", self._stream)
        self.talk = Conversation(bank, tools=tools)

    def _stream(self, _: Any, __: Any, prompt: list[int], **settings: Any) -> Iterator[str]:
        self.prompts.append(self.decode(prompt))
        assert settings["special"]
        assert settings["stops"]
        yield from self.texts.pop(0)

    def answer(self, *texts: str) -> list[str]:
        """Answer a message with these texts; return what each message of the history says."""
        self.texts = list(texts)
        self.talk.answer("What is twice 21?")
        return [message["content"] for message in self.talk.history]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "tools.py").write_text(TOOL)
    return tmp_path / "tools.py"


@pytest.fixture
def bank(llama: Any, tokenizer: Any, tmp_path: Path) -> AdapterBank:
    style = Style("chat", CHATML)
    folder = write_adapter(llama, LoRA(rank=2, alpha=4), tmp_path / "one", 1, prompt_style=style)
    return AdapterBank(tiny_base(llama, tokenizer), {"one": folder})


@pytest.fixture
def told(bank: AdapterBank, file: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Told]:
    def make(*says: str) -> Told:
        said = iter(says)
        monkeypatch.setattr("builtins.input", lambda _: next(said))
        tools = ChatTools(bank.base.tokenizer, [f"{file}:double"], confirm=bool(says))
        return Told(bank, monkeypatch, tools)

    return make


def test_a_call_is_run(told, capsys):
    chat = told()
    assert chat.answer(CALL, "It is 42.")[2:] == ["42", "It is 42."]
    assert "double" in chat.prompts[0]
    assert "42" in chat.prompts[1]
    screen = capsys.readouterr()
    assert "calls double(number=21)" in screen.err
    assert "= 42" in screen.err
    assert "<tool_call>" not in screen.out
    assert "It is 42." in screen.out


@pytest.mark.parametrize(
    ("says", "runs"), [("y", True), ("yes", True), ("n", False), ("", False), ("a", True)]
)
def test_nothing_runs_without_consent(told, says, runs):
    reply = told(says).answer(CALL, "Well.")[2]
    assert (reply == "42") is runs
    assert runs or "did not allow" in reply


def test_always_asks_once(told):
    assert told("a").answer(CALL, CALL, "Done.")[-2:] == ["42", "Done."]


def test_eof_and_ctrl_c_refuse(told, monkeypatch):
    for stop in (EOFError, KeyboardInterrupt):
        chat = told("y")

        def interrupted(_: str, stop: type[BaseException] = stop) -> str:
            raise stop

        monkeypatch.setattr("builtins.input", interrupted)
        assert "did not allow" in chat.answer(CALL, "Well.")[2]


def test_ctrl_c_in_an_answer_prevents_its_calls(told, capsys):
    chat = told()

    def stopped() -> Iterator[str]:
        yield CALL + " And"
        raise KeyboardInterrupt

    chat.texts = [stopped()]  # type: ignore[list-item]
    chat.talk.answer("What is twice 21?")
    assert [message["role"] for message in chat.talk.history] == ["user", "assistant"]
    assert "tool_calls" not in chat.talk.history[1]
    assert "calls double" not in capsys.readouterr().err


def test_ctrl_c_stops_a_call(told, monkeypatch):
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("peftkit_cli.chat_tools.called", interrupted)
    assert "stopped this call" in told().answer(CALL, "Well.")[2]


def test_what_goes_wrong_is_told_to_the_model(told):
    unknown, failing = CALL.replace("double", "triple"), CALL.replace("21", "-1")
    replies = told().answer(unknown, failing, "Sorry.")
    assert "triple not found" in replies[2]
    assert "too small" in replies[4]


def test_a_broken_call_is_text(told):
    chat = told()
    assert chat.answer(CALL.replace("21}}", "21"))[1].startswith("<tool_call>")
    assert len(chat.prompts) == 1


def test_endless_calls_stop(told, capsys):
    chat = told()
    chat.answer(*[CALL] * MAX_TURNS)
    assert len(chat.prompts) == MAX_TURNS
    assert f"called tools {MAX_TURNS} times" in capsys.readouterr().err


def test_a_saved_chat_has_its_tools_and_calls(told, tmp_path):
    chat = told()
    chat.answer(CALL, "It is 42.")
    chat.talk.take(f"/save {tmp_path}/rows.jsonl")
    row = json.loads((tmp_path / "rows.jsonl").read_text())
    assert [message["role"] for message in row["messages"]] == [
        *("user", "assistant", "tool", "assistant")
    ]
    assert row["messages"][1]["tool_calls"][0]["function"]["name"] == "double"
    assert row["tools"][0]["function"]["name"] == "double"


def test_functions_of_one_name_are_refused(bank, file):
    with pytest.raises(ConfigError, match="two tools have the same name"):
        ChatTools(bank.base.tokenizer, [f"{file}:double"] * 2, confirm=True)


def test_a_pipe_is_refused_unless_tools_may_run(peftkit, bank, model_folder, tmp_path, file):
    done = peftkit(
        *("chat", "--adapter", f"one={tmp_path}/one", "--base", str(model_folder), "--force"),
        *("--tool", f"{file}:double"),
    )
    assert done.code == 2
    assert "--run-tools" in done.err
