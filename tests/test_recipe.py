"""A recipe from its file to an adapter that others load: the whole run, at a tiny size."""

from pathlib import Path
from typing import Any, NamedTuple

import peft
import pytest
import torch
import transformers

from peftkit.config.schema import Config, from_dict
from peftkit.errors import ConfigError, DataError
from peftkit.events import EvalDone, Event, Notice, RunStarted, Saved, Stage, StepDone
from peftkit.formats.open_adapter import open_adapter
from peftkit.recipe import Recipe, load
from peftkit.run import check as check_recipe
from peftkit.run import run as run_recipe
from tests.helpers.finished import supervised

ROWS = [
    {"instruction": f"Say {word} {n}.", "output": f"{word} {n}"}
    for n in range(4)
    for word in ("yes", "no", "perhaps")
]


def settings_in(folder: Path, model: Path) -> dict[str, Any]:
    train = {"max_steps": 4, "batch_size": 2, "learning_rate": 5e-3, "eval_every": 2}
    train |= {"output_dir": str(folder / "run"), "save_every": 2}
    return supervised(folder, model, ROWS, ROWS[:3], **train)


@pytest.fixture
def settings(tmp_path: Path, model_folder: Path) -> dict[str, Any]:
    return settings_in(tmp_path, model_folder)


def parse(settings: dict[str, Any], **sections: dict[str, Any]) -> Recipe:
    merged = {name: {**section, **sections.get(name, {})} for name, section in settings.items()}
    return from_dict(Recipe, merged, "test")


class Trained(NamedTuple):
    """A run, what it told, and which fields of which config classes it read by their names."""

    recipe: Recipe
    settings: dict[str, Any]
    events: list[Event]
    reads: set[tuple[type, str]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Trained:
    """A run of 4 steps with a checkpoint at the second."""
    settings = settings_in(tmp_path_factory.mktemp("trained"), model_folder)
    recipe = parse(settings)
    events: list[Event] = []
    reads: set[tuple[type, str]] = set()

    def read(self: Config, name: str) -> Any:
        reads.update((cls, name) for cls in type(self).__mro__)
        return object.__getattribute__(self, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Config, "__getattribute__", read)
        run_recipe(recipe, on_event=events.append)
    return Trained(recipe, settings, events, reads)


def test_a_run_learns_and_its_folder_is_an_adapter(trained):
    losses = [event.loss for event in trained.events if isinstance(event, StepDone)]
    assert losses[-1] < losses[0]
    assert any(isinstance(event, EvalDone) and event.best for event in trained.events)
    started = next(event for event in trained.events if isinstance(event, RunStarted))
    assert started.num_trainable < started.num_parameters / 4
    folder = trained.recipe.train.output_dir
    assert Saved("adapter", folder) in trained.events
    names = {path.name for path in folder.iterdir()}
    assert {
        "adapter_config.json",
        "adapter_model.safetensors",
        "peftkit.json",
        "proof.json",
        "README.md",
        "recipe.yaml",
        "metrics.jsonl",
        "run.json",
        "finished.json",
        "checkpoints",
        ".locks",
    } == names
    unpacked = trained.recipe.model_copy(update={"data": trained.recipe.data.without_packing()})
    assert load(folder / "recipe.yaml") == unpacked  # its few rows are not packed by default
    assert open_adapter(folder).style.kind == "chat"


@pytest.mark.parametrize("quantize", ["nf4", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_quantised_run_reopens(settings, quantize, tmp_path):
    run_recipe(parse(settings, base={"quantize": quantize}, train={"max_steps": 1}))
    assert open_adapter(tmp_path / "run").base.audit.quantized_as == quantize


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_loads_the_run_and_gives_its_logits(trained, model_folder):
    folder = trained.recipe.train.output_dir
    ours = open_adapter(folder, dtype="fp32").base.model
    base = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, folder).eval()
    ids = torch.arange(20)[None] + 3
    with torch.no_grad():
        torch.testing.assert_close(
            ours(input_ids=ids).logits, theirs(input_ids=ids).logits, atol=1e-5, rtol=0
        )


def test_a_checkpoint_is_an_adapter_folder_too(trained):
    folder = trained.recipe.train.output_dir
    opened = open_adapter(folder / "checkpoints" / "step-2")
    assert opened.adapter.state().keys() == open_adapter(folder).adapter.state().keys()


READ_ELSEWHERE = {
    *("BaseConfig.double_quant", "BaseConfig.quantize_towers"),  # with quantize
    *("DataConfig.max_pixels", "DataConfig.video_frames"),  # by tasks with media
    "LoRA.eva_rho",  # by init: eva
    "TrainConfig.epochs",  # without max_steps
    "TrainConfig.quantize_from",  # with quantize_for
    *("TrainConfig.sample_prompts", "TrainConfig.sample_tokens"),  # with sample_every
}
"""Fields that this recipe leaves unread."""


def test_every_field_of_a_recipe_is_read_by_something(trained):
    parts = (getattr(trained.recipe, name) for name in ("base", "method", "data", "train"))
    unread = {
        f"{section.__name__}.{name}"
        for section in (Recipe, *map(type, parts))
        for name in section.model_fields
        if (section, name) not in trained.reads
    }
    assert not unread - READ_ELSEWHERE


def test_new_tokens_are_trained_saved_and_loaded(settings):
    tokens = ["<think>", "<done>"]
    recipe = parse(settings, base={"new_tokens": tokens}, train={"max_steps": 2})
    run_recipe(recipe)
    folder = recipe.train.output_dir
    assert (folder / "tokenizer.json").is_file()
    for place in (folder, folder / "checkpoints" / "step-2"):
        opened = open_adapter(place)
        ids = opened.base.tokenizer.convert_tokens_to_ids(tokens)
        assert len(set(ids)) == 2
        assert opened.base.tokenizer.unk_token_id not in ids
        state = opened.adapter.state()
        trained = [name for name in state if name.endswith("trainable_tokens_delta")]
        assert trained
        assert all(len(state[name]) == 2 for name in trained)


def test_virtual_tokens_with_packing_are_refused_early(settings):
    settings["method"] = {"type": "prompt_tuning"}
    with pytest.raises(ConfigError, match=r"data\.packing does not go with .*prompt_tuning"):
        parse(settings, data={"packing": True})


def test_packing_that_was_not_asked_for_gives_way(settings):
    settings["method"] = {"type": "prompt_tuning", "num_virtual_tokens": 3}
    events: list[Event] = []
    recipe = parse(settings, train={"max_steps": 1})
    run_recipe(recipe, on_event=events.append)
    assert [e for e in events if isinstance(e, Notice) and "not packed" in e.text]
    kept = load(recipe.train.output_dir / "recipe.yaml")  # and can be trained again
    assert not kept.data.packing


@pytest.mark.parametrize("command", [run_recipe, check_recipe])
@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"data": {"train": "{folder}/tran.jsonl"}}, "Did you mean 'train.jsonl'"),
        ({"data": {"eval": "{folder}/evl.jsonl"}}, "Did you mean 'eval.jsonl'"),
        ({"data": {"train": "{folder}/rows.bin"}}, "The suffix '.bin'"),
        ({"data": {"format": "messages"}}, "messages"),
        ({"task": {"type": "causal_lm", "prompt": "mail", "completion": "output"}}, "lacks 'mail'"),
    ],
)
def test_files_and_fields_are_checked_before_the_base_is_loaded(
    command, section, words, settings, tmp_path
):
    (tmp_path / "rows.bin").write_bytes(b"rows")
    settings["task"] = {"type": "causal_lm"}
    (name, values), events = *section.items(), list[Event]()
    values = {key: text.format(folder=tmp_path) for key, text in values.items()}
    with pytest.raises(DataError) as error:
        command(parse(settings, **{name: values}), on_event=events.append)
    assert words in str(error.value)
    assert not [event for event in events if isinstance(event, Stage)]
