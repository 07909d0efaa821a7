"""A step's gradient is that of one mean over its targets, whatever the step is cut into."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from peftkit.train.batches import StatelessSampler
from tests.helpers.toy import Toy, ToyTask, make_rows, play, step_of

# Sums of the same few hundred fp32 terms in another order.
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-7}
ROWS = make_rows(8)  # of 3 to 9 tokens


def gradients_of_a_step(model: nn.Module, **changes: Any) -> dict[str, Tensor]:
    """Return what the optimizer is given in one step over ROWS."""
    step, seen = step_of(model, ToyTask(), **changes), dict[str, Tensor]()

    def watch(*_: object) -> None:
        seen.update({n: p.grad.clone() for n, p in step.parameters.items() if p.grad is not None})

    step.optimizer.register_step_pre_hook(watch)
    step(ROWS, 0.1)
    return seen


def reference_gradients() -> dict[str, Tensor]:
    model, task = Toy(), ToyTask()
    batch = task.collate(ROWS)
    (task.loss(model, batch)[0] / task.num_targets(batch)).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_close(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], **CLOSE)


@pytest.mark.parametrize("batch_size", [8, 4, 3, 1])
def test_a_step_cut_into_batches_has_the_gradient_of_the_whole(batch_size):
    accumulation = -(-8 // batch_size)
    gradients = gradients_of_a_step(
        Toy(), batch_size=batch_size, gradient_accumulation=accumulation, max_grad_norm=None
    )
    assert_close(gradients, reference_gradients())


def test_a_mean_of_means_would_be_noticed_here():
    """The rows' lengths differ enough for the field's oldest bug to show."""
    model, task = Toy(), ToyTask()
    for row in ROWS:
        batch = task.collate([row])
        (task.loss(model, batch)[0] / task.num_targets(batch) / len(ROWS)).backward()
    wrong = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    right = reference_gradients()
    assert any(not torch.allclose(wrong[name], right[name], rtol=1e-2) for name in right)


def test_gradients_are_scaled_down_to_the_largest_norm_allowed():
    free = gradients_of_a_step(Toy(), max_grad_norm=None)
    clipped = gradients_of_a_step(Toy(), max_grad_norm=0.01)
    norm = torch.stack([g.norm() for g in free.values()]).norm()
    assert float(norm) > 0.1
    assert_close(clipped, {name: gradient * 0.01 / norm for name, gradient in free.items()})


@pytest.mark.parametrize("batch_size", [4, 2, 1])
def test_a_run_is_a_plain_loop_over_its_groups(batch_size, tmp_path):
    rows, task, model = make_rows(14), ToyTask(), Toy()
    trained = [p for p in model.parameters() if p.requires_grad]
    plain = torch.optim.AdamW(trained, lr=0.02, weight_decay=0.0)
    losses = []
    order = StatelessSampler(14, 4, seed=0)
    for step in range(12):
        batch = task.collate([rows[index] for index in order.step_indices(step)])
        loss = task.loss(model, batch)[0] / task.num_targets(batch)
        plain.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        plain.step()
        losses.append(float(loss.detach()))
    cut = {"batch_size": batch_size, "gradient_accumulation": 4 // batch_size}
    run = play(tmp_path, schedule="constant", warmup_ratio=0.0, weight_decay=0.0, **cut)
    assert run.losses == pytest.approx(losses, rel=1e-4)


def test_a_gradient_that_is_a_transposed_view_is_read_right():
    """The fused CPU AdamW reads a gradient with the parameter's strides, without a word."""

    def transposed(parameter: nn.Parameter) -> None:
        parameter.grad = parameter.grad.t().contiguous().t()

    plain, twisted = Toy(), Toy()
    assert isinstance(twisted.lora_A.weight, nn.Parameter)
    twisted.lora_A.weight.register_post_accumulate_grad_hook(transposed)
    for model in (plain, twisted):
        step = step_of(model, ToyTask())
        for _ in range(3):
            step(ROWS, 0.1)
    assert torch.equal(plain.lora_A.weight, twisted.lora_A.weight)


def test_a_parameter_without_a_gradient_gets_zeros():
    model = Toy()
    model.unused = nn.Parameter(torch.ones(3, 3))
    step = step_of(model, ToyTask(), weight_decay=0.5)
    step(ROWS, 0.1)
    # only the decay has moved it: 1 - 0.1 x 0.5
    torch.testing.assert_close(model.unused.data, torch.full((3, 3), 0.95))


@pytest.mark.parametrize("num_rows", [1, 4, 13, 14])
def test_every_epoch_has_every_row_once_and_in_its_own_order(num_rows):
    order = StatelessSampler(num_rows, 4, seed=3)
    epochs = [
        [
            i
            for step in range(order.steps_per_epoch)
            for i in order.step_indices(e * order.steps_per_epoch + step)
        ]
        for e in range(3)
    ]
    assert all(sorted(epoch) == list(range(num_rows)) for epoch in epochs)
    assert num_rows == 1 or num_rows == 4 or len({tuple(epoch) for epoch in epochs}) == 3


def test_the_order_of_a_step_depends_on_nothing_but_seed_and_step():
    forward, backward = StatelessSampler(14, 4, seed=3), StatelessSampler(14, 4, seed=3)
    steps = list(range(12))
    indices = {step: backward.step_indices(step) for step in reversed(steps)}
    assert [forward.step_indices(step) for step in steps] == [indices[step] for step in steps]
    assert [StatelessSampler(14, 4, seed=4).step_indices(step) for step in steps] != [
        indices[s] for s in steps
    ]


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_processes_share_a_group_evenly_and_without_overlap(world_size):
    order = StatelessSampler(14, 4, seed=3)
    for step in range(4):
        shares = [order.step_indices(step, rank, world_size) for rank in range(world_size)]
        assert sorted(i for share in shares for i in share) == sorted(order.step_indices(step))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
