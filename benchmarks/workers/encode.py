"""Encode the rows of a file by one method; see benchmarks/encoding.py.

Also runs in the peers' environment, where nothing of peftkit is imported.
"""

from __future__ import annotations

import json
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers

from benchmarks.workers.meter import read_job


class Watch:
    """Peak memory of this process and its children, shared pages counted once.

    Attributes:
        anonymous: Bytes without a file. mapped: Bytes of files, which the system can reclaim.
    """

    def __enter__(self) -> Watch:
        self._before = _held()
        self.anonymous = self.mapped = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.1):
            self._note()

    def _note(self) -> None:
        anonymous, mapped = _held()
        self.anonymous = max(self.anonymous, anonymous - self._before[0])
        self.mapped = max(self.mapped, mapped - self._before[1])

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self._note()


def _held() -> tuple[int, int]:
    anonymous = mapped = 0
    for pid in _family("self"):
        with suppress(OSError):  # it has ended meanwhile
            told = dict(
                line.split(":", 1)
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
            )
            anonymous += _bytes(told["Pss_Anon"])
            mapped += _bytes(told["Pss_File"]) + _bytes(told["Pss_Shmem"])
    return anonymous, mapped


def _bytes(told: str) -> int:
    return int(told.split()[0]) * 1024


def _family(pid: str) -> Iterator[str]:
    yield pid
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from _family(child)


def ours(job: dict[str, Any], tokenizer: Any) -> Any:
    """As peftkit."""
    from peftkit.data.encode import DocumentEncoder
    from peftkit.data.rows.cache import encoded

    encoder = DocumentEncoder(tokenizer, None, "auto", 1024)
    return encoded(job["path"], encoder, processes=job["processes"])


def by_map(job: dict[str, Any], tokenizer: Any) -> Any:
    """Encode like a script with datasets."""

    def encode(row: dict[str, Any]) -> dict[str, list[int]]:
        text = tokenizer.apply_chat_template(row["prompt"] + row["completion"], tokenize=False)
        return {"input_ids": tokenizer(text)["input_ids"]}

    rows = datasets.load_dataset("json", data_files=job["path"], split="train")
    return rows.map(encode, remove_columns=rows.column_names, num_proc=job["processes"])


def by_trl(job: dict[str, Any], tokenizer: Any) -> Any:
    """Encode with TRL's SFTTrainer and an empty model."""
    from trl import SFTConfig, SFTTrainer

    small = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    rows = datasets.load_dataset("json", data_files=job["path"], split="train")
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder,
            max_length=1024,
            dataset_num_proc=job["processes"],
            completion_only_loss=True,
            report_to=[],
            use_cpu=True,
            bf16=False,
        )
        trainer = SFTTrainer(
            transformers.LlamaForCausalLM(small), config, train_dataset=rows,
            processing_class=tokenizer,
        )  # fmt: skip
    return trainer.train_dataset


def main() -> None:
    """Encode, read 1,000 random rows, draw an order, and print time and memory."""
    job = read_job()
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["tokenizer"])
    tokenizer("warm up")
    if job["way"] == "trl":
        import trl  # noqa: F401 - not part of the measurement
    with Watch() as watch:
        began = time.perf_counter()
        rows = {"map": by_map, "trl": by_trl}.get(job["way"], ours)(job, tokenizer)
        chosen = random.Random(0).choices(range(len(rows)), k=1_000)
        is_ours = job["way"] in ("ours", "again")
        total = sum(len(rows[n].input_ids if is_ours else rows[n]["input_ids"]) for n in chosen)
        order = torch.randperm(len(rows))
        seconds = time.perf_counter() - began
    assert total > 0
    assert len(order) == len(rows)
    print()
    found = {"seconds": seconds, "anonymous": watch.anonymous, "mapped": watch.mapped}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
