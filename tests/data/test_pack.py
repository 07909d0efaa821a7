"""Documents are packed whole and in a fixed order; batches are padded on the right."""

import random

import pytest
import torch

from peftkit.data.pack import IGNORE, PackedRows, Row, collate
from peftkit.data.rows.lazy import View


def pack(rows: list[Row], max_length: int) -> list[Row]:
    return list(PackedRows(View([rows]), max_length))


def document(length: int, line: int, num_targets: int = 1) -> Row:
    ids = tuple(range(100 * line, 100 * line + length))
    labels = (IGNORE,) * (length - num_targets) + ids[length - num_targets :]
    return Row(ids, labels, (length,), f"a.jsonl:{line}")


@pytest.mark.parametrize("seed", range(2))
def test_no_document_is_lost_split_or_doubled(seed):
    draw = random.Random(seed)
    rows = [document(draw.randint(1, 41), line) for line in range(99)]
    packed = pack(rows, 41)
    assert all(len(row.input_ids) <= 41 for row in packed)
    documents = []
    for row in packed:
        start = 0
        for length in row.lengths:
            documents.append((row.input_ids[start : start + length], row.labels[start:][:length]))
            start += length
    assert sorted(documents) == sorted((row.input_ids, row.labels) for row in rows)
    # best fit is never far from the bound: the sum of lengths over the room of a row
    assert len(packed) <= 1.25 * sum(len(row.input_ids) for row in rows) / 41 + 1


def test_packing_is_deterministic_and_keeps_the_order_given():
    rows = [document(length, line) for line, length in enumerate((3, 9, 4, 6, 1, 10))]
    packed = pack(rows, 10)
    sources = ["a.jsonl:0", "a.jsonl:1,4", "a.jsonl:2,3", "a.jsonl:5"]
    assert [row.source for row in packed] == sources
    assert [row.lengths for row in packed] == [(3,), (9, 1), (4, 6), (10,)]
    assert pack(rows, 10) == packed
    assert pack(packed[3:], 10) == packed[3:]


def test_a_batch_is_padded_on_the_right_and_restarts_positions():
    packed = Row((5, 6, 7, 8, 9), (IGNORE, 6, IGNORE, 8, 9), (2, 3), "a")
    short = Row((4, 3), (IGNORE, 3), (2,), "b")
    batch = collate([packed, short], pad_id=6)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 6, 6, 6], [4, 3, 6, 6, 6, 6, 6, 6]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5]]
    # the padding token is a learnt one here: labels are masked by position, not by token
    assert batch["labels"].tolist() == [
        [IGNORE, 6, IGNORE, 8, 9, *[IGNORE] * 3],
        [IGNORE, 3, *[IGNORE] * 6],
    ]
    # the positions before the learnt tokens, in (B * T)
    assert batch["target_index"].tolist() == [0, 2, 3, 8]
    assert batch["targets"].tolist() == [6, 8, 9, 3]
    assert all(tensor.dtype == torch.long for tensor in batch.values())


@pytest.mark.parametrize(("limit", "width"), [(None, 16), (16, 16), (13, 13), (9, 9)])
def test_widths_are_multiples_of_eight_if_positions_allow(limit, width):
    batch = collate([document(9, 1), document(3, 2)], 0, limit)
    assert {batch[name].shape for name in ("input_ids", "labels", "position_ids")} == {(2, width)}
    assert batch["target_index"].tolist() == [7, width + 1]


def test_a_documents_first_token_is_not_predicted_from_the_one_before():
    batch = collate(pack([document(4, 1, num_targets=3), document(4, 2, num_targets=3)], 8), 0)
    assert batch["target_index"].tolist() == [0, 1, 2, 4, 5, 6]
