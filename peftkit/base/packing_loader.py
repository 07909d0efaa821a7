"""Weights that are packed as they come out of their files, one at a time, on their device.

loader_hooks.py hands each parameter over when it is whole, or as the codes that the files hold.
Here the sample is taken that the fingerprint wants, and the parameter is rounded to its dtype,
packed, or kept in its codes.
Modules stay as they are until all is loaded, so that transformers finds missing, misshapen and tied
weights as it always does; then `install_packed` gives them their packed weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.base.codes import Codes, read_codes, some_values, unpacked
from peftkit.base.fingerprint import sample, sample_positions, shown
from peftkit.base.published import UnreadableError, scheme_of
from peftkit.base.purpose import head_of_classes
from peftkit.base.request import StorageFormat
from peftkit.errors import BaseError, first_few
from peftkit.events import Listener, Notice, Progress
from peftkit.kernels.device import trim_malloc
from peftkit.kernels.packing import Packing
from peftkit.quant.layers import pack
from peftkit.quant.quantize import (
    Job,
    install_packed,
    is_turned,
    not_quantizable,
)

TRIM_BYTES = 1 << 26
"""After so much was loaded, the holes that it left between packed weights are given back."""


class PackingLoader:
    """What happens to each parameter of one model as it is loaded.

    Args:
        has_head: Whether the model's head of classes is trained: it is left in the files' dtype.
        settings: The checkpoint's `quantization_config`, if its codes are read by published.py.
        put: Moves what is kept to where it is to be.

    Attributes:
        taken: id(parameter) to its sample for the fingerprint.
        unpacked: Parameters whose codes could not be kept.
    """

    def __init__(
        self,
        form: StorageFormat,
        *,
        has_head: bool = False,
        settings: Mapping[str, Any] | None = None,
        put: Callable[[Tensor], Tensor] | None = None,
        on_event: Listener,
    ) -> None:
        self.kind, self.dtype, self.device = form.quantize, form.dtype, form.device
        self.form, self.has_head, self.on_event = form, has_head, on_event
        self.settings, self._put = settings, put or (lambda tensor: tensor)
        self.taken: dict[int, bytes] = {}
        self._jobs: dict[Job, str] = {}
        self._by_name: dict[str, Job] = {}
        self._packings: dict[int, Packing] = {}
        self._kept: list[Tensor] = []  # an id is only known while its tensor lives
        self._shapes: dict[str, torch.Size] = {}
        self._misshapen: set[str] = set()
        self._problems: dict[str, str] = {}
        self.unpacked: list[str] = []
        self._head: tuple[str, ...] = ()
        self._in_float32: Callable[[str], bool] = lambda name: False
        self._done = self._total = 0

    def begin(self, model: Any) -> None:
        """Look at the model while it has no weights."""
        named = model.named_parameters(remove_duplicate=False)
        self._shapes = {name: p.shape for name, p in named if p.is_floating_point()}
        self._total = sum(p.numel() * p.element_size() for p in model.parameters())
        self._in_float32 = kept_in_float32(model, self.dtype)
        self._head = head_of_classes(model) if self.has_head else ()
        if self.kind != "none" or self.settings is not None:
            with _as_tied(model):
                self._jobs = self.form.jobs(model, self._head)
        self._by_name = {f"{job[0]}.{job[2]}": job for job in self._jobs}

    def bytes_per_value(self, name: str) -> float | None:
        """Return what a value of a parameter that is packed takes, scales included."""
        if self.kind == "none" or name not in self._by_name:
            return None
        return 1.01 if self._jobs[self._by_name[name]] == "int8" else 0.57

    def wants(self, name: str) -> bool:
        """Tell whether a parameter passes through here."""
        return name in self._shapes and name not in self._misshapen

    def shape_of(self, name: str) -> torch.Size:
        return self._shapes[name]

    def take(self, name: str, value: Tensor) -> Tensor:
        """Return what a parameter is to be, given all of it."""
        self._advance(value)
        if value.shape != self._shapes[name]:
            self._misshapen.add(name)  # transformers is to notice it
            return value
        return self._taken(name, value, sample(value))

    def take_codes(self, name: str, codes: Codes) -> Tensor:
        """Return what a parameter is to be whose weight was read as codes.

        They are kept, unless they are to be packed in another kind or the model does not multiply
        with this parameter alone.
        """
        job = self._by_name.get(name)
        turns = job is not None and is_turned(job[1], job[2])
        expected = self._shapes[name]
        if (
            job is None
            or self.kind != "none"
            or codes.form.shape != (expected[::-1] if turns else expected)
        ):
            if self.kind == "none":
                self.unpacked.append(name)
            value = unpacked(codes, torch.float32)
            turned = value.dim() == 2 and value.shape != expected
            return self.take(name, value.t() if turned else value)
        positions = sample_positions(expected, codes.packed.device)
        if turns:
            positions = positions % expected[1] * expected[0] + positions // expected[1]
        known = shown(expected, some_values(codes, positions))
        self._advance(codes.packed)
        scales = tuple(self._put(scale.to(self.device)) for scale in codes.scales)
        parameter = nn.Parameter(self._put(codes.packed.to(self.device)), requires_grad=False)
        self._packings[id(parameter)] = Packing(codes.form, self.dtype, scales)
        self.taken[id(parameter)] = known
        self._kept.append(parameter)
        return parameter

    def _taken(self, name: str, value: Tensor, known: bytes) -> Tensor:
        if not (name.startswith(self._head) and self._head) and not self._in_float32(name):
            value = value.to(self.dtype)
        parameter = self._packed(name, value)
        self.taken[id(parameter)] = known
        self._kept.append(parameter)
        return parameter

    def _packed(self, name: str, value: Tensor) -> Tensor:
        if name not in self._by_name or self.kind == "none":
            return nn.Parameter(self._put(value), requires_grad=False)
        job = self._by_name[name]
        _, module, leaf = job
        if is_turned(module, leaf):
            value = value.t()
        try:
            packed, packing = pack(
                value.to(self.device), self._jobs[job], double_quant=self.form.double_quant
            )
        except ValueError as error:
            self._problems[name] = f"{name} of {type(module).__name__}: {error}"
            return nn.Parameter(value, requires_grad=False)
        parameter = nn.Parameter(self._put(packed), requires_grad=False)
        for scale in packing.parameters():
            scale.data = self._put(scale.data)
        self._packings[id(parameter)] = packing
        return parameter

    def install(self, model: nn.Module) -> None:
        """Let the loaded model compute with its packed weights.

        Raises:
            BaseError: Weights could not be packed; lists them.
        """
        if self._problems:
            raise not_quantizable(model, self.kind, list(self._problems.values()))
        install_packed(model, self._jobs, self._packings, self.device)
        if self.unpacked:
            kinds = first_few(dict.fromkeys(re.sub(r"\d+", "*", n) for n in self.unpacked), 5, ", ")
            self.on_event(
                Notice(
                    f"{len(self.unpacked)} quantised weights are kept dequantised, in 16 or 32 "
                    f"bits: the model keeps their transpose, or their parts are no whole blocks "
                    f"({kinds})."
                )
            )
        self._kept.clear()
        self.taken.clear()

    def as_codes(self, name: str, own: Mapping[str, Tensor]) -> Codes:
        """Read a layer's tensors.

        Raises:
            BaseError: They are not what the checkpoint's config says.
        """
        assert self.settings is not None
        path = name.removesuffix(".weight")
        try:
            return read_codes(own, scheme_of(self.settings, path))
        except UnreadableError as problem:
            raise BaseError(
                f"cannot read the quantised weight {path}.",
                found=f"{problem}; its tensors are {', '.join(sorted(own))}.",
                fix="Download it again, or give the same model in 16 bits.",
            ) from None

    def _advance(self, value: Tensor) -> None:
        before = self._done
        self._done = min(before + value.nbytes, self._total)
        if before // TRIM_BYTES != self._done // TRIM_BYTES:
            trim_malloc()
        self.on_event(Progress("Loading the base", self._done, self._total, "B"))


def kept_in_float32(model: Any, dtype: torch.dtype) -> Callable[[str], bool]:
    """Return what tells of a parameter's name whether its model keeps it in float32."""
    plan = [model._keep_in_fp32_modules_strict or ()]
    if dtype == torch.float16:
        plan.append(model._keep_in_fp32_modules or ())
    keep = {f".{name}." for names in plan for name in names}
    return lambda name: any(k in f".{name}." for k in keep)


@contextmanager
def _as_tied(model: Any) -> Iterator[None]:
    """Tie a model's weights for as long as the context holds: its loader ties them at the end."""
    before = []
    for target, source in getattr(model, "all_tied_weights_keys", {}).items():
        path, _, name = target.rpartition(".")
        owner = model.get_submodule(path)
        if name in owner._parameters:
            before.append((owner, name, owner._parameters[name]))
            owner._parameters[name] = model.get_parameter(source)
    try:
        yield
    finally:
        for owner, name, parameter in reversed(before):
            owner._parameters[name] = parameter
