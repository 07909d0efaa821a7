"""Graders: what each says of an answer, what is refused, and that runs learn from them."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from peftkit.adapter import attach
from peftkit.base.load import load_base
from peftkit.config.schema import dump_yaml, json_schema
from peftkit.data.chat_template import CHATML
from peftkit.data.tokens import tokens
from peftkit.errors import ConfigError, RunError
from peftkit.events import RolledOut
from peftkit.inference.generate import answers_to
from peftkit.methods.lora import LoRA
from peftkit.recipe import Recipe, load
from peftkit.settings import DataConfig
from peftkit.tasks.metrics import bleu, gleu
from peftkit.tasks.rewards.graders import computed, fields_of, parsed
from peftkit.tasks.rewards.grading import MAX_TEXT, SIMILARITIES, Answered, Grade, Grading
from peftkit.tasks.rewards.reward_functions import Rewards, RewardTerm
from peftkit.tasks.user_code import UserCode
from peftkit_cli.app import run
from tests.helpers.finished import WEIGHTS, finished, recipe
from tests.helpers.folders import write_rows
from tests.helpers.on_policy import reward_recipe

ROW = {"answer": "blue", "size": 4, "facts": {"colours": ["red", "blue"]}, "odd": "{{item.size}}"}
CHECK = {"type": "string_check", "name": "check", "operation": "eq"}
ASKS = {
    "type": "score_model",
    "name": "judge",
    "input": [{"role": "user", "content": "Is {{sample.output_text}} right? {{item.answer}}"}],
}


def grading(grader: dict[str, Any], ask: Any = None, seconds: float = 10.0) -> Grading:
    (term,) = [RewardTerm(use="grader", grader=grader)]
    assert term.grader is not None
    return Grading(term.grader, ask or (lambda *_: []), seconds, UserCode())


def grade(grader: dict[str, Any], text: str, item: dict[str, Any] = ROW, ask: Any = None) -> Grade:
    (found,) = grading(grader, ask).grades([Answered(text, item, "a.jsonl:1")])
    return found


@pytest.mark.parametrize(
    ("operation", "text", "worth"),
    [
        ("eq", "blue", 1.0),
        ("eq", "Blue", 0.0),
        ("ne", "Blue", 1.0),
        ("like", "it is blue.", 1.0),
        ("like", "it is Blue.", 0.0),
        ("ilike", "it is Blue.", 1.0),
        ("ilike", "it is red", 0.0),
    ],
)
def test_texts_are_compared(operation, text, worth):
    texts = {"input": "{{ sample.output_text }}", "reference": "{{item.answer}}"}
    assert grade({**CHECK, **texts, "operation": operation}, text).value == worth


@pytest.mark.parametrize(
    ("template", "text", "filled"),
    [
        ("{{item.size}} or {{ item.facts.colours[1] }}", "", "4 or blue"),
        ("{{item.facts}}", "", '{"colours": ["red", "blue"]}'),
        ("{{item.odd}}", "", "{{item.size}}"),
        ("{{sample.output_text}}", "{{item.size}}", "{{item.size}}"),
        ("{{sample.output_json.a[0].b}}", '{"a": [{"b": true}]}', "true"),
        ("{ {item.size} }", "", "{ {item.size} }"),
    ],
)
def test_templates_are_filled_once(template, text, filled):
    same = {**CHECK, "input": template, "reference": "{{item.filled}}"}
    assert grade(same, text, {**ROW, "filled": filled}).value == 1.0


def test_an_answer_that_lacks_a_value_has_0_and_a_row_that_lacks_one_ends_the_run():
    asks = {**CHECK, "input": "{{sample.output_json.a}}", "reference": "1"}
    for text in ("no JSON", '{"b": 1}', "[1]"):
        assert grade(asks, text) == Grade(0.0, "sample_parse_error")
    with pytest.raises(RunError, match=r"item\.absent\}\}, which a\.jsonl:1 lacks"):
        grade({**CHECK, "input": "{{item.absent}}", "reference": "1"}, "a")


def test_the_fields_that_a_grader_reads_are_known():
    read = {**CHECK, "input": "{{item.facts.colours[0]}}", "reference": "{{sample.output_text}}"}
    term = RewardTerm(
        use="grader",
        grader={
            "type": "multi",
            "name": "both",
            "graders": {"a": read, "b": ASKS},
            "calculate_output": "a + b",
        },
    )
    assert term.grader is not None
    assert fields_of(term.grader) == {"facts", "answer"}


def test_a_text_is_bounded():
    long = {"answer": "a" * (MAX_TEXT // 2)}
    twice = {**CHECK, "input": "{{item.answer}}{{item.answer}}", "reference": ""}
    with pytest.raises(RunError, match=r"more than 100,000 characters(.|\n)*a\.jsonl:1"):
        grade(twice, "", long)


@pytest.mark.parametrize("seed", range(4))
def test_similarities_are_those_of_others(seed):
    fuzz, nltk = pytest.importorskip("rapidfuzz.fuzz"), pytest.importorskip("nltk.translate")
    chance = random.Random(seed)
    one, other = (
        " ".join(chance.choices(["the", "quick", "brown", "fox", "jumps"], k=chance.randint(5, 14)))
        for _ in range(2)
    )
    from rouge_score.rouge_scorer import RougeScorer  # a second, with nltk and scipy

    scorer = RougeScorer([*(f"rouge{n}" for n in range(1, 6)), "rougeL"])
    expected = {
        name.replace("rouge", "rouge_").lower(): score.fmeasure
        for name, score in scorer.score(other, one).items()
    }
    expected["fuzzy_match"] = fuzz.ratio(one, other) / 100
    ours, theirs = one.split(), [other.split()]
    expected["gleu"] = nltk.gleu_score.sentence_gleu(theirs, ours)
    smooth = nltk.bleu_score.SmoothingFunction().method2
    expected["bleu"] = nltk.bleu_score.sentence_bleu(theirs, ours, smoothing_function=smooth)
    found = {name: similarity(one, other) for name, similarity in SIMILARITIES.items()}
    assert found == pytest.approx(expected)
    term = {
        "type": "text_similarity",
        "name": "like",
        "input": "{{sample.output_text}}",
        "reference": "{{item.answer}}",
        "evaluation_metric": "rouge_2",
    }
    assert grade(term, one, {"answer": other}).value == pytest.approx(expected["rouge_2"])


@pytest.mark.parametrize(("one", "other"), [("", ""), ("a", ""), ("", "a"), ("...", "a")])
def test_similarities_of_empty_texts_are_numbers(one, other):
    for name, similarity in SIMILARITIES.items():
        expected = float(name == "fuzzy_match" and one == other)
        assert similarity(one, other) == expected, name
    assert bleu("a b", "a b") == gleu("a b", "a b") == 1.0


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("a + 2 * b", 2.0),
        ("(a - b) / 2 ^ 2", 0.0),
        ("-a ^ 2", -4 / 9),
        ("min(a, b, 1) + max(a, 0.5)", 4 / 3),
        ("floor(10*a) + ceil(b) + abs(-1) + sqrt(4) + exp(0) + log(1)", 11.0),
    ],
)
def test_a_formula_is_computed(formula, value):
    values = {"a": 2 / 3, "b": 2 / 3}
    assert computed(parsed(formula, values), values) == pytest.approx(value)


@pytest.mark.parametrize(
    ("formula", "told"),
    [
        ("a +", "invalid syntax"),
        ("c", "c is not known"),
        ("a.real", r"a\.real is not known"),
        ("__import__('os')", "no function __import__"),
        ("(lambda: 1)()", "is not known"),
        ("min(a)", "no function min of 1 numbers"),
        ("sqrt(a, a)", "no function sqrt of 2"),
        ("a if a else 1", "is not known"),
        ("'x' * 9", "'x' is not known"),
        ("1" * 400, "too large"),
        ("1e999", "is not known"),
        ("-" * 60 + "a", "nested more than 40 deep"),
        ("(" * 240 + "a" + ")" * 240, "parentheses"),
    ],
)
def test_what_is_no_formula_is_refused(formula, told):
    with pytest.raises(ConfigError, match=told):
        parsed(formula, ["a", "b"])


BOTH = {
    "type": "multi",
    "name": "both",
    "graders": {
        "right": {**CHECK, "input": "{{sample.output_text}}", "reference": "{{item.answer}}"},
        "judge": ASKS,
    },
    "calculate_output": "0.5 * right + judge",
}


def test_a_formula_of_graders_and_the_base_s_numbers():
    asked = []

    def ask(prompts: Any, settings: Any) -> list[str]:
        asked.append((prompts, settings))
        return ["<think>3 of 4?</think> Score: 0.75.", "I cannot say", "7"][: len(prompts)]

    answers = [Answered(text, ROW, "a.jsonl:1") for text in ("blue", "red", "green")]
    first, second, third = grading(BOTH, ask).grades(answers)
    assert first == Grade(1.25, "", {"right": 1.0, "judge": 0.75})
    assert second == Grade(None, "model_grader_parse_error", {"right": 0.0, "judge": None})
    assert third.value == 1.0  # moved into the range
    ((prompts, settings),) = asked  # all at once
    assert prompts[0] == [{"role": "user", "content": "Is blue right? blue"}]
    assert settings == {"max_new_tokens": 32, "temperature": 0.0, "top_p": 1.0, "seed": 0}


def test_a_formula_without_a_value_ends_the_run():
    divides = {
        **BOTH,
        "calculate_output": "1 / right",
        "graders": {"right": BOTH["graders"]["right"]},
    }
    assert grade(divides, "blue").value == 1.0
    with pytest.raises(RunError, match=r"has no value: .*zero(.|\n)*a\.jsonl:1"):
        grade(divides, "red")


CODE = """
def share(sample, item):
    return sample["output_text"].count("o") / (len(sample["output_text"]) + 1)

def reads(sample, item):
    return float(sample["output_json"]["n"] == item["size"])

def nothing(sample, item):
    return None
"""


def python(folder: Path, name: str) -> dict[str, Any]:
    (folder / "mine.py").write_text(CODE)
    return {"type": "python", "name": name, "source": f"{folder}/mine.py:{name}"}


def test_a_function_grades_sample_and_item(tmp_path):
    assert grade(python(tmp_path, "reads"), '{"n": 4}').value == 1.0
    with pytest.raises(RunError, match=r"reads failed: KeyError: 'output_json'"):
        grade(python(tmp_path, "reads"), "four")
    with pytest.raises(RunError, match=r"returned None for an answer to a\.jsonl:1"):
        grade(python(tmp_path, "nothing"), "four")
    with pytest.raises(ConfigError, match="no function absent"):
        grading(python(tmp_path, "absent"))


def test_the_file_of_a_function_has_no_longer_than_the_function(tmp_path):
    (tmp_path / "own.py").write_text("import time\ntime.sleep(3)\ngrade = len\n")
    grader = {"type": "python", "name": "own", "source": f"{tmp_path / 'own.py'}:grade"}
    with pytest.raises(ConfigError, match=r"own.py cannot be imported: .* longer than 0.05 sec"):
        grading(grader, seconds=0.05)


@pytest.mark.parametrize("number", ["10 ** 400", "10 ** 5000", "[10 ** 5000]"])
def test_an_infinite_or_unprintable_number_ends_the_run(tmp_path, number):
    (tmp_path / "own.py").write_text(f"def grade(sample, item):\n    return {number}\n")
    grader = {"type": "python", "name": "own", "source": f"{tmp_path / 'own.py'}:grade"}
    with pytest.raises(RunError, match=r"returned .* for an answer to a\.jsonl:1"):
        grade(grader, "x")


@pytest.mark.parametrize(
    ("grader", "told"),
    [
        (
            {**CHECK, "input": "{{output}}", "reference": ""},
            "{{output}} of the template is invalid",
        ),
        (
            {**CHECK, "input": "{{sample.tools}}", "reference": ""},
            "{{sample.tools}} of the template is invalid",
        ),
        ({**CHECK, "input": "{{item[0]}}", "reference": ""}, "of the template is invalid"),
        ({**CHECK, "input": "{{item.__class__()}}", "reference": ""}, "of the template is invalid"),
        ({**CHECK, "input": "a", "reference": "b", "operation": "is"}, "operation"),
        ({**CHECK, "input": "a"}, "reference"),
        ({**CHECK, "type": "text_similarity", "evaluation_metric": "cosine"}, "evaluation_metric"),
        ({**ASKS, "model": "o4-mini"}, "model"),
        ({**ASKS, "range": [1, 0]}, "range"),
        ({**ASKS, "sampling_params": {"max_completions_tokens": 10**6}}, "max_completions_tokens"),
        ({**ASKS, "input": [{"role": "user", "content": {"type": "input_image"}}]}, "content"),
        ({**BOTH, "graders": {}}, "graders"),
        ({**BOTH, "graders": {"both": BOTH}}, "type"),
        ({**BOTH, "graders": {"a b": ASKS}}, "a b"),
        ({**BOTH, "calculate_output": "right + wrong"}, "wrong is not known"),
        ({"type": "label_model", "name": "a"}, "type"),
    ],
)
def test_what_is_no_grader_is_refused_by_its_field(grader, told):
    with pytest.raises(ConfigError) as error:
        RewardTerm(use="grader", grader=grader)
    assert told in str(error.value)


@pytest.mark.parametrize(
    "content",
    ["abc", [{"type": "input_text", "text": "a"}, "b", {"type": "output_text", "text": "c"}]],
)
def test_parts_of_text_are_one_text(content):
    seen: list[Any] = []

    def ask(prompts: Any, settings: Any) -> list[str]:
        seen.extend(prompts)
        return ["1"]

    asks = {**ASKS, "input": [{"role": "user", "content": content}]}
    assert grade(asks, "", ROW, ask).value == 1.0
    assert seen == [[{"role": "user", "content": "abc"}]]


def test_a_reward_needs_a_grader_to_grade():
    with pytest.raises(ConfigError, match="the reward grader needs grader"):
        RewardTerm(use="grader")
    with pytest.raises(ConfigError, match="the reward exact_match has no setting grader"):
        RewardTerm(use="exact_match", grader={**CHECK, "input": "a", "reference": "b"})
    assert "string_check" in json.dumps(json_schema(Recipe))


def test_a_grader_is_one_of_the_weighted_rewards():
    check = {**CHECK, "input": "{{sample.output_text}}", "reference": "{{item.answer}}"}
    terms = [RewardTerm(use="grader", grader=check, weight=2.0), RewardTerm(use="exact_match")]
    completions = [[{"role": "assistant", "content": "blue"}], "red"]
    columns = {"references": ["red", "red"]}
    judge = Rewards(terms, 10.0).judge
    totals, parts = judge(["q", "q"], completions, columns, ["a:1", "a:2"], [ROW, ROW])
    assert (totals, parts) == ([2.0, 1.0], {"check": [1.0, 0.0], "exact_match": [0.0, 1.0]})


def test_each_reward_has_a_metric_of_its_own(tmp_path):
    names = ("score", "score", "score_2", "std")
    for number, name in enumerate(names):
        code = f"def {name}(completions, **_):\n    return [{number}.0] * len(completions)\n"
        (tmp_path / f"{number}.py").write_text(code, encoding="utf-8")
    terms = [RewardTerm(use=f"{tmp_path / str(n)}.py:{name}") for n, name in enumerate(names)]
    _, parts = Rewards(terms, 10.0).judge(["q"], ["a"], {}, ["a:1"], [ROW])
    assert parts == {"score_1": [0.0], "score_3": [1.0], "score_2": [2.0], "std_4": [3.0]}


def graded(folder: Path, model_folder: Path, *graders: dict[str, Any]) -> dict[str, Any]:
    told = reward_recipe(folder, model_folder)
    told["task"]["rewards"] = [{"use": "grader", "grader": grader} for grader in graders]
    turns = [{"role": "user", "content": "the quick brown"}]
    rows = [{"messages": turns, "answer": "fox", "prompt": n} for n in range(6)]
    told["data"]["train"] = write_rows(folder / "p.jsonl", rows)
    return told


@pytest.mark.covers("peftkit")
def test_a_run_learns_from_graders_and_its_recipe_says_so(tmp_path, model_folder, capsys):
    like = {"type": "text_similarity", "name": "like it", "evaluation_metric": "fuzzy_match"}
    texts = {"input": "{{sample.output_text}}", "reference": "{{item.answer}} {{item.prompt}}"}
    number = {**ASKS, "range": [0, 9]}
    both = {
        **BOTH,
        "graders": {"like": {**like, **texts}, "judge": number, "own": python(tmp_path, "share")},
        "calculate_output": "like + own + 0 * max(judge, 0)",
    }
    told = graded(tmp_path, model_folder, {**like, **texts}, both)
    told["task"]["rewards"][1]["weight"] = 0.5
    done = finished(told, train={"max_steps": 2})
    assert load(done.folder / "recipe.yaml", ["task.rewards=[{use: exact_match}]"]).task
    (first, *_) = done.of_kind(RolledOut)
    assert all(answer.parts.keys() == {"like_it", "both"} for answer in first.answers)
    assert all(0 <= answer.parts["like_it"] <= 1 for answer in first.answers)
    assert (done.folder / WEIGHTS).is_file()
    with pytest.raises(ConfigError, match=r"task\.rewards: .*mine\.py:share"):
        load(done.folder / "recipe.yaml")
    command = ["eval", str(done.folder), "--data", str(tmp_path / "p.jsonl"), "--json"]
    assert run(command) == 0
    printed = capsys.readouterr()
    assert "reward_like_it" in json.loads(printed.out)
    assert "with --run-rewards; left out: grader" in " ".join(printed.err.split())


def test_reasoning_is_no_grade(llama, tokenizer, monkeypatch):
    opens = CHATML.replace("assistant\\n' }}{%- endif %}", "assistant\\n<think>\\n' }}{%- endif %}")
    assert opens != CHATML
    monkeypatch.setattr(tokenizer, "chat_template", opens)
    said = "it is 9 of 10"
    monkeypatch.setattr(
        "peftkit.inference.generate.generate_ids",
        lambda model, tokenizer, prompts, **_: [tokens(tokenizer, said)] * len(prompts),
    )

    def ask(prompts: Any, settings: Any) -> list[str]:
        return answers_to(llama, tokenizer, prompts)

    (grade,) = grading(ASKS, ask).grades([Answered("blue", ROW, "a.jsonl:1")])
    assert grade == Grade(None, "model_grader_parse_error")
    said = "it is 9 of 10</think> 0.25"
    (grade,) = grading(ASKS, ask).grades([Answered("blue", ROW, "a.jsonl:1")])
    assert grade == Grade(0.25)


def test_a_recipe_with_graders_is_written_and_read(tmp_path, model_folder):
    told = recipe(graded(tmp_path, model_folder, BOTH))
    (tmp_path / "recipe.yaml").write_text(dump_yaml(told))
    assert load(tmp_path / "recipe.yaml") == told


def test_score_models_use_the_bare_base_weights(tmp_path, model_folder):
    base = load_base(str(model_folder), dtype="fp32")
    prompts = [[{"role": "user", "content": text}] for text in ("the dog", "a fox and")]
    settings = {"max_new_tokens": 8}
    expected = answers_to(base.model, base.tokenizer, prompts, **settings)
    adapter = attach(base.model, LoRA(rank=4, alpha=64), seed=1)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter += 0.3
    assert answers_to(base.model, base.tokenizer, prompts, **settings) != expected
    told = recipe(graded(tmp_path, model_folder, ASKS))
    task: Any = told.task.on(base.model, base.tokenizer, DataConfig(train="p.jsonl", max_length=64))
    with task.training(base.model):
        assert task._base_answers(base.model, prompts, settings) == expected
    assert all(module.enabled for module in adapter.modules.values())
