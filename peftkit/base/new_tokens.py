"""New tokens for a base: added to its tokenizer, with new rows in embedding and head.

A new row starts as the mean of the existing rows, in the embedding and in the head. The adapter
trains and saves the rows (`Method.token_rows`). The tokenizer is saved with the adapter, which adds
the tokens to the plain base again when it is loaded.

Shapes: V existing tokens, H width.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AddedToken, PreTrainedTokenizerFast

from peftkit.base.load import Base
from peftkit.base.locate import locate
from peftkit.base.pretrained import load_tokenizer, quiet
from peftkit.data.chat_template import TEMPLATE, TOKENIZER_CONFIG, eos_in, own_template, template_in
from peftkit.data.generation import default_style
from peftkit.data.style import Style
from peftkit.errors import AdapterError, DataError, TargetError, first_few
from peftkit.events import Listener, Notice, ignore
from peftkit.model.places import input_embedding, num_embeddings, token_tables

FILE = "tokenizer.json"

TokenRows = tuple[int, ...] | dict[str, tuple[int, ...]]


def add_tokens(base: Base, tokens: Sequence[str]) -> tuple[int, ...]:
    """Add tokens to a base's tokenizer and to its model, in place; return their ids.

    A token of the tokenizer without a row in the embedding gets one. New tokens are not special
    tokens: decoded text shows them.

    Raises:
        DataError: A token is empty, given twice or already in the vocabulary; lists these tokens.
        TargetError: The model has no token embedding.
    """
    rows = _num_rows(base)
    vocabulary = {word: id for word, id in base.tokenizer.get_vocab().items() if id < rows}
    invalid = [t for t in tokens if t in vocabulary or tokens.count(t) > 1 or not t]
    if invalid or not tokens:
        tokens_text = ", ".join(map(repr, dict.fromkeys(invalid))) or "no token"
        raise DataError(
            f"cannot add {tokens_text} as new tokens",
            found="They are empty, repeated, or already in the vocabulary.",
            fix="Leave them out; rows of existing tokens are trained with method.token_rows: [ID].",
        )
    added = [AddedToken(token, normalized=False, special=False) for token in tokens]
    ids = _added_ids(base.tokenizer, added)
    grow(base.model, max(ids) + 1)
    _init_with_mean(base.model, [*ids, *range(rows, max(ids))], len(vocabulary))
    return ids


def token_rows(model: nn.Module, ids: Sequence[int]) -> TokenRows:
    """Return the `Method.token_rows` that train new tokens in the embedding and in the head."""
    path, head = input_embedding(model), _head(model)
    if head is None or head.weight is model.get_submodule(path).weight:
        return tuple(ids)
    output = next(name for name, module in model.named_modules() if module is head)
    return {path: tuple(ids), output: tuple(ids)}


def save_tokenizer(base: Base, folder: Path) -> None:
    """Write the tokenizer of an adapter with new tokens into its folder."""
    with quiet():
        base.tokenizer.save_pretrained(folder)


def restore_tokens(base: Base, folder: Path, trained: TokenRows = ()) -> tuple[int, ...]:
    """Add the new tokens of a folder's tokenizer to a base, in place; return their ids.

    Do nothing if the folder has no tokenizer, or one without new tokens.

    Args:
        trained: The `Method.token_rows` of the adapter: tokens of these ids get rows, too.

    Raises:
        AdapterError: The tokenizer cannot be read, or does not extend the base's.
    """
    rows = _num_rows(base)
    parts = trained.values() if isinstance(trained, dict) else [trained]
    without_row = {id for part in parts for id in part if id >= rows}
    saved = saved_tokens(folder)
    vocabulary = base.tokenizer.get_vocab() if saved else {}
    new = _unknown(saved, base.tokenizer).keys() | (saved.keys() & without_row)
    if not new:
        return ()
    added = {id: saved[id] for id in sorted(new)}
    num_known = sum(id < rows for id in vocabulary.values())
    ids = _added_ids(base.tokenizer, list(added.values()))
    if ids != tuple(added):
        raise AdapterError(
            f"{folder / FILE} is not of the base's tokenizer",
            found=f"Its new tokens have the ids {_few(added)}; with this base they would have "
            f"{_few(ids)}.",
            fix="Use the base that the adapter was trained on: peftkit inspect ADAPTER",
        )
    grow(base.model, max(ids) + 1)
    _init_with_mean(base.model, range(rows, max(ids) + 1), num_known)
    return ids


def adopt_tokenizer(
    base: Base, folder: Path, trained: TokenRows = (), on_event: Listener = ignore
) -> bool:
    """Give a base the tokens, chat template and end token of an adapter's tokenizer, in place.

    Args:
        trained: See `restore_tokens`.

    Returns:
        Whether the base's tokenizer differed. A folder of a further adapter must then store it.

    Raises:
        AdapterError, BaseError: The tokenizer cannot be read, or does not extend the base's.
    """
    ids = restore_tokens(base, folder, trained)
    template, eos = _format_over(folder, base.tokenizer)
    if eos:
        base.tokenizer.eos_token = eos
    for owner in (base.tokenizer, base.multimodal) if template else ():
        if owner is not None:
            owner.chat_template = template
    if template or eos:
        text = _format_text(Own((), template, eos))
        on_event(Notice(f"Uses {text} of {folder} instead of the base's."))
    return bool(ids or template or eos)


def style_over(folder: Path, recorded: Style | None, tokenizer: object) -> Style:
    """Return an adapter's prompt style over a tokenizer that other adapters share.

    Args:
        recorded: The style in the adapter's notes.
    """
    style = recorded or default_style(tokenizer)
    template, eos = _format_over(folder, tokenizer)
    if style.chat_template or (recorded and recorded.kind != "chat") or not (template or eos):
        return style
    if not (text := template or own_template(tokenizer)):
        return style
    if eos:  # a template renders the shared tokenizer's end token
        text = f"{{%- set eos_token = {json.dumps(eos, ensure_ascii=False)} -%}}\n{text}"
    return replace(style, kind="chat", chat_template=text)


def _format_text(own: Own) -> str:
    parts = ["the chat template"] if own.template else []
    return " and ".join([*parts, f"the end token {own.eos}"] if own.eos else parts)


def saved_tokens(folder: Path) -> dict[int, AddedToken]:
    """Return the added tokens of a folder's tokenizer by id; {} without a tokenizer.

    Raises:
        AdapterError: The tokenizer cannot be read.
    """
    file = folder / FILE
    if not file.is_file():
        return {}
    try:
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file))
    except Exception as error:  # the library raises a bare Exception
        raise AdapterError(
            f"cannot read {file}", found=str(error), fix="Download the adapter again."
        ) from error
    return dict(tokenizer.added_tokens_decoder)


def unknown_tokens(folder: Path, tokenizer: object) -> dict[int, AddedToken]:
    """Return the tokens of a folder's tokenizer that another tokenizer lacks, by id.

    Raises:
        AdapterError: The folder's tokenizer cannot be read.
    """
    return _unknown(saved_tokens(folder), tokenizer)


class Own(NamedTuple):
    """The differences of an adapter's tokenizer from its base's.

    Attributes:
        tokens: Tokens that the base's tokenizer lacks.
        template: Its chat template; "" if it has none, or the base's.
        eos: Its end token; "" if it has none, or the base's.
    """

    tokens: Sequence[str] = ()
    template: str = ""
    eos: str = ""


def own_of(folder: Path, base: str, revision: str | None = None) -> Own:
    """Compare the tokenizer in an adapter's folder with the tokenizer of its base.

    Raises:
        AdapterError: The folder's tokenizer cannot be read.
        BaseError: The base has no tokenizer.
    """
    if not any((folder / name).is_file() for name in (FILE, TOKENIZER_CONFIG, TEMPLATE)):
        return Own()
    return own_over(folder, load_tokenizer(locate(base, revision), ignore))


def own_over(folder: Path, tokenizer: object) -> Own:
    """Compare the tokenizer in an adapter's folder with another; see `own_of`."""
    if tokenizer is None:
        return Own()
    tokens = [str(token) for token in unknown_tokens(folder, tokenizer).values()]
    return Own(tokens, *_format_over(folder, tokenizer, tokens))


def _format_over(folder: Path, tokenizer: Any, tokens: Sequence[str] = ()) -> tuple[str, str]:
    """Return template and end token of `Own`; the end token may be one of the new `tokens`."""
    if tokenizer is None:
        return "", ""
    template, eos = template_in(folder), eos_in(folder)
    if eos and eos not in tokens:
        id = tokenizer.convert_tokens_to_ids(eos)
        eos = "" if id in (None, tokenizer.unk_token_id, tokenizer.eos_token_id) else eos
    return "" if template == own_template(tokenizer) else template, eos


def notify_split_tokens(
    folders: Mapping[str, Path], tokenizer: object, on_event: Listener = ignore
) -> None:
    """Emit a notice for each adapter whose tokenizer differs from the shared one.

    Args:
        folders: Adapter folders by name.
    """
    for name, folder in folders.items():
        try:
            own = own_over(folder, tokenizer)
        except AdapterError as error:  # the shared tokenizer is used instead
            on_event(Notice(f"'{name}': {error}"))
            continue
        if own.template or own.eos:
            on_event(Notice(f"'{name}' uses {_format_text(own)} of its folder."))
        if own.tokens:
            text = f"'{name}' was trained with tokens that its base lacks: {_few(own.tokens)}. "
            text += "Here they are split into several tokens. `peftkit chat ADAPTER` and merged "
            on_event(Notice(f"{text}models (`peftkit merge`) keep them whole."))


def grow(model: Any, num_rows: int) -> None:
    """Grow a model's embedding and head to this many rows, if they have fewer."""
    path = input_embedding(model)
    if num_rows > model.get_submodule(path).num_embeddings:
        resize(model, num_rows)


def resize(model: Any, num_rows: int) -> None:
    """Set the rows of embedding and head; raises TargetError if they are quantised."""
    for table in token_tables(model).values():
        _dense(model, table)  # transformers cannot resize others
    with quiet():
        model.resize_token_embeddings(num_rows, mean_resizing=False)
    model.requires_grad_(False)


@torch.no_grad()
def _init_with_mean(model: nn.Module, ids: Sequence[int], num_known: int) -> None:
    """Set the rows of new tokens in embedding and head to the mean of the existing rows."""
    if not ids:
        return
    tables = [_dense(model, model.get_submodule(input_embedding(model))), _head(model)]
    for weight in {id(t.weight): t.weight for t in tables if t is not None}.values():
        assert isinstance(weight, torch.Tensor)
        weight[list(ids)] = weight[:num_known].mean(0, dtype=torch.float32).to(weight.dtype)
    bias = getattr(tables[1], "bias", None)
    if bias is not None:
        bias[list(ids)] = bias[:num_known].mean(dtype=torch.float32).to(bias.dtype)


def _num_rows(base: Base) -> int:
    """Return the number of rows of a base's embedding; without one, no id is beyond it."""
    return num_embeddings(base.model) or sys.maxsize


def _head(model: nn.Module) -> nn.Module | None:
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if getter else None
    return None if head is None else _dense(model, head)


def _dense(model: nn.Module, table: nn.Module) -> nn.Module:
    """Return an embedding or a head, or raise TargetError if its rows are quantised."""
    if "weight" not in table._parameters:
        raise TargetError(
            f"cannot add tokens to {type(model).__name__}",
            found="The weight of its embedding or head is quantised.",
            fix="Load the base with quantize_embeddings='none'; for a GGUF file use its original.",
        )
    return table


def _unknown(saved: Mapping[int, AddedToken], tokenizer: Any) -> dict[int, AddedToken]:
    vocabulary = tokenizer.get_vocab() if saved else {}
    return {id: token for id, token in sorted(saved.items()) if str(token) not in vocabulary}


def _added_ids(tokenizer: Any, added: Sequence[AddedToken]) -> tuple[int, ...]:
    tokenizer.add_tokens(list(added))
    return tuple(tokenizer.convert_tokens_to_ids(str(token)) for token in added)


def _few(items: Iterable[object]) -> str:
    return first_few(map(str, items), 5, ", ")
