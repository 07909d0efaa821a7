"""Each loss is its formula, in three lines of plain torch, and so is its gradient."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, logsigmoid

from peftkit.data.pack import IGNORE, Row
from peftkit.tasks.batches import BATCH_SIZE
from peftkit.tasks.pairs.preference_rows import Compared
from tests.helpers.ignored_targets import with_ignored_targets
from tests.helpers.pair_cases import moved_adapter, settings, task_on, write_pairs, write_verdicts

B, E, GAMMA = 0.3, 0.1, 0.7


def plain(model: nn.Module, row: Row, *, whole: bool = False) -> tuple[Tensor, int]:
    """Return the summed log-probability of a document's answer, and its tokens."""
    ids = torch.tensor([row.input_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    each = log_softmax(logits.double(), -1).gather(1, ids[0, 1:, None])[:, 0]
    on = torch.tensor(row.labels[1:]) != IGNORE if not whole else torch.ones_like(each).bool()
    return each[on].sum(), int(on.sum())


Formula = Callable[[Tensor, Tensor, Tensor, Tensor, int, int, Tensor], Tensor]
# c, r: log-probabilities; C, R: the reference's; m, n: lengths; nll: of the chosen answer
FORMULAS: dict[str, Formula] = {
    "dpo": lambda c, r, C, R, m, n, nll: -logsigmoid(B * ((c - C) - (r - R))),
    "ipo": lambda c, r, C, R, m, n, nll: ((c - C) / m - (r - R) / n - 1 / (2 * B)) ** 2,
    "robust": lambda c, r, C, R, m, n, nll: (
        (-(1 - E) * logsigmoid(B * ((c - C) - (r - R))) + E * logsigmoid(-B * ((c - C) - (r - R))))
        / (1 - 2 * E)
    ),
    "hinge": lambda c, r, C, R, m, n, nll: torch.relu(1 - B * ((c - C) - (r - R))),
    "cpo": lambda c, r, C, R, m, n, nll: -logsigmoid(B * (c - r)) + nll,
    "simpo": lambda c, r, C, R, m, n, nll: -logsigmoid(B * (c / m - r / n) - GAMMA),
    "orpo": lambda c, r, C, R, m, n, nll: (
        -B * logsigmoid((c / m - (1 - (c / m).exp()).log()) - (r / n - (1 - (r / n).exp()).log()))
        + nll
    ),
}


def by_formula(model: nn.Module, adapter: object, rows: list[Compared], loss: str) -> Tensor:
    found = torch.zeros((), dtype=torch.double)
    for row in rows:
        chosen, rejected = row.documents
        (c, m), (r, n) = plain(model, chosen), plain(model, rejected)
        nll_sum, count = plain(model, chosen, whole=loss == "orpo")
        with torch.no_grad(), adapter.disabled():  # type: ignore[attr-defined]
            C, R = plain(model, chosen)[0], plain(model, rejected)[0]
        found = found + FORMULAS[loss](c, r, C, R, m, n, -nll_sum / count)
    return found


@pytest.mark.parametrize(
    ("loss", "together"), [*((loss, True) for loss in FORMULAS), ("dpo", False), ("orpo", False)]
)
def test_loss_and_gradient_are_the_formulas(loss, together, llama, tokenizer, tmp_path):
    adapter = moved_adapter(llama)
    asked = settings(
        loss,
        beta=B,
        **({"label_smoothing": E} if loss == "robust" else {}),
        **({"gamma": GAMMA} if loss == "simpo" else {}),
    )
    task, rows = task_on(llama, tokenizer, asked, write_pairs(tmp_path / "a.jsonl"))
    parameters = list(adapter.parameters())
    expected = by_formula(llama, adapter, rows, loss)
    wanted = torch.autograd.grad(expected, parameters)
    llama.train()
    if together:
        with task.training(llama):
            assert "the prompt once" in task.paths["pairs"]
            batch = task.collate(rows)
            plain_found = task.loss(llama, batch)
            found = task.loss(llama, with_ignored_targets(task, batch))
            gradients = torch.autograd.grad(found[0], parameters)
        torch.testing.assert_close(found, plain_found)
        assert batch["input_ids"].shape[0] == 1
    else:
        found = task.loss(llama, task.collate(rows))
        gradients = torch.autograd.grad(found[0], parameters)
    assert found[0].item() == pytest.approx(expected.item(), rel=1e-4)
    for a, b in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)  # float32 against float64


def test_kto_matches_its_formula(llama, tokenizer, tmp_path):
    adapter = moved_adapter(llama)
    asked = settings("kto", beta=B)
    task, rows = task_on(llama, tokenizer, asked, write_verdicts(tmp_path / "a.jsonl"))

    def gain(document: Row) -> Tensor:
        with adapter.disabled(), torch.no_grad():
            before = plain(llama, document)[0]
        return plain(llama, document)[0] - before

    z = torch.stack([gain(row.documents[1]) for row in rows]).mean().clamp(min=0).detach()
    assert z > 0
    gains = [gain(row.documents[0]) for row in rows]
    pairs = zip(gains, rows, strict=True)
    expected = sum(1 - torch.sigmoid(B * ((g - z) if row.wanted else (z - g))) for g, row in pairs)
    assert isinstance(expected, Tensor)
    wanted = torch.autograd.grad(expected, list(adapter.parameters()))
    llama.train()
    with task.training(llama):
        found = task.loss(llama, task.collate(rows))
        gradients = torch.autograd.grad(found[0], list(adapter.parameters()))
    told = task.metric_means((found[1:] / len(rows)).tolist())
    assert told["z"] == pytest.approx(float(z), rel=1e-4)
    assert found[0].item() == pytest.approx(expected.item(), rel=1e-5)
    for a, b in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_kto_is_evaluated_over_all_rows_as_in_training(llama, tokenizer, tmp_path):
    moved_adapter(llama)
    file = write_verdicts(tmp_path / "a.jsonl")
    task, rows = task_on(llama, tokenizer, settings("kto", beta=B), file)
    assert len(rows) > BATCH_SIZE
    with torch.no_grad():
        sums = task.loss(llama, task.collate(rows))  # one batch: the reference point of all rows
    loss, *means = (sums / len(rows)).tolist()
    expected = {"loss": loss, **task.metric_means(means)}
    assert expected["z"] > 0
    assert task.metrics(llama, rows) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    again = task.loss(llama, task.collate(rows[:3]))[0] / 3  # nothing of the rows stays behind
    assert again.item() != pytest.approx(loss, rel=1e-4)


def test_certain_answers_have_finite_odds():
    from peftkit.tasks.pairs.preference_losses import Answers, pair_losses

    log_probs = torch.tensor([0.0, -1e-9, -80.0], requires_grad=True)
    zeros, ones = torch.zeros(3), torch.ones(3)
    found = pair_losses(
        "orpo", Answers(log_probs, zeros, ones), Answers(log_probs.flip(0), zeros, ones), beta=0.1
    )
    found.sum().backward()
    assert torch.isfinite(found).all()
    assert log_probs.grad is not None
    assert torch.isfinite(log_probs.grad).all()
