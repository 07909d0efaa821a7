"""The law of exchange: PEFT reads what is saved here, and the reverse, with equal outputs."""

import copy
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

import peft
from torch import Tensor, nn

from peftkit.errors import PeftkitError
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.load import load_adapter
from peftkit.formats.peft.notes import Provenance
from tests.helpers.cell import (
    Cell,
    bare_model,
    demand_close,
    largest,
    own_warnings,
    perturb_trained,
)
from tests.helpers.grid import PEFT_LIMITS, READING_LIMITS
from tests.helpers.kinds import outputs


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
