"""The laws that every method obeys on every architecture, as functions over one cell of the grid.

A cell lives once: attached, trained for three steps, switched off, saved, taken off, loaded,
recomputed, compiled, read by PEFT, merged. Each law leaves it as it found it, trained and in place;
merging comes last.
"""

import copy
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn

from peftkit.adapter import Adapter, attach
from peftkit.errors import MergeError, PeftkitError
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.load import load_adapter
from peftkit.formats.peft.notes import Provenance
from peftkit.merging.fold import Tally, merge_dequantized, merge_into, shared_parameters
from peftkit.methods.base import Method
from peftkit.methods.data_init import eva_starts, loftq_starts
from peftkit.model.blocks import blocks
from peftkit.model.places import FrozenWrapper
from tests.helpers.cell import (
    ROUNDING,
    BrokenLaw,
    Cell,
    bare_model,
    demand,
    demand_close,
    demand_gradients,
    gradients,
    largest,
    losses,
    own_warnings,
    perturb_trained,
)
from tests.helpers.grid import (
    COLUMNS,
    PEFT_LIMITS,
    READING_LIMITS,
    REASONS,
    UNUSED,
    fitted,
    refusal,
    without_experts,
)
from tests.helpers.kinds import inputs, outputs

# ------------------------------------------------------------------- laws, in their order


def fresh_is_the_base(cell: Cell) -> None:
    """A fresh adapter leaves the output as it is, to the bit; or the method says that it cannot."""
    same = torch.equal(cell.outputs(), cell.plain)
    if reason := cell.adapter.method.fresh_changes:
        demand(not same, f"a fresh adapter changes nothing, though it says: {reason}")
    else:
        demand(same, "a fresh adapter changes the output")


def only_the_adapter_trains(cell: Cell) -> None:
    """Three steps lower the loss; all adapter tensors get gradients, and nothing else does."""
    model = cell.model
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    seen = losses(cell.adapter, cell.given)
    demand(seen[-1] < seen[0], f"the loss goes from {seen[0]:.4f} to {seen[-1]:.4f}")
    adapter_ids = {id(parameter) for parameter in cell.adapter.parameters()}
    idle = UNUSED.get(cell.architecture, ())
    for name, parameter in model.named_parameters():
        if id(parameter) not in adapter_ids:
            demand(parameter.grad is None, f"{name} gets a gradient")
            demand(torch.equal(parameter, frozen[name]), f"{name} is changed")
        elif any(part in name for part in idle):
            cell.notes.append("u")
        else:
            moved = parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
            demand(moved, f"{name} gets no gradient")
    demand(not torch.allclose(cell.outputs(), cell.plain), "training changes nothing")


def disabled_is_the_base(cell: Cell) -> None:
    """Switched off it is the base, switched on again it is as trained, to the bit."""
    trained = cell.outputs()
    with cell.adapter.disabled():
        demand(torch.equal(cell.outputs(), cell.plain), "disabled, it is not the base")
    demand(torch.equal(cell.outputs(), trained), "enabled again, it is another one")


def saved_is_loaded(cell: Cell) -> None:
    """Saved, taken off (it is the base then) and loaded, it is the same to the bit."""
    trained, state = cell.outputs(), cell.adapter.state()
    with tempfile.TemporaryDirectory() as folder:
        save_adapter(cell.adapter, folder)
        cell.adapter.detach()
        demand(torch.equal(cell.outputs(), cell.plain), "detached, it is not the base")
        for module in cell.model.modules():
            left = isinstance(module, FrozenWrapper) or module._forward_pre_hooks
            demand(not left, f"detached, it leaves something on a {type(module).__name__}")
        cell.adapter = load_adapter(cell.model, folder, trainable=True)
    demand(torch.equal(cell.outputs(), trained), "loaded, it gives something else")
    again = cell.adapter.state()
    demand(list(again) == list(state), "loaded, it has other tensors")
    demand(all(torch.equal(again[name], state[name]) for name in state), "a tensor has changed")


def recomputing_changes_nothing(cell: Cell) -> None:
    """Gradients with checkpointed blocks are those without."""
    model: Any = cell.model
    named = "activation_checkpointing_"  # by transformers 5.23; "gradient_..." before
    stem = named if hasattr(model, f"{named}enable") else "gradient_checkpointing_"
    expected = gradients(cell)
    getattr(model, f"{stem}enable")({"use_reentrant": False})
    try:
        demand_gradients(gradients(cell), expected, "with checkpointing")
    finally:
        getattr(model, f"{stem}disable")()


def compiling_changes_nothing(cell: Cell, backend: str = "aot_eager") -> None:
    """Loss and gradients with a compiled block are those without."""
    expected = gradients(cell)
    _, block = blocks(cell.model)[-1]
    torch._dynamo.reset()
    try:
        with own_warnings():
            block.compile(backend=backend)
            demand_gradients(gradients(cell), expected, "compiled")
    finally:
        block._compiled_call_impl = None


def peft_agrees(cell: Cell) -> None:
    """PEFT loads our file and gives our output; we load what it saves and give its output."""
    method, task = cell.adapter.method, task_type(cell.model)
    if cell.quantize != "none" or "PEFT" not in method.files:
        return
    if method.acts_on_input and task is None:
        cell.notes.append("v")
        return
    trained, bare = cell.outputs(), bare_model(cell.architecture, cell.quantize)
    with tempfile.TemporaryDirectory() as name, own_warnings():
        folder = Path(name)
        save_adapter(cell.adapter, folder, Provenance(task_type=task))
        try:
            theirs = peft.PeftModel.from_pretrained(copy.deepcopy(bare), str(folder)).eval()
        except Exception as error:
            cell.notes.append(_limit(error, PEFT_LIMITS))
            return

        def peft_outputs() -> Tensor:  # PEFT gives logits of virtual tokens too
            values = outputs(theirs, cell.given)
            return values[:, -trained.shape[1] :] if method.acts_on_input else values

        scale = largest(trained)
        demand_close(peft_outputs(), trained, "PEFT from our file", scale=scale)
        theirs.requires_grad_(True)  # as loaded, it is frozen
        perturb_trained(
            theirs, 0.02, ("bias",) if method.type == "bitfit" else (".default", "prompt")
        )
        theirs.save_pretrained(str(folder / "theirs"))
        try:
            load_adapter(bare, folder / "theirs")
        except PeftkitError as error:
            cell.notes.append(_limit(error, READING_LIMITS))
            return
        demand_close(outputs(bare, cell.given), peft_outputs(), "from PEFT's file", scale=scale)


def _limit(error: Exception, codes: Mapping[str, str]) -> str:
    """Return the code of a limit that is known; any other error is one."""
    for words, code in codes.items():
        if re.search(words, str(error)):
            return code
    raise error


def task_type(model: nn.Module) -> str | None:
    """Return PEFT's word for what a model is for; None where there is, or needs to be, none."""
    if type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        return "CAUSAL_LM"
    text = getattr(model, "main_input_name", "") == "input_ids"
    generates = model.config.is_encoder_decoder and hasattr(model, "prepare_inputs_for_generation")
    return "SEQ_2_SEQ_LM" if generates and text else None


def merged_is_the_same(cell: Cell) -> None:
    """Merged weights compute base and adapter at once; or the method says why there are none."""
    trained, adapter = cell.outputs(), cell.adapter
    if reason := adapter.method.unmergeable:
        try:
            merge(cell)
        except MergeError as error:
            demand(reason in str(error), f"its refusal does not say why: {error}")
            demand(adapter.method.type in str(error), f"its refusal names no method: {error}")
            return
        raise BrokenLaw("it merges, though it cannot")
    if adapter.method.train_fully and _tied(cell):
        return
    model = merge(cell)
    demand(not any(p.requires_grad for p in model.parameters()), "merged, it still trains")
    left = any(isinstance(module, FrozenWrapper) for module in model.modules())
    demand(not left, "merged, it still carries an adapter")
    # one product where there were two: float32 sums in another order, once in every layer
    demand_close(outputs(model, cell.given), trained, "merged", 2 * ROUNDING, largest(trained))


def merge(cell: Cell) -> nn.Module:
    """Return a model of merged weights."""
    if cell.quantize == "none":
        return merge_into(cell.adapter)
    merged = merge_dequantized(cell.adapter, torch.float32, tally=Tally()).state_dict()
    model = bare_model(cell.architecture, "none").requires_grad_(False)
    model.load_state_dict(merged)
    return model


def _tied(cell: Cell) -> bool:
    """Tell whether what is trained whole shares its weight, so that merging is refused."""
    ids = {
        id(p) for path in cell.adapter.full for p in cell.adapter.modules[path].base.parameters()
    }
    if not ids & shared_parameters(cell.model):
        return False
    cell.notes.append("t")
    try:
        merge(cell)
    except MergeError as error:
        demand("shares its weight" in str(error), f"its refusal does not say why: {error}")
        return True
    raise BrokenLaw("it merges into a weight that two modules use")


Law = Callable[[Cell], None]
START: tuple[Law, ...] = (fresh_is_the_base, only_the_adapter_trains)
CHEAP: tuple[Law, ...] = (*START, disabled_is_the_base, saved_is_loaded)
LAWS: tuple[Law, ...] = (
    *CHEAP,
    recomputing_changes_nothing,
    compiling_changes_nothing,
    peft_agrees,
    merged_is_the_same,
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a cell: what failed, or why it is none, and its notes."""

    failures: tuple[str, ...] = ()
    refusal: str = ""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.failures:
            return "FAIL"
        return " ".join([f"n/a:{self.refusal}" if self.refusal else "pass", *self.notes])


def start(method: Method, model: nn.Module, architecture: str) -> Adapter:
    """Attach a method, made beforehand what it begins with."""
    if method.initializer == "eva_starts":
        batches = [inputs(model, seed) for seed in range(8)]
        method, starts = eva_starts(model, method, batches, forward=outputs)
        return attach(model, method, starts=starts)
    if method.initializer == "loftq_starts":
        starts = loftq_starts(model, method, bare_model(architecture, "none"))
        return attach(model, method, starts=starts)
    return attach(model, method)


def check(
    column: str, architecture: str, quantize: str = "none", laws: Iterable[Law] = LAWS
) -> Outcome:
    """Ask some laws of a cell of the grid, in their order; those of the start always come first."""
    expected = refusal(column, architecture, quantize)
    return check_method(COLUMNS[column], architecture, quantize, laws, expected)


def check_method(
    method: Method, architecture: str, quantize: str, laws: Iterable[Law], expected: str = ""
) -> Outcome:
    """Ask some laws of a method on an architecture.

    Args:
        expected: Code of why it has to refuse.
    """
    model = bare_model(architecture, quantize)
    given = inputs(model)
    plain, method, notes = outputs(model, given), fitted(method, model), []
    try:
        adapter = start(method, model, architecture)
    except PeftkitError as error:
        if expected:
            return Outcome((), expected)
        if "stacked expert" not in str(error):
            return Outcome((f"attach: {error}",))
        adapter = start(without_experts(method, model), model, architecture)
        notes.append("x")
    if expected:
        return Outcome((f"attach: it takes what it has no form for ({REASONS[expected]})",))
    cell = Cell(architecture, quantize, model, given, plain, adapter, notes)
    for law in dict.fromkeys((*START, *laws)):
        try:
            law(cell)
        except Exception as error:
            # what comes after would start from something else
            return Outcome((f"{law.__name__}: {type(error).__name__}: {error}",))
    return Outcome(notes=tuple(dict.fromkeys(cell.notes)))
