"""What a teacher reads, of which files; which rows it is asked, and what becomes of its answers."""

import json

import pytest
from transformers import PreTrainedModel

from peftkit.adapter import attach
from peftkit.data.pack import IGNORE
from peftkit.errors import DataError
from peftkit.methods.lora import LoRA
from peftkit.settings import DataConfig
from peftkit.tasks.distill.rows import TeacherPrompt, read_prompt
from tests.helpers.command_line import turn
from tests.helpers.distill_cases import PROMPT, QUESTIONS, settings, write_questions
from tests.helpers.folders import write_rows as write
from tests.helpers.pair_cases import task_on

TURNS = (
    {"role": "user", "content": "the quick fox?"},
    {"role": "assistant", "content": "the lazy dog"},
)
SYSTEM = {"role": "system", "content": "The dog answers with pizza and olives."}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.md", PROMPT),
        ("a.json", json.dumps({"messages": [SYSTEM, *TURNS]})),
        ("a.jsonl", "\n".join(map(json.dumps, [SYSTEM, *TURNS]))),
    ],
)
def test_a_prompt_is_text_or_messages(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    found = read_prompt(tmp_path / name)
    assert found == TeacherPrompt(SYSTEM["content"], TURNS)
    assert found.examples == ["the quick fox?"]


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.md", " \n", "is empty"),
        ("a.docx", "text", "'.docx'"),
        ("a.json", "{", "line 1"),
        ("a.jsonl", '{"role": "usr", "content": "?"}', r"messages\[0\].role: unknown role"),
        ("a.jsonl", '{"role": "system", "content": ""}', r"messages\[0\].content: empty"),
        ("a.md", "## User\nOne?\n## Assistant\n\n## User\nTwo?", r"messages\[1\].content: empty"),
    ],
)
def test_an_unusable_prompt_is_refused(name, text, told, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=told):
        read_prompt(tmp_path / name)


def test_a_prompt_that_is_not_there_is_refused_with_what_is(tmp_path):
    (tmp_path / "rules.md").write_text("x")
    with pytest.raises(DataError, match=r"rules\.md"):
        read_prompt(tmp_path / "rule.md")


def test_a_rows_own_system_message_stands_after_the_prompt():
    prompt = TeacherPrompt("One.", TURNS)
    asked = ({"role": "system", "content": "Two."}, {"role": "user", "content": "?"})
    first, *rest = prompt.before(asked)
    assert first == {"role": "system", "content": "One.\n\nTwo."}
    assert rest == [*TURNS, asked[1]]
    assert TeacherPrompt().before(asked) == asked


@pytest.fixture
def model(llama: PreTrainedModel) -> PreTrainedModel:
    attach(llama, LoRA(rank=2, targets=("q", "v")))
    return llama


def test_both_documents_end_in_the_same_tokens(model, tokenizer, tmp_path):
    task, rows = task_on(model, tokenizer, settings(tmp_path), write_questions(tmp_path))
    assert [row.source.rpartition(":")[2] for row in rows] == ["1", "2", "3", "4", "5"]
    for row, (_, answer) in zip(rows, QUESTIONS, strict=True):
        student, teacher = row.documents
        learnt = [label for label in student.labels if label != IGNORE]
        assert learnt == [label for label in teacher.labels if label != IGNORE]
        assert tokenizer.decode(learnt) == f"{answer}<|im_end|>"
        assert "olives" in tokenizer.decode(teacher.input_ids[: -len(learnt)])
    assert task.spans(rows[0])[-1][0] == "the teacher reads"


def test_an_answer_is_cut_alike_in_both_documents(model, tokenizer, tmp_path):
    file = write_questions(tmp_path)
    _, whole = task_on(model, tokenizer, settings(tmp_path), file)
    length = max(len(row.documents[0].input_ids) for row in whole) - 2
    _, rows = task_on(model, tokenizer, settings(tmp_path), file, max_length=length)
    for row in rows:
        student, teacher = row.documents
        assert len(student.input_ids) <= length
        assert student.num_targets == teacher.num_targets
        assert teacher.input_ids[-2:] == student.input_ids[-2:]


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "the dog and "},
        {"prompt": "the dog and "},
        {"prompt": [{"role": "user", "content": "the dog and "}]},
        {"conversations": [{"from": "human", "value": "the dog and "}]},
        turn("the dog and ", "the fox"),
    ],
    ids=lambda row: "+".join(row),
)
def test_a_teacher_is_asked_rows_with_and_without_an_answer(row, model, tokenizer, tmp_path):
    file = write(tmp_path / "a.jsonl", [row])
    asked = settings(tmp_path, answers="teacher", max_new_tokens=6)
    task = asked.on(model, tokenizer, DataConfig(train=file, max_length=64))
    (question,) = task.load(file)
    assert question.reference == ("the fox" if "fox" in json.dumps(row) else None)
    assert question.num_targets == 0
    texts = [tokenizer.decode(document.input_ids) for document in question.documents]
    assert texts[1].startswith("<|im_start|>system\nThe dog answers")
    end = "<|im_start|>user\nthe dog and <|im_end|>\n<|im_start|>assistant\n"
    assert all(text.endswith(end) for text in texts)
    made = question.answered(tokenizer("a pizza<|im_end|>")["input_ids"])
    for text, document in zip(texts, made.documents, strict=True):
        assert tokenizer.decode(document.input_ids) == f"{text}a pizza<|im_end|>"
        learnt = [label for label in document.labels if label != IGNORE]
        assert tokenizer.decode(learnt) == "a pizza<|im_end|>"


def test_texts_have_no_prompts(model, tokenizer, tmp_path):
    file = write(tmp_path / "a.jsonl", [{"text": "the quick fox"}])
    with pytest.raises(DataError, match="asks nothing"):
        task_on(model, tokenizer, settings(tmp_path), file)


def test_a_prompt_longer_than_the_context_leaves_no_row(model, tokenizer, tmp_path):
    asked = settings(tmp_path)
    (tmp_path / "prompt.md").write_text("the quick brown fox " * 500)
    with pytest.raises(DataError, match="teacher's prompt"):
        task_on(model, tokenizer, asked, write_questions(tmp_path))


def test_a_teacher_reads_the_row_s_answer_as_an_example(model, tokenizer, tmp_path):
    config = settings(tmp_path, teacher={"answer": True})
    _, rows = task_on(model, tokenizer, config, write_questions(tmp_path))
    for row, (_, answer) in zip(rows, QUESTIONS, strict=True):
        student, teacher = (tokenizer.decode(each.input_ids) for each in row.documents)
        assert (student.count(answer), teacher.count(answer)) == (1, 2)
    file = write(tmp_path / "b.jsonl", [{"instruction": "the fox"}])
    with pytest.raises(DataError, match="Nothing to learn"):
        task_on(model, tokenizer, config, file)


def test_a_teacher_reads_another_training_row_and_never_its_own(model, tokenizer, tmp_path):
    def splits(seed=0, **data):
        config = settings(tmp_path, teacher={"answer": "other", "seed": seed})
        data = DataConfig(train=write_questions(tmp_path), max_length=64, **data)
        return config.on(model, tokenizer, data).rows.load_splits(data)

    def shown_in(row):
        """Return the questions and answers before the row's own question."""
        text = tokenizer.decode(row.documents[1].input_ids)
        return [pair for pair in QUESTIONS if f"{pair[1]}<|im_end|>\n<|im_start|>user" in text]

    rows, held = splits(eval=write(tmp_path / "eval.jsonl", [{"instruction": "?", "output": "!"}]))
    demonstrations = [shown_in(row) for row in rows]
    for row, shown, own in zip(rows, demonstrations, QUESTIONS, strict=True):
        assert len(shown) == 1
        assert own not in shown
        student, teacher = (tokenizer.decode(each.input_ids) for each in row.documents)
        assert (student.count(own[1]), teacher.count(own[1])) == (1, 1)
        assert shown[0][0] in teacher
        assert shown[0][1] not in student
    assert len(shown_in(held[0])) == 1  # a training row
    assert rows.num_tokens.tolist() == [len(row.input_ids) for row in rows]
    again, _ = splits()
    assert [row.input_ids for row in again] == [row.input_ids for row in rows]
    other, _ = splits(seed=1)
    assert [shown_in(row) for row in other] != demonstrations
    assert other.fingerprint != again.fingerprint


def test_no_row_is_shown_if_there_is_no_other(model, tokenizer, tmp_path):
    config = settings(tmp_path, teacher={"answer": "other"})
    file = write(tmp_path / "a.jsonl", 2 * [{"instruction": "the fox", "output": "the dog"}])
    data = DataConfig(train=file, max_length=64)
    with pytest.raises(DataError, match=r"no demonstration for .*a\.jsonl:1"):
        config.on(model, tokenizer, data).rows.load_splits(data)
