"""Record a proof of an adapter, and prove a model in memory by it.

Each hypothesis is a forward pass over a few short prompts. Planted faults change the adapter's
tensors within a context, or the tokens before a continuation.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.adapter import Adapter
from peftkit.base.load import Base
from peftkit.config.schema import from_dict
from peftkit.data.chat_template import own_template
from peftkit.data.general import MEASURED
from peftkit.data.generation import default_style, prompt_ids, template_of
from peftkit.data.pack import IGNORE, last_answer
from peftkit.data.style import Style
from peftkit.errors import AdapterError, ConfigError
from peftkit.execution.plan import compute_dtype
from peftkit.figures import dtype_name
from peftkit.files.disk import sha256_of, write_text
from peftkit.formats.folders import CONFIG, PROOF, TENSORS
from peftkit.formats.guard import read_json
from peftkit.formats.open_adapter import Opened, task_of
from peftkit.formats.peft.load import read_adapter
from peftkit.formats.peft.low_rank import A, B
from peftkit.methods.lora import LoRA
from peftkit.model.modes import adapters_off, evaluating
from peftkit.model.places import FrozenWrapper
from peftkit.model.roles import ATTENTION, FFN_LIKE, linear_role
from peftkit.proof.judge import (
    ADAPTER,
    BASE,
    NO_TEMPLATE,
    SECOND_BOS,
    Position,
    Prompt,
    Proof,
    Seen,
    Verdict,
    judge,
    with_rendered,
)
from peftkit.tasks.config import TaskConfig

NUM_PROMPTS, NEW_TOKENS, TOP = 4, 6, 3
"""Prompts, tokens of each continuation, and likely tokens of base and adapter at each position."""
MAX_PROMPT_TOKENS = 128
MAX_ROWS = 64
"""Evaluation rows of which the shortest prompts are chosen."""
LOWEST = -30.0
"""Smallest recorded log-probability."""
Logits = Callable[[list[int]], Any]
"""Returns logits (T, V) of T token ids."""


@torch.no_grad()
def record(
    base: Base,
    adapter: Adapter,
    style: Style | None = None,
    prompts: Sequence[str] = (),
    rows: Sequence[Any] = (),
    digest: str | None = None,
) -> Proof:
    """Return the proof of an adapter on its base.

    Args:
        style: Format of the prompts; None: the tokenizer's.
        prompts: Prompts to record; by default half are those of `rows`, and half are general.
        rows: Encoded evaluation rows.
        digest: SHA-256 of the adapter's tensors.

    Raises:
        ConfigError: There are too many prompts for the requests to a server.
    """
    if len(prompts) > NUM_PROMPTS:
        raise ConfigError(
            f"a proof has at most {NUM_PROMPTS} prompts.",
            found=f"{len(prompts)} are given.",
            fix="Keep those whose answers the adapter changes most.",
        )
    model, tokenizer = base.model, base.tokenizer
    style = style or default_style(tokenizer)
    given = _prompts(tokenizer, style, prompts, rows)
    with evaluating(model):
        starts = [list(prompt.ids) for prompt in given]
        ids = [list(start) for start in starts]
        for _ in range(NEW_TOKENS):  # not the engine: a few short passes, at the end of each run
            ends = _rows(model, ids, [(n, len(row)) for n, row in enumerate(ids)])
            for row, values in zip(ids, ends, strict=True):
                row.append(int(values.argmax()))
        places = [(n, at) for n, row in enumerate(ids) for at in range(len(starts[n]), len(row))]
        adapted, again = (_rows(model, ids, places, padded=padded) for padded in (0, 8))
        with adapter.disabled():
            bare, bare_again = (_rows(model, ids, places, padded=padded) for padded in (0, 8))
        likely = [_likely(*pair) for pair in zip(bare, adapted, strict=True)]

        def picked(rows: Iterable[Tensor | None]) -> tuple[tuple[float, ...] | None, ...]:
            pairs = zip(rows, likely, strict=True)
            return tuple(None if row is None else _rounded(row[tokens]) for row, tokens in pairs)

        found = {BASE: picked(bare), ADAPTER: picked(adapted)}
        for name, state in _planted(adapter):
            if all(map(torch.equal, state.values(), adapter.state().values())):
                continue  # of rank 1, a transposed B is the same
            with adapter.swapped_state(state):
                found[name] = picked(_rows(model, ids, places))
        for name, before in _other_starts(tokenizer, given, style).items():
            new = [row[len(start) :] for row, start in zip(ids, starts, strict=True)]
            moved = [row and row + end for row, end in zip(before, new, strict=True)]
            shifts = [len(row) - len(ids[n]) if row else 0 for n, row in enumerate(moved)]
            at = [(n, at + shifts[n]) for n, at in places]
            found[name] = picked(_rows(model, moved, at))
    template = template_of(tokenizer, style) or own_template(tokenizer)
    is_chat = style.kind == "chat" and template is not None
    return Proof(
        base={n: getattr(base, n) for n in ("name", "hub_id", "revision", "fingerprint")},
        adapter=digest,
        precision={
            "dtype": dtype_name(compute_dtype(model)),
            "quantize": base.audit.quantized_as,
        },
        noise=(_rms(bare, bare_again, likely), _rms(adapted, again, likely)),
        template=hashlib.sha256(str(template).encode()).hexdigest() if is_chat else None,
        bos=tokenizer.bos_token_id,
        prompts=tuple(
            prompt.model_copy(update={"ids": tuple(row)})
            for prompt, row in zip(given, ids, strict=True)
        ),
        positions=tuple(
            Position(
                prompt=n,
                at=at,
                ids=tuple(tokens.tolist()),
                texts=tuple(tokenizer.decode([token]) for token in tokens.tolist()),
            )
            for (n, at), tokens in zip(places, likely, strict=True)
        ),
        log_probs=found,
    )


def is_provable(task: TaskConfig) -> bool:
    """Return whether a task's model completes prompts of text alone."""
    is_causal = task.auto_class == "AutoModelForCausalLM"
    return task.generates and is_causal and task.processor == "tokenizer"


def write_proof(opened: Opened, prompts: Sequence[str] = ()) -> Proof:
    """Record the proof of an opened adapter, and write it into its folder.

    Raises:
        AdapterError: The model completes no text.
    """
    folder = opened.file.folder
    _check_provable(folder, opened.task)
    digest = sha256_of(folder / TENSORS)
    proof = record(opened.base, opened.adapter, opened.style, prompts, digest=digest)
    save_proof(proof, folder)
    return proof


def _check_provable(folder: Path, task: TaskConfig) -> None:
    if not is_provable(task):
        raise AdapterError(
            f"no proof exists for {folder}",
            found=f"It was trained for the task {task.type}.",
            fix="Proofs are for language models; evaluate the adapter with peftkit eval.",
        )


def save_proof(proof: Proof, folder: Path) -> None:
    """Write proof.json."""
    write_text(proof.model_dump_json(), folder / PROOF)


def read_proof(path: str | Path) -> Proof:
    """Read proof.json, or the one in a folder.

    Raises:
        AdapterError: There is none, or it is not valid.
    """
    path = Path(path).expanduser()
    file = path / PROOF if path.is_dir() else path
    if not file.is_file():
        if (path / CONFIG).is_file():
            _check_provable(path, task_of(read_adapter(path)))
        raise AdapterError(
            f"there is no {PROOF} in {path}",
            found="The adapter was saved without a proof.",
            fix=f"Write one: peftkit prove {path} --write. Or name it: --proof ADAPTER",
        )
    return from_dict(Proof, read_json(file), str(file))


def prove(model: nn.Module, proof: Proof | str | Path, *, tokenizer: object = None) -> Verdict:
    """Return whether a model in memory computes with an adapter.

    Args:
        model: A transformers model, with an adapter of peftkit or PEFT, or merged; or a function
            that returns the logits (T, V) of a list of T token ids.
        proof: The adapter's folder, its proof.json, or its content.
        tokenizer: The model's tokenizer, to compare the tokens of prompts.

    Raises:
        AdapterError: There is no proof.
    """
    proof = proof if isinstance(proof, Proof) else read_proof(proof)
    logits_of, off = (model, None) if not isinstance(model, nn.Module) else _calls(model)
    with evaluating(model) if isinstance(model, nn.Module) else nullcontext():
        seen, base, method = _observed(proof, logits_of), [], "logits"
        if off is not None:
            method = "logits with and without the adapter"
            with off:
                base = _observed(proof, logits_of)
        verdict = judge(proof, seen, base=base, method=method)
        if tokenizer is None or not verdict.is_applied:
            return verdict
        rendered = {
            n: (_first(proof, n, logits_of(ids)), len(ids))
            for n, ids in _rendered(proof, tokenizer).items()
            if tuple(ids) != proof.prompts[n].ids[: proof.prompts[n].length]
        }
    return with_rendered(verdict, proof, seen, rendered)


def _calls(model: nn.Module) -> tuple[Logits, AbstractContextManager[None] | None]:
    """Return a model's function of logits, and a context with its adapters off, if it has any."""
    switch: Any = getattr(model, "disable_adapter", None)  # of PEFT's models
    if switch is not None:
        return _logits_of(model), switch()
    has_adapter = any(isinstance(module, FrozenWrapper) for module in model.modules())
    return _logits_of(model), adapters_off(model) if has_adapter else None


def _logits_of(model: nn.Module) -> Logits:
    device = next(model.parameters()).device

    def call(ids: list[int]) -> Tensor:
        logits: Tensor = model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits
        return logits[0]

    return call


def _observed(proof: Proof, logits_of: Logits) -> list[Seen]:
    """Return the log-probabilities of all recorded tokens."""
    logits = [torch.as_tensor(logits_of(list(prompt.ids))) for prompt in proof.prompts]
    seen = []
    for n, position in enumerate(proof.positions):
        row, ids = logits[position.prompt], proof.prompts[position.prompt].ids
        seen += _tokens_at(proof, n, row[len(row) - len(ids) + position.at - 1])
    return seen


def _first(proof: Proof, number: int, logits: object) -> list[Seen]:
    """Return the log-probabilities after a prompt."""
    at = next(n for n, position in enumerate(proof.positions) if position.prompt == number)
    return _tokens_at(proof, at, torch.as_tensor(logits)[-1])


def _tokens_at(proof: Proof, number: int, logits: Tensor) -> list[Seen]:
    values = logits.float().log_softmax(-1)[list(proof.positions[number].ids)].tolist()
    return [Seen(number, token, max(LOWEST, value)) for token, value in enumerate(values)]


def _rendered(proof: Proof, tokenizer: Any) -> dict[int, list[int]]:
    """Return the tokens of prompts as a tokenizer and its chat template give them."""
    found: dict[int, list[int]] = {}
    for n, prompt in enumerate(proof.prompts):
        if prompt.messages and tokenizer.chat_template:
            kind = {"add_generation_prompt": True, "tokenize": False}
            text = tokenizer.apply_chat_template([*prompt.messages], **kind)
            found[n] = tokenizer(text, add_special_tokens=False)["input_ids"]
        elif prompt.text is not None and not prompt.messages:
            found[n] = tokenizer(prompt.text)["input_ids"]
    return found


def _prompts(
    tokenizer: object, style: Style, texts: Sequence[str], rows: Sequence[object]
) -> list[Prompt]:
    """Return the prompts to record, whose ids are the prompts' tokens."""
    chosen: list[Prompt] = []
    if not texts:
        starts = {tuple(ids) for row in rows[:MAX_ROWS] for ids in _starts(tokenizer, row)}
        short = sorted((ids for ids in starts if 0 < len(ids) <= MAX_PROMPT_TOKENS), key=len)
        chosen = [_prompt_of(tokenizer, style, ids) for ids in short[: NUM_PROMPTS // 2]]
        texts = MEASURED[: NUM_PROMPTS - len(chosen)]
    for text in texts:
        chosen.append(_prompt(style, text, prompt_ids(tokenizer, text, style)))
    return chosen


def _starts(tokenizer: Any, row: Any) -> list[Sequence[int]]:
    """Return the tokens of a row's prompts."""
    if not hasattr(row, "labels"):  # a prompt, whose answers are sampled
        return [row.input_ids]
    documents = [d for d in row.documents if d.num_targets and d.labels[0] == IGNORE]
    return [last_answer(tokenizer, document)[0] for document in documents]


def _prompt(style: Style, text: str, ids: Sequence[int], *, is_of_rows: bool = False) -> Prompt:
    messages = None
    if style.kind == "chat":
        turns = style.opened([{"role": "user", "content": text}])
        messages = tuple({k: str(v) for k, v in turn.items()} for turn in turns)
    fields: dict[str, Any] = {"messages": messages, "text": text, "is_of_rows": is_of_rows}
    return Prompt(ids=tuple(ids), length=len(ids), **fields)


def _prompt_of(tokenizer: Any, style: Style, ids: tuple[int, ...]) -> Prompt:
    """Return the prompt of an encoded row, with its user's text if the row has one turn."""
    mark = "\ue000"
    text = tokenizer.decode(ids)
    frame = tokenizer.decode(prompt_ids(tokenizer, mark, style))
    before, _, after = frame.partition(mark)
    question = text.removeprefix(before).removesuffix(after)
    if question and prompt_ids(tokenizer, question, style) == list(ids):
        return _prompt(style, question, ids, is_of_rows=True)
    return Prompt(ids=ids, length=len(ids), is_of_rows=True)


def _rows(
    model: nn.Module, ids: Sequence[Any], places: Sequence[tuple[int, int]], padded: int = 0
) -> list[Any]:
    """Return log-probabilities (V,) before each place; None for prompts without tokens.

    Args:
        padded: Further tokens after each prompt, which change only the rounding.
    """
    # one batch reads the weights once; a causal model ignores padding on the right
    longest = max(len(row or ()) for row in ids) + padded
    batch = [[*row, *[row[-1]] * (longest - len(row))] if row else [0] * longest for row in ids]
    device = next(model.parameters()).device
    logits = model(input_ids=torch.tensor(batch, device=device), use_cache=False).logits
    start = logits.shape[1] - longest  # virtual tokens
    return [
        logits[n, start + at - 1].float().log_softmax(-1).cpu() if ids[n] else None
        for n, at in places
    ]


def _likely(bare: Tensor, adapted: Tensor) -> Tensor:
    return torch.cat([bare.topk(TOP).indices, adapted.topk(TOP).indices]).unique()


def _rounded(values: Tensor) -> tuple[float, ...]:
    return tuple(round(max(LOWEST, value), 3) for value in values.tolist())


def _rms(one: Sequence[Tensor], other: Sequence[Tensor], likely: Sequence[Tensor]) -> float:
    triples = zip(one, other, likely, strict=True)
    squares = torch.cat([(a[tokens] - b[tokens]).square() for a, b, tokens in triples])
    return round(math.sqrt(float(squares.mean())), 5)


def _planted(adapter: Adapter) -> Iterable[tuple[str, Mapping[str, Tensor]]]:
    """Yield the adapter's tensors with each fault; none for methods without A and B."""
    state = {name: tensor.clone() for name, tensor in adapter.state().items()}
    method = adapter.method
    if not isinstance(method, LoRA):
        return
    rank = math.sqrt(method.rank)
    for factor in (0.1, 0.5, 2.0, 1 / rank if method.rslora else rank):
        yield f"strength {factor:.3g}", _scaled(state, lambda path, factor=factor: factor)
    numbers = {path: int(found[1]) for path in adapter.modules if (found := _LAYER.search(path))}
    middle = (max(numbers.values()) + 1) / 2 if numbers else 0
    parts: dict[str, Callable[[str], bool]] = {
        "the first half of the layers": lambda path: numbers.get(path, 0) < middle,
        "the second half of the layers": lambda path: numbers.get(path, 0) >= middle,
        "the attention": lambda path: linear_role(path) in ATTENTION,
        "the feed-forward layers": lambda path: linear_role(path) in FFN_LIKE,
    }
    for name, holds in parts.items():
        if 0 < sum(map(holds, adapter.modules)) < len(adapter.modules):
            yield f"only {name}", _scaled(state, lambda path, holds=holds: float(holds(path)))
    turned = dict(state)
    for name, b in state.items():
        if name.endswith(B):
            turned[name] = b.T.reshape(b.shape)
    yield "transposed B", turned
    swapped = dict(state)
    for name, b in state.items():
        a = state.get(name.removesuffix(B) + A)
        if name.endswith(B) and a is not None and a.T.shape == b.shape:
            swapped |= {name: a.T, name.removesuffix(B) + A: b.T}
    if any(swapped[name] is not state[name] for name in state):
        yield "transposed update", swapped


_LAYER = re.compile(r"\.(\d+)\.")


def _scaled(state: Mapping[str, Tensor], factor: Any) -> dict[str, Tensor]:
    """Multiply each B by the factor of its module."""
    return {
        name: tensor * factor(name.removesuffix(f".{B}")) if name.endswith(B) else tensor
        for name, tensor in state.items()
    }


def _other_starts(
    tokenizer: Any, prompts: Sequence[Prompt], style: Style
) -> dict[str, list[list[int]]]:
    """Return the prompts' tokens with a second BOS, and without the template."""
    starts = {}
    if tokenizer.bos_token_id is not None:
        starts[SECOND_BOS] = [[tokenizer.bos_token_id, *prompt.ids] for prompt in prompts]
    if style.kind != "plain":
        plain = [prompt.text and tokenizer(prompt.text)["input_ids"] for prompt in prompts]
        starts[NO_TEMPLATE] = [row or [] for row in plain]
    return starts
