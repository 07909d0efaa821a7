"""Export of an adapter as one merged GGUF file, for Ollama, LM Studio and llama.cpp.

The adapter is merged into its base, llama.cpp's converter writes a GGUF file, and the matrices are
quantised. Missing programs are reported before anything is computed; the output appears complete or
not at all.
"""

from __future__ import annotations

import importlib.util
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote

from torch import Tensor

from peftkit.base.load import Base, load_base
from peftkit.base.purpose import CAUSAL_LM
from peftkit.data.generation import default_style
from peftkit.data.style import Style
from peftkit.errors import AdapterError, ConfigError, OutputError, first_few
from peftkit.events import Event, Listener, Notice, Saved, ignore
from peftkit.files import disk
from peftkit.formats.find_adapter import adapter_folder
from peftkit.formats.gguf.requantize import KINDS, requantize
from peftkit.formats.open_adapter import task_of
from peftkit.formats.peft.load import AdapterFile, read_adapter
from peftkit.forward.row_lengths import context_length
from peftkit.merging.advice import advice
from peftkit.merging.fold import check_mergeable
from peftkit.merging.merge import merge
from peftkit.merging.prompt_format import set_added_tokens
from peftkit.merging.quantized import gguf_codes
from peftkit_cli.deploy.modelfile import Untranslatable, modelfile, template_for
from peftkit_cli.deploy.programs import (
    INSTALL_CONVERTER,
    INSTALL_QUANTIZER,
    Programs,
    find_programs,
    run_program,
)

TARGETS = ("gguf", "ollama", "lmstudio")
FLOATS = ("f32", "f16", "bf16")
ONLY_LLAMA_CPP = (
    *("q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k"),
    *("iq4_nl", "iq4_xs"),
)
QUANTIZATIONS = (*FLOATS, *KINDS, *ONLY_LLAMA_CPP)
"""Types of the merged weights; types in `ONLY_LLAMA_CPP` need llama-quantize."""
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")
MAX_CONTEXT = 8192
"""Tokens of a conversation in Ollama, whose cache is allocated for all of them."""


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """A merged GGUF file.

    Attributes:
        path: The file, or the folder that holds it.
        commands: Program -> shell command that runs it.
    """

    path: Path
    file: Path
    commands: Mapping[str, str]


def export_model(
    adapter: str | Path,
    *,
    to: str,
    out: str | Path | None = None,
    name: str | None = None,
    quantize: str = "q8_0",
    base: str | None = None,
    calibrate: str | Path | None = None,
    llama_cpp: str | Path | None = None,
    force: bool = False,
    on_event: Listener = ignore,
) -> ExportedModel:
    """Write base and adapter as one GGUF file.

    Args:
        to: gguf (one file), ollama (a folder with a Modelfile), lmstudio (its models folder).

    `peftkit export --help` describes the other arguments.

    Raises:
        AdapterError: The adapter does not complete text, or a program is missing.
        ConfigError: An argument is not possible.
        MergeError: The method cannot be merged.
        OutputError: `out` is taken or cannot be written.
        RunError: A program failed, or the disk is full.
    """
    if to not in TARGETS or quantize not in QUANTIZATIONS:
        wrong, allowed = (to, TARGETS) if to not in TARGETS else (quantize, QUANTIZATIONS)
        raise ConfigError(f"cannot export to {wrong!r}.", fix=f"One of: {', '.join(allowed)}.")
    if calibrate is not None and quantize not in ("q4_0", "q4_1"):
        fix = "Add --quantize q4_0 or q4_1, or leave --calibrate out."
        raise ConfigError(f"--calibrate is not possible for {quantize}.", fix=fix)
    source = adapter_folder(adapter)
    file, model = read_adapter(source), _model_name(name, source, to)
    out = _output(out, to, model, source, quantize, force)
    _check_adapter(file)
    programs = find_programs(None if llama_cpp is None else Path(llama_cpp))
    _check_programs(programs, quantize, to, on_event)
    if text := advice(file, file.base_or(base)[0], quantize):
        on_event(Notice(text))
    parent = disk.writable_folder(out.absolute().parent)
    with tempfile.TemporaryDirectory(dir=parent, prefix=f".{out.name}-") as scratch:
        folder = Path(scratch, _stem(model))
        merge(source, folder, base=base, on_event=_without_saved(on_event))
        loaded = load_base(str(folder), device="cpu")
        style = file.provenance.prompt_style or default_style(loaded.tokenizer)
        _set_bos(folder, loaded, style)
        gguf = Path(scratch, out.name if to == "gguf" else f"{folder.name}-{quantize}.gguf")
        codes = None
        if calibrate is not None:
            codes = gguf_codes(folder, quantize, str(calibrate), style, on_event)
        _convert(folder, gguf, quantize, programs, codes, on_event)
        text = _modelfile(gguf.name, loaded, style, on_event) if to == "ollama" else ""
        _move(gguf, out, text, partial(_is_ours, model=model))
    on_event(Saved(f"merged model in {quantize.upper()}", out))
    final = out if to == "gguf" else out / gguf.name
    if to == "ollama" and programs.ollama:
        create = [*programs.ollama, "create", model, "-f", str(out / "Modelfile")]
        run_program(create, f"Creating {model} in Ollama", on_event)
    return ExportedModel(out, final, _commands(to, out, final, model, programs))


def _model_name(name: str | None, source: Path, to: str) -> str:
    chosen = name or source.absolute().name
    if to == "ollama":
        chosen = chosen.lower() if name is None else chosen
    if not _NAME.fullmatch(chosen):
        raise ConfigError(
            f"{chosen!r} is not a model's name.",
            fix="Give --name with letters, digits, dots, dashes and underscores.",
        )
    return chosen


def _output(
    out: str | Path | None, to: str, model: str, source: Path, quantize: str, force: bool
) -> Path:
    """Return the output path.

    Raises:
        ConfigError: It is needed, or is no .gguf file.
        OutputError: It is taken.
    """
    if to == "gguf":
        if out is None or Path(out).suffix != ".gguf":
            fix = f"Add --out {model.replace('/', '-')}-{quantize}.gguf"
            raise ConfigError("a merged GGUF export needs a file's name.", fix=fix)
    elif out is None:
        home = Path("~/.lmstudio/models/peftkit").expanduser() / model.replace("/", "-")
        out = home if to == "lmstudio" else source / "ollama"
    path = Path(out).expanduser()
    if to == "gguf" and path.is_dir():
        raise OutputError(f"cannot write {path}", found="It is a folder.", fix="Name a file.")
    if to != "gguf" and path.suffix == ".gguf":
        raise ConfigError(
            f"--to {to} writes a folder, not the file {path}.",
            fix="Give a folder with --out, or use --to gguf --merged for one file.",
        )
    is_taken = path.exists() and (path.is_file() or any(path.iterdir()))
    if is_taken and (not force or (to != "gguf" and path.is_file())):
        raise OutputError(
            f"cannot write {path}", found="It exists.", fix="Choose another --out, or add --force."
        )
    if to != "gguf" and is_taken:
        foreign = sorted(p.name for p in path.iterdir() if not _is_ours(p.name, model))
        if foreign:
            raise OutputError(
                f"cannot write {path}",
                found=f"It holds files of another origin: {first_few(foreign, 5, ', ')}.",
                fix="Choose a new or an empty folder with --out.",
            )
    return path


def _is_ours(name: str, model: str) -> bool:
    """Return whether an export of this model into a folder writes a file of this name."""
    return name == "Modelfile" or name in {f"{_stem(model)}-{q}.gguf" for q in QUANTIZATIONS}


def _stem(model: str) -> str:
    return model.rpartition("/")[2].partition(":")[0]


def _check_adapter(file: AdapterFile) -> None:
    check_mergeable(file.method)
    task = task_of(file)
    if not task.generates or task.purpose != CAUSAL_LM or task.processor != "tokenizer":
        raise AdapterError(
            f"cannot export {file.folder} as a merged GGUF file",
            found=f"It was trained for the task {task.type}; only language models are exported.",
            fix="Merge it, and convert the folder with llama.cpp's tools: peftkit merge",
        )


def _check_programs(programs: Programs, quantize: str, to: str, on_event: Listener) -> None:
    """Check that every required program is installed, and report the optional ones.

    Raises:
        AdapterError: Lists what is missing, with the commands that install it.
    """
    missing = []
    if programs.converter is None:
        missing.append(("llama.cpp's converter", INSTALL_CONVERTER))
    if quantize in ONLY_LLAMA_CPP and programs.quantizer is None:
        text = f"{INSTALL_QUANTIZER} Or use --quantize {', '.join(KINDS)}."
        missing.append((f"llama-quantize, for {quantize}", text))
    if importlib.util.find_spec("gguf") is None:
        missing.append(("the package gguf", 'pip install "gguf>=0.17"'))
    if missing:
        raise AdapterError(
            "programs for this export are missing",
            found="\n".join(f"Not found: {name}." for name, _ in missing),
            fix="\n".join(text for _, text in missing),
        )
    if to == "ollama" and programs.ollama is None:
        on_event(Notice("Ollama is not on this machine's PATH: only its files are written."))


def _without_saved(on_event: Listener) -> Listener:
    """Return a listener that hides the merge's temporary folder."""

    def listen(event: Event) -> None:
        if not isinstance(event, Saved):
            on_event(event)

    return listen


def _set_bos(folder: Path, base: Base, style: Style) -> None:
    """Have the file's tokenizer add BOS exactly where training did.

    A chat template renders BOS itself, if at all. With the flag, llama.cpp adds a second one, or
    one that training never had.
    """
    tokenizer = base.tokenizer
    begins = tokenizer("x")["input_ids"][:1] == [tokenizer.bos_token_id]
    set_added_tokens(folder, bos=style.kind != "chat" and begins)


def _convert(
    folder: Path,
    out: Path,
    quantize: str,
    programs: Programs,
    codes: Mapping[str, Tensor] | None,
    on_event: Listener,
) -> None:
    """Write the GGUF file of a merged folder.

    Args:
        codes: Packed rows by the file's names, chosen by GPTQ; None: round to nearest.
    """
    assert programs.converter is not None
    is_float = quantize in FLOATS
    # quantised from the merged weights' own dtype: they are rounded once
    dtype = quantize if is_float else _dtype_of(folder)
    plain = out if is_float else out.with_name(f"{dtype}.gguf")
    command = [*programs.converter, str(folder), "--outfile", str(plain), "--outtype", dtype]
    run_program(command, "Converting to GGUF", on_event)
    if is_float:
        return
    if programs.quantizer is not None and codes is None:
        command = [*programs.quantizer, str(plain), str(out), quantize.upper()]
        run_program(command, f"Quantising to {quantize.upper()}", on_event)
    else:
        requantize(plain, out, quantize, codes=codes, on_event=on_event)
    plain.unlink()


def _dtype_of(folder: Path) -> str:
    config = disk.read_json(folder / "config.json", max_bytes=16 << 20)
    name = str(config.get("dtype") or config.get("torch_dtype"))
    return {"float16": "f16", "bfloat16": "bf16"}.get(name, "f32")


def _modelfile(file: str, base: Base, style: Style, on_event: Listener) -> str:
    context = min(context_length(base.model.config) or MAX_CONTEXT, MAX_CONTEXT)
    template, system = None, style.system
    try:
        template, system = template_for(base.tokenizer, style)
    except Untranslatable as reason:
        on_event(
            Notice(
                f"The chat template cannot be written for Ollama: {reason}. Ollama guesses a "
                "template, and its prompts may differ from training. Use llama-server or LM "
                "Studio, which run the file's own template."
            )
        )
    try:
        return modelfile(
            file, base.tokenizer, style, template=template, system=system, context=context
        )
    except Untranslatable as reason:
        raise AdapterError(
            "the system prompt of training cannot be written into a Modelfile",
            found=str(reason),
            fix="Export with --to gguf or --to lmstudio: the chat template contains it.",
        ) from reason


def _move(gguf: Path, out: Path, text: str, replaced: Callable[[str], bool]) -> None:
    """Move the finished file to its place, for Ollama with its Modelfile."""
    disk.fsync_file(gguf)
    if out.suffix == ".gguf":
        os.replace(gguf, out)
        disk.fsync_dir(out.absolute().parent)
        return
    last = "Modelfile" if text else gguf.name
    with disk.new_folder(out, last=last, replaced=replaced) as folder:
        os.replace(gguf, folder / gguf.name)
        if text:
            disk.write_text(text, folder / "Modelfile")


def _commands(to: str, out: Path, file: Path, model: str, programs: Programs) -> dict[str, str]:
    commands = {"llama.cpp": f"llama-server -m {quote(str(file))} --jinja"}
    if to == "ollama":
        create = f"ollama create {quote(model)} -f {quote(str(out / 'Modelfile'))} && "
        commands["Ollama"] = f"{'' if programs.ollama else create}ollama run {quote(model)}"
    if to == "lmstudio":
        commands["LM Studio"] = f"lms load {quote(model.replace('/', '-'))}"
    return commands
