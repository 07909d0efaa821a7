"""Training over fq(W + s B A): gradients, when it begins, resuming, and what it is for."""

import json
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from peftkit.adapter import attach
from peftkit.base.load import load_base
from peftkit.errors import ConfigError
from peftkit.events import EvalDone, Event, Notice, StepDone
from peftkit.execution.plan import compute_dtype
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.notes import Provenance
from peftkit.forward.fake_quantized import FakeQuantized
from peftkit.kernels.fake_quantize import fake_quantized
from peftkit.merging.merge import merge
from peftkit.methods.base import Method
from peftkit.methods.dora import DoRA
from peftkit.methods.lora import LoRA
from peftkit.quant.weights import weight_of
from peftkit.settings import DataConfig, TrainConfig
from peftkit.tasks.tokens import CausalLM
from peftkit.train.loop import fit
from tests.helpers.adapters import perturb
from tests.helpers.families import ARCHITECTURES

IDS = torch.arange(36).remainder(23).view(3, 12) + 3
LORA = LoRA(rank=3, alpha=6)


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3"])
def test_gradients_are_straight_through(family):
    """Against autograd of W + U + (fq(W + U) - W - U).detach(), in every layer."""
    torch.manual_seed(0)
    model = ARCHITECTURES[family]().train()
    adapter = attach(model, LORA)
    perturb(adapter.parameters(), 0.1, seed=7)
    for module in adapter.modules.values():
        x = torch.randn(5, 9, module.in_features, requires_grad=True)
        given = (x, module.lora_A, module.lora_B)
        dy = torch.randn(5, 9, module.out_features)
        weight = weight_of(module.base).detach().float()
        update = module.scaling * (module.full_b() @ module.full_a())
        quantized = fake_quantized((weight + update).detach(), "q4_0")
        straight = weight + update + (quantized - weight - update).detach()
        expected = functional.linear(x, straight, getattr(module.base, "bias", None))
        module.quantized = FakeQuantized("q4_0")
        found = module(x)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        pairs = zip(
            torch.autograd.grad(found, given, dy), torch.autograd.grad(expected, given, dy),
            strict=True,
        )  # fmt: skip
        for ours, theirs in pairs:  # float32 sums in another order; dx is by fq(W + U) in both
            torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
        assert not torch.equal(found, functional.linear(x, weight + update))


def test_quantised_layers_compute_with_the_values_of_a_reference():
    model = ARCHITECTURES["llama"]().eval()
    adapter = attach(model, LORA)
    states = []
    for seed in (1, 2):
        perturb(adapter.parameters(), 0.1, seed=seed)
        states.append({name: tensor.clone() for name, tensor in adapter.state().items()})
    for module in adapter.modules.values():
        module.quantized = FakeQuantized("q4_0")
    now = model(IDS).logits
    with adapter.swapped_state(states[0]):
        before = model(IDS).logits
    assert torch.equal(model(IDS).logits, now)
    adapter.load_state(states[0])
    for module in adapter.modules.values():
        module.quantized = FakeQuantized("q4_0")
    assert torch.equal(model(IDS).logits, before)
    assert not torch.equal(before, now)


@pytest.fixture
def run(tokenizer, tmp_path):
    """Return a function that trains a tiny Llama and returns its state, events and loss."""
    file = tmp_path / "rows.jsonl"
    rng = torch.Generator().manual_seed(0)
    words = ["the", "quick", "brown", "fox", "answer", "pizza", "olives", "lazy", "dog"]
    texts = [
        " ".join(words[int(n)] for n in torch.randint(0, 9, (8,), generator=rng)) for _ in range(24)
    ]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def trained(
        folder: str, method: Method = LORA, resume: bool = False, **settings: Any
    ) -> tuple[dict[str, torch.Tensor], list[Event], float]:
        torch.manual_seed(0)
        model = ARCHITECTURES["llama"]()
        adapter = attach(model, method, seed=0)
        task = CausalLM(model, tokenizer, DataConfig(train=str(file), max_length=64, packing=False))
        rows = task.load(str(file))
        events: list[Event] = []
        config = TrainConfig(
            output_dir=tmp_path / folder, max_steps=8, batch_size=4, learning_rate=0.01,
            save_every=3, **{"eval_every": 2, **settings},
        )  # fmt: skip
        fit(model, task, rows, rows, config, resume=resume, on_event=events.append)
        merged = {
            path: module.merged_weight(weight_of(module.base).float()).detach()
            for path, module in adapter.modules.items()
        }
        state = adapter.state()
        adapter.detach()
        with torch.no_grad():
            for path, weight in merged.items():
                model.get_submodule(path).weight.copy_(fake_quantized(weight, "q4_0"))
        loss = task.metrics(model.eval(), rows)["loss"]
        return state, events, loss

    return trained


@pytest.mark.covers("peftkit")
def test_losses_are_those_of_the_merged_quantised_model(run):
    _, events, merged = run("qat", quantize_for="q4_0", quantize_from=0.5)
    evals = {event.step: event.metrics["loss"] for event in events if isinstance(event, EvalDone)}
    assert evals[8] == pytest.approx(merged, rel=1e-5)
    assert [e.text for e in events if isinstance(e, Notice) and "From step 5 on" in e.text]
    assert next(e for e in events if isinstance(e, EvalDone) and e.step > 4).best
    _, plain, worse = run("plain")
    losses = [[e.loss for e in each if isinstance(e, StepDone)] for each in (events, plain)]
    assert losses[0][:4] == losses[1][:4]
    assert losses[0][4:] != losses[1][4:]
    assert merged < worse  # the adapter fits the quantised weights better


@pytest.mark.covers("peftkit")
def test_a_resumed_run_continues_exactly(run, tmp_path):
    whole, of_whole, _ = run("whole", quantize_for="q4_1", quantize_from=0.5)
    run("part", quantize_for="q4_1", quantize_from=0.5, eval_every=None)
    checkpoints = sorted((tmp_path / "part" / "checkpoints").iterdir())
    kept = [path for path in checkpoints if path.name in ("step-6", "step-8")]
    assert [path.name for path in kept] == ["step-6", "step-8"]

    shutil.rmtree(kept[1])
    resumed, events, _ = run("part", resume=True, quantize_for="q4_1", quantize_from=0.5)
    assert [e.step for e in events if isinstance(e, StepDone)] == [7, 8]
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    # the first evaluation is that of the saved step, which was stopped before it
    losses = [
        {e.step: e.metrics["loss"] for e in each if isinstance(e, EvalDone) and e.step >= 6}
        for each in (of_whole, events)
    ]
    assert losses[0] == losses[1]
    assert losses[0].keys() == {6, 8}


@pytest.mark.parametrize(
    ("method", "settings", "reason"),
    [
        (DoRA(rank=2), {}, "DoRALinear"),
        (LORA.model_copy(update={"dropout": 0.1}), {}, "dropout"),
        (LORA.model_copy(update={"init": "pissa"}), {}, "subtracts"),
        (LORA, {"compile": True}, "compile is true"),
    ],
)
def test_impossible_settings_are_refused(method, settings, reason, run):
    with pytest.raises(ConfigError, match=reason):
        run("refused", method, quantize_for="q4_0", **settings)


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
@pytest.mark.parametrize("computed", ["bf16", "fp32"])
@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q8_0", "int4_32"])
def test_weights_are_those_of_the_merged_file_to_the_bit(
    stored, computed, in_memory, kind, tokenizer, tmp_path, monkeypatch
):
    """Whatever the dtype of the base's files, and the dtype that the run computes in."""
    torch.manual_seed(0)
    ARCHITECTURES["llama"]().to(getattr(torch, stored)).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    base = load_base(str(tmp_path / "base"), dtype=computed, device="cpu")
    adapter = attach(base.model, LORA)
    perturb(adapter.parameters(), 0.1, seed=7)
    plan = {"dtype": str(compute_dtype(base.model)).removeprefix("torch.")}
    origin = Provenance(base=base.name, loading={"quantize_for": kind}, plan=plan)
    folder = save_adapter(adapter, tmp_path / "run", origin)
    if in_memory:
        monkeypatch.setattr("peftkit.merging.merge.changes_of", lambda *_: None)
    merge(folder, tmp_path / "merged", verify=False)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for path, module in adapter.modules.items():
        file = merged[f"{path}.weight"].float()
        trained = FakeQuantized(kind).weight(module, torch.float32)
        assert torch.equal(trained, fake_quantized(file, kind))
