"""Training over the API equals a plain training loop, even if other models train meanwhile."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("google.protobuf", reason="the extra peftkit[train-api] is not installed")

from peftkit.adapter import attach
from peftkit.execution.environment import Environment
from peftkit.methods.lora import LoRA
from peftkit.train.optim import LossScale
from peftkit_server.tinker import learner, tenants
from peftkit_server.tinker.learner import Learner
from peftkit_server.tinker.losses import LOSSES, Settings
from tests.helpers.bank import tiny_base
from tests.helpers.tinker import CE_DATA, MIXED_RANKS, loss_formula, train_steps
from tests.helpers.wire_client import datum

ADAM = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-7, "weight_decay": 0.1, "grad_clip_norm": 5.0}


def some(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rewarded(seed: int) -> tuple[list[int], dict[str, Tensor]]:
    ids = torch.randint(5, 300, (8,), generator=torch.Generator().manual_seed(seed))
    advantages = some(7, seed=seed)
    advantages[:3] = 0
    return datum(ids.tolist(), logprobs=some(7, seed=seed + 50) - 6, advantages=advantages)


def plain(model: nn.Module, rank: int, **config: Any) -> tuple[nn.Module, list[nn.Parameter]]:
    """Return a copy of the base with a LoRA that computes layer by layer."""
    model = copy.deepcopy(model)
    adapter = attach(model, LoRA(rank=rank, alpha=32, **config), seed=7)
    return model, list(adapter.parameters())


def log_probs(model: nn.Module, ids: list[int], targets: Tensor) -> Tensor:
    return model(torch.tensor([ids])).logits[0].log_softmax(-1).gather(1, targets[:, None])[:, 0]


def plain_loss(model: nn.Module, data: Any, loss: str) -> tuple[Tensor, list[Tensor]]:
    total, found = torch.zeros(()), []
    for ids, given in data:
        x = log_probs(model, ids, given["target_tokens"])
        inputs = {
            "weights": torch.ones(len(x)),
            "logprobs": torch.zeros(len(x)),
            "advantages": torch.ones(len(x)),
            "datum": torch.zeros(len(x), dtype=torch.long),
            **given,
        }
        total = total + loss_formula(loss, x, inputs, 0.8, 1.2, 0.05)
        found.append(x.detach())
    return total, found


@pytest.mark.smoke
@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "gspo"])
def test_losses_and_steps_match_a_plain_loop(client, llama, loss):
    data = CE_DATA if loss == "cross_entropy" else [rewarded(1), rewarded(2)]
    other, parameters = plain(llama, 4, targets=("attention", "ffn", "head"))
    optimizer = torch.optim.AdamW(parameters, lr=0.02, betas=(0.8, 0.9), eps=1e-7, weight_decay=0.1)
    model = client.model(rank=4, seed=7, train_unembed=True)
    for _ in range(3):
        total, rows = model.forward(data, loss)
        expected, found = plain_loss(other, data, loss)
        assert total == pytest.approx(expected.item(), rel=1e-5)
        for row, x in zip(rows, found, strict=True):
            torch.testing.assert_close(row["logprobs"], x, rtol=1e-5, atol=1e-5)
        expected.backward()
        norm = nn.utils.clip_grad_norm_(parameters, 5.0)
        optimizer.step()
        optimizer.zero_grad()
        said = model.step(learning_rate=0.02, **ADAM)["metrics"]["grad_norm:mean"]
        assert said == pytest.approx(float(norm), rel=1e-4)


def test_several_targets_of_a_token_are_weighted(client, llama):
    targets = torch.randint(5, 300, (4, 3), generator=torch.Generator().manual_seed(1))
    weights = some(4, 3).abs()
    data = [
        ([5, 6, 7, 8], {"target_tokens": targets, "weights": weights}),
        datum([9, 10, 11]),
        ([5, 6], {"target_tokens": targets[:2], "weights": weights[:2]}),
    ]
    other, parameters = plain(llama, 2, targets=("attention", "ffn", "head"))
    expected = torch.zeros(())
    for (ids, given), w in zip(data, (weights, torch.ones(2, 1), weights[:2]), strict=True):
        x = other(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = expected - (w * x.gather(1, given["target_tokens"].view(len(ids), -1))).sum()
    expected.backward()
    model = client.model(rank=2, seed=7, train_unembed=True)
    total, rows = model.forward(data)
    assert [row["logprobs"].shape for row in rows] == [(4, 3), (2,), (2, 3)]
    assert total == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(rows[0]["elementwise_loss"], -rows[0]["logprobs"] * weights)
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    assert model.step()["metrics"]["grad_norm:mean"] == pytest.approx(float(norm), rel=1e-4)


def test_gspo_takes_the_ratio_of_a_whole_datum(client, llama):
    data = [rewarded(1), rewarded(2)]
    for _, inputs in data:
        inputs["sequence_ratio_mask"] = (torch.arange(7) > 2).float()
    x = [log_probs(llama, ids, given["target_tokens"]).detach() for ids, given in data]
    expected = 0.0
    for each, (_, given) in zip(x, data, strict=True):
        mask = given["sequence_ratio_mask"]
        s = float((((each - given["logprobs"]) * mask).sum() / mask.sum()).exp())
        a = given["advantages"]
        expected -= float(torch.minimum(s * a, min(max(s, 0.8), 1.2) * a).sum())
    assert client.model().forward(data, "gspo")[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.smoke
def test_gradients_add_up_until_the_step_and_forward_alone_adds_none(client):
    whole, parts, none = (client.model(seed=3) for _ in range(3))
    whole.forward(CE_DATA)
    for one in CE_DATA:
        parts.forward([one])
        parts.forward(CE_DATA, forward_only=True)
    expected = whole.step(learning_rate=0.1)["metrics"]["grad_norm:mean"]
    assert parts.step(learning_rate=0.1)["metrics"]["grad_norm:mean"] == pytest.approx(
        expected, rel=1e-5
    )
    after = whole.forward(CE_DATA)[0]
    assert parts.forward(CE_DATA)[0] == pytest.approx(after, rel=1e-5)
    before = none.forward(CE_DATA, forward_only=True)[0]
    assert none.step(learning_rate=0.1)["metrics"]["grad_norm:mean"] == 0.0
    assert none.forward(CE_DATA)[0] == pytest.approx(before, rel=1e-5) != after


def test_tenants_of_unlike_ranks_learn_what_each_learns_alone(client):
    alone = [train_steps(client.model(**config), 4) for config in MIXED_RANKS]
    models = [client.model(**config) for config in MIXED_RANKS]
    mixed: list[list[Any]] = [[] for _ in MIXED_RANKS]
    for _ in range(4):
        for told, model in zip(mixed, models, strict=True):
            told += train_steps(model, 1)
    assert mixed == alone
    assert alone[0] != alone[2]


def test_offloaded_tenants(client, monkeypatch, tmp_path):
    alone = [train_steps(client.model(**config), 3) for config in MIXED_RANKS]
    monkeypatch.setattr(tenants, "MAX_LOADED", 1)
    models = [client.model(**config) for config in MIXED_RANKS]
    away = tmp_path / "state" / "tinker" / "away"
    assert len(list(away.iterdir())) == 5
    mixed: list[list[Any]] = [[] for _ in MIXED_RANKS]
    for _ in range(3):
        halves = [model.forward(CE_DATA) for model in models]  # the gradient is offloaded
        for told, model, (total, rows) in zip(mixed, models, halves, strict=True):
            told += [total, [row["logprobs"].tolist() for row in rows]]
            told.append(model.step(learning_rate=0.05))
    assert mixed == alone


def test_common_beginnings_are_computed_once(client, llama):
    model = client.model()
    model.forward(CE_DATA)  # probes the base
    seen: list[int] = []
    handle = llama.model.embed_tokens.register_forward_hook(
        lambda module, args, out: seen.append(args[0].numel())
    )
    prompt = list(range(5, 45))
    alone = [
        model.forward([datum([*prompt, token, 7])], forward_only=True)[0] for token in (50, 51)
    ]
    together, _ = model.forward([datum([*prompt, token, 7]) for token in (50, 51)])
    handle.remove()
    assert together == pytest.approx(sum(alone), rel=1e-5)
    assert seen[-1] < sum(seen[:2]) * 0.75


class Memory:
    """Runs out of memory in the backward pass of batches above a number of tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
        self.most, self.failures = most, 0
        losses = learner.DatumTask.losses

        def bounded(task: Any, model: Any, head: Any, rows: Any, *rest: Any) -> Any:
            summed, *found = losses(task, model, head, rows, *rest)
            if sum(len(row.input_ids) for row in rows) > self.most and summed.requires_grad:
                summed.register_hook(self._fail)
                for parameter in (p for p in model.parameters() if p.requires_grad):
                    parameter.grad = torch.full_like(parameter, 1e6)  # a partial gradient
            return summed, *found

        monkeypatch.setattr(learner.DatumTask, "losses", bounded)

    def _fail(self, grad: Tensor) -> None:
        self.failures += 1
        raise torch.OutOfMemoryError("out of memory")


def test_fewer_rows_give_the_same_gradient(client, monkeypatch):
    expected = train_steps(client.model(), 2)
    model = client.model()
    model.forward(CE_DATA[:1])
    memory = Memory(monkeypatch, most=6)
    model.forward(CE_DATA[1:])
    norm = model.step(learning_rate=0.05)["metrics"]["grad_norm:mean"]
    assert memory.failures
    assert norm == pytest.approx(expected[2]["metrics"]["grad_norm:mean"], rel=1e-4)
    assert model.forward(CE_DATA)[0] == pytest.approx(expected[3], rel=1e-4)


def test_a_row_too_long_keeps_the_gradient(client, monkeypatch):
    expected = train_steps(client.model(), 1)[2]["metrics"]["grad_norm:mean"]
    model = client.model()
    model.forward(CE_DATA)
    with monkeypatch.context() as patch:
        memory = Memory(patch, most=20)
        failed = model.forward([*CE_DATA, datum(range(5, 60))])
    assert memory.failures
    assert failed["category"] == "user"
    assert "datum 3 alone does not fit" in failed["error"]
    assert model.step()["metrics"]["grad_norm:mean"] == expected


@pytest.mark.parametrize("runs_out", ["in the plan", "in the passes"])
def test_a_row_that_fits_without_the_others_sends_them_to_the_disk(
    client, monkeypatch, tmp_path, runs_out
):
    model, _, _ = (client.model() for _ in range(3))
    expected = model.forward(CE_DATA)[0]
    away, losses = tmp_path / "state" / "tinker" / "away", learner.DatumTask.losses

    def is_full() -> bool:
        return len(list(away.iterdir())) < 2

    def free(device: Any) -> Environment:
        return Environment("cpu", 4000 if is_full() else 1 << 32)

    def bounded(*args: Any) -> Any:
        if is_full():
            raise torch.OutOfMemoryError("out of memory")
        return losses(*args)

    if runs_out == "in the plan":
        monkeypatch.setattr(learner, "free_now", free)
    else:
        monkeypatch.setattr(learner.DatumTask, "losses", bounded)
    assert model.forward(CE_DATA)[0] == pytest.approx(expected, rel=1e-5)


def test_failed_pass_plans_nothing(llama, tokenizer, monkeypatch):
    teacher = Learner(tiny_base(llama, tokenizer))
    tenant = teacher.new(LoRA(rank=2, alpha=32), 1, fresh=True)
    rows = [learner.Datum.of(list(range(5, 25))) for _ in range(4)]
    before, rest = teacher.plan, (LOSSES["cross_entropy"], Settings(), True)
    with monkeypatch.context() as patch:
        Memory(patch, most=10)
        with pytest.raises(learner.RequestError, match="alone does not fit"):
            teacher.forward(tenant, rows, *rest)
    assert teacher.plan == before
    Memory(monkeypatch, most=40)
    teacher.forward(tenant, rows, *rest)
    assert teacher.plan.less_than(before)


def test_a_step_out_of_memory_is_repeated(client, monkeypatch):
    first, second = (client.model(seed=3) for _ in range(2))
    expected = (first.forward(CE_DATA), first.step(grad_clip_norm=1.0), first.forward(CE_DATA))
    zeros, num_calls = torch.zeros_like, 0

    def bounded(*args: Any, **named: Any) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 4:  # at the optimizer state of the second parameter
            raise torch.OutOfMemoryError("out of memory")
        return zeros(*args, **named)

    before = second.forward(CE_DATA)
    monkeypatch.setattr(torch, "zeros_like", bounded)
    stepped = second.step(grad_clip_norm=1.0)
    assert num_calls > 4
    assert stepped["metrics"]["grad_norm:mean"] > 1.0
    assert (before[0], stepped, second.forward(CE_DATA)[0]) == (
        *(expected[0][0], expected[1]),
        expected[2][0],
    )


def test_a_gradient_that_is_not_finite_is_dropped_and_nothing_else(client):
    model = client.model()
    expected = model.forward(CE_DATA)[0]
    model.step(learning_rate=0.0)
    ids, inputs = datum([5, 6, 7], logprobs=[-300.0, 0.0], advantages=[1.0, 1.0])
    assert abs(model.forward([(ids, inputs)], "importance_sampling")[0]) == float("inf")
    failed = model.step()
    assert failed["category"] == "user"
    assert "not finite" in failed["error"]
    assert model.forward(CE_DATA)[0] == pytest.approx(expected, rel=1e-5)
    assert model.step()["metrics"]["grad_norm:mean"] > 0


def test_a_gradient_is_whole_before_its_factor_grows(llama, tokenizer):
    teacher = Learner(tiny_base(llama, tokenizer))
    tenant = teacher.new(LoRA(rank=2, alpha=32), 1, fresh=True)
    teacher.fitting.scale = scale = LossScale(needed=True)  # as on a GPU with fp16
    before, rows = scale.factor, [learner.Datum.of([5, 6, 7, 8, 9])]

    def gradients(backward: bool = True) -> list[Tensor | None]:
        teacher.forward(tenant, rows, LOSSES["cross_entropy"], Settings(), backward)
        return tenant.take_gradients()

    expected = gradients()
    scale.good_steps = scale.GROWTH_STEPS - 1
    gradients(backward=False)
    assert (scale.factor, scale.good_steps) == (before, scale.GROWTH_STEPS - 1)
    torch.testing.assert_close(gradients(), expected)
    assert scale.factor == 2 * before
    torch.testing.assert_close(gradients(), expected)


def test_rows_are_planned_by_size(llama, tokenizer, monkeypatch):
    teacher = Learner(tiny_base(llama, tokenizer))
    tenant = teacher.new(LoRA(rank=2, alpha=32), 1, fresh=True)
    rows = [learner.Datum.of(list(range(5, 5 + length))) for length in (90, 30, 20, 10)]
    loss = LOSSES["cross_entropy"]
    _, expected = teacher.forward(tenant, rows, loss, Settings(), True)
    gradients = tenant.take_gradients()
    cost = dict(teacher._costs_of(tenant))["keep"]
    modes, sizes = [], []
    seated, losses = Learner.seated, learner.DatumTask.losses

    def seen(self: Any, tenant: Any, activations: Any = "keep") -> Any:
        modes.append(activations)
        return seated(self, tenant, activations)

    def counted(task: Any, model: Any, head: Any, rows: Any, *rest: Any) -> Any:
        sizes.append([len(row.input_ids) for row in rows])
        return losses(task, model, head, rows, *rest)

    monkeypatch.setattr(Learner, "seated", seen)
    monkeypatch.setattr(learner.DatumTask, "losses", counted)
    for tokens, mode in ((110, "keep"), (80, "recompute")):
        free = int(cost * tokens / learner.AUTO_SHARE) + tenant.num_later + tenant.num_bytes
        monkeypatch.setattr(learner, "free_now", lambda device, free=free: Environment("cpu", free))
        modes.clear(), sizes.clear()
        _, total = teacher.forward(tenant, rows, loss, Settings(), True)
        assert (modes, total) == ([mode], pytest.approx(expected, rel=1e-5))
        assert len(sizes) > 1 if mode == "keep" else len(sizes) >= 1
        for before, after in zip(gradients, tenant.take_gradients(), strict=True):
            torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(learner, "free_now", lambda device: Environment("cpu", 4000))
    with pytest.raises(learner.RequestError, match="alone does not fit"):
        teacher.forward(tenant, rows, loss, Settings(), True)
