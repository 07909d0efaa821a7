"""What the benchmarks train on, and how time is sorted by kind."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import families, shapes
from benchmarks.orders import make_rows
from benchmarks.profile import kind_of, shares
from benchmarks.workers import ours, run_group
from benchmarks.workers.peft_loop import collate


def test_mixed_rows_are_as_uneven_as_conversations(tmp_path):
    lines = make_rows(tmp_path, 400, "mixed").read_text().splitlines()
    words = sorted(len(json.loads(line)["output"].split()) for line in lines)
    assert len(lines) == 400
    assert words[40] < median(words) / 3
    assert words[360] > 2 * median(words)
    again = make_rows(tmp_path / "again", 400, "mixed").read_text().splitlines()
    assert again == lines


@pytest.mark.parametrize("task", ["causal_lm", "masked_lm", "seq2seq"])
def test_rows_learn_what_their_task_learns(task):
    rows = families.make_rows(task, 20, shortest=9, longest=41)
    for row in rows:
        ids, labels = row["input_ids"], row["labels"]
        learnt = [label for label in labels if label != -100]
        if task == "seq2seq":
            assert len(learnt) == len(labels) == len(ids) // 2
        elif task == "masked_lm":
            assert len(learnt) == ids.count(families.MASK) == max(1, len(ids) * 15 // 100)
        else:
            assert learnt == ids[len(ids) // 2 :]
    batch = collate(rows, paired=task == "seq2seq")
    lengths = [len(row["input_ids"]) for row in rows]
    assert batch["attention_mask"].sum(1).tolist() == lengths
    assert int((batch["labels"] != -100).sum()) == sum(
        label != -100 for row in rows for label in row["labels"]
    )


def test_our_worker_hides_the_tokens_that_the_rows_say():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    model = shapes.build(shapes.SHAPES["bert"], num_hidden_layers=1, **sizes)
    rows = families.make_rows("masked_lm", 6, shortest=9, longest=41)
    task = ours._task({"rows": rows, "task": "masked_lm"}, model, shapes.tokenizer())
    batch = task.collate([ours._row("masked_lm", n, row) for n, row in enumerate(rows)])
    hidden = [label for row in rows for label in row["labels"] if label != -100]
    assert batch["targets"].tolist() == hidden
    assert torch.isfinite(task.loss(model, batch)[0])


def test_time_is_sorted_by_what_was_called_for():
    weight = torch.randn(16, 16, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], fused=True)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as watched:
        hidden = torch.nn.functional.silu(torch.randn(8, 16) @ weight)
        query = hidden.view(1, 2, 4, 16)
        attended = torch.nn.functional.scaled_dot_product_attention(query, query, query)
        loss = torch.nn.functional.cross_entropy(attended.reshape(8, 16), torch.arange(8))
        loss.backward()
        optimizer.step()
    found = shares(watched.events(), device_time=False)
    assert {"matmul", "attention", "loss", "optimizer", "pointwise"} <= found.keys()
    assert all(time >= 0 for time in found.values())
    assert kind_of(["aten::mul", "Optimizer.step#AdamW.step"]) == "optimizer"
    assert kind_of(["aten::mul", "aten::silu_backward"]) == "pointwise"
    assert kind_of(["graph_0_cpp_fused_add_1"]) == "compiled"
    assert kind_of(["aten::view"]) == "other"


FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(60)
"""


@pytest.mark.covers("benchmarks")
def test_a_worker_out_of_time_takes_its_children_along(tmp_path):
    told = tmp_path / "child"
    with pytest.raises(subprocess.TimeoutExpired):
        run_group([sys.executable, "-c", FAMILY, str(told)], os.environ, seconds=1)
    child = int(told.read_text())
    for _ in range(100):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail(f"process {child} is still there")
