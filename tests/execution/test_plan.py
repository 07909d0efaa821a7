"""The next step of what takes less memory: before a run by counts, in it when memory runs out."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from peftkit.execution.plan import Activations, ExecutionPlan, activation_modes, plan_from
from peftkit.kernels.device import busy_tokens
from peftkit.train.fitting import Fitting, choose

COSTS: list[tuple[Activations, float]] = [("keep", 10.0), ("recompute", 4.0), ("offload", 2.0)]
ALL: tuple[Activations, ...] = ("keep", "recompute", "offload")


@pytest.mark.parametrize(
    ("available", "tokens", "expected"),
    [
        (3200, None, ("keep", None)),  # 4 rows of 80
        (3199, None, ("keep", 319)),
        (800, None, ("keep", 80)),
        (799, None, ("recompute", 199)),
        (320, None, ("recompute", 80)),
        (319, None, ("offload", 159)),
        (159, None, None),
        (-1, None, None),
        (1600, 160, ("keep", 160)),
        (1599, 160, ("keep", 159)),
        (800, 16, ("keep", 16)),  # one row alone may have more
        (799, 16, ("recompute", 16)),
    ],
)
def test_the_first_step_that_fits_is_chosen(available, tokens, expected):
    requested = ExecutionPlan(rows=4, tokens=tokens)
    chosen = choose(requested, COSTS, available, 80)
    assert (None if chosen is None else (chosen.activations, chosen.tokens)) == expected


def test_rows_without_tokens_are_planned_by_rows():
    requested = ExecutionPlan(rows=4)
    assert choose(requested, COSTS, 39, 1) == replace(requested, rows=3)
    assert choose(requested, COSTS, 9, 1) == replace(requested, activations="recompute", rows=2)


@pytest.mark.parametrize(
    ("available", "expected"),
    [
        (10 * 8000, ("keep", 8000)),
        (10 * 5000, ("keep", 5000)),
        (10 * 4000, ("recompute", None)),  # 4,000 tokens would leave this GPU waiting
        (4 * 5000, ("recompute", 5000)),
        (4 * 4000, ("recompute", 4000)),  # and so do these, but nothing takes more
    ],
)
def test_a_gpu_recomputes_first(available, expected):
    requested = ExecutionPlan(device="cuda", rows=200, busy_tokens=4096)
    chosen = choose(requested, COSTS[:2], available, 50)
    assert (chosen.activations, chosen.tokens) == expected


@pytest.mark.parametrize(
    ("teraflops", "parameters", "blocks", "expected"),
    [
        (132, 8.0e9, 32, 660),  # an 8B on an RTX 4090
        (780, 8.0e9, 32, 3900),  # on an H100
        (132, 0.49e9, 24, 4096),  # a 0.5B
        (20, 8.0e9, 32, 512),  # on an RTX 3060
        (0, 8.0e9, 32, 1),  # on a CPU
    ],
)
def test_tokens_that_keep_a_card_busy_follow_from_model_and_card(
    teraflops, parameters, blocks, expected
):
    assert busy_tokens(teraflops * 1e12, int(parameters), blocks) == expected


def test_an_8b_keeps_its_activations_on_24_gb():
    """In nf4 it keeps 3.1 MB a token; 16.3 GB are left, and 660 tokens keep the card busy."""
    costs = list(zip(ALL, (3.1e6, 0.405e6, 0.19e6), strict=True))
    requested = ExecutionPlan(device="cuda", rows=8, tokens=16_384, busy_tokens=660)
    chosen = choose(requested, costs, 16.3e9, 1024)
    assert (chosen.activations, chosen.tokens) == ("keep", 5258)


@pytest.mark.parametrize("available", range(100, 1001, 37))
def test_memory_is_full_and_as_few_blocks_as_possible_are_recomputed(available):
    """A row of 100 tokens: each block of 4 takes a quarter of the difference of two modes."""
    costs: list[tuple[Activations, float]] = [("keep", 10.0), ("selective", 6.0)]
    costs += [("recompute", 3.0), ("offload", 1.0)]
    requested = ExecutionPlan(rows=1)
    chosen = choose(requested, costs, available, 100, num_blocks=4)
    quarters = [10, 9, 8, 7, 6, 5.25, 4.5, 3.75, 3, 1]
    least = next(n for n, cost in enumerate(quarters) if 100 * cost <= available)
    modes = [("keep", None), *(("selective", n) for n in (1, 2, 3, None))]
    modes += [*(("recompute", n) for n in (1, 2, 3, None)), ("offload", None)]
    assert (chosen.activations, chosen.num_recomputed) == modes[least]
    assert plan_from(chosen.as_dict()) == chosen
    assert chosen.is_selective == (0 < least < 8)
    without = choose(requested, [costs[0], *costs[2:]], available, 100, num_blocks=4)
    assert without.num_recomputed is None, "blocks without feed-forward layers change together"


def test_selective_plans_recompute_more_blocks_when_memory_runs_out():
    modes: tuple[Activations, ...] = ("keep", "selective", "recompute", "offload")
    first = ExecutionPlan(activations="selective", num_recomputed=3)
    shown = [(plan.activations, plan.num_recomputed) for plan in (first, *steps(first, modes, 10))]
    assert shown[:4] == [
        ("selective", 3),
        ("selective", None),
        ("recompute", None),
        ("offload", None),
    ]
    (less, *_) = steps(first, modes, 10)
    assert "activations of feed-forward layers are recomputed" in less.less_than(first)
    compiled = steps(ExecutionPlan(compile=True), modes, 10)
    assert compiled[0].activations == "recompute", "compiled blocks are recomputed as a whole"


def test_tiles_and_main_memory_are_the_last_resort():
    """Recomputed blocks repeat a product for tiles; offloaded inputs need main memory."""
    tiled = list(zip(ALL, (10.0, 2.0, 1.0), strict=True))
    requested = ExecutionPlan(rows=4, tokens=200)

    def chosen(available: float, most: int | None = None) -> tuple[str, bool, int | None] | None:
        plan = choose(requested, COSTS, available, 80, tiled=tiled, most_offloaded=most)
        return None if plan is None else (plan.activations, plan.tiles, plan.tokens)

    assert chosen(320) == ("recompute", False, 80)
    assert chosen(200) == ("offload", False, 100)
    assert chosen(200, most=90) == ("offload", False, 90)
    assert chosen(200, most=70) == ("recompute", True, 100)
    assert chosen(159) == ("offload", True, 159)
    assert chosen(159, most=79) is None
    fitting = fitting_of(requested, ALL, 80)
    fitting.most_offloaded = 100
    rows = [[SimpleNamespace(input_ids=range(80))]]
    smaller = fitting.smaller(replace(requested, activations="recompute"), rows)
    assert (smaller.activations, smaller.tiles, smaller.tokens) == ("offload", True, 100)
    last = replace(smaller, tiles=False)  # counted to fit, and one row still ran out
    assert fitting.smaller(last, rows) == smaller
    assert fitting.smaller(smaller, rows) is None


def fitting_of(plan: ExecutionPlan, modes: tuple[Activations, ...], length: int) -> Fitting:
    return Fitting(plan, modes, lambda rows: len(rows) * length, needs_scale=False)


def steps(plan: ExecutionPlan, modes: tuple[Activations, ...], length: int) -> list[ExecutionPlan]:
    """Return all steps after a plan, for many rows of one length."""
    fitting, passed = fitting_of(plan, modes, length), []
    row = SimpleNamespace(input_ids=range(length))
    next_plan: ExecutionPlan | None = plan
    while next_plan is not None:
        passed.append(next_plan)
        limit = next_plan.rows
        if next_plan.tokens is not None:
            limit = max(min(limit, next_plan.tokens // length), 1)
        next_plan = fitting.smaller(next_plan, [[row] * limit])
    return passed[1:]


def test_a_cpu_takes_fewer_rows_before_it_computes_them_twice():
    chosen = steps(ExecutionPlan(rows=4), ("keep", "recompute"), 10)
    shown = [(plan.activations, plan.rows) for plan in chosen]
    assert shown == [("keep", 2), ("keep", 1), ("recompute", 4), ("recompute", 2), ("recompute", 1)]


def test_one_row_longer_than_the_limit_does_not_keep_the_limit_where_it_is():
    plans = [ExecutionPlan(rows=8, tokens=1280)]
    row = SimpleNamespace(input_ids=range(1000))
    for _ in range(2):
        less = fitting_of(plans[0], ("keep",), 1000).smaller(plans[-1], [[row, row]])
        plans.append(less)
    assert [plan.tokens for plan in plans] == [1280, 640, 320]


def test_a_gpu_is_kept_busy_as_long_as_another_step_takes_less():
    plan = ExecutionPlan(device="cuda", rows=16, tokens=16_384, busy_tokens=4096)
    chosen = steps(plan, ALL, 1024)
    shown = [(plan.activations, plan.tokens) for plan in chosen]
    most = [16_384, 8192, 4096]
    assert shown == [
        *(("keep", tokens) for tokens in most[1:]),
        *(("recompute", tokens) for tokens in most),
        *(("offload", tokens) for tokens in [*most, 2048, 1024]),
    ]


def test_what_may_be_kept_follows_the_wish_and_the_model():
    assert activation_modes("auto", on_gpu=True) == ALL
    assert activation_modes("auto", on_gpu=False) == ("keep", "recompute")
    selective = activation_modes("auto", on_gpu=True, selective=True)
    assert selective == ("keep", "selective", "recompute", "offload")
    assert activation_modes(True, on_gpu=True, selective=True) == ("recompute", "offload")
    assert activation_modes(True, on_gpu=True) == ("recompute", "offload")
    assert activation_modes(False, on_gpu=True) == ("keep",)
    assert activation_modes("auto", on_gpu=True, has_blocks=False) == ("keep",)
    assert "keep" not in activation_modes("auto", on_gpu=True, streamed=True)


def test_what_a_device_is_good_at_follows_from_its_kind_alone():
    cpu, cuda = ExecutionPlan(), ExecutionPlan(device="cuda")
    assert cpu.lora_grouped
    assert cuda.lora_grouped
    for plan in (replace(cpu, shard="base"), replace(cuda, group_layers=False)):
        assert not plan.lora_grouped
        assert not plan.fused_kernels
    assert cuda.fused_kernels
    assert cpu.recomputing_keeps_unpacked
    assert not cuda.recomputing_keeps_unpacked
    assert cpu.chunk_bytes < cuda.chunk_bytes


def test_a_plan_is_the_same_after_it_was_saved():
    plan = ExecutionPlan("cuda", 2, shard="offload", activations="offload", rows=3, tokens=77)
    assert plan_from({**plan.as_dict(), "of_a_later_version": 1}) == plan
    shown = plan.describe()
    for part in ("2 x cuda", "sharded over processes", "main memory", "3 rows", "77 tokens"):
        assert part in shown
