"""Each loss and its gradient equal the formula of its paper; errors name invalid inputs."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("google.protobuf", reason="the extra peftkit[train-api] is not installed")

from peftkit_server.refusals import RequestError
from peftkit_server.tinker.losses import LOSSES, Settings, loss_of, settings_of
from tests.helpers.tinker import LENGTHS, loss_formula


def some(seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(sum(LENGTHS), generator=generator)


def inputs() -> dict[str, Tensor]:
    advantages = some(3)
    advantages[::4] = 0
    mask = (torch.arange(sum(LENGTHS)) % 3 > 0).float()
    return {
        "target_tokens": torch.arange(sum(LENGTHS)),
        "weights": some(1).abs(),
        "logprobs": some(0) + some(2, 0.5),
        "advantages": advantages,
        "sequence_ratio_mask": mask,
        "datum": torch.arange(2).repeat_interleave(torch.tensor(LENGTHS)),
    }


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradient_are_the_formula_s(name):
    given = {key: value for key, value in (("beta", 0.3),) if key in LOSSES[name].settings}
    given |= dict.fromkeys(set(LOSSES[name].settings) - {"beta"}, 0.0)
    if "clip_low_threshold" in given:
        given |= {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1}
    settings = settings_of(name, given)
    ours, theirs = (some(0).requires_grad_() for _ in range(2))
    loss = LOSSES[name].of_tokens(ours, inputs(), settings).sum()
    expected = loss_formula(name, theirs, inputs(), 0.7, 1.1, 0.3)
    loss.backward()
    expected.backward()
    assert math.isclose(loss.item(), expected.item(), rel_tol=1e-5)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    assert float(theirs.grad.abs().max()) > 0.1


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_not_learnt_has_no_gradient(name):
    given = inputs()
    given["weights"][2:4] = 0
    x = some(0).requires_grad_()
    LOSSES[name].of_tokens(x, given, Settings()).sum().backward()
    learnt = LOSSES[name].is_learnt(given)
    assert not x.grad[~learnt].any()
    assert not learnt[2:4].any()
    assert learnt.any()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: loss_of("stable_reinforce"), "importance_sampling"),
        (lambda: loss_of("crossentropy"), "cross_entropy"),
        (lambda: loss_of("__class__"), "no loss"),
        (lambda: settings_of("cross_entropy", {"beta": 0.1}), "takes numbers for: nothing"),
        (lambda: settings_of("ppo", {"clip_low_threshold": math.nan}), "clip_low_threshold"),
        (lambda: settings_of("ppo", {"clip_low_threshold": "0.8"}), "clip_low_threshold"),
        (lambda: settings_of("ppo", {"clip_low_threshold": 2.0}), "bound the ratio"),
        (lambda: settings_of("dro", {"beta": -1.0}), "cannot use"),
        (lambda: settings_of("ppo", {"__init__": 1.0}), "__init__"),
    ],
)
def test_unknown_losses_and_settings_are_named(call, words):
    with pytest.raises(RequestError, match=words):
        call()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"advantages": None}, "missing: advantages"),
        ({"mask": torch.ones(3)}, "unknown: mask"),
        ({"logprobs": torch.ones(4)}, r"Its shape is \[4\]; the targets have \[3\]"),
        ({"logprobs": torch.ones(3, 1)}, "Its shape is"),
        ({"advantages": torch.tensor([1.0, math.nan, 0])}, "not finite"),
        ({"weights": torch.tensor([1.0, math.inf, 0])}, "not finite"),
    ],
)
def test_inputs_that_a_loss_cannot_use_are_named(change, words):
    given: dict[str, Any] = {
        "target_tokens": torch.tensor([1, 2, 3]),
        "logprobs": torch.zeros(3),
        "advantages": torch.ones(3),
        **change,
    }
    with pytest.raises(RequestError, match=words):
        LOSSES["ppo"].check({k: v for k, v in given.items() if v is not None}, "datum 0")
