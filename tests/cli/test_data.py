"""`peftkit data`: what is in a file, before any model is loaded."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from peftkit_cli.app import app
from peftkit_cli.start.survey import survey
from tests.helpers.folders import write_rows

ROWS = [
    {"instruction": "Say yes.", "input": "", "output": "yes"},
    {"instruction": "Say no.", "input": "", "output": "no"},
    {"instruction": "Say yes.", "input": "", "output": "yes"},
    {"instruction": "Скажи да.", "input": "", "output": "да"},
    {"instruction": "Say nothing.", "input": "", "output": " "},
]


def write(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    write_rows(path, ROWS)
    return path


def test_fields_are_counted_without_a_model(tmp_path):
    done = CliRunner().invoke(app, ["data", str(write(tmp_path)), "--json"])
    facts = json.loads(done.stdout)
    assert (facts["num_rows"], facts["format"], facts["num_duplicates"]) == (5, "alpaca", 1)
    fields = {field["name"]: field for field in facts["fields"]}
    assert fields["input"]["num_empty"] == 5
    assert fields["output"]["num_empty"] == 1


ASKED, ANSWERED = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


OPENAI_PAIR = {
    "input": {"messages": [ASKED]},
    "preferred_output": [ANSWERED],
    "non_preferred_output": [{**ANSWERED, "content": "c"}],
}
SHAREGPT_PAIR = {
    "conversations": [{"from": "human", "value": "a"}],
    **{side: {"from": "gpt", "value": text} for side, text in (("chosen", "b"), ("rejected", "c"))},
}


@pytest.mark.parametrize(
    ("row", "tasks"),
    [
        ({"text": "a"}, ["causal_lm", "masked_lm"]),
        ({"prompt": "a", "completion": "b"}, ["causal_lm", "seq2seq", "distill", "grpo"]),
        ({"prompt": "a"}, ["distill", "grpo"]),
        ({"prompt": "a", "answer": "b"}, ["causal_lm", "grpo", "distill"]),
        ({"Instruction": "a", "Response": "b"}, ["causal_lm", "seq2seq"]),
        ({"messages": [{"role": "agent", "content": "b"}]}, []),
        ({"prompt": "a", "completion": "b", "label": True}, ["preference (loss: kto)"]),
        ({"messages": [ASKED, ANSWERED], "label": True}, ["preference (loss: kto)"]),
        ({"instruction": "a", "output": "b", "label": False}, ["preference (loss: kto)"]),
        ({"messages": [ASKED]}, ["distill", "grpo"]),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, ["preference", "reward"]),
        (OPENAI_PAIR, ["preference", "reward"]),
        (SHAREGPT_PAIR, ["preference", "reward"]),
        ({"instruction": "a", "output": None}, []),
        ({"anchor": "a", "positive": "b"}, ["embedding"]),
        ({"query": "a", "positive": "b", "negatives": ["c"]}, ["reranker"]),
        ({"query": "a", "text": "b", "score": 1}, ["reranker"]),
        ({"image": "a.png", "label": "b"}, ["image_classification"]),
        ({"audio": "a.wav", "question": "a", "answer": "b"}, ["audio_text"]),
        ({"audio": "a.wav", "text": "b"}, ["transcription", "ctc"]),
        ({"foo": 1}, []),
    ],
)
def test_rows_name_their_task(row, tasks, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    done = CliRunner().invoke(app, ["data", str(path), "--json"])
    assert json.loads(done.stdout)["tasks"] == tasks


def test_pairs_without_a_preference_are_counted(tmp_path):
    path = tmp_path / "pairs.jsonl"
    sides = [("b", "c"), ("b", "b"), (" ", "c"), ("b", "d")]
    rows = [{"prompt": "a", "chosen": good, "rejected": bad} for good, bad in sides]
    write_rows(path, rows)
    done = CliRunner().invoke(app, ["data", str(path), "--json"])
    facts = json.loads(done.stdout)
    assert (facts["num_useless"], facts["first_useless"]) == (2, f"{path}:2")
    shown = " ".join(CliRunner().invoke(app, ["data", str(path)]).stdout.split())
    assert "useless pairs 2: an empty answer, or two equal ones; first" in shown
    write_rows(path, rows[::3])
    assert "useless" not in CliRunner().invoke(app, ["data", str(path)]).stdout


def test_wrong_rows_are_one_message(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": \n')
    done = CliRunner().invoke(app, ["data", str(path)])
    assert done.exit_code != 0
    assert "rows.jsonl:2" in str(done.exception)


def test_a_file_of_several_formats_is_named_without_a_model(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"prompt": "a", "completion": "b"}\n')
    assert survey(str(path)).mixed == f"{path}:2 has the format prompt_completion"
    path.write_text('{"text": "a"}\n')
    assert survey(str(path)).mixed == ""


def test_rows_of_wrong_roles_fit_no_task_and_characters_are_those_of_texts(tmp_path):
    path = tmp_path / "a.jsonl"
    turns = [{"role": "user", "content": "abcd"}, {"role": "assistant", "content": "ef"}]
    write_rows(path, [{"messages": turns}, {"messages": [turns[1] | {"role": "usr"}]}])
    summary = survey(str(path))
    assert summary.fields[0].mean_chars == 4
    assert (summary.num_chars, summary.num_wrong) == (8, 1)
    assert "a.jsonl:2: messages[0].role: unknown role 'usr'" in summary.wrong
    assert summary.tasks == ("causal_lm", "distill", "grpo")
