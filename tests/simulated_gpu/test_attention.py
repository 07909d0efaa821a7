"""Documents of one row on a card: which kernel takes them apart, and what that waits for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import shapes
from peftkit.events import Event, RunStarted, StepDone
from peftkit.forward import attention_kernels
from peftkit.forward.attention_kernels import Call
from peftkit.forward.attention_trials import MIN_CALLS, Trials
from peftkit.kernels import varlen
from peftkit.kernels.varlen import Spans, spans_of
from peftkit.recipe import Recipe
from peftkit.run import run
from peftkit.settings import DataConfig
from peftkit.tasks.tokens import CausalLM
from tests.helpers.families import ARCHITECTURES
from tests.helpers.varlen_reference import reference_varlen_attn
from tests.simulated_gpu.recipes import recipe_for
from tests.simulated_gpu.same import make_rows
from tests.simulated_gpu.simulation import simulated


def missing(*args: Any, **more: Any) -> Any:
    raise RuntimeError("no kernel image is available for execution on the device")


def task_on(device: str, family: str) -> tuple[Any, CausalLM]:
    torch.manual_seed(0)
    model: Any = ARCHITECTURES[family]().eval().to(torch.bfloat16).to(device)
    data = DataConfig(train="", packing=False, max_length=64)
    return model, CausalLM(model, shapes.tokenizer(), data)


@pytest.mark.parametrize(
    ("family", "kernel", "name"),
    [
        ("llama", reference_varlen_attn, "varlen"),
        ("mistral_swa", reference_varlen_attn, "varlen"),
        ("llama", missing, "sdpa"),
    ],
)
def test_documents_are_taken_apart_by_the_kernel_that_the_header_names(
    family, kernel, name, card, monkeypatch
):
    monkeypatch.setattr(varlen, "kernel", lambda: kernel)
    monkeypatch.setattr(varlen, "is_available", lambda device: device.type == "cuda")
    model, task = task_on("cuda", family)
    rows = make_rows()
    with task.training(model), torch.no_grad():
        assert task.paths["attention"] == name
        assert task.paths["rows"] == "without padding, common beginnings once"
        batch = {n: t.to("cuda") for n, t in task.collate(rows).items()}
        assert ("span_queries" in batch) == (name == "varlen")
        found = float(task.loss(model, batch)[0])
    alone, own = task_on("cpu", family)
    with torch.no_grad():
        assert found == pytest.approx(float(own.loss(alone, own.collate(rows))[0]), rel=0.01)


@pytest.mark.smoke
def test_document_starts_need_no_wait(card, monkeypatch):
    sizes: list[tuple[int, int]] = []

    def passing(query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> Any:
        sizes.append(rest[2:4])
        return query.clone()

    monkeypatch.setattr(varlen, "kernel", lambda: reference_varlen_attn)
    monkeypatch.setattr(varlen, "is_available", lambda device: device.type == "cuda")
    model, task = task_on("cuda", "llama")
    with task.training(model), torch.no_grad():
        batch = {n: t.to("cuda") for n, t in task.collate(make_rows(packed=True)).items()}
        monkeypatch.setattr(varlen, "kernel", lambda: passing)
        card.reset()
        task.loss(model, batch)[0]
        assert [str(wait) for wait in card.waits] == []
    assert len(set(sizes)) == 1  # numbers of Python, read off a shape
    assert all(type(size) is int for pair in sizes for size in pair)


@pytest.mark.parametrize(
    ("kernel", "packing", "name"),
    [
        pytest.param(reference_varlen_attn, False, "varlen", marks=pytest.mark.slow),
        (reference_varlen_attn, True, "varlen"),
        pytest.param(missing, True, "sdpa", marks=pytest.mark.slow),
    ],
)
def test_a_run_in_16_bits_learns_what_the_cpu_does(kernel, packing, name, tmp_path, monkeypatch):
    recipe = recipe_for("causal_lm", tmp_path)
    recipe = recipe.model_copy(
        update={
            "base": recipe.base.model_copy(update={"dtype": "bf16"}),
            "data": recipe.data.model_copy(update={"packing": packing}),
        }
    )
    expected = losses_of(recipe, overwrite=False)
    monkeypatch.setattr(varlen, "kernel", lambda: kernel)
    monkeypatch.setattr(varlen, "is_available", lambda device: device.type == "cuda")
    with simulated():
        found = losses_of(recipe, overwrite=True, header=f"attention: {name};")
    assert found == pytest.approx(expected, rel=0.02)


def losses_of(recipe: Recipe, *, overwrite: bool, header: str = "") -> list[float]:
    events: list[Event] = []
    run(recipe, overwrite=overwrite, on_event=events.append)
    assert [e for e in events if isinstance(e, RunStarted) and header in e.paths]
    return [event.loss for event in events if isinstance(event, StepDone)]


class TwoKernels:
    """The varlen of torch 2.15, which computes by cuDNN if it may, and the time that it takes."""

    def __init__(self, seconds: float, change: Callable[[Tensor], Tensor]) -> None:
        self.now, self._seconds, self._change = 0.0, seconds, change
        self.used: list[str] = []

    def __call__(self, *args: Any, **more: Any) -> Tensor:
        is_cudnn = args[3] is args[4]
        assert torch._C._get_flash_sdp_enabled() != is_cudnn
        self.used.append("cudnn" if is_cudnn else "flash")
        self.now += self._seconds if is_cudnn else 1.0
        out = reference_varlen_attn(*args, **more)
        return self._change(out) if is_cudnn else out


def fails(out: Tensor) -> Tensor:
    raise RuntimeError("cuDNN has no engine for these sizes.\nat line 7")


@pytest.mark.parametrize(
    ("seconds", "change", "report"),
    [
        (0.5, lambda out: out, "for 1 of 1 sets of shapes, up to 2.0 times as fast as the flash"),
        (0.5, lambda out: out * (1 + 2**-10), "for 1 of 1"),  # an eighth of a rounding to bf16
        (0.97, lambda out: out, "for 0 of 1 sets of shapes."),
        (0.5, lambda out: out * 1.02, "for 0 of 1 sets of shapes. It computed another result"),
        (0.5, lambda out: out.detach() + 1.02 * (out - out.detach()), "for 0 of 1"),
        (0.5, fails, "for 0 of 1 sets of shapes. RuntimeError: cuDNN has no engine for these"),
    ],
)
def test_cudnn_computes_documents_if_it_is_faster_and_right(
    seconds, change, report, card, monkeypatch
):
    both = TwoKernels(seconds, change)
    trials = Trials(clock=lambda: both.now)
    monkeypatch.setattr(attention_kernels, "TRIALS", trials)
    monkeypatch.setattr(varlen, "kernel", lambda: both)
    monkeypatch.setattr(varlen, "_chooses_backend", lambda: True)
    torch.manual_seed(0)
    module, spans = nn.Module(), spans_of([range(27), range(27, 36), range(36, 41)], 45)
    spans = Spans(*(tensor.to("cuda") for tensor in spans))
    query, key, value = (
        torch.randn(1, heads, 45, 8, dtype=torch.bfloat16, device="cuda") for heads in (4, 2, 2)
    )

    def used(**more: Any) -> str:
        call = Call(
            *(module, query, key, value, None, 0.0, 0.3, True, None, None, None, spans, more)
        )
        attention_kernels._varlen(call)
        return both.used[-1]

    assert [used() for _ in range(MIN_CALLS - 1)] == ["flash"] * (MIN_CALLS - 1)
    chosen = "cudnn" if report.startswith("for 1") else "flash"
    before = torch.random.get_rng_state(), torch.cuda.get_rng_state()
    assert [used(), used()] == [chosen] * 2
    after = torch.random.get_rng_state(), torch.cuda.get_rng_state()
    assert all(map(torch.equal, before, after))  # dropout draws what it draws without a trial
    assert report in trials.report()
    assert trials.report() == ""
    num_calls = len(both.used)
    assert [used(sliding_window=9) for _ in range(5)] == ["flash"] * 5, "which cuDNN has not"
    assert used() == chosen
    module.eval()
    query = query[:, :, :33]  # other shapes, which no training needs
    key, value, spans = key[:, :, :33], value[:, :, :33], spans_of([range(30)], 33)
    spans = Spans(*(tensor.to("cuda") for tensor in spans))
    assert [used() for _ in range(5)] == ["flash"] * 5
    assert len(both.used) == num_calls + 11, "it was tried again"
