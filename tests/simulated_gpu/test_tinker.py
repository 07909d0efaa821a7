"""Models of Tinker's clients learn on a card as on a CPU, in as much memory as it has."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("google.protobuf", reason="the extra peftkit[train-api] is not installed")

from peftkit.adapter import group_modules
from peftkit.base.load import load_base
from peftkit.methods.lora import LoRA
from peftkit_server.tinker.bodies import Adam
from peftkit_server.tinker.learner import Learner
from peftkit_server.tinker.losses import LOSSES, TARGETS, Settings
from peftkit_server.tinker.rows import Datum
from peftkit_server.tinker.tenant import Tenant
from tests.simulated_gpu.simulation import simulated

LENGTHS = (40, 24, 9)
METHOD = LoRA(rank=3, alpha=32, targets=("attention", "ffn", "head"))


def rows(name: str) -> list[Datum]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for length in LENGTHS:
        shape = (length, 2) if name == "several" else (length,)
        ids = torch.randint(5, 300, (length,), generator=generator)
        inputs = {TARGETS: torch.randint(5, 300, shape, generator=generator)}
        for key in ("weights", "logprobs", "advantages", "sequence_ratio_mask"):
            inputs[key] = torch.randn(shape, generator=generator)
        inputs["weights"][::3] = 0
        inputs["sequence_ratio_mask"].abs_()
        inputs["logprobs"] -= 6
        made.append(Datum(ids.tolist(), inputs, f"datum {len(made)}"))
    return made


def learnt(folder: Path, context: AbstractContextManager[Any], **loading: Any) -> list[Any]:
    """Take a step by each loss; return what is told of it."""
    told: list[Any] = []
    with context:
        base = load_base(str(folder), dtype="fp32", **loading)
        learner = Learner(base)
        tenant = learner.new(METHOD, 1, fresh=True)
        for name in (*LOSSES, "several"):
            loss = LOSSES.get(name, LOSSES["cross_entropy"])
            for backward in (False, True):
                found, total = learner.forward(tenant, rows(name), loss, Settings(), backward)
                told += [total, *(row["logprobs"] for row in found)]
            told.append(tenant.step(Adam(learning_rate=1e-2, grad_clip_norm=1.0)))
            tenant.fill(tenant.emptied(), base.device)
            with learner.on(tenant):
                group_modules(base.model)
        assert {p.device.type for p in tenant.parameters.values()} == {base.device.type}
    return told


@pytest.mark.parametrize("loading", [{}, {"quantize": "nf4"}], ids=["fp32", "nf4"])
def test_training_is_equal_on_card_and_cpu(model_folder, loading):
    expected = learnt(model_folder, nullcontext(), **loading)
    found = learnt(model_folder, simulated(), **loading)
    for one, other in zip(found, expected, strict=True):
        pair = torch.as_tensor(one), torch.as_tensor(other)
        torch.testing.assert_close(*pair, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("free", "ends_in"), [(200_000, "selective"), (10**9, "recompute"), (10**9, "offload")]
)
def test_a_card_that_is_nearly_full_gives_the_same_gradient(
    card, model_folder, monkeypatch, free, ends_in
):
    learner = Learner(load_base(str(model_folder), dtype="fp32"))
    tenant, loss = learner.new(METHOD, 1, fresh=True), LOSSES["cross_entropy"]
    _, expected = learner.forward(tenant, rows(""), loss, Settings(), True)
    assert card.launches  # what fits into so little memory is the simulation's to say
    gradients, modes, seated = tenant.take_gradients(), list[str](), Learner.seated

    def seen(self: Learner, tenant: Tenant, activations: Any = "keep") -> Any:
        if ends_in != "selective":  # a model of two blocks is too small to need them
            activations = ends_in
        modes.append(activations)
        return seated(self, tenant, activations)

    monkeypatch.setattr(Learner, "seated", seen)
    card.memory = card.allocated + free
    _, total = learner.forward(tenant, rows(""), loss, Settings(), True)
    assert modes[0] == ("keep" if ends_in == "selective" else ends_in)
    assert modes[-1] == ends_in
    assert total == pytest.approx(expected, rel=1e-5)
    for before, after in zip(gradients, tenant.take_gradients(), strict=True):
        assert before is not None
        assert after is not None
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
