"""Completions: greedy and sampled, batched and streamed, and a model left as it was."""

import threading

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from peftkit.data.style import Style
from peftkit.errors import DataError
from peftkit.inference.generate import generate, generate_ids, stream
from tests.helpers.families import EOS
from tests.helpers.generation import greedy_tokens

PROMPTS = [[9, 41, 77, 130], [55], [201, 33, 8, 99, 120, 61, 340], [17, 18]]


def test_greedy_is_argmax(llama, tokenizer):
    for batch_size in (1, 3, 8):
        completions = generate_ids(
            llama, tokenizer, PROMPTS, max_new_tokens=9, batch_size=batch_size
        )
        pairs = zip(PROMPTS, completions, strict=True)
        assert completions == [greedy_tokens(llama, prompt, ids, 9) for prompt, ids in pairs]


def always(model: PreTrainedModel, token: int) -> None:
    """Make a model say one token for ever."""
    head = model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(head.out_features))
    head.bias.data[token] = 1e4


def test_any_eos_ends_a_reply(llama, tokenizer):
    for token, ends in (
        (EOS, {}),
        (200, {"model": [199, 200]}),
        (200, {"model": 200}),
        (200, {"stops": [200]}),
    ):
        always(llama, token)
        llama.generation_config = GenerationConfig(eos_token_id=ends.get("model"))
        stops = ends.get("stops", ())
        assert generate_ids(llama, tokenizer, PROMPTS, stops=stops, max_new_tokens=5) == [[]] * 4
    llama.generation_config = GenerationConfig()
    assert generate_ids(llama, tokenizer, PROMPTS, max_new_tokens=5) == [[200] * 5] * 4


def test_a_seed_repeats_a_text(llama, tokenizer):
    def sample(seed: int) -> list[list[int]]:
        return generate_ids(
            llama, tokenizer, PROMPTS, max_new_tokens=12, temperature=1.0, seed=seed
        )

    before = torch.get_rng_state()
    first = sample(1)
    assert torch.equal(torch.get_rng_state(), before)
    assert sample(1) == first
    assert sample(2) != first


def test_stream_parts_are_the_whole(llama, tokenizer):
    (ids,) = generate_ids(llama, tokenizer, [PROMPTS[2]], max_new_tokens=30)
    pieces = list(stream(llama, tokenizer, PROMPTS[2], max_new_tokens=30))
    assert len(pieces) > 1
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


def test_a_closed_stream_stops(llama, tokenizer):
    (letter,) = tokenizer("x")["input_ids"]
    always(llama, letter)
    calls = 0

    def count(*args: object) -> None:
        nonlocal calls
        calls += 1

    llama.register_forward_hook(count)
    threads = threading.active_count()
    pieces = stream(llama, tokenizer, [9], max_new_tokens=250)
    next(pieces)
    pieces.close()
    assert threading.active_count() == threads
    assert calls < 250


def test_context_ends_a_reply(llama, tokenizer):
    always(llama, 100)
    (answer,) = generate_ids(llama, tokenizer, [[9] * 250], max_new_tokens=50)
    assert len(answer) == 6, "256 positions are 250 of the prompt and 6 new ones"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, t: generate_ids(m, t, [[9] * 256]), "it has 256 tokens"),
        (lambda m, t: generate_ids(m, t, [[9], []]), "the prompt is empty"),
        (lambda m, t: generate_ids(m, t, [[9]], temperature=-1.0), "the temperature is -1.0"),
        (
            lambda m, t: generate_ids(m, t, [[9]], temperature=float("nan")),
            "the temperature is nan",
        ),
        (lambda m, t: generate_ids(m, t, [[9]], max_new_tokens=0), "max_new_tokens is 0"),
        (lambda m, t: generate_ids(m, t, [[9]], temperature=1.0, top_p=0.0), "top_p is 0.0"),
        (lambda m, t: list(stream(m, t, [])), "the prompt is empty"),
        (lambda m, t: list(stream(m, t, [9], top_p=2.0)), "top_p is 2.0"),
    ],
)
def test_what_cannot_be_done_is_told(call, message, llama, tokenizer):
    with pytest.raises(DataError, match=message):
        call(llama, tokenizer)


def test_a_text_uses_the_chat_template(llama, tokenizer):
    def answer_to(text: str) -> str:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return str(
            tokenizer.decode(
                generate_ids(llama, tokenizer, [ids], max_new_tokens=9)[0], skip_special_tokens=True
            )
        )

    prompt = "<|im_start|>user\nwhat is the fox?<|im_end|>\n<|im_start|>assistant\n"
    texts = generate(llama, tokenizer, "what is the fox?", max_new_tokens=9)
    assert texts == [answer_to(prompt)]
    plain = generate(
        llama, tokenizer, ["what is the fox?", "name"], style=Style("plain"), max_new_tokens=9
    )
    assert plain == [answer_to("what is the fox?"), answer_to("name")]
