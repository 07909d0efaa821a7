"""Learning rates, groups, and the four forms of AdamW."""

from typing import Any

import pytest
import torch
from torch import nn

from peftkit.errors import CheckpointError, ConfigError
from peftkit.settings import TrainConfig
from peftkit.train.optim import (
    LossScale,
    build_optimizer,
    learning_rate,
    load_optimizer_state,
    optimizer_state,
    parameter_groups,
)
from tests.helpers.toy import Toy, ToyTask, crash_after, make_rows, play, same, step_of


def rates(**changes: object) -> list[float]:
    config = TrainConfig(learning_rate=1.0, **changes)  # type: ignore[arg-type]
    return [learning_rate(step, 10, config) for step in range(10)]


def test_warm_up_rises_to_the_peak_and_never_is_zero():
    assert rates(warmup_ratio=0.3, schedule="constant") == [0.25, 0.5, 0.75, *[1.0] * 7]


def test_cosine_and_linear_fall_from_the_peak_towards_zero():
    for schedule, middle in (("cosine", 0.5), ("linear", 0.5)):
        factors = rates(warmup_ratio=0.0, schedule=schedule)
        assert factors[0] == 1.0
        assert factors[5] == pytest.approx(middle)
        assert 0 < factors[9] < 0.11
        assert factors == sorted(factors, reverse=True)


def test_loraplus_moves_lora_B_further(tmp_path):
    start = Toy()
    moved = {
        ratio: play(tmp_path / str(ratio), max_steps=1, loraplus_ratio=ratio, weight_decay=0.0)
        for ratio in (1.0, 4.0)
    }
    step = {r: run.weights["lora_B.weight"] - start.lora_B.weight for r, run in moved.items()}
    # Adam's first step is the sign of the gradient times the learning rate
    torch.testing.assert_close(step[4.0], 4 * step[1.0], rtol=1e-3, atol=1e-6)
    others = ({**run.weights, "lora_B.weight": start.magnitude} for run in moved.values())
    assert same(*others)


def test_only_matrices_decay():
    parameters = dict(Toy().named_parameters())
    groups = parameter_groups(parameters, TrainConfig(weight_decay=0.1))
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    undecayed = {name for name, p in parameters.items() if decay[id(p)] == 0.0}
    assert undecayed == {"base.bias", "magnitude"}


def test_adamw_is_torchs_fused_one():
    optimizer = build_optimizer({"w": nn.Parameter(torch.ones(2, 2))}, TrainConfig())
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["fused"] is True


@pytest.mark.parametrize("name", ["paged_adamw", "paged_adamw_8bit"])
def test_paged_optimizers_without_a_gpu_are_refused_with_the_one_to_use(name):
    with pytest.raises(ConfigError, match=f"Use train.optimizer: {name.removeprefix('paged_')}"):
        build_optimizer({"w": nn.Parameter(torch.ones(2, 2))}, TrainConfig(optimizer=name))


def test_8_bit_adamw_keeps_large_states_in_8_bits_and_reads_them_back():
    def parameters() -> dict[str, nn.Parameter]:
        generator = torch.Generator().manual_seed(0)
        return {
            "large": nn.Parameter(torch.randn(64, 128, generator=generator)),
            "small": nn.Parameter(torch.randn(9, generator=generator)),
        }

    config = TrainConfig(optimizer="adamw_8bit")
    first, second = parameters(), parameters()
    optimizer, resumed = build_optimizer(first, config), build_optimizer(second, config)

    def step(optimizer: torch.optim.Optimizer, ps: dict[str, nn.Parameter], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for p in ps.values():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()

    step(optimizer, first, 1)
    tensors, numbers = optimizer_state(optimizer, first)
    assert tensors["large/state1"].dtype == torch.uint8
    assert numbers == {"large/step": 1, "small/step": 1}
    with torch.no_grad():
        for name in second:
            second[name].copy_(first[name])
    load_optimizer_state(resumed, second, {n: t.clone() for n, t in tensors.items()}, numbers)
    step(optimizer, first, 2)
    step(resumed, second, 2)
    assert same(first, second)
    assert same(optimizer_state(optimizer, first)[0], optimizer_state(resumed, second)[0])


def test_a_state_that_does_not_fit_lists_every_reason():
    parameters = {"w": nn.Parameter(torch.ones(2, 2))}
    optimizer = build_optimizer(parameters, TrainConfig())
    tensors = {"w/exp_avg": torch.zeros(3, 3), "w/step": torch.zeros(()), "v/step": torch.zeros(())}
    with pytest.raises(CheckpointError) as caught:
        load_optimizer_state(optimizer, parameters, tensors, {})
    assert caught.value.found.splitlines() == [
        "missing or misshapen: w/exp_avg",
        "missing or misshapen: w/exp_avg_sq",
        "unexpected: v/step",
    ]


def test_the_loss_scale_falls_on_overflow_and_rises_again():
    scale = LossScale(needed=True)
    before = scale.factor
    assert scale.overflowed()
    assert scale.factor == before / 2
    for _ in range(LossScale.GROWTH_STEPS):
        scale.went_well()
    assert scale.factor == before
    while scale.overflowed():
        pass
    assert scale.factor == 1.0


def test_without_fp16_the_loss_is_not_scaled():
    scale = LossScale(needed=False)
    assert not scale.overflowed()
    for _ in range(LossScale.GROWTH_STEPS):
        scale.went_well()
    assert scale.factor == 1.0


class Overflow(torch.autograd.Function):
    """A gradient that is too large for 16 bits."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.where(gradient.abs() > 100, float("inf"), gradient)


class Half(Toy):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return Overflow.apply(super().forward(ids))


def test_a_step_that_overflows_is_done_again_at_a_lower_scale_and_learns_the_same():
    plain, scaled = step_of(Toy(0.3), ToyTask()), step_of(Half(0.3), ToyTask())
    scaled.fitting.scale = LossScale(needed=True)
    for step in (plain, scaled):
        torch.manual_seed(0)
        for _ in range(3):
            step(make_rows(8), 0.1)
    assert 1.0 < scaled.fitting.scale.factor < 2.0**16
    assert scaled.fitting.scale.good_steps == 3
    for name, parameter in plain.parameters.items():
        # the factor is a power of two: only fused multiply-adds round otherwise
        torch.testing.assert_close(scaled.parameters[name], parameter, rtol=1e-5, atol=1e-6)


def test_8_bit_adamw_trains_and_resumes_in_a_run(tmp_path):
    whole = play(tmp_path / "a", optimizer="adamw_8bit")
    assert whole.error is None
    play(tmp_path / "b", optimizer="adamw_8bit", on_event=crash_after(5))
    rest = play(tmp_path / "b", optimizer="adamw_8bit", resume=True)
    assert rest.losses == whole.losses[5:]
    assert same(rest.weights, whole.weights)
