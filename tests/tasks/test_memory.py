"""Measuring a task when memory is short: batches are halved, and one row too large is told."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from peftkit.errors import RunError
from peftkit.settings import DataConfig
from peftkit.tasks.tokens import CausalLM

SIGN = "CUDA out of memory. Tried to allocate 2.00 GiB"


def short_of_memory(model: torch.nn.Module, positions: int) -> None:
    """Have a model fail where a batch has more places for tokens than this."""

    def refuse(_: object, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        if inputs["input_ids"].numel() > positions:
            raise RuntimeError(SIGN)

    model.register_forward_pre_hook(refuse, with_kwargs=True)


def rows_of(tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel, folder: Path) -> Any:
    texts = [f'{{"text": "{"the fox " * length}"}}\n' for length in range(1, 11)]
    (folder / "rows.jsonl").write_text("".join(texts))
    config = DataConfig(train="", max_length=64, packing=False)
    task = CausalLM(model, tokenizer, config)
    return task, task.load(str(folder / "rows.jsonl"))


@pytest.mark.covers("peftkit")
def test_evaluation_uses_smaller_batches_if_memory_is_short(llama, tokenizer, tmp_path):
    task, rows = rows_of(tokenizer, llama, tmp_path)
    expected = task.metrics(llama, rows)
    longest = max(len(row.input_ids) for row in rows)
    short_of_memory(llama, 2 * longest)
    found = task.metrics(llama, rows)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)  # sums in another order
    assert found["num_targets"] == expected["num_targets"]


@pytest.mark.covers("peftkit")
def test_a_row_that_does_not_fit_by_itself_is_named_and_so_is_what_would_fit(
    llama, tokenizer, tmp_path
):
    task, rows = rows_of(tokenizer, llama, tmp_path)
    fitting = max(len(row.input_ids) for row in rows if len(row.input_ids) <= 16)
    short_of_memory(llama, 16)  # rows are padded to multiples of some size
    with pytest.raises(RunError, match=rf"rows\.jsonl[\s\S]*Rows of {fitting} tokens would fit"):
        task.metrics(llama, rows)
