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
    """Return what `varlen.kernel()` does, (N, H, D), with the arguments of every version.

    As the kernel, it reads the offsets on the device alone. It returns NaN if a document is longer
    than the longest.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    documents, places = [], []  # of queries and keys: their document, and how far before its end
    for x, ends in ((query, cu_seq_q), (key, cu_seq_k)):
        place = torch.arange(len(x), device=x.device)
        document = torch.searchsorted(ends[1:].long(), place, right=True)
        documents.append(document)
        places.append(place - ends.long()[document + 1])
    distance = places[0][:, None] - places[1]
    left, right = window_size
    hidden = ((distance > left) & (left >= 0)) | ((-distance > right) & (right >= 0))
    hidden |= documents[0][:, None] != documents[1]
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    out = torch.einsum("hqk,khd->qhd", probs, value)
    is_too_long = (cu_seq_q.diff() > max_q).any() | (cu_seq_k.diff() > max_k).any()
    return out.masked_fill(is_too_long, torch.nan)
