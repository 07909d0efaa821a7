"""What a quantisation does to an adapter's update, and what to do instead; before any work."""

from __future__ import annotations

from peftkit.base.locate import gguf_of
from peftkit.formats.peft.load import AdapterFile
from peftkit.methods.lora import LoRA

SMALL = ("q2", "q3", "q4", "q5", "iq", "int4")
"""Beginnings of the names of formats whose steps are larger than most updates."""
WITH_MINIMUM = ("q4_1", "q5_1")
"""Types that keep an update that is constant in blocks."""


def advice(file: AdapterFile, base: str, kind: str) -> str:
    """Return what is lost if an adapter is merged and quantised, and alternatives; "" if little.

    Args:
        base: Location of the base.
        kind: The format of the merged weights, such as q4_1.
    """
    method = file.method
    blocks = method.constant_in if isinstance(method, LoRA) else None
    if not kind.startswith(SMALL):
        return ""
    trained_for = str(file.provenance.loading.get("quantize_for", "none"))
    if trained_for != "none":
        if trained_for == kind:
            return ""
        return (
            f"The adapter was trained for {trained_for} (train.quantize_for); quantised to {kind} "
            f"it answers differently. Use {trained_for}."
        )
    if blocks and blocks % 32 == 0 and kind in WITH_MINIMUM:
        return ""
    more = " Or train for the format: train.quantize_for"
    more += ", or method.constant_in: 32." if kind in WITH_MINIMUM else "."
    instead = "Keep the adapter in a second file (peftkit export --to gguf), or use q8_0."
    if grid_of(base) == kind:
        return (
            f"The base's weights lie on the grid of {kind.upper()}: merging into the same type "
            f"deletes updates smaller than half a step. {instead}{more}"
        )
    return (
        f"{kind.upper()} rounds to steps larger than most updates. The update survives on average, "
        f"with the noise of the quantised base: evaluate the result. {instead}{more}"
    )


def grid_of(base: str) -> str:
    """Return the type of most weights of a base that is, or comes from, a GGUF file; else ""."""
    path = gguf_of(base)
    if path is None:
        return ""
    from peftkit.formats.gguf.requantize import stored_dtype

    return stored_dtype(path).lower()
