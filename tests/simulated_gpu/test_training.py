"""Training on a card gives the CPU's numbers: methods, bits, activations, tasks."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from peftkit.methods.base import Method
from peftkit.methods.bottleneck import Bottleneck
from peftkit.methods.dora import DoRA
from peftkit.methods.ia3 import IA3
from peftkit.methods.lora import LoRA
from peftkit.methods.prefix import PrefixTuning
from peftkit.methods.prompt import PromptTuning
from peftkit.methods.vera import VeRA
from peftkit.quant.layers import keep_copies, packed_tensors
from peftkit.recipe import Recipe
from peftkit.run import run as run_recipe
from peftkit.tasks.tokens import CausalLM
from peftkit.train import memory
from tests.helpers.families import ARCHITECTURES
from tests.helpers.vision import COLOURS, solid_png
from tests.simulated_gpu.recipes import recipe_for, small_recipe
from tests.simulated_gpu.same import CLOSE, Heard, train
from tests.simulated_gpu.simulation import simulated

METHODS: dict[str, Method] = {
    "lora": LoRA(rank=4, alpha=8, dropout=0.1),
    "pissa": LoRA(rank=3, alpha=6, init="pissa"),
    "head and rows": LoRA(rank=2, targets=("q",), train_fully=("lm_head",), token_rows=(5, 12)),
    "dora": DoRA(rank=3, alpha=6),
    "ia3": IA3(),
    "vera": VeRA(rank=16, d_initial=1.0),
    "bottleneck": Bottleneck(style="pfeiffer", size=8),
    "prompt": PromptTuning(num_virtual_tokens=4),
    "prefix": PrefixTuning(num_virtual_tokens=4),
}


def assert_same(found: Heard, expected: Heard) -> None:
    assert expected.losses[-1] < expected.losses[0]
    assert found.figures == pytest.approx(expected.figures, abs=CLOSE * 20, rel=CLOSE)
    assert "NVIDIA" in found.device
    assert expected.device == "cpu"


QV = {"targets": ["q", "v"]}
FAST = ("lora", "head and rows", "dora", "prefix")


@pytest.mark.parametrize(
    "method", [m if m in FAST else pytest.param(m, marks=pytest.mark.slow) for m in METHODS]
)
def test_every_method_learns_what_it_learns_on_a_cpu(method, tmp_path):
    expected, weights = train("cpu", tmp_path, method=METHODS[method])
    with simulated():
        found, ours = train("cuda", tmp_path, method=METHODS[method])
    if "dropout" in repr(METHODS[method]) and getattr(METHODS[method], "dropout", 0.0):
        assert found.losses[-1] < found.losses[0]  # padded rows draw other masks
        return
    assert_same(found, expected)
    assert ours.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(ours[name], tensor, atol=2e-3, rtol=1e-2)


@pytest.mark.parametrize(
    ("quantize", "packed"),
    [
        ("none", False),
        pytest.param("none", True, marks=pytest.mark.slow),
        ("nf4", True),
        pytest.param("int8", False, marks=pytest.mark.slow),
    ],
)
def test_all_activation_modes_are_equal(quantize, packed, tmp_path):
    expected, _ = train("cpu", tmp_path, quantize=quantize, packed=packed)
    peaks = {}
    for keep in ("auto", True):
        with simulated() as card:
            how: dict[str, Any] = {"quantize": quantize, "gradient_checkpointing": keep}
            found, _ = train("cuda", tmp_path, packed=packed, **how)
            peaks[keep] = card.peak
        assert_same(found, expected)
        assert ("recomputed" in found.paths) == (keep is True)
        assert "fused: 9 norms, gated layers and rotations" in found.paths
    assert peaks[True] < peaks["auto"]


@pytest.mark.parametrize("runs_out", [False, True])
def test_memory_that_is_left_holds_unpacked_weights_of_the_same_bits(
    runs_out, tmp_path, monkeypatch
):
    kept: list[tuple[nn.Module, int]] = []
    loss = CausalLM.loss

    def copied(model: nn.Module, room: int) -> int:
        kept.append((model, keep_copies(model, room)))
        return kept[-1][1]

    def full(task: CausalLM, model: Any, batch: Any, *args: Any) -> Tensor:
        if runs_out and any(packing.unpacked is not None for *_, packing in packed_tensors(model)):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss(task, model, batch, *args)

    how: dict[str, Any] = {"quantize": "nf4", "eval_every": None}
    monkeypatch.setattr(memory, "keep_copies", lambda *_: 0)
    with simulated():
        expected, _ = train("cuda", tmp_path, **how)
    monkeypatch.setattr(memory, "keep_copies", copied)
    monkeypatch.setattr(CausalLM, "loss", full)
    with simulated():
        found, _ = train("cuda", tmp_path, **how)
        ((model, num_bytes),) = kept
        assert num_bytes == sum(p.unpacked_bytes for *_, p in packed_tensors(model)) > 0
        assert all(packing.unpacked is None for *_, packing in packed_tensors(model))
    assert found.losses == expected.losses
    (notice,) = [text for text in found.notices if "Memory ran out" in text] if runs_out else [""]
    assert ("packed weights are unpacked for each product" in notice) == runs_out


def image_recipe(folder: Path) -> Recipe:
    """Return a recipe over folders of pictures in one colour each."""
    for name, colour in COLOURS.items():
        (folder / "data" / name).mkdir(parents=True)
        for number in range(2):
            (folder / "data" / name / f"{number}.png").write_bytes(
                solid_png(colour, (9 + number, 41))
            )
    ARCHITECTURES["vit"]().save_pretrained(folder / "base")
    task = {"type": "image_classification", "fresh_head": True}
    return small_recipe(folder, task, folder / "base", folder / "data", {"targets": "attention"})


def audio_recipe(folder: Path) -> Recipe:
    """Return a recipe over conversations about sounds; skip the test without soundfile."""
    from tests.helpers.listening import QWEN2_AUDIO, SPOKEN, write_sound_rows

    model, processor = QWEN2_AUDIO.build()
    model.save_pretrained(folder / "base")
    processor.save_pretrained(folder / "base")
    data = write_sound_rows(folder, SPOKEN)
    how: dict[str, Any] = {"max_length": 128, "batch_size": 4, "eval_every": None}
    return small_recipe(folder, "audio_text", folder / "base", data, QV, **how)


def speech_recipe(task: dict[str, str], folder: Path) -> Recipe:
    """Return a recipe over tones and what they say; skip the test without soundfile."""
    from tests.helpers.speech import hears_frames, saved, whisper, write_speech_rows

    made = hears_frames("Parakeet") if task["type"] == "ctc" else whisper()
    rows = [{"audio": 3 * [440.0, 880.0], "text": "one"}, {"audio": 3 * [300.0], "text": "a"}]
    data = write_speech_rows(folder, rows)
    return small_recipe(folder, task, saved(folder / "base", made), data, QV, batch_size=2)


TASKS = (
    "image_classification",
    "audio_text",
    "ctc",
    "transcription",
    pytest.param("causal_lm", marks=pytest.mark.smoke),
    pytest.param("seq2seq", marks=pytest.mark.slow),
    pytest.param("masked_lm", marks=pytest.mark.slow),
    "sequence_classification",
    pytest.param("token_classification", marks=pytest.mark.slow),
    pytest.param("reranker", marks=pytest.mark.slow),
)


@pytest.mark.parametrize("task", TASKS)
def test_every_task_runs_from_recipe_to_adapter(task, tmp_path):
    made = {
        "image_classification": image_recipe,
        "audio_text": audio_recipe,
        "ctc": partial(speech_recipe, {"type": "ctc"}),
        "transcription": partial(speech_recipe, {"type": "transcription", "language": "english"}),
    }
    make: Any = made.get(task) or partial(recipe_for, task)
    asked, expected, found = make(tmp_path), Heard(), Heard()
    on_cpu = run_recipe(asked, on_event=expected)
    with simulated():
        on_card = run_recipe(asked, overwrite=True, on_event=found)
    assert_same(found, expected)
    same = {n: v for n, v in on_cpu.metrics.items() if n.startswith("eval_")}
    assert same
    for name, value in same.items():
        assert on_card.metrics[name] == pytest.approx(value, abs=1e-3)
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
