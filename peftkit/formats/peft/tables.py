"""Tables of tokens in PEFT's files: the embedding and the head, trained or frozen.

PEFT saves both tables with an adapter if the base was resized, or if one of them is a target. The
names of the frozen table of a module at `path`:

- `path.weight`: the module is not adapted;
- `path.base_layer.weight`: it has LoRA;
- `path.token_adapter.base_layer.weight`: some of its rows are trained;
- `path.original_module.weight`: it is trained in full. The trained table is `path.weight`, which
  `path.modules_to_save.weight` repeats.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from peftkit.errors import AdapterError
from peftkit.formats.peft.targets import trained_fully
from peftkit.model.places import embedding_of, token_tables

_FROZEN = re.compile(r"(?:\.(original_module|(?:token_adapter\.)?base_layer))?\.(weight|bias)$")
_COPY = re.compile(r"\.modules_to_save(?=\.(?:weight|bias)$)")


def split_tables(
    model: nn.Module, fields: Mapping[str, object], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split a file's tensors into the adapter's and the base's frozen tables."""
    paths, full = token_tables(model), trained_fully(fields, model)
    ours: dict[str, Tensor] = {}
    tables: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = _FROZEN.search(name)
        path = name[: match.start()] if match else ""
        if path in paths and match and (match[1] or path not in full):
            tables[name] = tensor
        elif _COPY.search(name) and _COPY.sub("", name).rpartition(".")[0] in paths:
            ours.setdefault(_COPY.sub("", name), tensor)
        else:
            ours[name] = tensor
    return ours, tables


def restore_tables(
    model: nn.Module, tables: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> dict[str, nn.Parameter]:
    """Give a base the number of tokens and the frozen tables of an adapter's file, in place.

    Args:
        tables, tensors: The base's tables, and the adapter's tensors.

    Returns:
        File name to parameter for the tables of a resized base, and for tables that differed. Tied
        tables occur once, tables of modules that are trained in full do not.

    Raises:
        TargetError: The base has another number of rows, which are quantised.
        AdapterError: The file's tables have several shapes.
    """
    named = {f"{path}.weight" for path in token_tables(model)} & tensors.keys()
    sizes = {len(t) for t in [*tables.values(), *(tensors[n] for n in named)] if t.ndim == 2}
    num_rows = getattr(embedding_of(model), "num_embeddings", None)
    if is_resized := len(sizes) == 1 and sizes != {num_rows}:
        from peftkit.base.new_tokens import resize  # a leaf

        resize(model, *sizes)
    modules, differing = token_tables(model), dict[str, nn.Parameter]()
    for name, table in tables.items():
        match = _FROZEN.search(name)
        assert match is not None
        parameter = modules[name[: match.start()]]._parameters.get(match[2])
        if parameter is None:  # it is packed, and has the same number of rows
            continue
        if parameter.shape != table.shape:
            raise AdapterError(
                f"the adapter does not fit {type(model).__name__}",
                found=f"misshapen: {name} is {tuple(table.shape)}, not {tuple(parameter.shape)}",
                fix="Use the base it was trained on: peftkit inspect ADAPTER",
            )
        frozen = parameter.detach().cpu()
        is_equal = torch.equal(frozen, table.to(frozen)) or torch.equal(frozen.to(table), table)
        if not is_equal:
            parameter.data = table.to(parameter)
        is_stored = match[1] == "original_module" or any(parameter is p for p in differing.values())
        if (is_resized or not is_equal) and not is_stored:
            differing[name] = parameter
    return differing
