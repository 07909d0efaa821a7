"""Data, losses and steps for the server of Tinker's API."""

from typing import Any

import torch
from torch import Tensor

from tests.helpers.wire_client import Model, datum

CE_DATA = [
    datum([5, 6, 7, 8, 9, 10, 11]),
    datum([5, 6, 7, 30, 31, 32], weights=[0, 0, 1, 1, 0.5]),
    datum([40, 41, 42], weights=[-1.0, 0.3]),
]


def train_steps(model: Model, number: int) -> list[Any]:
    """Take some steps; return all that is told of them."""
    told: list[Any] = []
    for _ in range(number):
        total, rows = model.forward(CE_DATA)
        told += [total, [row["logprobs"].tolist() for row in rows]]
        told.append(model.step(learning_rate=0.05))
    return told


MIXED_RANKS = (
    {"rank": 2, "seed": 1},
    {"rank": 5, "seed": 2, "train_mlp": False, "train_unembed": True},
    {"rank": 3, "seed": 1, "train_attn": False},
)


PROMPT = [5, 6, 7, 8]
LENGTHS = (5, 9)


def loss_formula(
    name: str, x: Tensor, i: dict[str, Tensor], lo: float, hi: float, beta: float
) -> Any:
    """Return the sum of losses, token by token."""
    total: Any = 0.0
    starts = (0, LENGTHS[0])
    for n in range(len(x)):
        q, a, w = i["logprobs"][n], i["advantages"][n], i["weights"][n]
        r = (x[n] - q).exp()
        if name == "gspo":
            start = starts[int(i["datum"][n])]
            rows = slice(start, start + LENGTHS[int(i["datum"][n])])
            m = i["sequence_ratio_mask"][rows]
            s = ((x[rows] - i["logprobs"][rows]) * m).sum().div(m.sum()).exp().detach()
            r = s * x[n].exp() / x[n].exp().detach()
        clipped = min(max(r.item(), lo), hi)
        inside = r if lo <= r.item() <= hi else torch.tensor(clipped)
        gain = {
            "cross_entropy": x[n],
            "importance_sampling": r * a,
            "ppo": torch.minimum(r * a, inside * a),
            "gspo": torch.minimum(r * a, inside * a),
            "cispo": clipped * x[n] * a,
            "dro": x[n] * a - beta / 2 * (x[n] - q) ** 2,
        }[name]
        total = total - w * gain
    return total
