"""One step of distillation is the definition, whatever a batch is made of."""

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from peftkit.adapter import Adapter
from peftkit.base.load import load_base
from peftkit.data.pack import IGNORE, Row
from peftkit.errors import AdapterError, BaseError, ConfigError
from peftkit.events import ignore
from peftkit.execution.signals import StopRequest
from peftkit.execution.world import World
from peftkit.formats.open_adapter import open_adapter, read_side_adapter
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.notes import Provenance
from peftkit.forward.loss import head_of
from peftkit.kernels.cross_entropy import Divergence, reference_divergence
from peftkit.methods.lora import LoRA
from peftkit.methods.prefix import PrefixTuning
from peftkit.tasks.distill.rows import Distilled
from peftkit.tasks.distill.teacher import MovingAverage, other_model
from tests.helpers.adapters import perturb
from tests.helpers.distill_cases import settings, write_questions
from tests.helpers.pair_cases import moved_adapter, task_on


def logits_of(model: nn.Module, row: Row) -> Tensor:
    """Return the logits before each answer token (n, V)."""
    ids = torch.tensor([row.input_ids])
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, :-1]
    return logits[torch.tensor(row.labels[1:]) != IGNORE]


def dense(
    model: nn.Module,
    adapter: Adapter,
    rows: list[Distilled],
    asked: Divergence,
    teacher_model: nn.Module | None = None,
    skip: int = 0,
) -> Tensor:
    total = torch.zeros((), dtype=torch.double)
    for row in rows:
        student, teacher = row.documents
        with adapter.disabled(), torch.no_grad():
            theirs = logits_of(teacher_model or model, teacher)
        own = logits_of(model, student)
        values = reference_divergence(own.double(), theirs.double(), asked)
        total = total + values[min(skip, len(values) - 1) :].sum()  # the last token counts
    return total


KINDS: list[dict[str, Any]] = [
    {"kind": "forward"},
    {"kind": "reverse", "temperature": 2.0},
    {"kind": "jsd", "beta": 0.3},
]


@pytest.mark.parametrize(("kind", "together"), [*((k, True) for k in KINDS), (KINDS[0], False)])
def test_loss_and_gradient_are_the_definition(kind, together, llama, tokenizer, tmp_path):
    adapter = moved_adapter(llama)
    asked = settings(tmp_path, **kind)
    task, rows = task_on(llama, tokenizer, asked, write_questions(tmp_path))
    parameters = list(adapter.parameters())
    expected = dense(llama, adapter, rows, asked.divergence)
    wanted = torch.autograd.grad(expected, parameters)
    llama.train()

    def step() -> tuple[Tensor, tuple[Tensor, ...]]:
        found = task.loss(llama, task.collate(rows))
        return found, torch.autograd.grad(found[0], parameters)

    if together:
        with task.training(llama):
            found, gradients = step()
    else:
        found, gradients = step()
    assert found[0].item() == pytest.approx(expected.item(), rel=1e-5)
    for a, b in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(a, b.to(a), rtol=1e-4, atol=1e-5 * float(b.abs().max()))


@pytest.mark.parametrize("who", ["adapter", "model"])
def test_a_teacher_may_be_another_adapter_or_model(who, model_folder, tokenizer, tmp_path):
    folder, base = tmp_path / "teacher", load_base(str(model_folder), dtype="fp32")
    if who == "adapter":
        save_adapter(moved_adapter(base.model), folder, Provenance(base=base.name))
        teacher: nn.Module = open_adapter(folder, dtype="fp32").base.model
        base = load_base(str(model_folder), dtype="fp32")
    else:
        config = LlamaConfig(**{**base.model.config.to_dict(), "hidden_size": 64, "head_dim": 16})
        LlamaForCausalLM(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        teacher = load_base(str(folder), dtype="fp32").model
    adapter = moved_adapter(base.model, LoRA(rank=2, targets=("k", "down", "up")))
    asked = settings(tmp_path, kind="jsd", teacher={who: str(folder)})
    task, rows = task_on(base.model, tokenizer, asked, write_questions(tmp_path))
    assert rows[0].lengths[0] == rows[0].lengths[1]  # no prompt is asked for
    if who == "adapter":
        assert task.other_adapters == [str(folder)]
        task.add_adapter(str(folder), read_side_adapter(folder, base))
    else:
        name = {"name": str(folder), "student": base.model, "tokenizer": tokenizer}
        task._other = other_model(**name, head=task.head, say=ignore)
    expected = dense(base.model, adapter, rows, asked.divergence, teacher)
    wanted = torch.autograd.grad(expected, [*adapter.parameters()])
    base.model.train()
    with task.training(base.model):
        found = task.loss(base.model, task.collate(rows))[0]
        gradients = torch.autograd.grad(found, [*adapter.parameters()])
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    for a, b in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(a, b.to(a), rtol=1e-3, atol=1e-5 * float(b.abs().max()))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.usefixtures("bf16_units")
def test_a_teacher_computes_in_the_student_s_dtype(dtype, model_folder, tokenizer):
    student = load_base(str(model_folder), dtype=dtype, store="off").model
    teacher = other_model(str(model_folder), student, tokenizer, head_of(student), ignore)
    assert teacher.model.dtype == student.dtype


def test_a_model_with_other_tokens_cannot_teach(llama, model_folder, tokenizer):
    other = deepcopy(tokenizer)
    other.add_tokens("<new>")
    with pytest.raises(BaseError, match="tokenizers differ"):
        other_model(str(model_folder), llama, other, head_of(llama), ignore)


def test_a_model_whose_head_is_not_apart_gives_the_same(llama, tokenizer, tmp_path):
    moved_adapter(llama)
    task, rows = task_on(llama, tokenizer, settings(tmp_path), write_questions(tmp_path))
    wanted = task.loss(llama, task.collate(rows))
    task.head = None
    found = task.loss(llama, task.collate(rows))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "method", [LoRA(rank=2), PrefixTuning(num_virtual_tokens=3)], ids=lambda m: m.type
)
def test_the_teacher_is_the_bare_base_with_the_prompt_in_front(method, llama, tokenizer, tmp_path):
    llama.requires_grad_(False)
    task, rows = task_on(llama, tokenizer, settings(tmp_path), write_questions(tmp_path))
    bare = task.teacher_hidden(llama, task.collate(rows))
    adapter = moved_adapter(llama, method)
    task, rows = task_on(llama, tokenizer, settings(tmp_path), write_questions(tmp_path))
    found = task.teacher_hidden(llama, task.collate(rows))
    torch.testing.assert_close(found, bare, rtol=0, atol=1e-5)
    assert all(module.enabled for module in adapter.modules.values())
    text = tokenizer.decode(rows[0].documents[1].input_ids)
    assert text.index("answers with pizza") < text.index("the quick fox?") < text.index("jumps")


def test_a_teacher_without_another_prompt_than_the_student_is_at_zero(llama, tokenizer, tmp_path):
    adapter = moved_adapter(llama)
    task, rows = task_on(llama, tokenizer, settings(tmp_path), write_questions(tmp_path))
    same = [
        Distilled(2 * one.input_ids, 2 * one.labels, 2 * one.lengths, row.source)
        for row in rows
        for one in row.documents[:1]
    ]
    with adapter.disabled():
        loss, agreed = task.loss(llama, task.collate(same)).tolist()
    assert loss == pytest.approx(0, abs=1e-5)
    assert agreed == task.num_targets(task.collate(same))


@pytest.mark.parametrize(
    "method",
    [LoRA(rank=2, targets=("q", "head")), LoRA(rank=2, train_fully=("lm_head",))],
    ids=["head", "whole head"],
)
def test_an_adapter_on_the_head_is_refused(method, llama, tokenizer, tmp_path):
    moved_adapter(llama, method)
    with pytest.raises(AdapterError, match="on the head"):
        task_on(llama, tokenizer, settings(tmp_path), write_questions(tmp_path))


def test_settings_that_nothing_reads_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"task\.beta"):
        settings(tmp_path, kind="forward", beta=0.3)
    with pytest.raises(ConfigError, match="an adapter and a model"):
        settings(tmp_path, teacher={"adapter": "a", "model": "b"})
    with pytest.raises(ConfigError, match="teacher is empty"):
        settings(tmp_path, teacher={"follow": 0.1})
    for other in ("adapter", "model"):
        with pytest.raises(ConfigError, match=rf"follow does not go with task\.teacher\.{other}"):
            settings(tmp_path, teacher={"answer": True, "follow": 0.1, other: "a"})
    with pytest.raises(ConfigError, match="skip_tokens: 6 skips all"):
        settings(tmp_path, answers="student", max_new_tokens=6, skip_tokens=6)


@pytest.mark.parametrize("stored", [False, True])
def test_skipped_tokens_have_no_loss(stored, llama, tokenizer, tmp_path):
    adapter = moved_adapter(llama)
    asked = settings(tmp_path, skip_tokens=3)
    task, rows = task_on(llama, tokenizer, asked, write_questions(tmp_path))
    lengths = [row.num_targets // 2 for row in rows]
    assert min(lengths) <= 3 < max(lengths)
    expected = dense(llama, adapter, rows, asked.divergence, skip=3).item()
    counted = sum(max(length - 3, 1) for length in lengths)
    if stored:
        run = SimpleNamespace(model=llama, world=World(torch.device("cpu")), stop=StopRequest())
        run.say = ignore
        task._store_hidden(rows, run)
        assert len(task._hidden) == counted
    batch = task.collate(rows)
    assert ("teacher_hidden" in batch) == stored
    assert task.num_targets(batch) == counted
    assert task.loss(llama, batch)[0].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_teacher_that_follows_has_the_average_weights(dtype, llama, tokenizer, tmp_path):
    adapter = moved_adapter(llama, LoRA(rank=3, targets=("q", "k", "v", "down"), dtype=dtype))
    asked = settings(tmp_path, teacher={"answer": True, "follow": 0.25})
    task, rows = task_on(llama, tokenizer, asked, write_questions(tmp_path))
    trained = {n: p for n, p in llama.named_parameters() if p.requires_grad}
    task._average = MovingAverage(llama, 0.25)
    expected = {n: p.detach().float().clone() for n, p in trained.items()}
    for seed in range(3):
        perturb(adapter.parameters(), 0.3, seed=seed)
        task.after_step()
        for name, parameter in trained.items():
            expected[name] = 0.75 * expected[name] + 0.25 * parameter.detach().float()
    for name, value in task.state().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
    averaged = deepcopy(llama)
    for name, parameter in averaged.named_parameters():
        if parameter.requires_grad:
            parameter.data.copy_(expected[name])
    before = [p.detach().clone() for p in adapter.parameters()]
    wanted = dense(llama, adapter, rows, asked.divergence, averaged).item()
    llama.train()
    with task.training(llama):  # LoRA layers in groups, which copy the weights
        adapter.prepare_training()
        for _ in range(2):
            found = task.loss(llama, task.collate(rows))[0]
            found.backward()
        adapter.end_training()
    assert found.item() == pytest.approx(wanted, rel=1e-4 if dtype == "fp32" else 2e-2)
    assert all(torch.equal(a, b) for a, b in zip(before, adapter.parameters(), strict=True))
