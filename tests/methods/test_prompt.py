"""Prompt tuning alone; the laws that it shares with prefix tuning are in test_virtual.py."""

import peft
import pytest
import torch
import transformers
from torch import nn

from peftkit.adapter import attach
from peftkit.errors import TargetError
from peftkit.formats.peft.load import load_adapter, read_adapter
from peftkit.methods.prompt import PromptTuning
from tests.helpers.cell import tiny_model as build
from tests.helpers.families import ARCHITECTURES
from tests.helpers.virtual_tokens import IDS, logits

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"  # PEFT asks by an old name
)
PROMPT = PromptTuning(num_virtual_tokens=4)


def test_positions_and_token_types_that_are_given_go_on_behind_the_prompt():
    model = build("bert")
    attach(model, PROMPT)
    types = torch.zeros_like(IDS)
    extra = {"position_ids": torch.arange(9)[None], "token_type_ids": types}
    assert torch.equal(logits(model, **extra), logits(model))
    assert not torch.allclose(logits(model, token_type_ids=types + 1), logits(model))
    shifted = {"position_ids": torch.arange(3, 12)[None]}
    assert not torch.allclose(logits(model, **shifted), logits(model))


def test_embeddings_in_place_of_tokens_get_the_prompt_too():
    model = build("llama")
    attach(model, PROMPT)
    embeds = model.get_input_embeddings()(IDS)
    actual = model(inputs_embeds=embeds).logits
    torch.testing.assert_close(actual, logits(model), atol=1e-6, rtol=0)


def test_classifiers_that_pool_the_last_token_find_it_behind_the_prompt():
    torch.manual_seed(0)
    config = ARCHITECTURES["llama"]().config
    model = transformers.LlamaForSequenceClassification(config).eval()
    attach(model, PROMPT)
    padded = torch.cat([IDS, torch.full((2, 5), config.pad_token_id)], 1)
    # padding changes the shapes of products
    torch.testing.assert_close(logits(model, padded), logits(model), atol=1e-5, rtol=0)
    hidden = model.model(IDS).last_hidden_state
    torch.testing.assert_close(model.score(hidden)[:, -1], logits(model), atol=1e-5, rtol=0)


def test_a_prompt_that_peft_made_of_a_text_is_read(tmp_path):
    config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(build("llama"), config)
    theirs.peft_config["default"].prompt_tuning_init = "TEXT"
    theirs.peft_config["default"].prompt_tuning_init_text = "Say it in French:"
    theirs.peft_config["default"].tokenizer_name_or_path = "nobody/nothing"
    theirs.save_pretrained(tmp_path)
    assert read_adapter(tmp_path).method.num_virtual_tokens == 3
    load_adapter(build("llama"), tmp_path)


def test_an_encoder_without_embeddings_is_refused():
    with pytest.raises(TargetError, match="WhisperEncoder has none"):
        attach(build("whisper"), PROMPT)
    with pytest.raises(TargetError, match="Linear has none"):
        attach(nn.Linear(2, 2), PROMPT)
