"""Each loss of policy gradients is its formula, answer by answer, and so is its gradient."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from peftkit.tasks.rewards.grpo_losses import advantages
from peftkit.tasks.rewards.grpo_rows import Group
from tests.helpers.on_policy import (
    FORMULAS,
    KL,
    MAX_NEW,
    gradients,
    task_of,
)
from tests.helpers.pair_cases import moved_adapter

GROUPS = (
    ((5, 9, 4, 11), ((7, 8, 3), (12, 3), (6, 6, 6, 10, 3)), (1.1, -0.4, -0.7)),
    ((9, 2), ((4, 4, 3), (13, 3)), (-0.5, 0.5)),
)


def make_groups() -> list[Group]:
    return [Group(prompt, answers, worth, "rows:1") for prompt, answers, worth in GROUPS]


def each_answer(model: nn.Module) -> list[Tensor]:
    """Return the log-probabilities of each answer's tokens, by the definition."""
    found = []
    for prompt, answers, _ in GROUPS:
        for answer in answers:
            ids = torch.tensor([prompt + answer])
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            every = log_softmax(logits.double(), -1).gather(1, ids[0, 1:, None])[:, 0]
            found.append(every[len(prompt) - 1 :])
    return found


@pytest.mark.parametrize(
    ("loss", "together", "is_moved"),
    [*((loss, True, True) for loss in FORMULAS), ("dapo", True, False), ("grpo", False, True)],
)
def test_loss_and_gradient_are_the_formulas(loss, together, is_moved, llama, tokenizer):
    llama.double()
    adapter = moved_adapter(llama)
    task = task_of(llama, tokenizer, loss, updates=1 + is_moved)
    groups = make_groups()
    with task.training(llama):
        if not together:
            task.layout.attention = None
        old = [each.detach() for each in each_answer(llama)]
        if is_moved:
            with torch.no_grad():
                task.add_log_probs(llama, groups, task.collate(groups))
                for parameter in adapter.parameters():
                    parameter += 0.02 * torch.randn_like(parameter)
        formula, unit = FORMULAS[loss]
        worth = [value for _, _, values in GROUPS for value in values]
        now = each_answer(llama)
        terms = [formula(lp, o, a) for lp, o, a in zip(now, old, worth, strict=True)]
        torch.stack(terms).sum().backward()
        expected, grads = float(torch.stack(terms).sum().detach()), gradients(adapter)
        llama.zero_grad()
        batch = task.collate(groups)
        found = task.loss(llama, batch)
        found[0].backward()
    assert float(found[0].detach()) == pytest.approx(expected, abs=1e-5, rel=1e-5)
    assert torch.allclose(gradients(adapter), grads, atol=1e-5, rtol=1e-5)
    now = [lp.detach() for lp in now]
    assert task.num_targets(batch) == (sum(map(len, now)) if unit == "tokens" else len(now))
    surprise = sum(float(-lp.sum() if unit == "tokens" else -lp.mean()) for lp in now)
    assert float(found[1].detach()) == pytest.approx(surprise, rel=1e-4)


def test_base_kl_is_added(llama, tokenizer):
    adapter = moved_adapter(llama)
    task = task_of(llama, tokenizer, "dapo", kl=KL)
    groups = make_groups()
    with torch.no_grad():
        task.add_log_probs(llama, groups, task.collate(groups))
        now = torch.cat(each_answer(llama))
        with adapter.disabled():
            d = torch.cat(each_answer(llama)) - now
        found = task.loss(llama, task.collate(groups))
    kl = (d.exp() - d - 1).sum()
    plain = sum(
        -value * len(answer)
        for _, answers, values in GROUPS
        for answer, value in zip(answers, values, strict=True)
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
