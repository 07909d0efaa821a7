"""Base and adapter folders to merge."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tests.helpers.merging import Saver


@pytest.fixture
def saved(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Saver:
    return Saver(tmp_path, tokenizer)
