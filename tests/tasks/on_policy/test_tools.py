"""Tools in answers: what is called, told to the model, learnt from, and how runs resume."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from peftkit.data.chat_template import CHATML
from peftkit.data.style import Style
from peftkit.data.tokens import tokens
from peftkit.errors import ConfigError, DataError, PeftkitError, RunError
from peftkit.events import EvalDone, RolledOut, StepDone
from peftkit.inference.call_formats import Call
from peftkit.inference.calls import AnswerPiece
from peftkit.inference.generate import SampledAnswer
from peftkit.tasks.rewards.grpo_config import GRPOConfig
from peftkit.tasks.rewards.grpo_tools import Dialogue, Tools
from peftkit.tasks.user_code import UserCode
from peftkit_cli.app import run
from tests.helpers.call_templates import SHORT
from tests.helpers.children import exit_code, start_ranks
from tests.helpers.finished import WEIGHTS, Finished, finished, replaced, sections
from tests.helpers.folders import write_rows

CODE = '''
import threading
import time

def multiply(a: int, b: int) -> int:
    """
    Multiply two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a * b

async def later(text: str) -> str:
    """
    Say a text back.

    Args:
        text: It.
    """
    return text * 2

def fails(text: str) -> str:
    """
    Fail.

    Args:
        text: Why.
    """
    raise KeyError(text)

def hangs() -> str:
    """Hang."""
    time.sleep(5)

goes_on = threading.Event()

def waits() -> str:
    """Wait for something."""
    return "it went on" if goes_on.wait(50) else "in vain"

def huge() -> str:
    """Return ten million characters."""
    return "ab" * 5_000_000

def untold(a):
    return a

def long(prompts, completions, **columns):
    return [float(sum(len(m["content"]) for m in one)) for one in completions]

class Counter:
    made = 0

    def __init__(self):
        type(self).made += 1

    def reset(self, word: str, **row):
        self.calls = 0
        return f" Word: {word}."

    def later(self, text: str) -> str:
        """
        Count a call.

        Args:
            text: Any.
        """
        self.calls += 1
        return f"{self.calls} {len(text)}"

    def get_reward(self) -> float:
        return float(self.calls)
'''


@pytest.fixture
def code(tmp_path: Path) -> str:
    (tmp_path / "tools.py").write_text(CODE)
    return str(tmp_path / "tools.py")


def tools_of(tokenizer: Any, *uses: str, environment: str | None = None, **more: Any) -> Tools:
    asked = {"tools": uses, "environment": environment, "rewards": [{"use": "exact_match"}], **more}
    style = Style("chat", CHATML)
    return Tools(tokenizer, style, GRPOConfig(**asked), UserCode(), 200)


def said(tokenizer: Any, text: str) -> SampledAnswer:
    return SampledAnswer((*tokens(tokenizer, text), tokenizer.eos_token_id), False)


def calls(*pairs: tuple[str, dict[str, Any]]) -> str:
    each = (json.dumps({"name": name, "arguments": given}) for name, given in pairs)
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in each)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("call", "told", "failed"),
    [
        (("multiply", {"a": 37, "b": 84}), "3108", 0),
        (("later", {"text": "ab"}), "abab", 0),
        (("fails", {"text": "why"}), "{'error': \"'why'\"}", 1),
        (("nothing", {}), "{'error': 'Tool nothing not found.'}", 1),
        (("multiply", {"a": 1}), "missing 1 required positional argument: 'b'", 1),
        (("hangs", {}), "{'error': 'It took longer than 0.2 seconds.'}", 1),
    ],
)
def test_the_model_reads_the_result_of_a_call(call, told, failed, code, tokenizer):
    names = ("multiply", "later", "fails", "hangs")
    tools = tools_of(tokenizer, *(f"{code}:{name}" for name in names), tool_timeout=0.2)
    dialogue = Dialogue(tools, [1, 2, 3], [], None)
    wait = dialogue.reply(said(tokenizer, f"I ask.\n{calls(call)}"))
    assert wait is not None
    ids = wait(500)
    assert ids is not None
    assert told in tokenizer.decode(ids)
    answer, reply = dialogue.messages
    assert answer["content"] == "I ask."
    assert answer["tool_calls"][0]["function"] == {"name": call[0], "arguments": call[1]}
    assert reply["role"] == "tool"
    assert reply["tool_call_id"] == answer["tool_calls"][0]["id"]
    assert told in reply["content"]
    assert (dialogue.num_calls, dialogue.num_failed) == (1, failed)
    assert dialogue.reply(said(tokenizer, "It is done.")) is None
    assert dialogue.messages[-1] == {"role": "assistant", "content": "It is done."}


def test_calls_of_a_turn_run_in_parallel(code, tokenizer):
    tools = tools_of(tokenizer, f"{code}:multiply", f"{code}:waits")
    dialogue = Dialogue(tools, [1], [], None)
    wait = dialogue.reply(said(tokenizer, calls(("waits", {}), ("multiply", {"a": 2, "b": 3}))))
    assert wait is not None
    assert dialogue.num_calls == 0  # the first one is not over, and the model may go on
    tools._functions[1].__globals__["goes_on"].set()
    assert wait(500)
    assert [each["content"] for each in dialogue.messages[1:]] == ["it went on", "6"]


@pytest.mark.smoke
def test_a_result_beyond_the_context_ends_the_completion(code, tokenizer, monkeypatch):
    tools = tools_of(tokenizer, f"{code}:huge", max_turns=2)
    dialogue = Dialogue(tools, [1], [], None)
    wait = dialogue.reply(said(tokenizer, calls(("huge", {}))))
    assert wait is not None
    with monkeypatch.context() as patched:
        patched.setattr(tools.turns, "after", None)  # ten megabytes are not even tokenised
        assert wait(400) is None
    assert [each["role"] for each in dialogue.messages] == ["assistant"]
    # the last turn's calls, and those of a turn that was cut, are not made
    assert dialogue.reply(said(tokenizer, calls(("huge", {})))) is None
    cut = Dialogue(tools, [1], [], None)
    assert cut.reply(SampledAnswer(tuple(tokens(tokenizer, calls(("huge", {})))), True)) is None
    assert cut.messages[0]["tool_calls"]
    assert cut.num_calls == 0


@pytest.mark.smoke
def test_a_hung_environment_is_replaced(tokenizer, tmp_path):
    (tmp_path / "slow.py").write_text(
        "import threading\nclass Slow:\n"
        "    def reset(self, **row):\n        self.goes_on = threading.Event()\n"
        "    def wait(self) -> str:\n        'Wait.'\n        self.goes_on.wait(20)\n"
        "    def get_reward(self):\n        return 1.0\n"
    )
    tools = tools_of(tokenizer, environment=f"{tmp_path}/slow.py:Slow", tool_timeout=0.1)
    both = tools._environments(2)
    for each in both:
        each.reset()
    wait = Dialogue(tools, [1], [], both[0]).reply(said(tokenizer, calls(("wait", {}))))
    assert wait is not None
    assert wait(500)
    others = tools._environments(2)
    both[0].goes_on.set()
    assert others[0] is both[1]  # in which nothing hung
    assert others[1] not in both


def test_code_may_have_dataclasses_with_annotations_as_text(tmp_path):
    file = tmp_path / "env.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Env:\n    count: int = 3\n"
    )
    assert UserCode().load(f"{file}:Env")().count == 3


def test_a_file_that_exits_is_a_file_that_fails(tmp_path):
    (tmp_path / "exits.py").write_text("raise SystemExit(0)\n")
    with pytest.raises(ConfigError, match="cannot be imported: SystemExit"):
        UserCode().load(f"{tmp_path}/exits.py:grade")


def test_half_a_character_is_replaced(tokenizer, tmp_path):
    file = tmp_path / "half.py"
    file.write_text("def half() -> str:\n    'Cut a text.'\n    return 'a' + chr(0xD83D)\n")
    dialogue = Dialogue(tools_of(tokenizer, f"{file}:half"), [1], [], None)
    wait = dialogue.reply(said(tokenizer, calls(("half", {}))))
    assert wait is not None
    assert wait(500)
    assert dialogue.messages[-1]["content"] == "a?"


@pytest.mark.smoke
def test_what_cannot_be_a_tool_is_refused(code, tokenizer):
    with pytest.raises(ConfigError, match="untold cannot be a tool"):
        tools_of(tokenizer, f"{code}:untold")
    with pytest.raises(ConfigError, match="no function absent"):
        tools_of(tokenizer, f"{code}:absent")
    with pytest.raises(ConfigError, match="Two tools have the same name"):
        tools_of(tokenizer, f"{code}:later", environment=f"{code}:Counter")
    with pytest.raises(ConfigError, match="No reward is set"):
        GRPOConfig(tools=(f"{code}:multiply",))


# Runs: a model with random weights calls no tool by itself, so that each of its answers is read as
# a call of `later`.


def as_call(_: Any, text: str, *__: Any, **___: Any) -> AnswerPiece:
    calls = (Call("later" if len(text) % 3 else "fails", {"text": text[:3]}),)
    return AnswerPiece(text, "", calls if len(text) % 5 else ())


def spec(folder: Path, model_folder: Path, **task: Any) -> dict[str, Any]:
    (folder / "tools.py").write_text(CODE)
    (folder / "short.jinja").write_text(SHORT)
    rows = [{"prompt": f"the quick brown {n}", "word": str(n)} for n in range(6)]
    file = write_rows(folder / "p.jsonl", rows)
    task = {"answers": 4, "max_new_tokens": 120, "max_turns": 4, "mask_cut": False, **task}
    told = sections(folder, model_folder, file, "grpo", **{"updates": 2, **task})
    told["data"] |= {"max_length": 250, "chat_template": str(folder / "short.jinja")}
    train = {"max_steps": 3, "batch_size": 2, "learning_rate": 0.02, "save_every": 1}
    told["train"] |= {**train, "compile": False}
    return told


@contextmanager
def calling() -> Iterator[None]:
    """Have the model end its turns soon, and each of them read as a call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("peftkit.tasks.rewards.grpo_tools.whole", as_call)
        patch.setattr("peftkit.inference.calls.stop_ids", lambda *_: list(range(0, 384, 8)))
        yield


@pytest.fixture(scope="module")
def patched() -> Iterator[None]:
    with calling():
        yield


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, patched: Any) -> Finished:
    folder = tmp_path_factory.mktemp("tools")
    asked = spec(folder, model_folder, environment=f"{folder}/tools.py:Counter")
    asked["data"]["eval"] = asked["data"]["train"]
    return finished(asked, train={"eval_every": 3})


def test_a_run_with_an_environment_rewards_what_it_says(done):
    steps = done.of_kind(StepDone)
    figures = steps[0].figures
    assert figures["turns"] > 1.5
    assert figures["calls"] > figures["failed_calls"] > 0
    assert figures["length"] < 120
    answers = [one for event in done.of_kind(RolledOut) for one in event.answers]
    assert {one.reward for one in answers} > {0.0, 1.0}
    assert all(one.parts == {"Counter": one.reward} for one in answers)
    assert any("<|im_start|>tool\n1 3<|im_end|>" in one.completion for one in answers)
    assert all(f" Word: {one.prompt[-30:].split('brown ')[1][0]}." in one.prompt for one in answers)
    (evaluation,) = done.of_kind(EvalDone)
    assert evaluation.metrics["turns"] >= 1


def test_a_resumed_run_with_tools_ends_with_the_same_bits(done, tmp_path):
    half = done.resumed(tmp_path / "half", "step-3")
    assert (half.folder / WEIGHTS).read_bytes() == (done.folder / WEIGHTS).read_bytes()
    refused = pytest.raises(PeftkitError, match=r"tools\.py:Counter")
    with replaced(done.folder.parent / "tools.py", CODE + "\n# changed\n"), refused:
        done.resumed(tmp_path / "changed", "step-3")


def test_foreign_tools(done, tmp_path, capsys):
    with replaced(done.folder.parent / "tools.py", "raise SystemExit('it ran')"):
        for more in ([], ["--set", "task.rewards=[{use: exact_match}]"]):
            given = [str(done.folder / "recipe.yaml"), "--out", str(tmp_path / "again"), *more]
            assert run(["train", *given]) == 2
            told = capsys.readouterr().err
            assert "task.environment" in told
            assert "it ran" not in told
        data = str(done.told["data"]["train"])
        assert run(["eval", str(done.folder), "--data", data, "--json"]) == 0
        printed = capsys.readouterr()
        assert "--run-rewards" in printed.err
        assert json.loads(printed.out).keys() == {"cut", "length", "num_rows"}
    assert run(["eval", str(done.folder), "--data", data, "--json", "--run-rewards"]) == 0
    told = json.loads(capsys.readouterr().out)
    last = done.of_kind(EvalDone)[0].metrics
    assert told["reward"] == pytest.approx(last["reward"], rel=1e-4)
    assert told["turns"] == pytest.approx(last["turns"])


def test_rewards_get_the_dialogue(tmp_path, model_folder, patched):
    here = f"{tmp_path}/tools.py"
    asked = spec(tmp_path, model_folder, tools=[f"{here}:later"], rewards=[{"use": f"{here}:long"}])
    (rolled,) = finished(asked, train={"max_steps": 1}).of_kind(RolledOut)
    assert max(one.reward for one in rolled.answers) > 10


def test_a_failed_environment_ends_it(tmp_path, model_folder, patched):
    asked = spec(tmp_path, model_folder, environment=f"{tmp_path}/tools.py:Counter")
    file = tmp_path / "tools.py"
    file.write_text(CODE.replace("self.calls = 0", "self.calls = 0\n        {}[word]"))
    with pytest.raises(RunError, match=r"reset\(\) of .* failed: KeyError(.|\n)*p\.jsonl:\d"):
        finished(asked)
    file.write_text(CODE.replace("get_reward", "_reward"))
    with pytest.raises(ConfigError, match="no method get_reward"):
        finished(asked, overwrite=True)


def test_rewritten_turns_are_refused(code, tokenizer):
    strips = CHATML.replace(
        "{%- if message.content %}", "{%- if message.content and (loop.last or loop.first) %}"
    ).replace(
        "{%- for call in message.tool_calls or [] %}",
        "{%- for call in (message.tool_calls or []) if messages[-1].role == 'assistant' %}",
    )
    asked = GRPOConfig(tools=(f"{code}:multiply",), rewards=({"use": "exact_match"},))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="differently if a message follows"):
        Tools(tokenizer, Style("chat", strips), asked, UserCode(), 200)
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ConfigError, match="no calls"):
        Tools(tokenizer, Style("chat", plain), asked, UserCode(), 200)


def learn(folder: str, model: str, out: str, accumulation: int) -> None:
    """Run a step, and write what it told."""
    here = Path(folder, f"{out}{os.environ.get('RANK', '')}")
    here.mkdir()
    asked = spec(here, Path(model), environment=f"{folder}/tools.py:Counter", updates=1)
    asked["data"]["train"] = f"{folder}/p.jsonl"
    asked["data"]["chat_template"] = f"{folder}/short.jinja"
    train = {"output_dir": f"{folder}/{out}", "gradient_accumulation": accumulation}
    with calling():
        done = finished(asked, train={**train, "max_steps": 1, "save_every": None})
    for step in done.of_kind(StepDone):  # the first process tells it
        (here / "told.json").write_text(json.dumps([step.loss, dict(step.figures)]))


@pytest.mark.slow
def test_two_processes_call_their_own_tools(tmp_path, model_folder):
    spec(tmp_path, model_folder)
    here, model = str(tmp_path), str(model_folder)
    children = start_ranks(learn, here, model, "two", 1)
    learn(here, model, "one", 2)
    assert [exit_code(each, 240) for each in children] == [0, 0]
    one, two = (json.loads((tmp_path / n / "told.json").read_text()) for n in ("one", "two0"))
    assert two[0] == pytest.approx(one[0], rel=1e-3, abs=1e-4)
    for name in ("reward", "calls", "failed_calls", "turns", "length", "cut"):
        assert two[1][name] == pytest.approx(one[1][name], rel=1e-4), name
    assert one[1]["calls"] > 0
