"""Compiled blocks: the same numbers, decided by config and rows alone, and never the run's end."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from peftkit.adapter import attach
from peftkit.errors import RunError
from peftkit.events import RunStarted
from peftkit.execution import rng
from peftkit.forward import batch_layout
from peftkit.forward import blocks as blocks_module
from peftkit.forward.attention import training_attention
from peftkit.forward.blocks import Blocks
from peftkit.methods.lora import LoRA
from peftkit.settings import DataConfig
from peftkit.tasks.tokens import CausalLM
from peftkit.train import memory
from peftkit.train.compiled import why_refused
from peftkit.train.step import Step
from tests.helpers.adapters import gradients as gradients_of
from tests.helpers.families import ARCHITECTURES, FAMILIES
from tests.helpers.padding_free import row_of
from tests.helpers.toy import (
    CausalTask,
    Deep,
    Played,
    Row,
    ToyTask,
    crash_after,
    make_rows,
    play,
    same,
    step_of,
)

# torch.compile itself uses what torch has deprecated; who runs Python as usual does not see it
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
IDS = torch.arange(36).remainder(23).view(3, 12) + 3
LONGER = torch.arange(60).remainder(19).view(3, 20) + 3


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Trace as ever, and generate no code: that takes most of the time."""
    torch.compiler.reset()
    counters.clear()
    monkeypatch.setattr(blocks_module, "BACKEND", "eager")
    yield monkeypatch
    torch.compiler.reset()


def adapted(family: str, dropout: float = 0.0, targets: Any = "all-linear") -> nn.Module:
    torch.manual_seed(0)
    model = ARCHITECTURES[family]().train()
    adapter = attach(model, LoRA(rank=3, dropout=dropout, targets=targets))
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.1)
    adapter.prepare_training()
    model.config.use_cache = False
    return model


def gradients(model: nn.Module, *batches: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model.zero_grad(set_to_none=True)
    with training_attention(model):
        for ids in batches:
            model(input_ids=ids, labels=ids).loss.backward()
    return gradients_of(model)


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert a
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        *(
            pytest.param(f, marks=pytest.mark.slow)
            for f in ("gpt2", "gemma2", "qwen3_moe", "bert", "t5")
        ),
    ],
)
def test_blocks_are_one_graph_with_their_groups(family, backend):
    model = adapted(family)
    for layers in [m for m in model.modules() if isinstance(m, nn.ModuleList)]:
        if any(layer in Blocks(model).blocks for layer in layers):
            del layers[1:]  # one of a kind is enough, and half the work
    wanted = gradients(model, IDS, LONGER)
    blocks = Blocks(model)
    blocks.compile()
    assert_close(gradients(model, IDS, LONGER), wanted)
    assert not counters["graph_break"]
    blocks.restore()
    assert not any(block._compiled_call_impl for block in blocks.blocks)


def test_documents_of_any_length_share_a_graph(backend, tokenizer):
    model = adapted("llama", targets=("v",))
    task = CausalLM(model, tokenizer, DataConfig(train="", max_length=64))
    batches = [[row_of(n) for n in lengths] for lengths in ((39, 20, 30), (52, 35, 20), (17,) * 7)]

    def learnt() -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        with task.training(model):
            for rows in batches:
                batch = task.collate(rows)
                assert "grid_tokens" in batch
                task.loss(model, batch)[0].backward()
        return gradients_of(model)

    wanted = learnt()
    blocks = Blocks(model)
    blocks.compile()
    # a run asks before it compiles
    backend.setattr(batch_layout, "why_padded", lambda model, attention, share: "")
    assert_close(learnt(), wanted)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1
    blocks.restore()


def test_scales_of_layers_make_no_graph_more(backend):
    torch.manual_seed(0)
    model = ARCHITECTURES["llama"]().train()
    names = {f"layers.0.mlp.{name}_proj": 7 for name in ("up", "down")}
    attach(model, LoRA(rank=4, targets=("up", "down"), alpha_pattern=names)).prepare_training()
    model.config.use_cache = False
    blocks = Blocks(model)
    blocks.compile()
    gradients(model, IDS)
    assert counters["stats"]["unique_graphs"] == 1
    blocks.restore()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["recompute", "offload"])
def test_compiling_and_recomputing_are_exact(way, backend):
    model = adapted("llama", dropout=0.2, targets=("v",))
    wanted = gradients(model, IDS, LONGER)
    blocks = Blocks(model)
    blocks.set_activations(way)
    blocks.compile()
    assert_close(gradients(model, IDS, LONGER), wanted)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2  # the first block's input needs no gradient
    with blocks.eagerly():
        again = adapted("llama", dropout=0.2, targets=("v",))
        assert_close(gradients(model, IDS), gradients(again, IDS))
    blocks.restore()


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("device", "threshold"), [("cpu", 1.2e13), ("cuda", 4e16), ("mps", float("inf"))]
)
def test_long_runs_are_compiled(device, threshold, monkeypatch):
    for work, is_long in ((min(0.9 * threshold, 1e30), False), (threshold, threshold < 1e30)):
        step, events = step_of(Deep(), ToyTask()), []
        step.run.listeners.append(events.append)
        step.use(replace(step.plan, device=device))
        monkeypatch.setattr(memory, "work_of", lambda run: min(work, 1e30))  # noqa: B023
        monkeypatch.setattr(Blocks, "why_not_compiled", lambda blocks: "Not here.")
        memory.compile_blocks(step.run, step)
        assert bool(events) == is_long


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("family", "kinds"), [("llama", 1), ("gpt2", 1), ("bert", 1), ("bart", 2), ("t5", 4)]
)
def test_blocks_that_are_built_alike_are_of_one_kind(family, kinds):
    assert Blocks(adapted(family)).num_kinds == kinds


@pytest.mark.smoke
def test_the_work_of_a_run_is_its_tokens_times_the_parameters():
    rows = make_rows(14)
    run = step_of(Deep(), CausalTask(), batch_size=4, max_steps=7).run
    parameters = sum(p.numel() for p in run.model.parameters())
    tokens = sum(len(row.input_ids) for row in rows)
    run.rows = rows
    assert memory.work_of(run) == pytest.approx(7 * 8 / 14 * tokens * parameters)
    run.rows = rows[:2]
    assert memory.work_of(run) == 7 * (3 + 4) * parameters


def compiling(folder: Path, **changes: Any) -> Played:
    model = changes.pop("model", None) or Deep(dropout=0.3)
    return play(folder, model=model, **{"compile": True, **changes})


def paths_of(run: Played) -> str:
    return next(event.paths for event in run.events if isinstance(event, RunStarted))


@pytest.mark.smoke
def test_a_compiled_run_is_the_run(tmp_path, backend):
    plain = compiling(tmp_path / "a", compile=False)
    run = compiling(tmp_path / "b")
    assert run.error is None
    assert run.notices == []
    assert counters["stats"]["unique_graphs"] > 0
    assert run.losses == pytest.approx(plain.losses, rel=1e-6)
    assert "blocks: compiled" in paths_of(run)
    assert "blocks: not compiled" in paths_of(plain)
    assert not any(block._compiled_call_impl for block in run.model.blocks)


def test_a_compiled_run_resumes_to_the_bit(tmp_path, backend):
    whole = compiling(tmp_path / "a")
    compiling(tmp_path / "b", on_event=crash_after(5))
    torch.compiler.reset()
    rest = compiling(tmp_path / "b", resume=True)
    assert rest.losses == whole.losses[5:]
    assert same(rest.weights, whole.weights)


def test_auto_compiles_what_is_long_enough(tmp_path, backend):
    short = compiling(tmp_path / "a", compile="auto")
    backend.setattr(memory, "MIN_WORK", {"cpu": 1e5})
    long = compiling(tmp_path / "b", compile="auto")
    assert "not compiled" in paths_of(short)
    assert "blocks: compiled" in paths_of(long)


def broken(*_: Any) -> Any:
    raise RuntimeError("no code for you\nand more of it")


MEND = "Set train.compile: false, or remove the cause."
CAUSES = {
    "backend": ("no code for you", MEND),
    "blocks": ("Deep has no blocks", MEND),
    "compiler": (
        "There is no C++ compiler",
        "Install a C++ compiler; on Debian and Ubuntu: apt-get install g++",
    ),
}
"""What the notice of each cause has, and how it ends."""


@pytest.mark.parametrize("cause", CAUSES)
def test_compile_failures_are_eager(cause, tmp_path, backend):
    backend.setattr(memory, "MIN_WORK", {"cpu": 0.0})
    plain = compiling(tmp_path / "plain", compile=False)
    if cause == "backend":
        backend.setattr(blocks_module, "BACKEND", broken)
    elif cause == "compiler":
        backend.setattr("peftkit.forward.compiler.cpp_compiler", lambda: None)
    else:
        backend.setattr("peftkit.model.blocks.RECOMPUTABLE", "OtherLayer")
    text, fix = CAUSES[cause]
    run = compiling(tmp_path / "a", compile="auto")
    (notice,) = run.notices
    assert notice.startswith("Blocks are not compiled. ")
    assert notice.endswith("Each step takes longer; its numbers are the same. " + fix)
    assert text in notice
    assert "\n" not in notice
    assert run.losses == plain.losses
    compiling(tmp_path / "b").failed(RunError, text)


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "no gradient": lambda x: x.detach(),
    "a gradient that is a thousandth too large": lambda x: x * 1.001 - (x * 0.001).detach(),
    "another loss": lambda x: x + 0.001,
    "not a number": lambda x: x * float("nan"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_code_that_computes_other_numbers_is_refused(fault, tmp_path, backend):
    def wrong(graph: Any, _: Any) -> Any:
        return lambda *args: tuple(WRONG[fault](out) for out in graph(*args))

    backend.setattr(memory, "MIN_WORK", {"cpu": 0.0})
    plain = compiling(tmp_path / "plain", compile=False)
    backend.setattr(blocks_module, "BACKEND", wrong)
    run = compiling(tmp_path / "a", compile="auto")
    (notice,) = run.notices
    assert "computes other numbers than eager blocks: " in notice
    assert ("the gradient of start differs by 1 of" in notice) == (fault == "no gradient")
    assert run.losses == plain.losses
    compiling(tmp_path / "b").failed(RunError, "computes other numbers")


def test_a_gradient_of_a_is_compared_though_b_is_zero(backend):
    def without_a(graph: Any, _: Any) -> Any:
        def run(*args: Any) -> Any:
            assert any(x is layer.lora_A for x in args)
            return graph(*(x.detach() if x is layer.lora_A else x for x in args))

        return run

    torch.manual_seed(0)
    model = ARCHITECTURES["llama"]()
    del model.model.layers[1:]
    attach(model, LoRA(rank=3, targets=("v",)))
    layer: Any = model.model.layers[0].self_attn.v_proj
    assert not layer.lora_B.any()
    step = step_of(model, CausalTask())
    assert why_refused(step.run, step) == ""
    torch.compiler.reset()
    backend.setattr(blocks_module, "BACKEND", without_a)
    assert "v_proj.lora_A differs by 1 of its norm" in why_refused(step.run, step)
    step.blocks.restore()


@pytest.mark.parametrize("backend_name", ["eager", "inductor"])
def test_the_comparison_leaves_no_trace(backend_name, backend):
    """With inductor, the only fast test that generates code: for two small blocks."""
    backend.setattr(blocks_module, "BACKEND", backend_name)
    step = step_of(Deep(dropout=0.3), ToyTask())
    model, device = step.run.model, torch.device("cpu")
    before = rng.capture(device), {n: x.clone() for n, x in model.state_dict().items()}
    assert why_refused(step.run, step) == ""
    assert counters["stats"]["unique_graphs"] > 0
    assert same(before[0], rng.capture(device))
    assert same(before[1], model.state_dict())
    assert all(p.grad is None for p in model.parameters())
    assert not any(block._forward_hooks for block in step.blocks.blocks)
    step.blocks.restore()


def test_rows_that_do_not_fit_are_compared_in_part(backend):
    seen, step = [], step_of(Deep(), ToyTask(), batch_size=2)

    def loss(rows: Any) -> Tensor:
        seen.append(len(rows))
        if len(rows) > few:
            raise torch.OutOfMemoryError
        return Step.loss(step, rows)

    backend.setattr(step, "loss", loss)
    few = 1
    assert why_refused(step.run, step) == ""
    assert seen == [2, 1, 1, 1]
    few = 0
    assert why_refused(step.run, step).startswith("Memory ran out")
    step.blocks.restore()


def test_a_failure_within_a_run_is_one_notice(tmp_path, backend):
    calls = []

    def later(graph: Any, _: Any) -> Any:
        calls.append(graph)
        if len(calls) > 1:  # a form that the first rows do not have
            raise RuntimeError("no code for you")
        return graph.forward

    backend.setattr(blocks_module, "BACKEND", later)
    rows = [*make_rows(14), make_rows(1)[0]]  # the last step of an epoch has one batch of one row
    # without dropout, for rows in other batches; the first block is compiled for the second too
    plain = compiling(tmp_path / "a", compile=False, rows=rows, gradient_accumulation=1)
    run = compiling(tmp_path / "b", rows=rows, gradient_accumulation=1)
    assert run.error is None
    (notice,) = run.notices
    assert "Blocks run eagerly from now on, which is slower. " in notice
    assert "no code for you" in notice
    assert run.losses == plain.losses


def test_a_resumed_run_does_not_decide_anew(tmp_path, backend):
    compiling(tmp_path, compile="auto", on_event=crash_after(5))
    backend.setattr(memory, "MIN_WORK", {"cpu": 0.0})
    rest = compiling(tmp_path, compile="auto", resume=True)
    assert "not compiled" in paths_of(rest)


@pytest.mark.slow
def test_generated_code_trains_a_transformer_and_resumes_to_the_bit(tmp_path):
    """Code for one row and for several: half a minute."""
    rows = [Row(tuple(range(3, 3 + n)), (0,) * n, f"{n}") for n in (5, 12, 30, 9, 17, 6, 21)]

    def run(folder: str, **changes: Any) -> Played:
        torch.manual_seed(0)
        model = FAMILIES["llama"]()
        del model.model.layers[1:]
        attach(model, LoRA(rank=3, dropout=0.1))
        settings = {"batch_size": 2, "gradient_accumulation": 1, "max_steps": 8, "rows": rows}
        return play(tmp_path / folder, model=model, task=CausalTask(), **{**settings, **changes})

    torch.compiler.reset()
    plain, whole = run("plain"), run("whole", compile=True)
    assert whole.error is None
    assert whole.notices == []
    # dropout draws the same numbers in generated code
    assert whole.losses == pytest.approx(plain.losses, rel=1e-5)
    run("parted", compile=True, on_event=crash_after(5))
    torch.compiler.reset()
    rest = run("parted", compile=True, resume=True)
    assert rest.losses == whole.losses[5:]
    assert same(rest.weights, whole.weights)
    torch.compiler.reset()
