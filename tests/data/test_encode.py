"""Prompts are the same tokens in training and in generation; answers continue them and end."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from peftkit.data.encode import Encoder
from peftkit.data.examples import Completion, Conversation, Instruction, Text
from peftkit.data.generation import prompt_ids
from peftkit.data.pack import IGNORE
from peftkit.data.style import Style
from peftkit.errors import DataError
from tests.helpers.families import tiny_tokenizer

_SPLIT = r"\s*[\r\n]+|\s+(?!\S)| ?[^\s\d]+| ?\d+|\s+"  # merges line breaks, as Llama 3 and Qwen do


def trained(
    tokenizer: Any, corpus: list[str], size: int, special: list[str], alphabet: Any, **named: Any
) -> Any:
    """Train a tokenizer that adds bos."""
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus * 5, trainer)
    bos = [("<s>", special.index("<s>"))]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=bos)
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends, **named)


def merging_tokenizer() -> Any:
    """Byte-level BPE that makes one token of several line breaks, and adds bos."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_SPLIT), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    corpus = ["the fox\n\nthe dog\n\n\nthe  fox   12 345", "hello world the answer is"]
    special, alphabet = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"], bytes_of.alphabet()
    return trained(tokenizer, corpus, 400, special, alphabet, model_max_length=10**30)


def sentencepiece_tokenizer(scheme: str) -> Any:
    """A tokenizer that marks spaces and puts one first, as Llama 2 and Mistral do; adds bos."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    corpus = ["the fox jumps over the lazy dog [INST] [/INST]", "what is the answer:"]
    special, alphabet = ["<unk>", "<s>", "</s>"], list("abcdefghijklmnopqrstuvwxyz[]/:\n.▁")
    return trained(tokenizer, corpus, 150, special, alphabet, unk_token="<unk>")


PAIRS = [
    ("the fox\n", "\nthe dog"),
    ("the fox", "\n\n\nthe dog"),
    ("the fox ", "the dog"),
    ("the ", "  fox"),
    ("hello wo", "rld"),
    ("the answer is 12", "345"),
    ("hello", " world"),
    ("caf", "é"),
    ("日", "本"),
    ("", "the fox"),
]


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "tiny": tiny_tokenizer,
    "merging": merging_tokenizer,
    **{scheme: partial(sentencepiece_tokenizer, scheme) for scheme in ("first", "never")},
}


@pytest.mark.parametrize(
    ("kind", "prompt", "answer"),
    [
        (kind, prompt, answer)
        for kind in TOKENIZERS
        for prompt, answer in PAIRS
        # the alphabet of the small SentencePiece models is a to z
        if kind in ("tiny", "merging") or not set(prompt + answer) & set("0123456789é日本")
    ],
)
def test_prompt_tokens_do_not_depend_on_the_rest(kind, prompt, answer):
    custom = TOKENIZERS[kind]()
    row = Encoder(custom).encode(Completion(prompt, answer, "a.jsonl:1"))
    start = len(prompt_ids(custom, prompt, Style("plain")))
    assert list(row.input_ids[:start]) == prompt_ids(custom, prompt, Style("plain"))
    assert set(row.labels[:start]) <= {IGNORE}
    targets = row.labels[max(start, 1) :]
    assert targets == row.input_ids[max(start, 1) :]
    assert row.input_ids[-1] == custom.eos_token_id
    together = custom(prompt + answer)["input_ids"]
    assert custom.decode(row.input_ids[:-1]) == custom.decode(together)


@pytest.mark.parametrize("answer", ["\n\nthe fox", "\nthe fox\n\n", "  the fox"])
def test_a_turn_that_begins_with_white_space_does_not_melt_into_its_header(answer):
    custom = merging_tokenizer()
    custom.chat_template = (
        "{{ bos_token }}{% for m in messages %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    turns = [{"role": "user", "content": "the dog"}, {"role": "assistant", "content": answer}]
    row = Encoder(custom).encode(Conversation((*turns, *turns), (1, 3), (), "a.jsonl:1"))
    prompt = prompt_ids(custom, "the dog", Style("chat"))
    assert list(row.input_ids[: len(prompt)]) == prompt
    assert row.labels[len(prompt)] != IGNORE
    text = custom.apply_chat_template([*turns, *turns], tokenize=False)
    assert custom.decode(row.input_ids) == text.removesuffix("\n")
    targets = custom.decode([label for label in row.labels if label != IGNORE])
    assert targets == (answer + "<|im_end|>") * 2


def test_bos_is_added_once_and_eos_once(tokenizer):
    custom = merging_tokenizer()
    encoder = Encoder(custom)
    bos, eos = custom.bos_token_id, custom.eos_token_id
    for text in ("the fox", "<s>the fox", "the fox</s>"):
        row = encoder.encode(Text(text, "a.jsonl:1"))
        assert row.input_ids == (
            bos,
            *custom("the fox", add_special_tokens=False)["input_ids"],
            eos,
        )
        assert row.labels == (IGNORE, *row.input_ids[1:])
    row = encoder.encode(Completion("the", " fox</s>", "a.jsonl:1"))
    assert row.input_ids.count(eos) == 1
    # this one adds no bos of its custom, though it has one
    assert Encoder(tokenizer).encode(Text("the fox", "a")).input_ids[0] != tokenizer.bos_token_id


def test_an_instruction_is_a_conversation_where_there_is_a_template(tokenizer):
    example = Instruction("what", "the fox", "a dog", "a.jsonl:1")
    encoder = Encoder(tokenizer)
    row = encoder.encode(example)
    assert encoder.style(example) == Style("chat")
    assert tokenizer.decode(row.input_ids) == (
        "<|im_start|>user\nwhat\n\nthe fox<|im_end|>\n<|im_start|>assistant\na dog<|im_end|>"
    )


def test_an_instruction_is_put_in_alpacas_frame_where_there_is_none():
    custom = merging_tokenizer()
    encoder = Encoder(custom)
    example = Instruction("the {fox}", "", "the dog", "a.jsonl:1")
    assert encoder.style(example) == Style("alpaca")
    row = encoder.encode(example)
    prompt = prompt_ids(custom, "the {fox}", Style("alpaca"))
    assert list(row.input_ids[: len(prompt)]) == prompt
    assert custom.decode(prompt).endswith("### Instruction:\nthe {fox}\n\n### Response:\n")
    assert custom.decode(row.input_ids[len(prompt) :]) == "the dog</s>"
    given = encoder.encode(Instruction("the fox", "the dog", "a", "a.jsonl:1"))
    assert "### Input:\nthe dog\n\n### Response:\na</s>" in custom.decode(given.input_ids)


def test_a_conversation_needs_a_template():
    custom = merging_tokenizer()
    example = Conversation(({"role": "user", "content": "a"},), (), (), "a.jsonl:1")
    with pytest.raises(DataError, match=r"(?s)no chat template.*chatml"):
        Encoder(custom).style(example)
    with pytest.raises(DataError, match="no chat template"):
        prompt_ids(custom, "a", Style("chat"))
    assert Encoder(custom, "{{ messages }}").style(example) == Style("chat", "{{ messages }}")


def test_a_plain_style_takes_no_conversation(tokenizer):
    with pytest.raises(DataError, match="single prompts"):
        prompt_ids(tokenizer, [{"role": "user", "content": "a"}], Style("plain"))


def test_nothing_said_is_nothing_to_learn(tokenizer):
    encoder = Encoder(tokenizer)
    for example in (
        Text(" \n", "a"),
        Completion("the fox", " ", "a"),
        Instruction("a", "", "", "a"),
    ):
        assert encoder.encode(example).num_targets == 0


def test_a_tokenizer_without_eos_cannot_teach_to_stop(tokenizer):
    custom = copy.deepcopy(tokenizer)
    custom.eos_token = None
    with pytest.raises(DataError, match="no end-of-sequence token"):
        Encoder(custom).encode(Text("the fox", "a.jsonl:1"))


def test_an_answer_that_shares_a_token_with_its_prompt_for_good_is_refused():
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "hugging": 1, "hug": 2, "ging": 3, "e": 4}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    custom = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="e")
    with pytest.raises(DataError, match=r"(?s)Cannot separate.*of a.jsonl:1.*'hug'.*'ging'"):
        Encoder(custom).encode(Completion("hug", "ging", "a.jsonl:1"))
