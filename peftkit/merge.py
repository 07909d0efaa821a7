"""Merging: an adapter folded into its base, which is then an ordinary model.

Into the original 16- or 32-bit weights, W' = method.merged_weight(W) in float32, one tensor at a
time over the base's files, without building the model. Where the names on disk are not those of the
modules, or there are no such files (GGUF), the model is loaded and saved whole. Either way the
result is loaded again and compared with base and adapter on a few prompts.
"""

from __future__ import annotations

import gc
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from peftkit import files
from peftkit.adapter import Adapter
from peftkit.base import Base, load_base
from peftkit.errors import AdapterError, MergeError, OutputError, RunError
from peftkit.events import Listener, Notice, Progress, Saved, Stage, Table, ignore
from peftkit.formats.card import Card, write_card
from peftkit.formats.folder import Opened, adapter_folder, open_adapter
from peftkit.formats.peft import AdapterFile, read_adapter
from peftkit.formats.shards import Shards, copy_companions, find_shards, rewrite_shards
from peftkit.methods.protocol import AdapterModule
from peftkit.quant import weight_of

Dtype = Literal["bf16", "fp16", "fp32"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

PROMPTS = (
    "The capital of France is",
    "Question: If I have three apples and eat one, how many are left?\nAnswer:",
    '{"name": "Anna", "order": ["pizza", "salad"], "total":',
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
)
"""What the merged model is compared on: a fact, a question, data, code."""
