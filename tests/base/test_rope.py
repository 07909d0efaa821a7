"""Rotary positions are scaled as transformers scales them, wherever the base is opened again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from peftkit.config.schema import from_dict
from peftkit.errors import BaseError
from peftkit.events import Event, Notice
from peftkit.formats.exchange import export_adapter
from peftkit.formats.open_adapter import open_adapter
from peftkit.merging.merge import merge
from peftkit.recipe import Recipe
from peftkit.run import run as run_recipe
from tests.helpers.adapters import logits

YARN = {"rope_type": "yarn", "factor": 4.0}
IDS = torch.arange(3, 43)[None]


def settings(model: Path, folder: Path, scaling: dict[str, Any]) -> Recipe:
    rows = folder / "rows.jsonl"
    rows.write_text('{"prompt": "the fox", "completion": " the dog"}\n' * 4)
    told = {
        "base": {"model": str(model), "dtype": "fp32", "rope_scaling": scaling},
        "method": {"type": "lora", "rank": 2},
        "data": {"train": str(rows), "max_length": None, "packing": False},
        "train": {"output_dir": str(folder / "run"), "max_steps": 2, "learning_rate": 0.01},
    }
    return from_dict(Recipe, told, "test")


@pytest.mark.covers("peftkit")
def test_adapter_and_merged_model_keep_the_scaling(tmp_path, model_folder):
    asked = settings(model_folder, tmp_path, YARN)
    run_recipe(asked)
    opened = open_adapter(tmp_path / "run")
    config = opened.base.model.config
    assert config.max_position_embeddings == 4 * 256
    told = config.rope_parameters
    assert (told["rope_type"], told["original_max_position_embeddings"]) == ("yarn", 256)
    with opened.adapter.disabled():
        bare = logits(opened.base.model, IDS)
    plain = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    assert not torch.allclose(bare, logits(plain, IDS), atol=1e-3)
    plain.config.rope_parameters = dict(told)
    plain.config.max_position_embeddings = 1024
    scaled = type(plain)(plain.config).eval()
    scaled.load_state_dict(plain.state_dict())
    torch.testing.assert_close(bare, logits(scaled, IDS))

    merge(tmp_path / "run", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert merged.config.rope_parameters == told
    assert merged.config.max_position_embeddings == 1024
    found, expected = (logits(model, IDS) for model in (merged, opened.base.model))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    events: list[Event] = []
    export_adapter(tmp_path / "run", tmp_path / "peft", to="peft", on_event=events.append)
    (text,) = [e.text for e in events if isinstance(e, Notice) and "rope_scaling" in e.text]
    override = json.loads(text.split("'")[1])
    assert override == {"rope_parameters": told, "max_position_embeddings": 1024}
    assert "--rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 256" in text


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "yarm", "factor": 4.0}, "yarn"),
        ({"rope_type": "yarn"}, "factor"),
        ({"rope_type": "yarn", "factor": 0.5}, "factor field must be a float or int >= 1"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
    ],
)
def test_what_transformers_would_not_take_is_refused(scaling, words, tmp_path, model_folder):
    with pytest.raises(BaseError, match=words):
        run_recipe(settings(model_folder, tmp_path, scaling))
