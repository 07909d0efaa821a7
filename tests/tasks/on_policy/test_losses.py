"""Each loss of policy gradients is its formula, answer by answer, and so is its gradient."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from peftkit.data.pack import IGNORE
from peftkit.tasks.rewards.grpo_losses import advantages
from peftkit.tasks.rewards.grpo_rows import Group
from tests.helpers.ignored_targets import with_ignored_targets
from tests.helpers.on_policy import (
    FORMULAS,
    KL,
    MAX_NEW,
    gradients,
    task_of,
)
from tests.helpers.pair_cases import moved_adapter

T, F = True, False
GROUPS = [
    Group((5, 9, 4, 11), ((7, 8, 3), (12, 3), (6, 6, 6, 10, 3)), (1.1, -0.4, -0.7), ""),
    Group((9, 2), ((4, 4, 3), (13, 3)), (-0.5, 0.5), ""),
]
WITH_REPLIES = [
    Group(
        (5, 9, 4, 11),
        ((7, 8, 3, 1, 2, 9, 6), (12, 3), (6, 6, 6, 10, 3, 4, 4)),
        (1.1, -0.4, -0.7),
        "",
        ((T, T, T, F, F, F, T), (T, T), (F, F, T, T, T, F, T)),
    ),
    Group((9, 2), ((4, 4, 3), (13, 3, 7, 7)), (-0.5, 0.5), "", ((T, T, T), (T, F, F, T))),
]
"""Groups of answers with tokens of tools, which are not targets."""


def log_probs_of(model: nn.Module, groups: list[Group] = GROUPS) -> list[Tensor]:
    """Return the log-probabilities of each answer's targets, by the definition."""
    found = []
    for group in groups:
        for answer, labels in zip(group.answers, group.labels, strict=True):
            ids = torch.tensor([group.prompt + answer])
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            every = log_softmax(logits.double(), -1).gather(1, ids[0, 1:, None])[:, 0]
            found.append(every[len(group.prompt) - 1 :][torch.tensor(labels) != IGNORE])
    return found


@pytest.mark.parametrize(
    ("loss", "groups", "together", "is_moved"),
    [
        *((loss, groups, True, True) for loss in FORMULAS for groups in (GROUPS, WITH_REPLIES)),
        ("dapo", GROUPS, True, False),
        ("grpo", GROUPS, False, True),
        ("dapo", WITH_REPLIES, False, True),
    ],
)
def test_loss_and_gradient_are_the_formulas(loss, groups, together, is_moved, llama, tokenizer):
    llama.double()
    adapter, groups = moved_adapter(llama), [replace(group) for group in groups]
    task = task_of(llama, tokenizer, loss, updates=1 + is_moved)
    with task.training(llama):
        if not together:
            task.layout.attention = None
        old = [each.detach() for each in log_probs_of(llama, groups)]
        if is_moved:
            with torch.no_grad():
                task.add_log_probs(llama, groups, task.collate(groups))
                for parameter in adapter.parameters():
                    parameter += 0.02 * torch.randn_like(parameter)
        formula, unit = FORMULAS[loss]
        advantages = [value for group in groups for value in group.advantages]
        now = log_probs_of(llama, groups)
        terms = [formula(lp, o, a) for lp, o, a in zip(now, old, advantages, strict=True)]
        torch.stack(terms).sum().backward()
        expected, grads = float(torch.stack(terms).sum().detach()), gradients(adapter)
        batch = task.collate(groups)
        for each in (batch, with_ignored_targets(task, batch)):
            llama.zero_grad()
            found = task.loss(llama, each)
            found[0].backward()
            assert float(found[0].detach()) == pytest.approx(expected, abs=1e-5, rel=1e-5)
            assert torch.allclose(gradients(adapter), grads, atol=1e-5, rtol=1e-5)
    now = [lp.detach() for lp in now]
    assert task.num_targets(batch) == (sum(map(len, now)) if unit == "tokens" else len(now))
    entropy = sum(float(-lp.sum() if unit == "tokens" else -lp.mean()) for lp in now)
    assert float(found[1].detach()) == pytest.approx(entropy, rel=1e-4)


def test_base_kl_is_added(llama, tokenizer):
    adapter = moved_adapter(llama)
    task = task_of(llama, tokenizer, "dapo", kl=KL)
    groups = [replace(group) for group in GROUPS]
    with torch.no_grad():
        task.add_log_probs(llama, groups, task.collate(groups))
        now = torch.cat(log_probs_of(llama))
        with adapter.disabled():
            d = torch.cat(log_probs_of(llama)) - now
        found = task.loss(llama, task.collate(groups))
    kl = (d.exp() - d - 1).sum()
    plain = sum(
        -value * len(answer)
        for group in GROUPS
        for answer, value in zip(group.answers, group.advantages, strict=True)
    )
    assert float(found[0]) == pytest.approx(plain + KL * float(kl), rel=1e-5)
    assert task.metric_means((found[1:] / len(now)).tolist())["kl"] == pytest.approx(
        float(kl) / len(now), rel=1e-5
    )


def test_advantages_are_taken_within_a_group():
    rewards, deviation = [1.0, 0.0, 0.0, 3.0], math.sqrt(2.0)
    by_std = advantages("dapo", rewards, True)
    assert by_std == pytest.approx([r / (deviation + 1e-4) for r in (0.0, -1.0, -1.0, 2.0)])
    assert advantages("dr_grpo", rewards, False) == [0.0, -1.0, -1.0, 2.0]
    assert advantages("rloo", rewards, False) == pytest.approx([0.0, -4 / 3, -4 / 3, 8 / 3])
    assert advantages("dapo", [2.0, 2.0, 2.0], True) is None
    assert advantages("dr_grpo", [1.0, float("nan"), 3.0], False) == [-1.0, 0.0, 1.0]


def test_a_prompt_poses_as_its_longest_answers(llama, tokenizer, tmp_path):
    task = task_of(llama, tokenizer, "dapo", answers=3)
    (tmp_path / "p.jsonl").write_text('{"prompt": "the quick brown", "answer": "fox"}\n')
    (prompt,) = task.load(str(tmp_path / "p.jsonl"))
    assert prompt.reference == "fox"
    batch = task.collate([prompt])
    assert len(batch["targets"]) == 3 * MAX_NEW
    assert float(task.loss(llama, batch)[0].detach()) == 0.0
