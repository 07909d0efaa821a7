"""Several adapters on one frozen base, switched by name or mixed row by row in a batch.

    bank = AdapterBank(base, {"json": "runs/json", "sql": "runs/sql"})
    with bank.use("json"):                # every row
        model(...)
    with bank.use(["json", None, "sql"]):  # row by row; None is the bare base
        model(...)

A switch is a lookup and changes no tensor. An adapter takes the memory of its file, or less if the
base computes in a smaller dtype. Within `use` with mixed rows, the layers hold another copy of the
adapters in use.

The switch applies to the base, not to a thread: run one forward pass or generation at a time, and
lock `use` if several threads send requests.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from peftkit.base.load import Base
from peftkit.base.new_tokens import style_over
from peftkit.data.generation import default_style, prompt_ids, stop_ids
from peftkit.data.style import Style
from peftkit.data.tokens import decoded
from peftkit.errors import AdapterError, DataError, did_you_mean
from peftkit.events import Fallback, Listener, Notice, Stage, ignore
from peftkit.formats.find_adapter import adapter_folder
from peftkit.formats.open_adapter import base_of, require_causal, task_of
from peftkit.formats.peft.load import AdapterFile, check_weights, read_adapter
from peftkit.formats.peft.low_rank import layers_of, read_low_rank
from peftkit.inference.bank_layer import BankLinear, Routing, make_update, rows_in_order
from peftkit.inference.engine import MAX_ROWS, Engine, Limits
from peftkit.inference.open_engine import open_engine
from peftkit.inference.sampling import Sampling
from peftkit.methods.base import ADAPTER_DTYPES
from peftkit.model.modes import lifted, take_off
from peftkit.model.places import unwrap_adapter

NAME = re.compile(r"\w[\w.-]*")
"""Allowed names of adapters; `..` is not allowed."""
QUANTISED = ("quantize", "double_quant", "quantize_embeddings", "quantize_towers", "rope_scaling")
"""Settings of the base that change its outputs, except for its dtype."""


class AdapterBank:
    """LoRA and DoRA adapters over one base, with any ranks, scales and targets.

    Attributes:
        base: The base; its model is changed in place, and restored when no adapter is left.
    """

    def __init__(
        self,
        base: Base,
        adapters: Mapping[str, str | Path] | None = None,
        *,
        force: bool = False,
    ) -> None:
        """Load adapters onto a base.

        Args:
            base: A base without an adapter.
            adapters: Name to folder.
            force: Accept adapters that were trained on other weights.

        Raises:
            AdapterError: See `add`; the base then has no adapter.
        """
        self.base = base
        self._active: list[Routing] = []
        self._engines: weakref.WeakSet[Engine] = weakref.WeakSet()
        self._layers: dict[str, BankLinear] = {}
        self._is_lifted = False
        self._in_order: dict[str, bool] | None = None
        self._files: dict[str, AdapterFile] = {}
        self._styles: dict[str, Style] = {}
        if any(unwrap_adapter(module) is not module for module in base.model.modules()):
            raise AdapterError(
                f"{type(base.model).__name__} already has an adapter",
                fix="Call its detach() first, drop its bank's adapters, or merge it.",
            )
        try:
            for name, path in (adapters or {}).items():
                self.add(name, path, force=force)
        except BaseException:
            for name in self.names:
                self.drop(name)
            raise

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._files)

    def add(self, name: str, path: str | Path, *, force: bool = False) -> None:
        """Load another adapter, even while others are in use.

        Args:
            name: Letters, digits, `_`, `-` and `.`.
            path: A folder made by peftkit or PEFT.
            force: Accept one that was trained on other weights.

        Raises:
            AdapterError: The name is taken or not allowed, the adapter is not LoRA or DoRA, or it
                belongs to another base; lists everything that does not fit.
        """
        check_name(name)
        if name in self._files:
            raise AdapterError(
                f"the bank has an adapter '{name}' already",
                found=f"It is from {self._files[name].folder}.",
                fix="Drop it first, or choose another name.",
            )
        file, modules = read_low_rank(adapter_folder(path))
        if not force:
            check_weights(file, self.base.fingerprint)
        linears = layers_of(file, modules, self.base.model)
        self._refuse_taken(file, linears)
        scales_in = ADAPTER_DTYPES[file.method.dtype]
        updates = {
            path: make_update(linears[path], one.a, one.b, one.scaling, one.magnitude, scales_in)
            for path, one in modules.items()
        }
        for path, update in updates.items():
            self._layer(path, linears[path]).updates[name] = update
        self._files[name] = file

    def drop(self, name: str) -> None:
        """Remove an adapter, and the wrappers of layers without adapters.

        Raises:
            AdapterError: There is no adapter with this name, or it is in use.
        """
        self._require(name)
        if any(name in routing.names for routing in self._active):
            raise AdapterError(
                f"the adapter '{name}' is in use", fix="Leave the `with bank.use(...)` block first."
            )
        if any(engine.uses(name) for engine in self._engines):
            raise AdapterError(f"the adapter '{name}' is in use", fix="Wait until its answers end.")
        for engine in self._engines:
            engine.forget(name)
        del self._files[name]
        self._styles.pop(name, None)
        for path, layer in list(self._layers.items()):
            layer.updates.pop(name, None)
            if not layer.updates:
                del self._layers[path]
                if not self._is_lifted:
                    self.base.model.set_submodule(path, layer.base)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Remove all adapters within the context, for example for training another one.

        Adapters can be added and dropped meanwhile. Other adapters are removed at the end.
        """
        take_off(self.base.model)
        self._is_lifted = True
        try:
            yield
        finally:
            take_off(self.base.model)
            self._is_lifted = False
            self._put_on()

    @contextmanager
    def returned(self) -> Iterator[None]:
        """Within `lifted`, restore the bank's adapters in place of others within the context."""
        with lifted(self.base.model):
            self._is_lifted = False
            self._put_on()
            try:
                yield
            finally:
                self._is_lifted = True

    def use(self, rows: str | Sequence[str | None] | None) -> Routing:
        """Return a reusable context that switches the adapter.

        Args:
            rows: One adapter for all rows, or one for each row of the following batches. None: the
                bare base.

        Raises:
            AdapterError: There is no adapter with a name. The model's forward pass raises it if a
                batch has another number of rows.
        """
        routing = Routing(self._active, rows)
        if routing.is_mixed:
            routing.in_order = self._rows_in_order()
        for name in routing.names:
            self._require(name)
        return routing

    def num_bytes(self, name: str) -> int:
        """Return the memory of an adapter; raises AdapterError for an unknown name."""
        self._require(name)
        updates = (layer.updates.get(name) for layer in self._layers.values())
        return sum(update.num_bytes for update in updates if update is not None)

    def file(self, name: str) -> AdapterFile:
        """Return an adapter's folder, without tensors; raises AdapterError for an unknown name."""
        self._require(name)
        return self._files[name]

    def style(self, name: str | None) -> Style:
        """Return the prompt style of an adapter, or of the bare base.

        Raises:
            AdapterError: There is no adapter with this name.
        """
        if name is None:
            return default_style(self.base.tokenizer)
        file = self.file(name)
        if name not in self._styles:
            recorded = file.provenance.prompt_style
            self._styles[name] = style_over(file.folder, recorded, self.base.tokenizer)
        return self._styles[name]

    def generate(
        self,
        prompts: Sequence[str],
        names: Sequence[str | None],
        *,
        batch_size: int | None = None,
        **settings: Any,
    ) -> list[str]:
        """Return the completion of each prompt by its adapter, in the adapter's prompt style.

        Args:
            names: The adapter of each prompt; None: the bare base.
            batch_size: Maximum concurrent completions over all adapters; None: 64.
            settings: As in `generate`.

        Raises:
            AdapterError: There is no adapter with a name.
            DataError: The numbers of prompts and names differ, or see `generate`.
        """
        if isinstance(names, str) or len(prompts) != len(names):
            raise DataError(
                f"{len(prompts)} prompts and {len(names)} names of adapters",
                fix="Give one name, or None, for each prompt.",
            )
        tokenizer = self.base.tokenizer
        styles = {name: self.style(name) for name in set(names)}
        ids = [
            prompt_ids(tokenizer, prompt, styles[name])
            for prompt, name in zip(prompts, names, strict=True)
        ]
        sampling = [Sampling(**settings, stops=stop_ids(tokenizer, styles[name])) for name in names]
        with self.engine(Limits(rows=batch_size or MAX_ROWS)) as engine:
            groups = engine.answers(ids, sampling, adapters=names, log_probs=False)
        return [decoded(tokenizer, answer.ids) for (answer,) in groups]

    def engine(self, limits: Limits | None = None) -> Engine:
        """Return an engine, a context manager, whose requests name their adapters."""
        self._rows_in_order()
        engine = open_engine(self.base.model, self.base.tokenizer, limits, self.use)
        engine.can_mix = self._can_mix
        self._engines.add(engine)
        return engine

    @property
    def fallbacks(self) -> list[Fallback]:
        """The fallbacks of completions with several adapters; probes the base once."""
        in_order = self._rows_in_order() if self._layers else {}
        path = next((path for path in self._layers if not in_order.get(path, True)), None)
        if path is None:
            return []
        return [
            Fallback(
                path="A forward pass uses one adapter",
                cause=f"{type(self.base.model).__name__} reorders tokens before {path}.",
                cost="Requests for other adapters, or for the base, wait until these have ended.",
                fix="Serve each adapter with its own server, or train other layers.",
            )
        ]

    def _rows_in_order(self) -> dict[str, bool]:
        """Return `rows_in_order` of the base, which runs once."""
        if self._in_order is None:
            self._in_order = rows_in_order(self.base.model)
        return self._in_order

    def _can_mix(self) -> bool:
        """Return whether all adapted layers find the rows of a mixed batch."""
        return all(self._rows_in_order().get(path, True) for path in self._layers)

    def _require(self, name: str) -> None:
        if name not in self._files:
            raise AdapterError(
                f"there is no adapter '{name}' in the bank",
                found=f"It holds: {', '.join(self._files) or 'none'}.",
                fix=did_you_mean(name, self._files) or "Add it first.",
            )

    def _refuse_taken(self, file: AdapterFile, layers: Mapping[str, nn.Module]) -> None:
        model = self.base.model
        for path, bare_layer in layers.items():
            if model.get_submodule(path) not in (bare_layer, self._layers.get(path)):
                raise AdapterError(
                    f"the adapter in {file.folder} cannot wrap {path}",
                    found="The module already has an adapter that is not in this bank.",
                    fix="Call its detach() first, or merge it.",
                )

    def _layer(self, path: str, linear: nn.Module) -> BankLinear:
        if path not in self._layers:
            layer = BankLinear(linear, path, self._active).train(linear.training)
            if not self._is_lifted:
                self.base.model.set_submodule(path, layer)
            self._layers[path] = layer
        return self._layers[path]

    def _put_on(self) -> None:
        for path, layer in self._layers.items():
            self.base.model.set_submodule(path, layer)


def open_bank(
    adapters: Mapping[str, str | Path],
    base: str | None = None,
    *,
    force: bool = False,
    on_event: Listener = ignore,
) -> AdapterBank:
    """Load the base of the first adapter, with its training settings, and all adapters.

    A notice lists adapters that were trained over another quantisation of the base.

    Args:
        adapters: Name to folder; at least one.
        base: Location of the base, if it differs from the recorded one.
        force: Accept adapters that were trained on other weights.

    Raises:
        AdapterError: See `AdapterBank.add`; or no adapter names its base.
        BaseError: The base cannot be found or loaded.
    """
    files = read_files(adapters)
    naming = next((f for f in files.values() if f.provenance.base), next(iter(files.values())))
    loaded = base_of(naming, base, on_event=on_event)
    report_other_bases(files, naming.provenance.loading, on_event)
    on_event(Stage(f"Loading {len(files)} adapter{'s' * (len(files) > 1)}"))
    return AdapterBank(loaded, adapters, force=force)


def read_files(adapters: Mapping[str, str | Path]) -> dict[str, AdapterFile]:
    """Read the folders of adapters, without tensors.

    Raises:
        AdapterError: An adapter is missing or completes no prompts, or its name is not allowed.
    """
    for name in adapters:
        check_name(name)
    files = {name: read_adapter(adapter_folder(path)) for name, path in adapters.items()}
    for file in files.values():
        require_causal(task_of(file), file.folder, media=False)
    return files


def report_other_bases(
    files: Mapping[str, AdapterFile], loading: Mapping[str, object], on_event: Listener
) -> None:
    """Emit a notice for each adapter that was trained over another quantisation of the base.

    Args:
        loading: The base settings that are in use.
    """
    for name, file in files.items():
        saved = file.provenance.loading
        keys = [key for key in QUANTISED if saved and saved.get(key) != loading.get(key)]
        if keys:
            other = ", ".join(f"{key}: {saved.get(key)}, here {loading.get(key)}" for key in keys)
            on_event(Notice(f"'{name}' was trained over a base with {other}: answers may differ."))


def check_name(name: str) -> None:
    """Raise AdapterError if a name is empty or has others than letters, digits, `_`, `-`, `.`."""
    if not NAME.fullmatch(name) or ".." in name:
        raise AdapterError(
            f"{name!r} is not allowed as the name of an adapter",
            fix="Use letters, digits, '_', '-' and single dots.",
        )
