"""Decide from log-probabilities alone whether a target computes with an adapter.

A `Proof` records log-probabilities of the likeliest tokens at a few positions: of the base, with
the adapter, and with planted faults (`FAULTS`). The judge compares what a target returned with each
of these hypotheses, and weighs their distances by the noise that the best one leaves.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

from peftkit.config.schema import Config

Alarm = Literal["not_applied", "strength", "part", "transposed", "damaged", "template"]
OtherAlarm = Literal["other_adapter", "other_base", "second_bos", "tokenizer"]
Kind = Literal["applied", "undecided", Alarm, OtherAlarm]
BASE, ADAPTER, NO_TEMPLATE, SECOND_BOS = "base", "adapter", "without template", "second BOS"
FAULTS: Mapping[str, Kind] = {
    "strength": "strength",
    "only": "part",
    "transposed": "transposed",
    SECOND_BOS: "second_bos",
    NO_TEMPLATE: "template",
}
"""Verdict of each planted fault, by the beginning of its name."""
FIXES: Mapping[Kind, str] = {
    "applied": "",
    "not_applied": "The target answers like the base. Name the adapter in the request (--model), "
    "and load it: vllm serve BASE --enable-lora --lora-modules NAME=FOLDER; llama-server --lora "
    "FILE.gguf. A merged model may have lost a small update in rounding: keep more bits (q8_0).",
    "strength": "Compare lora_alpha, r, rank_pattern and use_rslora of the loaded files with the "
    "adapter's, and remove any scale of the server (--lora-scaled, weights of set_adapters).",
    "part": "Modules of the adapter were skipped: read the server's log for unknown names, or "
    "serve the merged model (peftkit merge).",
    "other_adapter": "Compare the sha256 of adapter_model.safetensors with the proof's, and load "
    "the folder that was trained last.",
    "other_base": "Load the base and revision that the adapter records: peftkit inspect ADAPTER",
    "template": "Serve the chat template of training: peftkit merge writes it into its folder; "
    "vllm --chat-template FILE; llama-server --chat-template-file FILE.",
    "second_bos": "The prompt begins with BOS twice: remove bos_token from the template, or set "
    "add_bos_token: false (tokenizer.ggml.add_bos_token in a GGUF file).",
    "tokenizer": "Load the tokenizer of the adapter's folder, otherwise the base's.",
    "transposed": "Convert the adapter again with peftkit export; fan_in_fan_out has to be true "
    "for Conv1D layers only.",
    "damaged": "Quantise to more bits (q8_0), serve base and adapter as two files, or train for "
    "the format (train.quantize_for).",
    "undecided": "Send prompts that the adapter was trained for: peftkit prove ADAPTER --write "
    "--prompt TEXT. Servers that return log-probabilities decide more. After few steps, an adapter "
    "may change answers less than 16-bit rounding does: train longer.",
}
FLOOR = 0.01
"""Smallest noise of a log-probability between two programs, in nats."""
SURE = math.log(1000)
"""Log of the likelihood ratio at which a hypothesis is refused."""
SHARE = 0.8
"""Smallest share of the update in a target that is called applied."""
NOISE = 1.0
"""Largest noise of a quantised base, in nats: root mean square over likely tokens."""
CLIP = 4.0
"""Largest difference of a log-probability that counts, in nats."""


class Prompt(Config):
    """A prompt and its continuation.

    Attributes:
        ids: Tokens of the prompt and of the adapter's greedy continuation.
        length: Number of tokens of the prompt.
        messages: The prompt as a conversation, if a chat template renders it.
        text: The prompt as text; None if only its tokens are recorded.
        is_of_rows: Whether it is a prompt of the evaluation rows.
    """

    ids: tuple[int, ...]
    length: int
    messages: tuple[dict[str, str], ...] | None = None
    text: str | None = None
    is_of_rows: bool = False


class Position(Config):
    """A position of a prompt, and the tokens that are likely there."""

    prompt: int
    at: int
    ids: tuple[int, ...]
    texts: tuple[str, ...]


class Proof(Config):
    """The content of proof.json.

    Attributes:
        base: Name, hub id, revision and fingerprint of the base.
        adapter: SHA-256 of the adapter's tensors.
        precision: Compute dtype and quantisation of the base.
        noise: Root mean square of rounding, in nats, of the base and with the adapter.
        template: SHA-256 of the chat template; None without one.
        log_probs: Hypothesis to log-probabilities by position, in the order of its `ids`; None
            where the hypothesis does not apply.
    """

    version: Literal[1] = 1
    base: dict[str, str | None]
    adapter: str | None
    precision: dict[str, str]
    noise: tuple[float, float]
    template: str | None
    bos: int | None
    prompts: tuple[Prompt, ...]
    positions: tuple[Position, ...]
    log_probs: dict[str, tuple[tuple[float, ...] | None, ...]]


class Seen(NamedTuple):
    """An observed token.

    Attributes:
        position: Index in `Proof.positions`.
        token: Index in `Position.ids`; -1: none of them.
        log_prob: None: only the chosen token is returned, and this is it.
        is_bound: `log_prob` is the smallest returned one, and the token's is lower.
    """

    position: int
    token: int
    log_prob: float | None = None
    is_bound: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verdict with its evidence.

    Attributes:
        share: Share of the update that the target shows; None if it cannot be measured.
        is_certain: Whether all other hypotheses are refused.
        method: What the target returned.
    """

    kind: Kind
    evidence: tuple[str, ...]
    share: float | None = None
    is_certain: bool = True
    method: str = ""

    @property
    def is_applied(self) -> bool:
        """Whether the target computes with the adapter."""
        return self.kind == "applied"

    @property
    def fix(self) -> str:
        """What to do about it."""
        return FIXES[self.kind]

    @property
    def line(self) -> str:
        """The verdict in one line."""
        share = "" if self.share is None else f", {max(self.share, 0):.0%} of the update"
        likely = "" if self.is_certain or self.kind == "undecided" else " (likely)"
        decided = "not proved" if self.kind == "undecided" else "proved"
        return f"{decided}: {self.kind.replace('_', ' ')}{likely}{share}"

    def as_dict(self) -> dict[str, object]:
        """Return the verdict as JSON."""
        return {**asdict(self), "fix": self.fix}


@dataclass(frozen=True)
class _Fit:
    """Distances of observations from each hypothesis: mean squares over positions, in nats^2."""

    proof: Proof
    seen: Sequence[Seen]

    def far(self, name: str) -> float:
        """Return the distance of the observations from a hypothesis."""
        at: dict[int, list[float]] = defaultdict(list)
        for one in self.seen:
            at[one.position].append(self._difference(one, name) ** 2)
        return sum(sum(values) / len(values) for values in at.values()) / len(at)

    def _difference(self, one: Seen, name: str) -> float:
        row = self._row(name, one.position)
        if one.log_prob is None:
            chosen = min(row) if one.token < 0 else row[one.token]
            return min(CLIP, max(row) - chosen)
        difference = one.log_prob - row[one.token]
        return min(difference, 0.0) if one.is_bound else max(-CLIP, min(CLIP, difference))

    def _row(self, name: str, position: int) -> tuple[float, ...]:
        row = self.proof.log_probs[name][position]
        assert row is not None
        return row

    def names(self) -> list[str]:
        """Return the hypotheses that apply to all observed positions."""
        at = {one.position for one in self.seen}
        rows = self.proof.log_probs.items()
        return [name for name, row in rows if all(row[n] is not None for n in at)]

    def expected(self, name: str) -> _Fit:
        """Return what a target of a hypothesis would have shown."""
        return replace(self, seen=[self._expected(one, name) for one in self.seen])

    def _expected(self, one: Seen, name: str) -> Seen:
        row = self._row(name, one.position)
        if one.log_prob is None:
            return one._replace(token=row.index(max(row)))
        value = row[one.token]
        return one if one.is_bound and value <= one.log_prob else Seen(*one[:2], value)

    def share(self) -> float | None:
        """Return the projection of the observed change on the adapter's."""
        product = square = 0.0
        for one in self.seen:
            if one.log_prob is not None and not one.is_bound:
                base, adapted = (self._row(n, one.position)[one.token] for n in (BASE, ADAPTER))
                moved = max(-CLIP, min(CLIP, adapted - base))
                product += moved * max(-CLIP, min(CLIP, one.log_prob - base))
                square += moved * moved
        return product / square if square else None


def judge(
    proof: Proof, seen: Sequence[Seen], *, base: Sequence[Seen] = (), method: str = ""
) -> Verdict:
    """Return the hypothesis that explains a target's log-probabilities.

    Args:
        seen: The target's. base: The same with the target's adapter off, if that is possible; the
            noise of its precision is then known.
    """
    bare = {one[:2]: one for one in base if one.log_prob is not None and not one.is_bound}
    if bare:
        noise = math.sqrt(_Fit(proof, list(bare.values())).far(BASE))
        if noise > NOISE:
            found = f"without its adapter, the target differs from the base by {noise:.2f} nats"
            return Verdict("other_base", (found,), method=method)
        seen = [_without_noise(proof, one, bare) for one in seen]
    if not seen:
        return Verdict("undecided", ("no recorded token was returned",), method=method)
    fit, number = _Fit(proof, seen), len({one.position for one in seen})
    far = {name: fit.far(name) for name in fit.names()}
    floor = max(FLOOR, *proof.noise) ** 2
    effect, share = fit.expected(ADAPTER).far(BASE), fit.share()
    best = min(far, key=lambda name: far[name])

    def odds(name: str, than: str) -> float:
        return number / 2 * math.log((far[name] + floor) / (far[than] + floor))

    kind, evidence = _kind(far, best, effect, floor, share, number, odds)
    rivals = [n for n in far if kind_of(n) != kind_of(best) and odds(n, best) < SURE]
    if rivals and kind != "undecided":
        evidence = (
            *evidence,
            f"almost as likely: {', '.join(sorted(rivals, key=far.__getitem__))}",
        )
    lines = (
        f"{number} positions; in nats (rms), {math.sqrt(far[BASE]):.3f} from the base, "
        f"{math.sqrt(far[ADAPTER]):.3f} from the adapter, which moves {math.sqrt(effect):.3f}",
        *evidence,
    )
    shown = None if share is None or kind in ("undecided", "other_base") else share
    return Verdict(kind, lines, shown, not rivals and kind != "undecided", method)


def _kind(
    far: Mapping[str, float],
    best: str,
    effect: float,
    floor: float,
    share: float | None,
    number: int,
    odds: Any,
) -> tuple[Kind, tuple[str, ...]]:
    """Return the verdict and its reason."""
    rest, noise = far[best], math.sqrt(far[best])
    if effect < 4 * floor:
        return "undecided", ("the adapter changes these prompts less than rounding does",)
    error = 2 * math.sqrt(rest / effect / number)
    left = f"{share or 0:.0%} of the update is left, with noise of {noise:.2f} nats"
    is_wide = noise > NOISE and rest > effect / 2
    if best != ADAPTER and odds(ADAPTER, best) >= SURE:
        is_near = rest <= min(far[BASE], far[ADAPTER]) / 4
        if best != BASE and is_near:
            return kind_of(best), (f"it answers like the adapter with {best}",)
        if best == BASE and rest <= effect / 2:
            if share is not None and share > 0.15 + error:
                return "damaged", (left,)
            return "not_applied", ("it answers like the base",)
        is_far = rest > 4 * effect and noise > NOISE  # as far as another adapter never is
        if best.startswith("strength 0") and (noise <= NOISE or rest <= effect / 8):
            return "damaged", (left,)
        least = SHARE if noise > NOISE else SHARE / 2
        if share is None or (share < least and not is_far):
            return "other_adapter", ("it answers neither like the base nor like the adapter",)
        if share < SHARE and noise <= NOISE:
            return "damaged", (left,)
    if is_wide:
        return "other_base", (f"no hypothesis explains it: {noise:.2f} nats are left",)
    if odds(BASE, ADAPTER) < SURE:
        return "undecided", ("noise hides the difference between base and adapter",)
    if share is not None and share < SHARE - error:
        return "damaged", (left,)
    return "applied", (f"it answers like the adapter, up to {math.sqrt(far[ADAPTER]):.3f} nats",)


def distance(proof: Proof, seen: Sequence[Seen], name: str = ADAPTER) -> float:
    """Return the distance of observations from a hypothesis, in nats (root mean square)."""
    return math.sqrt(_Fit(proof, seen).far(name))


def kind_of(name: str) -> Kind:
    """Return the verdict of a hypothesis."""
    if name in (BASE, ADAPTER):
        return "not_applied" if name == BASE else "applied"
    return next(kind for start, kind in FAULTS.items() if name.startswith(start))


def with_rendered(
    verdict: Verdict,
    proof: Proof,
    seen: Sequence[Seen],
    rendered: Mapping[int, tuple[Sequence[Seen], int | None]],
) -> Verdict:
    """Return the verdict, or another one if the target renders a prompt to other tokens.

    A date in a template changes tokens, but hardly the answer: the answers decide.

    Args:
        seen: Observations after the recorded tokens.
        rendered: Index of a prompt to what follows it as the target renders it, and its number of
            tokens; None: unknown.
    """
    for number, (first, count) in rendered.items():
        plain = [one for one in seen if first and one.position == first[0].position]
        if not plain or distance(proof, first) <= 0.1 + 3 * distance(proof, plain):
            continue
        prompt = proof.prompts[number]
        names = _Fit(proof, first).names()
        nearest = min(names, key=lambda name: distance(proof, first, name))
        kind: Kind = "template" if prompt.messages else "tokenizer"
        if nearest == SECOND_BOS or (proof.bos is not None and count == prompt.length + 1):
            kind = "second_bos"
        facts = f"prompt {number} has {count} tokens in the target, {prompt.length} in training"
        return replace(verdict, kind=kind, evidence=(*verdict.evidence, facts))
    return verdict


def _without_noise(proof: Proof, one: Seen, bare: Mapping[tuple[Any, ...], Seen]) -> Seen:
    """Return an observation minus the difference of the target's base from the recorded one."""
    if one.log_prob is None or one.is_bound or (found := bare.get(one[:2])) is None:
        return one
    row = proof.log_probs[BASE][one.position]
    assert row is not None
    assert found.log_prob is not None
    return one._replace(log_prob=one.log_prob - found.log_prob + row[one.token])
