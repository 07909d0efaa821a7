"""Where each row of a batch is in the input of each linear layer.

Some models flatten a batch (B, T) to (B * T) tokens before their feed-forward layers (OPT, shared
experts), some put positions before rows (XLNet), some route tokens to experts. Only the first keep
the order of the rows. There is no table of models: the inputs of each layer are compared.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.execution.out_of_memory import is_out_of_memory
from peftkit.forward.loss import accepted
from peftkit.forward.noise import is_noise, noise_of, rounded, sizes_of
from peftkit.kernels.device import forked_generators
from peftkit.model.modes import evaluating
from peftkit.model.places import is_linear

NUM_ROWS, NUM_TOKENS = 3, 5
"""B and T of the probe."""


@torch.no_grad()
def rows_in_order(model: Any) -> dict[str, bool]:
    """Return whether the rows of a layer's input are in the batch's order, by path.

    True: the flattened input is that of the first row, then that of the second, and so on, with the
    same number of vectors for each row. Layers that do not run on tokens alone are missing. Runs
    the model seven times on a few tokens.
    """
    vocab = model.config.get_text_config().vocab_size
    count = torch.arange(NUM_ROWS * NUM_TOKENS, device=model.device)
    ids = count.mul(7).add(3).remainder(vocab).view(NUM_ROWS, NUM_TOKENS)
    try:
        with evaluating(model), forked_generators(model.device):
            together = _inputs(model, ids)
            alone = [_inputs(model, row[None]) for row in ids]
            moved = list(rounded(model, lambda: _inputs(model, ids)))
    except Exception as error:  # whatever a model raises that needs more than tokens
        if is_out_of_memory(error):
            raise
        return {}
    return {
        path: _are_joined(
            found,
            [row[path] for row in alone if path in row],
            [[draw[path]] for draw in moved if path in draw],
        )
        for path, found in together.items()
    }


def _are_joined(
    together: Tensor, parts: Sequence[Tensor], moved: Sequence[Sequence[Tensor]]
) -> bool:
    per_row, rest = divmod(len(together), NUM_ROWS)
    if rest or per_row % NUM_TOKENS or [len(part) for part in parts] != [per_row] * NUM_ROWS:
        return False
    sizes = sizes_of([torch.cat(list(parts))], [together])
    return is_noise(sizes, noise_of(moved, [together]))


def _inputs(model: Any, ids: Tensor) -> Mapping[str, Tensor]:
    """Return each linear layer's input in one forward pass, flattened to vectors, on the CPU."""
    inputs: dict[str, Tensor] = {}

    def watch(path: str, layer: nn.Module) -> Any:
        def note(_: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], Tensor):
                inputs[path] = args[0].float().flatten(0, -2)

        return layer.register_forward_pre_hook(note)

    handles = [watch(path, m) for path, m in model.named_modules() if is_linear(m)]
    try:
        model(**accepted(model, {"input_ids": ids, "use_cache": False}))
    finally:
        for handle in handles:
            handle.remove()
    return {path: tensor.cpu() for path, tensor in inputs.items()}
