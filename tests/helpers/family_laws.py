"""What a family of transformers has to do: columns of the table of `benchmarks.coverage`.

Each column is a function of a `Bench` that returns a few words for its cell and raises where a law
does not hold. A family runs in a forked process, so that a crash or a hang ends one row alone.
"""

import json
import os
import signal
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import peft
import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from benchmarks.plan import reckoner_of
from peftkit.adapter import attach
from peftkit.errors import PeftkitError
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.notes import Provenance
from peftkit.inference.generate import generate_ids
from peftkit.inference.open_engine import why_plain
from peftkit.merging.fold import shared_parameters
from peftkit.methods.lora import LoRA
from peftkit.model.targets import find_roles
from peftkit.tasks.table import TASKS
from tests.helpers import grid, laws
from tests.helpers.adapters import gradients
from tests.helpers.cell import Cell, bare_model, demand, demand_close, largest
from tests.helpers.families import ARCHITECTURES, EOS, tiny_tokenizer
from tests.helpers.installed import Family, shrunk
from tests.helpers.kinds import NUM_ROWS, SPECIAL, noise, outputs, words
from tests.helpers.kinds import loss as loss_of
from tests.helpers.laws import peft_agrees
from tests.helpers.padding_free import PACKED, ROWS, loss_and_gradients, task_on
from tests.helpers.rows_alone import alone, assert_equal, generated

LIMIT_S = 120
"""Of one family's process."""
LORA = LoRA(rank=3, alpha=6)
PROMPTS = [[11, 45, 200, 7, 90], [33, 34, 35, 36, 9, 41, 77, 130, 55], [17]]
TASK = {
    "causal": "causal_lm",
    "multimodal": "image_text",  # or audio_text
    "seq2seq": "seq2seq",
    "masked": "masked_lm",
    "classifier": "sequence_classification",
    "encoder": "embedding",
    "image": "image_classification",
    "speech": "transcription",
    "ctc": "ctc",
}
"""Kind -> the task that trains it."""


@dataclass(slots=True)
class Bench:
    """A family with its inputs.

    Attributes:
        given: Everything that one forward pass with a loss needs.
        plain: Outputs of the bare model.
        idle: Paths of layers that the loss of this pass does not depend on.
        cells: The family with LoRA on all layers, trained for three steps, by quantization.
        lost: Paths of layers that PEFT does not load from its own files.
    """

    family: Family
    given: dict[str, Any]
    plain: Tensor
    idle: tuple[str, ...]
    cells: dict[str, Cell] = field(default_factory=dict)
    lost: tuple[str, ...] = ()

    def cell(self, quantize: str = "none") -> Cell:
        """Return the family with LoRA on all linear layers, trained for some steps."""
        if quantize not in self.cells:
            model = bare_model(self.family.name, quantize)
            plain, notes = outputs(model, self.given), []
            try:
                adapter = attach(model, LORA)
            except PeftkitError as error:
                if "stacked expert" not in str(error):
                    raise
                adapter, notes = attach(model, grid.without_experts(LORA, model)), ["x"]
            cell = Cell(self.family.name, quantize, model, self.given, plain, adapter, notes)
            laws.fresh_is_the_base(cell)
            laws.only_the_adapter_trains(cell)
            self.cells[quantize] = cell
        return self.cells[quantize]


def bench_of(family: Family) -> Bench:
    """Return a family and the first inputs that it takes."""
    ARCHITECTURES[family.name] = family.build
    model = bare_model(family.name, "none")
    errors = []
    for given in _inputs(family, model):
        try:
            plain = outputs(model, given)
        except Exception as error:
            errors.append(error)
            continue
        demand(bool(plain.isfinite().all()), "the bare model's outputs are not finite")
        called: set[nn.Module] = set()
        hooks = [
            m.register_forward_hook(lambda m, *_, to=called: to.add(m)) for m in model.modules()
        ]
        loss_of(model.requires_grad_(True), given).backward()
        for hook in hooks:
            hook.remove()
        shared, idle = shared_parameters(model), []
        for site in LORA.sites(model):
            module = model.get_submodule(site.path)
            weight = getattr(module, site.parameter or "weight")
            elsewhere = id(weight) in shared and module not in called
            if elsewhere or weight.grad is None or not weight.grad.any():
                idle.append(site.path)
        grid.UNUSED[family.name] = tuple(f"{path}." for path in idle)
        return Bench(family, given, plain, tuple(idle))
    raise errors[0]


def _inputs(family: Family, model: Any) -> Iterator[dict[str, Any]]:
    """Yield inputs that a model of a kind may take; sounds have one of three shapes."""
    if family.kind in ("speech", "ctc"):
        config = model.config
        labels = {"labels": words(3, 6).remainder(config.get_text_config().vocab_size)}
        name, frames = model.main_input_name, 2 * getattr(config, "max_source_positions", 64)
        sizes = [16, 32, 64, 80, 160]
        shapes = [(16, frames), (4000,), *((frames, size) for size in sizes)]
        for shape in shapes:
            yield {name: noise(NUM_ROWS, *shape), **labels}
            mask = torch.ones(NUM_ROWS, shape[0], dtype=torch.long)
            yield {name: noise(NUM_ROWS, *shape), **labels, "attention_mask": mask}
        return
    if family.kind == "multimodal" and (special := SPECIAL.get(model.config.model_type)):
        yield special(model, 0)
    given: dict[str, Any] = {"input_ids": words()}
    config = getattr(model.config, "vision_config", model.config)
    side = getattr(config, "image_size", None) or 32
    size = side if isinstance(side, list | tuple) else (side, side)
    pixels = {"pixel_values": noise(NUM_ROWS, 3, *size)}
    if family.kind == "image":
        for image in (pixels, {"pixel_values": noise(NUM_ROWS, 3, 64, 64)}, given):
            yield image | {"labels": torch.arange(NUM_ROWS)}
    elif family.kind == "classifier":
        given["input_ids"][:, -1] = EOS  # the token that encoder-decoders classify by
        yield given | {"labels": torch.arange(NUM_ROWS)}
    elif family.kind == "encoder":
        yield given
    elif getattr(model.config, "is_encoder_decoder", False):
        yield given | {"labels": words(3, 6)}
        yield given | {"labels": words(3)}
    else:
        yield given | {"labels": words(), "use_cache": False}
        yield given | {"labels": words()}
        yield given | pixels | {"labels": words()}


def _greedy(model: Any, prompt: list[int], number: int) -> list[int]:
    """Return the tokens of `generate` up to the end token; without it, of full forward passes."""
    try:
        wanted, _ = generated(model, prompt, number)
    except Exception:  # transformers' own defect: some classes cannot make their cache
        wanted = []
        for _ in range(number):
            ids = torch.tensor([prompt + wanted])
            wanted.append(int(model(ids, use_cache=False).logits[0, -1].argmax()))
    return wanted[: wanted.index(EOS)] if EOS in wanted else wanted


# ------------------------------------------------------------------- columns


def roles(bench: Bench) -> str:
    """Roles are found for all linear layers."""
    model = bare_model(bench.family.name, "none")
    counts = Counter({role: len(sites) for role, sites in find_roles(model).items()})
    demand(bool(counts), "no role is found")
    return " ".join(f"{role} {count}" for role, count in counts.items())


def lora(bench: Bench) -> str:
    """LoRA on all linear layers starts as the base, and trains where the loss depends on them."""
    cell = bench.cell()
    left_out = f", {len(bench.idle)} without effect" if bench.idle else ""
    return f"{len(cell.adapter.modules)} layers{left_out}"


def recompute(bench: Bench) -> str:
    """Gradients with checkpointed blocks are those without."""
    cell = bench.cell()
    if not type(cell.model).supports_gradient_checkpointing:
        return "-"
    laws.recomputing_changes_nothing(cell)
    return "equal"


def as_peft(bench: Bench) -> str:
    """Loss and gradients are those of PEFT's adapter in a plain loop."""
    model, theirs = _beside_peft(bench, {})
    if isinstance(theirs, str):
        return f"not loaded: {theirs}"
    own = b_of(model)
    lost = {name for name, value in b_of(theirs).items() if not value.equal(own[name])}
    if lost:
        with tempfile.TemporaryDirectory() as folder:
            theirs.save_pretrained(folder)
            bare = bare_model(bench.family.name, "none")
            again = b_of(peft.PeftModel.from_pretrained(bare, folder))
        demand(not lost & {n for n, v in again.items() if v.any()}, f"PEFT does not read {lost}")
        bench.lost = tuple(sorted({name.rpartition(".lora_")[0] for name in lost}))
        model, theirs = _beside_peft(bench, {*bench.lost})
    loss, wanted = loss_of(model, bench.given), loss_of(theirs, bench.given)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-5)
    found, expected = gradients(model, loss), gradients(theirs, wanted)
    expected = {_name(name): value for name, value in expected.items()}
    demand(found.keys() == expected.keys(), "gradients of other tensors")
    scale = largest(*expected.values())
    for name, value in expected.items():
        demand_close(found[name], value, name, 1e-4, scale)
    return (
        "equal"
        if not lost
        else f"yes: PEFT does not read {len(bench.lost)} layers of its own files"
    )


def _beside_peft(bench: Bench, without: Collection[str]) -> tuple[nn.Module, Any]:
    """Return a model with random LoRA, and PEFT's of the same file or why it does not load it."""
    model = bare_model(bench.family.name, "none")
    targets = grid.without_experts(LORA, model).targets
    kept = tuple(path for path in targets if path not in without)
    adapter = attach(model, LORA.model_copy(update={"targets": kept}))
    for number, parameter in enumerate(adapter.parameters()):
        parameter.data = 0.1 * noise(*parameter.shape, seed=number)
    with tempfile.TemporaryDirectory() as folder:
        save_adapter(adapter, folder, Provenance(task_type=None))
        bare = bare_model(bench.family.name, "none")
        try:
            return model, peft.PeftModel.from_pretrained(bare, folder, is_trainable=True).eval()
        except Exception as error:
            return model, _line(error)


def b_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the B of each layer, by our names; in PEFT it is zero where a file has none."""
    named = model.named_parameters()
    return {_name(name): value.detach() for name, value in named if ".lora_B" in name}


def _name(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".default.weight", "")


def saved(bench: Bench) -> str:
    """Saved and loaded it is the same; PEFT reads our file and we read PEFT's."""
    cell = bench.cell()
    cell.notes.clear()
    laws.saved_is_loaded(cell)
    if bench.lost:
        return "read by peftkit: PEFT does not read all layers of its own files"
    peft_agrees(cell)
    return "; ".join(grid.NOTES[note] for note in dict.fromkeys(cell.notes)) or "equal"


def nf4(bench: Bench) -> str:
    """All of it holds over a base in 4 bits, merged too."""
    cell = bench.cell("nf4")
    laws.saved_is_loaded(cell)
    laws.merged_is_the_same(cell)
    return "equal"


def generation(bench: Bench) -> str:
    """Greedy completions of a batch are those of `generate` for each prompt alone."""
    model: Any = bench.cell().model
    if bench.family.kind not in ("causal", "multimodal") or model.config.is_encoder_decoder:
        return "-"
    tokenizer = tiny_tokenizer()
    reason = why_plain(model, tokenizer)
    found = generate_ids(model, tokenizer, PROMPTS, max_new_tokens=6)
    for prompt, answer in zip(PROMPTS, found, strict=True):
        wanted = _greedy(model, prompt, 6)
        demand(answer == wanted, f"{answer} after {len(prompt)} tokens, generate: {wanted}")
    return "cached" if reason is None else f"by generate: {reason}"


def rows(bench: Bench) -> str:
    """Documents in a padding-free batch, and packed, have the gradients that they have alone."""
    if bench.family.kind not in ("causal", "multimodal"):
        return "-"
    model, tokenizer, words = bench.cell().model, tiny_tokenizer(), []
    for packing, batch in ((False, ROWS), (True, PACKED)):
        try:
            task = task_on(model, tokenizer, packing)
        except PeftkitError as error:
            if packing and not words:
                raise  # neither way is possible
            words += [f"refused: {_line(error)}"] * packing
            continue
        with task.training(model):
            collated = task.collate(batch)
            found = loss_and_gradients(task, model, collated)
        assert_equal(found, alone(model, batch))
        free = "grid_tokens" in collated or (not packing and "attention_mask" not in collated)
        words.append(("packed" if packing else "padding-free") if free else "padded")
    return ", ".join(dict.fromkeys(words))


def merge(bench: Bench) -> str:
    """Merged weights compute base and adapter together."""
    laws.merged_is_the_same(bench.cell())
    return "equal"


def plan(bench: Bench) -> str:
    """A step is counted without data."""
    family, task = bench.family, TASK[bench.family.kind]
    if task == "image_text" and family.type not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        task = "audio_text"
    config = shrunk(getattr(transformers, CONFIG_MAPPING_NAMES[family.type])(), {})
    config.architectures = [family.name]
    steps = reckoner_of(config, "nf4", TASKS[task]())
    counted = steps.count(1, 16, steps.activation_modes()[0])
    demand(counted.flops > 0, "a step takes no operations")
    return "counted"


Column = Callable[[Bench], str]
COLUMNS: tuple[Column, ...] = (
    roles,
    lora,
    recompute,
    as_peft,
    saved,
    nf4,
    generation,
    rows,
    plan,
    merge,
)
"""In their order: merging ends the cell."""

AFTER_LORA = (recompute, saved, generation, rows, merge)
"""Columns that use the adapter of `lora`."""


@dataclass(frozen=True, slots=True)
class Result:
    """A cell of the table: its words, or what failed or was refused."""

    text: str
    state: str = "works"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:240]


def _try(call: Callable[[], str]) -> Result:
    try:
        text = call()
        return Result(text, "none" if text == "-" else "works")
    except PeftkitError as error:
        return Result(_line(error), "refused")
    except Exception as error:
        return Result(f"{type(error).__name__}: {_line(error)}", "fails")


def results(family: Family, columns: Sequence[Column] = COLUMNS) -> dict[str, Result]:
    """Return the row of a family, computed in this process."""
    benches: list[Bench] = []

    def build() -> str:
        benches.append(bench_of(family))
        return ""

    row = {"build": _try(build)}
    for column in columns if benches else ():
        if column in AFTER_LORA and "lora" in row and row["lora"].state != "works":
            row[column.__name__] = Result("-", "none")
        else:
            row[column.__name__] = _try(lambda column=column: column(benches[0]))
    return row


def results_in_child(family: Family, columns: Sequence[Column] = COLUMNS) -> dict[str, Result]:
    """Return the row of a family, computed in a forked process with a time limit."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reader)
        signal.alarm(LIMIT_S)
        warnings.simplefilter("ignore")
        try:
            row = {n: (r.text, r.state) for n, r in results(family, columns).items()}
            os.write(writer, json.dumps(row).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if not text:
        reason = f"over {LIMIT_S} s" if status == signal.SIGALRM else f"process ended with {status}"
        return {"build": Result(reason, "fails")}
    return {name: Result(*cell) for name, cell in json.loads(text).items()}
