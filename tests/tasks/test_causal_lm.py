"""From a file to rows and batches, with nothing lost that is not counted."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    XLNetConfig,
    XLNetLMHeadModel,
)

from peftkit.data.generation import prompt_ids
from peftkit.data.pack import last_answer
from peftkit.data.style import Style
from peftkit.errors import BaseError, DataError
from peftkit.events import Event, Notice, Progress, Stage, Table
from peftkit.settings import DataConfig
from peftkit.tasks.table import TASKS
from peftkit.tasks.tokens import CausalLM
from tests.helpers.command_line import turn as said
from tests.helpers.folders import write_rows

Tokenizer = PreTrainedTokenizerFast
Build = Callable[..., CausalLM]


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def task(llama: PreTrainedModel, tokenizer: Tokenizer, events: list[Event]) -> Build:
    def build(style: Style | None = None, **settings: Any) -> CausalLM:
        config = DataConfig(**{"train": "", "max_length": 64, **settings})
        return CausalLM(llama, tokenizer, config, style=style, on_event=events.append)

    return build


def write(path: Path, *rows: dict[str, Any]) -> str:
    write_rows(path, rows)
    return str(path)


def counts(events: list[Event]) -> dict[str, str]:
    (table,) = [event for event in events if isinstance(event, Table)]
    return {row[0]: row[1] for row in table.rows}


def test_another_tokenizer_is_refused(llama, tokenizer):
    other = copy.deepcopy(tokenizer)
    words = llama.get_input_embeddings().weight.shape[0]
    other.add_tokens([f"<{n}>" for n in range(words)])
    CausalLM(llama, other, DataConfig(train="", max_length=64))  # what was added may be more
    vocabulary = json.loads(other.backend_tokenizer.to_str())
    vocabulary["model"]["vocab"] |= {f"w{n}": 10_000 + n for n in range(words)}
    other = PreTrainedTokenizerFast(tokenizer_object=Backend.from_str(json.dumps(vocabulary)))
    with pytest.raises(BaseError, match=f"the model {words:,} embeddings"):
        CausalLM(llama, other, DataConfig(train=""))


ROWS_OF_TASKS: dict[str, Callable[[str], dict[str, Any]]] = {
    "causal_lm": lambda text: {"prompt": "the ", "completion": text},
    "distill": lambda text: {"prompt": text},
    "preference": lambda text: {"prompt": "the ", "chosen": "dog", "rejected": text},
    "grpo": lambda text: {"prompt": text},
    "embedding": lambda text: {"anchor": "the", "positive": "a dog", "negatives": [text]},
}


@pytest.mark.parametrize("name", ROWS_OF_TASKS)
def test_a_token_without_a_row_in_the_embedding_is_named(name, llama, tokenizer, tmp_path):
    more, rows = copy.deepcopy(tokenizer), llama.get_input_embeddings().num_embeddings
    more.add_tokens("<ask>")
    assert more.convert_tokens_to_ids("<ask>") == rows
    prompt = tmp_path / "rules.md"
    prompt.write_text("Be kind.", encoding="utf-8")
    settings = {
        "distill": {"teacher": {"prompt": str(prompt)}, "max_new_tokens": 4},
        "grpo": {"rewards": [{"use": "length", "max_chars": 9}], "max_new_tokens": 4},
    }
    config = TASKS[name](type=name, **settings.get(name, {}))
    model = copy.deepcopy(llama).requires_grad_(False)
    task = config.on(model, more, DataConfig(train="", max_length=64))
    line = ROWS_OF_TASKS[name]
    assert len(task.load(write(tmp_path / "a.jsonl", line("fox")))) == 1
    where = write(tmp_path / "b.jsonl", line("fox"), line("a <ask>"))
    with pytest.raises(DataError) as caught:
        task.load(where)
    message = str(caught.value)
    assert f"{where}:2: the base has no embedding of its token '<ask>'" in message
    assert f"has the id {rows}; the embedding has {rows} rows" in message
    assert 'base.new_tokens: ["<ask>"]' in message


def test_prompts_without_a_template_are_told(llama, tokenizer, tmp_path, events):
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    where = write(tmp_path / "a.jsonl", {"instruction": "a", "output": "b"})
    for _ in range(2):
        task = CausalLM(llama, bare, DataConfig(train="", max_length=200), on_event=events.append)
        task.load(where)
        task.load(where)
        assert sum("no chat template" in str(event) for event in events) == 1
        events.clear()


def test_every_row_is_counted(tmp_path, task, events):
    rows = [said("the fox", "the dog")] * 17
    rows += [said("the fox", "a b c d e f " * 20)]  # line 18: cut
    rows += [said("a b c d e f " * 20, "the dog")]  # line 19: the answer is beyond the cut
    rows += [said("the fox", "")]  # line 20: nothing to learn
    where = write(tmp_path / "a.jsonl", *[row | {"id": 1} for row in rows])
    encoded = task(max_dropped=0.1).rows.encode(where)
    assert [row.source.rpartition(":")[2] for row in encoded] == [str(n) for n in range(1, 19)]
    assert len(encoded[-1].input_ids) == 64
    assert counts(events) == {
        "format": "messages",
        "rows read": "20",
        "rows kept": "18",
        "cut at 64 tokens": "1",
        "dropped: nothing to learn": f"1 ({where}:20)",
        "dropped: the answer is beyond the cut": f"1 ({where}:19)",
        "tokens": str(sum(len(row.input_ids) for row in encoded)),
        "tokens of a row: median, 95 %, longest": "15, 64, 64",
        "target tokens": str(sum(row.num_targets for row in encoded)),
        "fields not used": "id",
    }
    assert any(isinstance(event, Stage) for event in events)
    assert any(isinstance(event, Progress) for event in events)


BAD_ROWS = {
    "no assistant turn": {"messages": [{"role": "user", "content": "the fox"}]},
    "an unknown role": {"messages": [{"role": "usr", "content": "the fox"}]},
    "another format": {"text": "the fox"},
    "no format": {"foo": 1},
    "refused by the template": {
        "messages": [{"role": "user", "content": "STOP"}, {"role": "assistant", "content": "a"}]
    },
}
REFUSES = "{% if messages[0].content == 'STOP' %}{{ raise_exception('no') }}{% endif %}"


@pytest.mark.parametrize("bad", BAD_ROWS)
@pytest.mark.parametrize("place", [1, 4])
def test_invalid_rows_are_dropped_and_counted_if_the_recipe_says_so(
    bad, place, tmp_path, task, tokenizer, events
):
    template = tmp_path / "strict.jinja"
    template.write_text(REFUSES + tokenizer.chat_template)
    rows = [said("the fox", f"the dog {n}") for n in range(4)]
    where = write(tmp_path / "a.jsonl", *rows[:place], BAD_ROWS[bad], *rows[place:])
    settings = {"chat_template": str(template), "max_dropped": 0.2}
    with pytest.raises(DataError, match=r"data\.drop_invalid: true"):
        task(**settings).rows.encode(where)
    strict = task(**settings).rows.encode(write(tmp_path / "b.jsonl", *rows))
    events.clear()
    encoded = task(**settings, drop_invalid=True).rows.encode(where)
    assert [row.input_ids for row in encoded] == [row.input_ids for row in strict]
    assert counts(events)["dropped: invalid"] == f"1 ({where}:{place + 1})"
    with pytest.raises(DataError, match="1 of 5 rows cannot be trained on"):
        task(**settings | {"max_dropped": 0.1}, drop_invalid=True).rows.encode(where)


def test_keys_that_the_template_reads_are_no_unused_fields(tmp_path, task, tokenizer, events):
    template = tmp_path / "named.jinja"
    template.write_text("{% set seen = messages[0].name %}" + tokenizer.chat_template)
    row = said("the fox", "the dog") | {"chat_template_kwargs": {"seen": 1, "quiet": True}}
    row["messages"][0] |= {"name": "n", "score": 3}
    where = write(tmp_path / "a.jsonl", row)
    task(chat_template=str(template)).rows.encode(where)
    unused = {"messages[].score", "chat_template_kwargs.quiet"}
    assert set(counts(events)["fields not used"].split(", ")) == unused


def test_too_many_dropped_rows_are_named(tmp_path, task, events):
    rows = [said("the fox", "the dog")] * 8 + [said("the fox", "")] + [said("a " * 99, "b")]
    where = write(tmp_path / "a.jsonl", *rows)
    with pytest.raises(DataError) as caught:
        task(max_dropped=0.19).rows.encode(where)
    message = str(caught.value)
    assert "2 of 10 rows cannot be trained on, more than data.max_dropped (19%)" in message
    assert f"Nothing to learn: 1 ({where}:9)" in message
    assert f"The answer is beyond the cut: 1 ({where}:10)" in message
    assert "raise data.max_length" in message
    assert counts(events)["rows kept"] == "8"  # told before the error
    assert len(task(max_dropped=0.2).rows.encode(where)) == 8


def test_no_row_left_is_an_error_whatever_was_allowed(tmp_path, task):
    where = write(tmp_path / "a.jsonl", said("the fox", " "))
    with pytest.raises(DataError, match="no row has a target token"):
        task(max_dropped=1.0).rows.encode(where)
    masked = said("the fox", "the dog")
    masked["messages"][1]["weight"] = 0
    with pytest.raises(DataError, match=r"(?s)no row has a target token.*a\.jsonl:1"):
        task(max_dropped=1.0).rows.encode(write(tmp_path / "a.jsonl", masked))


def test_load_packs_and_logs_the_fill(tmp_path, task, events):
    where = write(tmp_path / "a.jsonl", *[said("the fox", "the dog")] * 9)
    plain = task(packing=False).load(where)
    assert len(plain) == 9
    packed = task(packing=True).load(where)
    assert len(packed) < 9
    assert sum(len(row.lengths) for row in packed) == 9
    assert all(len(row.input_ids) <= 64 for row in packed)
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert notices[-1].startswith(f"Packed 9 documents into {len(packed)} rows of up to 64 tokens")


def test_the_last_turn_matches_generation(tmp_path, task, tokenizer):
    maker = task()
    turns = said("the fox", "the dog")["messages"] + said("and", "the answer")["messages"]
    (row,) = maker.rows.encode(write(tmp_path / "a.jsonl", {"messages": turns}))
    prompt, answer = last_answer(maker.tokenizer, row)
    assert answer == "the answer"
    assert prompt == prompt_ids(tokenizer, turns[:3], maker.rows.style)


def test_eos_is_a_target_even_as_padding(tmp_path, llama, tokenizer):
    own = copy.deepcopy(tokenizer)
    own.pad_token = own.eos_token
    config = DataConfig(train="", max_length=64, packing=False)
    maker = CausalLM(llama, own, config)
    rows = maker.rows.encode(
        write(tmp_path / "a.jsonl", said("a", "b"), said("the fox", "the dog and the fox"))
    )
    batch = maker.collate(rows)
    ends = batch["targets"] == own.eos_token_id
    assert int(ends.sum()) == 2
    assert int((batch["input_ids"] == own.eos_token_id).sum()) > 4  # the padding and user turns


def test_the_style_is_that_of_the_rows(tmp_path, task):
    chat = write(tmp_path / "chat.jsonl", said("the fox", "the dog"))
    plain = write(tmp_path / "plain.jsonl", {"prompt": "the fox", "completion": " the dog"})
    for where, style in ((chat, Style("chat")), (plain, Style("plain"))):
        maker = task()
        maker.rows.encode(where)
        assert maker.rows.style == style
    with pytest.raises(DataError, match=r"(?s)style 'chat'.*the other rows have 'plain'"):
        maker.rows.encode(chat)
    with pytest.raises(DataError, match=r"(?s)style 'plain'.*the adapter was trained on 'chat'"):
        task(style=Style("chat")).rows.encode(plain)


def test_a_template_of_ones_own_is_part_of_the_style(tmp_path, task):
    template = tmp_path / "mine.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    where = write(tmp_path / "a.jsonl", said("the fox", "the dog"))
    maker = task(chat_template=str(template))
    (row,) = maker.rows.encode(where)
    assert maker.rows.style == Style("chat", template.read_text())
    again = task(style=maker.rows.style)
    assert [*again.rows.encode(where)] == [row]
    assert again.spans(row)[0] == ("", "user:the fox<|im_end|>assistant:")


@pytest.mark.parametrize(
    ("asked", "tokenizers", "found"),
    [(64, 256, 64), (None, 256, 256), (None, 10**30, 256), (None, 100, 100), (256, 100, 256)],
)
def test_a_row_is_as_long_as_asked_or_as_the_model_can_read(
    llama, tokenizer, asked, tokenizers, found
):
    own = copy.deepcopy(tokenizer)
    own.model_max_length = tokenizers
    assert CausalLM(llama, own, DataConfig(train="", max_length=asked)).rows.max_length == found


def test_xlnet_reads_rows_of_any_length(tokenizer):
    sizes = {"vocab_size": 384, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}
    data = DataConfig(train="", max_length=257, packing=False)
    causal, mutual = (
        XLNetLMHeadModel(XLNetConfig(**sizes, attn_type=kind, initializer_range=0.2))
        for kind in ("uni", "bi")
    )
    assert causal.config.max_position_embeddings == -1
    assert CausalLM(causal, tokenizer, data).rows.max_length == 257
    with pytest.raises(BaseError, match="change with the tokens after it"):
        CausalLM(mutual, tokenizer, data)


def test_a_row_longer_than_the_model_reads_is_refused(task, tokenizer):
    with pytest.raises(DataError, match=r"(?s)data\.max_length: 257.*at most 256 tokens"):
        task(max_length=257)
    own = copy.deepcopy(tokenizer)
    own.model_max_length = 10**30
    endless = BloomForCausalLM(BloomConfig(vocab_size=384, hidden_size=32, n_layer=1, n_head=4))
    with pytest.raises(DataError, match=r"(?s)data\.max_length: null.*Set data\.max_length"):
        CausalLM(endless, own, DataConfig(train="", max_length=None, packing=False))
