"""The models in training: a limited number in memory, the others offloaded to the disk.

All methods run in the worker's thread.
"""

from __future__ import annotations

import logging
import shutil
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from peftkit.adapter import group_modules
from peftkit.data.generation import default_style
from peftkit.errors import AdapterError, RunError
from peftkit.execution.environment import free_now
from peftkit.execution.out_of_memory import is_out_of_memory, release_memory
from peftkit.files.disk import is_disk_full, sha256_of, write_json
from peftkit.files.tensors import read_tensors, specs_of, write_tensor_stream, write_tensors
from peftkit.formats.folders import NOTES
from peftkit.formats.guard import read_json
from peftkit.formats.peft.folder import AdapterFolder, save_adapter
from peftkit.formats.peft.load import check_weights, read_adapter
from peftkit.formats.peft.notes import Provenance
from peftkit.methods.lora import LoRA
from peftkit.model import roles
from peftkit.model.places import find_places
from peftkit.tasks.tokens import CausalLMConfig
from peftkit_server.refusals import RequestError
from peftkit_server.tinker.bodies import Lora
from peftkit_server.tinker.learner import DoesNotFit, Learner
from peftkit_server.tinker.tenant import Tenant
from peftkit_server.training import Training

T = TypeVar("T")
_LOG = logging.getLogger(__name__)

ALPHA = 32
"""LoRA alpha of every adapter, for all ranks, as on Tinker's service."""
MAX_LOADED = 16
"""Most tenants in memory."""
OPTIMIZER_FILE = "optimizer.safetensors"
"""Optimizer state in the adapter's folder."""


class Tenants:
    """All tenants, by the id of their model."""

    def __init__(self, training: Training) -> None:
        base = training.bank.base
        self.learner, self._fingerprint = Learner(base), base.fingerprint
        self._loaded: OrderedDict[str, Tenant] = OrderedDict()
        self._offloaded: dict[str, Tenant] = {}
        self._owners: dict[str, str] = {}
        self._folder = training.folder / "tinker" / "away"
        shutil.rmtree(self._folder, ignore_errors=True)  # models do not survive a restart
        self._folder.mkdir(parents=True)
        excluded = {"model", "revision", "new_tokens", "store", "placement"}
        self._provenance = Provenance(
            base=base.name,
            hub_id=base.hub_id,
            revision=base.revision,
            fingerprint=base.fingerprint,
            trunk=base.trunk or None,
            loading=training.options.base.model_dump(mode="json", exclude=excluded),
            prompt_style=default_style(base.tokenizer),
            task=CausalLMConfig().saved(),
        )

    def add(self, id: str, config: Lora, *, fresh: bool, owner: str = "") -> None:
        """Create a tenant of an owner; `fresh`: see `Learner.new`.

        Raises:
            TargetError: The base does not support its adapter.
        """
        method = LoRA(rank=config.rank, alpha=ALPHA, targets=self._targets(config))
        seed, self._owners[id] = config.seed or 0, owner
        self._loaded[id] = self._with_room(lambda: self.learner.new(method, seed, fresh=fresh))
        self._make_room(id, self._loaded[id].num_later)

    def _targets(self, config: Lora) -> tuple[str, ...]:
        """Return the requested groups of layers that the base has."""
        present = {role for place in find_places(self.learner.model) for role in place.roles}
        groups = ["attention"] * config.train_attn + ["ffn", "experts"] * config.train_mlp
        groups += ["head"] * config.train_unembed
        targets = tuple(name for name in groups if present & {*roles.GROUPS.get(name, (name,))})
        if not targets:
            raise RequestError(
                "the model has nothing to train.",
                fix="Set train_attn, train_mlp or train_unembed to true.",
            )
        return targets

    def run(self, id: str, work: Callable[[Tenant], T]) -> T:
        """Return the result of a function of a tenant; load the tenant if it is offloaded.

        Raises:
            RequestError: There is no tenant with this id.
        """
        return self._with_room(lambda: work(self._get(id)), but=id)

    def drop(self, id: str) -> None:
        """Remove a tenant, if it exists."""
        self._loaded.pop(id, None)
        self._owners.pop(id, None)
        if self._offloaded.pop(id, None) is not None:
            self._path(id).unlink(missing_ok=True)
        release_memory()

    def _path(self, id: str) -> Path:
        return self._folder / f"{id.replace(':', '.')}.safetensors"

    def _get(self, id: str) -> Tenant:
        if id in self._offloaded:
            path = self._path(id)
            self._make_room(id, path.stat().st_size)
            self._fill(self._offloaded[id], read_tensors(path))
            self._loaded[id] = self._offloaded.pop(id)
            path.unlink()
        if id not in self._loaded:
            raise RequestError("the model was not created, or is unloaded.")
        self._loaded.move_to_end(id)
        return self._loaded[id]

    def _with_room(self, work: Callable[[], T], but: str = "") -> T:
        """Return the result of a function; if memory runs out, offload other tenants and retry."""
        while True:
            try:
                return work()
            except Exception as error:
                others = self._others(but)
                is_short = isinstance(error, DoesNotFit) or is_out_of_memory(error)
                if not (others and is_short):
                    raise
            release_memory()
            if not self._offload(others[0]):
                raise RunError(
                    "the server has no memory for this operation.",
                    found="Other models stay in memory, since its disk is full.",
                    fix="Try again later. The model is unchanged.",
                )

    def _others(self, but: str) -> list[str]:
        """Return the loaded tenants to offload, in order.

        The owner with the most comes first, and then the least recently used tenant.
        """
        numbers = Counter(self._owners.get(id, "") for id in self._loaded)
        others = [id for id in self._loaded if id != but]
        return sorted(others, key=lambda id: -numbers[self._owners.get(id, "")])

    def _make_room(self, but: str, num_bytes: int) -> None:
        """Offload tenants until `num_bytes` are free and at most `MAX_LOADED` are loaded.

        A full disk is no error here: the tenant may still fit in memory.
        """
        while others := self._others(but):
            free = free_now(self.learner.model.device)
            if len(self._loaded) <= MAX_LOADED and (free.memory is None or num_bytes < free.usable):
                return
            if not self._offload(others[0]):
                _LOG.warning("a model stays in memory: the disk is full")
                return

    def _offload(self, id: str) -> bool:
        """Write a tenant to the disk, and free its memory; return whether the disk has room."""
        tensors = self._loaded[id].emptied()
        try:
            specs = specs_of(tensors)
            stream = (tensors[spec.name].cpu() for spec in specs)
            write_tensor_stream(self._path(id), specs, stream)
        except BaseException as error:
            self._fill(self._loaded[id], tensors)
            if isinstance(error, Exception) and is_disk_full(error):
                return False
            raise
        self._offloaded[id] = self._loaded.pop(id)
        return True

    def _fill(self, tenant: Tenant, tensors: Mapping[str, Tensor]) -> None:
        tenant.fill(tensors, self.learner.model.device)
        with self.learner.on(tenant):
            group_modules(self.learner.model)

    def save(self, id: str, folder: Path, *, with_optimizer: bool) -> None:
        """Write a tenant's adapter in PEFT's format, and the state of its optimizer.

        Raises:
            RunError: A weight is not finite, or the disk is full.
        """

        def write(tenant: Tenant) -> None:
            with self.learner.on(tenant):
                save_adapter(tenant.adapter, folder, self._provenance)
            if with_optimizer and (state := tenant.optimizer_tensors()):
                tensors = {name: tensor.cpu() for name, tensor in state.items()}
                write_tensors(tensors, folder / OPTIMIZER_FILE)
                notes = read_json(folder / NOTES)
                notes["sha256"][OPTIMIZER_FILE] = sha256_of(folder / OPTIMIZER_FILE)
                write_json(notes, folder / NOTES)

        self.run(id, write)

    def load(self, id: str, folder: Path, *, with_optimizer: bool) -> None:
        """Load an adapter folder into a tenant.

        Raises:
            AdapterError: The folder's adapter has another rank or other layers, was trained on
                other weights, or a file is damaged or missing.
        """

        def read(tenant: Tenant) -> None:
            with torch.no_grad():
                AdapterFolder(tenant.adapter, self._provenance).load(folder)
            tenant.take_gradients()
            if with_optimizer and (folder / OPTIMIZER_FILE).is_file():
                tenant.load_optimizer(read_tensors(folder / OPTIMIZER_FILE))

        check_weights(read_adapter(folder), self._fingerprint)
        if with_optimizer:
            _check_optimizer(folder)
        self.run(id, read)


def _check_optimizer(folder: Path) -> None:
    """Compare the file of an optimizer's state with the hash in peftkit.json.

    Raises:
        AdapterError: The file is missing or damaged.
    """
    path = folder / OPTIMIZER_FILE
    digest = read_json(folder / NOTES)["sha256"].get(OPTIMIZER_FILE)
    if digest is None:  # saved before the first step
        return
    if not path.is_file() or sha256_of(path) != digest:
        raise AdapterError(
            "cannot load the state of the optimizer.",
            found=f"Its file {'is damaged' if path.is_file() else 'is missing'}.",
            fix="Load the weights without the optimizer, or load other weights.",
        )
