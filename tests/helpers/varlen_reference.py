"""What the flash kernel of `torch.nn.attention.varlen` does, by plain products."""

import torch
from torch import Tensor


def reference_varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Return what `varlen.kernel()` does, (N, H, D), with the arguments of every version."""
    groups = query.shape[1] // key.shape[1]
    out = []
    limits = zip(*(x.tolist() for x in (cu_seq_q, cu_seq_k)), strict=True)
    (q_start, k_start), *ends = limits
    for q_stop, k_stop in ends:
        if not (0 < q_stop - q_start <= max_q and 0 < k_stop - k_start <= max_k):
            raise ValueError("a document is longer than the longest, or empty")
        q, k, v = (
            x[start:stop].transpose(0, 1)
            for x, start, stop in (
                (query, q_start, q_stop),
                (key, k_start, k_stop),
                (value, k_start, k_stop),
            )
        )
        k, v = (x[:, None].expand(-1, groups, -1, -1).flatten(0, 1) for x in (k, v))
        scores = q @ k.mT * scale
        places = [torch.arange(x.shape[1], device=x.device) for x in (q, k)]
        distance = places[0][:, None] + k.shape[1] - q.shape[1] - places[1]
        left, right = window_size
        hidden = ((distance > left) & (left >= 0)) | ((-distance > right) & (right >= 0))
        probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out.append((probs @ v).transpose(0, 1))
        q_start, k_start = q_stop, k_stop
    return torch.cat(out)
