"""GRPO: trains on groups of completions of each prompt, weighted by their advantages.

A row is a prompt with a group of its answers. They are in one micro-batch, with the prompt once
where the model can share prefixes.

Shapes: n answer tokens of a batch, D answers, G answers of each prompt.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from peftkit.data.encode import Encoder, shared_system
from peftkit.data.examples import Completion, Conversation, Example
from peftkit.data.generation import prompt_ids, stop_ids
from peftkit.data.messages import Message
from peftkit.data.pack import IGNORE, Row, padded_rows
from peftkit.data.prompts import PromptExample, read_prompts
from peftkit.data.records import Dropped, Record
from peftkit.data.rows.encoder import EncodedRows, RowEncoder, tokenizer_key
from peftkit.data.style import Style
from peftkit.errors import AdapterError, ConfigError, PeftkitError
from peftkit.events import Listener, Notice, ScoredAnswer, Stage, ignore
from peftkit.forward.loss import accepted, target_rows, unwrapped
from peftkit.inference.generate import ModelSampler, SampledAnswer, answers_to
from peftkit.model.modes import adapters_off, evaluating
from peftkit.model.side_adapter import SideAdapter
from peftkit.settings import CHAT
from peftkit.tasks.documents import Rollout, RolloutTask
from peftkit.tasks.metrics import exact_match
from peftkit.tasks.rewards.grpo_losses import (
    CLIP,
    OF_TOKENS,
    LossName,
    advantages,
    kl_to_reference,
    policy_losses,
)
from peftkit.tasks.rewards.grpo_tools import Dialogue, Tools, figures
from peftkit.tasks.rewards.reward_functions import Rewards, RewardTerm
from peftkit.tasks.run_hooks import TrainingRun
from peftkit.tasks.tokens import AnswerConfig
from peftkit.tasks.user_code import PATTERN, UserCode, source_hashes

SCORED = 16
"""Documents that a reward adapter reads at once."""


class GRPO(RolloutTask):
    """Policy-gradient losses over groups of completions, weighted by group-relative advantages."""

    why_nothing: ClassVar[str] = (
        "the answers to each prompt all had the same reward, so none was better than another. Look "
        "at answers and rewards (task.rewards; peftkit generate shows what the adapter says): a "
        "reward that tells them apart, task.answers higher, or supervised rows first."
    )

    def build(self, model: nn.Module) -> None:
        super().build(model)
        tokenizer, config = self.tokenizer, self.config
        self.updates = config.updates
        kl = ("kl",) if config.kl else ()
        self.metric_names = ("entropy", "clipped_low", "clipped_high", *kl)
        self.needs_log_probs = config.updates > 1 or config.kl > 0
        rows = self.rows
        if rows.style is None:
            is_chat = Encoder(tokenizer, rows.template).has_template
            rows.style = Style("chat", rows.template) if is_chat else Style("plain")
        rows.encoder = PromptEncoder(tokenizer, rows.style, self._max_prompt, self._schemas)
        self._rewards: Rewards | None = None
        self._code = UserCode()
        self._adapters: dict[str, SideAdapter] = {}
        self.stops = stop_ids(tokenizer, rows.style)

    def _schemas(self) -> Sequence[Mapping[str, Any]]:
        """Return the tools of prompts; called when rows are encoded, since opening runs no code."""
        return self._tools.schemas if self._tools is not None else ()

    @cached_property
    def _tools(self) -> Tools | None:
        if not self.config.has_tools:
            return None
        most = self._max_prompt
        return Tools(self.tokenizer, self.rows.prompt_style, self.config, self._code, most)

    @property
    def _max_prompt(self) -> int:
        return self.rows.max_length - self.config.max_new_tokens

    @property
    def paths(self) -> dict[str, str]:
        rows = "the prompt once" if self.layout.attention else "each with its prompt"
        return {"loss": f"{self.config.loss}, answer rows alone, in chunks", "answers": rows}

    @property
    def identity(self) -> Mapping[str, Any]:
        """The source of the reward functions, and the reward adapters."""
        adapters = {folder: adapter.key for folder, adapter in self._adapters.items()}
        uses = [use for part in self.config.code.values() for use in part]
        return {"rewards": source_hashes(uses) | adapters}

    @property
    def other_adapters(self) -> Sequence[str]:
        """Reward adapters."""
        return [term.adapter for term in self.config.rewards if term.adapter is not None]

    def add_adapter(self, folder: str, adapter: SideAdapter) -> None:
        refusal = f"{folder} cannot be a reward here"
        if adapter.task.get("type") != "reward" or not adapter.head:
            reason = f"it was trained for the task {adapter.task.get('type', 'causal_lm')}"
            fix = "Train one: task: reward, on pairs of a better and a worse answer."
            raise AdapterError(refusal, found=reason, fix=fix)
        self._adapters[folder] = adapter

    def spans(self, row: Prompt) -> list[tuple[str, str]]:
        """Return the prompt; its answers are not there yet."""
        return [("prompt", str(self.tokenizer.decode(row.input_ids)))]

    def metrics(
        self, model: nn.Module, rows: Sequence[Any], *, on_event: Listener = ignore
    ) -> dict[str, float]:
        """Return nothing: `evaluate` and `completion_metrics` return the rewards of completions."""
        return {}

    def completion_metrics(
        self,
        model: nn.Module,
        rows: Sequence[Any],
        *,
        run_code: bool = False,
        on_event: Listener = ignore,
    ) -> dict[str, float]:
        """Return the mean rewards of greedy completions, and their exact match with the rows.

        The weighted sum is left out if one of the rewards is not available.
        """
        rows = [*rows]
        terms = [term for term in self.terms if self._is_available(model, term, on_event)]
        if functions := [term.use for term in terms if term.is_function and not run_code]:
            text = "Reward functions are called only with --run-rewards; left out:"
            on_event(Notice(f"{text} {', '.join(functions)}."))
            terms = [term for term in terms if not term.is_function]
        self.use_rewards(model, terms)
        on_event(Stage(f"Answering {len(rows)} prompts"))
        with evaluating(model):
            rollout = self.roll_out(rows, None, self.sampler(model))
        left_out = {"taught", "reward_std"}  # metrics of groups of completions
        if not terms or len(terms) < len(self.terms):
            left_out.add("reward")
        means = {name: value for name, value in rollout.metrics.items() if name not in left_out}
        pairs = [
            (one.completion, row.reference)
            for one, row in zip(rollout.answers, rows, strict=True)
            if row.reference is not None
        ]
        return means | ({"exact_match": exact_match(pairs)} if pairs else {})

    def _is_available(self, model: nn.Module, term: RewardTerm, on_event: Listener) -> bool:
        """Load what a built-in reward reads; emit a notice if that fails."""
        if term.adapter is not None:
            return term.adapter in self._adapters
        if not term.is_function:
            try:
                self.use_rewards(model, [term])
            except PeftkitError as error:
                on_event(Notice(f"The reward {term.use} is left out: {error}"))
                return False
        return True

    # Answers and their rewards.

    def setup(self, run: TrainingRun) -> None:
        """Load the reward functions: here, so that opening an adapter runs no code."""
        self.check_answers(run)
        if not self.terms:
            problem = f"nothing rewards answers: {self.config.environment} has no get_reward."
            raise ConfigError(problem, fix="Give it one, or set task.rewards.")
        self.use_rewards(run.model, self.terms)

    @property
    def terms(self) -> Sequence[RewardTerm]:
        """The config's rewards, and the environment's."""
        terms = self.config.rewards
        if self._tools is not None and self._tools.has_reward:
            terms = (*terms, RewardTerm(use=self.config.environment))
        return terms

    def use_rewards(self, model: nn.Module, terms: Sequence[RewardTerm]) -> None:
        """Load the rewards that answers get from here on: some of the task's, or all."""
        scorer, ask = partial(self._scores, model), partial(self._asked, model)
        self._rewards = Rewards(terms, self.config.reward_timeout, scorer, self._code, ask)

    def _asked(
        self,
        model: nn.Module,
        prompts: Sequence[Sequence[Message]],
        settings: Mapping[str, Any],
    ) -> list[str]:
        """Return what the base, with the policy's adapter off, answers to conversations."""
        self.layout.forget()
        with adapters_off(model):
            return answers_to(unwrapped(model), self.tokenizer, prompts, **settings)

    def _scores(
        self, model: nn.Module, folder: str, prompts: Sequence[Any], texts: Sequence[str]
    ) -> list[float]:
        """Return the rewards of answers by a reward adapter, with the policy's adapter off.

        Prompts and answers are formatted as in its training.
        """
        self.layout.forget()
        adapter = self._adapters[folder]
        style = adapter.style or self.rows.prompt_style
        encoder = Encoder(self.tokenizer, style.chat_template)
        documents = [
            encoder.encode(_example(prompt, text, style)).input_ids
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        scores = [0.0] * len(documents)
        order = sorted(range(len(documents)), key=lambda n: len(documents[n]))
        with adapter.on(model):
            for start in range(0, len(order), SCORED):
                part = order[start : start + SCORED]
                ids, mask = padded_rows([documents[n] for n in part], self.pad_id)
                last = torch.arange(len(part)) * ids.shape[1] + mask.sum(1) - 1
                device = unwrapped(model).device
                inputs = accepted(model, {"input_ids": ids.to(device), "use_cache": False})
                values = adapter.values(target_rows(model, inputs, last.to(device)))
                for n, value in zip(part, values.tolist(), strict=True):
                    scores[n] = value
        return scores

    def before_step(self, rows: Sequence[Any], run: TrainingRun) -> Sequence[Sequence[Any]]:
        return self.answered_step(rows, run)

    def evaluate(self, rows: Sequence[Any], run: TrainingRun) -> dict[str, float]:
        return self.greedy_metrics(rows, run)

    def stop_reason(self, figures: Mapping[str, float]) -> str:
        least, entropy = self.config.stop_entropy, figures.get("entropy")
        if least is None or entropy is None or entropy >= least:
            return ""
        reason = f"The model's entropy fell to {entropy:.4g}"
        return f"{reason}, below task.stop_entropy: {least:g}. The run ends here."

    def roll_out(
        self, prompts: Sequence[Prompt], seeds: Sequence[int] | None, sampler: ModelSampler
    ) -> Rollout:
        """Have the model answer prompts; groups with equal rewards are left out."""
        prompts, sampled, dialogues = self._sampled(prompts, seeds, sampler)
        pairs = [(p, one) for p, group in zip(prompts, sampled, strict=True) for one in group]
        texts = [self.text(one.ids, special=bool(dialogues)) for _, one in pairs]
        totals, parts = self._judged([prompt for prompt, _ in pairs], texts, dialogues)
        all_advantages, groups, start = [], [], 0
        for prompt, group in zip(prompts, sampled, strict=True):
            rewards = totals[start : start + len(group)]
            start += len(group)
            of_group = advantages(self.config.loss, rewards, self.config.normalises)
            all_advantages += of_group or [0.0] * len(group)
            if of_group is not None:
                groups += self._group(prompt, group, of_group)
        answers = tuple(
            ScoredAnswer(
                prompt=self.text(prompt.input_ids, special=False),
                completion=text,
                reward=total,
                parts={name: values[n] for name, values in parts.items()},
                advantage=advantage,
                is_cut=one.is_cut,
                source=prompt.source,
            )
            for n, ((prompt, one), text, total, advantage) in enumerate(
                zip(pairs, texts, totals, all_advantages, strict=True)
            )
        )
        means = self._means(answers, pairs, len(groups) / max(len(prompts), 1))
        return Rollout(groups, means | (figures(dialogues) if self._tools else {}), answers)

    def _sampled(
        self, prompts: Sequence[Prompt], seeds: Sequence[int] | None, sampler: ModelSampler
    ) -> tuple[Sequence[Prompt], list[list[SampledAnswer]], list[Dialogue]]:
        """Return prompts, answers to each, and with tools the dialogues of all answers."""
        if self._tools is None:
            ids = [prompt.input_ids for prompt in prompts]
            return prompts, self.sample(ids, seeds, sampler, self.config.answers), []
        self.layout.forget()
        number = 1 if seeds is None else self.config.answers
        groups = self._tools.sample(prompts, seeds, sampler, number)
        pairs = zip(prompts, groups, strict=True)
        prompts = [replace(prompt, input_ids=group.prompt) for prompt, group in pairs]
        every = [one for group in groups for one in group.dialogues]
        return prompts, [group.answers for group in groups], every

    def _group(
        self, prompt: Prompt, group: Sequence[SampledAnswer], values: Sequence[float]
    ) -> list[Group]:
        """Return the answers of a group to train on: cut ones only count in its mean."""
        kept = [
            (one.ids, advantage, one.is_target or (True,) * len(one.ids))
            for one, advantage in zip(group, values, strict=True)
            if not (one.is_cut and self.config.mask_cut)
        ]
        if not any(advantage for _, advantage, _ in kept):
            return []
        ids, kept_values, learnt = zip(*kept, strict=True)
        masks = None if self._tools is None else learnt
        return [Group(prompt.input_ids, ids, kept_values, prompt.source, masks)]

    def _judged(
        self, prompts: Sequence[Prompt], texts: Sequence[str], dialogues: Sequence[Dialogue]
    ) -> tuple[list[float], dict[str, list[float]]]:
        """Call the reward functions; conversations are passed as messages, as in TRL."""
        assert self._rewards is not None
        fields = [prompt.fields for prompt in prompts]
        asked_for = [json.loads(prompt.asked) for prompt in prompts]
        is_chat = [not isinstance(each, str) for each in asked_for]
        completions: list[Any] = [
            [{"role": "assistant", "content": text}] if chat else text
            for text, chat in zip(texts, is_chat, strict=True)
        ]
        names = dict.fromkeys(name for row in fields for name in row)
        columns: dict[str, Any] = {name: [row.get(name) for row in fields] for name in names}
        columns["references"] = [prompt.reference for prompt in prompts]
        if dialogues:
            asked_for = [one.asked for one in dialogues]
            completions = [one.messages for one in dialogues]
            columns["environments"] = [one.environment for one in dialogues]
        for name in ("prompt", "prompts", "completions"):
            columns.pop(name, None)
        sources = [prompt.source for prompt in prompts]
        return self._rewards.judge(asked_for, completions, columns, sources, fields)

    def _means(
        self,
        answers: Sequence[ScoredAnswer],
        pairs: Sequence[tuple[Prompt, SampledAnswer]],
        share_with_signal: float,
    ) -> dict[str, float]:
        rewards = torch.tensor([one.reward for one in answers])
        lengths = [one.num_targets for _, one in pairs]
        number = max(len(pairs), 1)
        assert self._rewards is not None
        means = {"reward": _mean(rewards), "reward_std": _deviation(rewards)}
        for name in self._rewards.names:
            means[f"reward_{name}"] = _mean(torch.tensor([one.parts[name] for one in answers]))
        return {
            **means,
            "taught": share_with_signal,
            "cut": sum(one.is_cut for _, one in pairs) / number,
            "length": sum(lengths) / number,
        }

    # The loss.

    def _as_group(self, row: Prompt | Group) -> Group:
        """Return a row as a group; a prompt gets the longest answers, to plan memory."""
        if isinstance(row, Group):
            return row
        number = self.config.answers
        longest = (self.pad_id,) * self.config.max_new_tokens
        return Group(row.input_ids, (longest,) * number, (0.0,) * number, row.source)

    def num_positions(self, rows: Sequence[Prompt | Group]) -> int:
        groups = [self._as_group(row) for row in rows]
        lengths = [len(g.prompt) + len(answer) for g in groups for answer in g.answers]
        return self.positions(lengths, sum(len(g.prompt) * (len(g.answers) - 1) for g in groups))

    def collate(self, rows: Sequence[Prompt | Group]) -> dict[str, Tensor]:
        """Return a batch of all answers, and their `advantages` (D,)."""
        groups = [self._as_group(row) for row in rows]
        batch = super().collate([document for group in groups for document in group.documents])
        values = torch.tensor([value for group in groups for value in group.advantages])
        with_advantages = {**batch, "advantages": values}
        for name in ("old", "reference"):
            stored = [each for g in groups if (each := getattr(g, name)) is not None]
            if len(stored) == len(groups):
                with_advantages[name] = torch.cat(stored)
        return with_advantages

    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        """Return the number of answer tokens, or of answers: what the loss is divided by."""
        if self.config.loss in OF_TOKENS:
            return len(batch["targets"])
        return len(batch["advantages"])

    def log_probs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the log-probabilities before later updates, and the reference's for the KL."""
        log_probs = {}
        if self.updates > 1:
            log_probs["old"] = self.token_log_probs(model, batch)
        if self.config.kl:
            with self.reference.state():
                log_probs["reference"] = self.token_log_probs(model, batch)
        return log_probs

    def remember(self, rows: Sequence[Group], values: Mapping[str, Tensor]) -> None:
        sizes = [sum(t != IGNORE for one in g.labels for t in one) for g in rows]
        for name, each in values.items():
            for group, part in zip(rows, each.cpu().split(sizes), strict=True):
                setattr(group, name, part)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the summed loss, -log p (an estimate of the entropy), clipped shares and KL."""
        config = self.config
        now = self.token_log_probs(model, batch)
        policy = policy_losses(
            config.loss,
            now,
            batch["old"] if "old" in batch else now.detach(),
            batch["advantages"],
            batch["document"],
            clip=config.clips,
            max_new_tokens=config.max_new_tokens,
        )
        losses, kl = policy.losses, torch.zeros_like(now)
        if "reference" in batch:
            kl = kl_to_reference(now, batch["reference"].to(now))
            losses = losses + config.kl * kl
        figures = (-now, policy.clipped_low.to(now), policy.clipped_high.to(now), kl)
        means = [
            value.detach() * policy.mean_weights for value in figures[: len(self.metric_names)]
        ]
        return torch.stack([(losses * policy.weights).sum(), *(each.sum() for each in means)])


def _example(prompt: Any, text: str, style: Style) -> Example:
    """Return a prompt and its answer in the format of a reward adapter's training."""
    if style.kind != "chat":
        if not isinstance(prompt, str):
            raise AdapterError(
                "a reward adapter cannot read conversations",
                found="It was trained on single prompts.",
                fix="Train it on messages, or give prompts as text.",
            )
        return Completion(prompt, text, "an answer")
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    turns = (*turns, {"role": "assistant", "content": text})
    return Conversation(turns, (len(turns) - 1,), (), "an answer")


def _deviation(values: Tensor) -> float:
    rated = values[~values.isnan()]
    return float(rated.std(correction=0)) if len(rated) else 0.0


def _mean(values: Tensor) -> float:
    rated = values[~values.isnan()]
    return float(rated.mean()) if len(rated) else 0.0


class GRPOConfig(AnswerConfig):
    """Reinforcement learning from rewards of the model's own answers: GRPO and variants."""

    writes_text: ClassVar[bool] = False
    scores_documents: ClassVar[bool] = True
    data_fields: ClassVar[frozenset[str]] = frozenset({"max_length", *CHAT, "max_dropped"})

    task: ClassVar = GRPO

    type: Literal["grpo"] = "grpo"
    rewards: tuple[RewardTerm, ...] = ()
    """Reward functions; an answer's reward is their weighted sum, and what the environment's
    get_reward() returns."""
    tools: tuple[Annotated[str, Field(pattern=PATTERN)], ...] = ()
    """Functions that the model may call in its answers, FILE.py:FUNCTION: with types and a
    docstring, sync or async."""
    environment: Annotated[str, Field(pattern=PATTERN)] | None = None
    """A class of which each answer has an instance, FILE.py:CLASS: reset(**row) begins, its public
    methods are tools, get_reward() rewards."""
    max_turns: Annotated[int, Field(ge=1)] = 8
    """The most turns of an answer; after the last one no tool is called."""
    tool_timeout: Annotated[float, Field(gt=0)] = 60.0
    """Seconds that a call may take; what takes longer is told to the model as an error."""
    loss: LossName = "dapo"
    """The policy-gradient loss: see grpo_losses.py."""
    answers: Annotated[int, Field(ge=2)] = 8
    """Answers to each prompt: the size of a group."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 256
    """The most tokens of an answer; with tools, of all its turns and the replies to them."""
    updates: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps with the same answers."""
    kl: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the divergence from the base, or from method.start_from."""
    clip_low: Annotated[float, Field(ge=0)] | None = None
    """How far a token's ratio counts below 1; null: 0.2 (gspo, luspo: 3e-4)."""
    clip_high: Annotated[float, Field(ge=0)] | None = None
    """And above 1; null: 0.28 of dapo, 4e-4 of gspo and luspo, else 0.2; of cispo the largest
    ratio, 5. sapo and vespo have no bounds."""
    normalise: bool | None = None
    """Divide by the standard deviation of the group's rewards; null: true but for dr_grpo, rloo."""
    mask_cut: bool = True
    """Do not train on answers that reach max_new_tokens; their rewards still count."""
    stop_entropy: Annotated[float, Field(ge=0)] | None = None
    """End the run when the model's entropy (nats per token) falls below this, as it no longer
    explores; null: never. 0.05 is usual."""
    reward_timeout: Annotated[float, Field(gt=0)] = 60.0
    """Seconds that one call of a reward function may take."""

    @model_validator(mode="after")
    def _has_rewards(self) -> GRPOConfig:
        if not self.rewards and self.environment is None:
            raise ConfigError(
                "nothing rewards answers.",
                fix="Set task.rewards, or task.environment, a class with get_reward().",
            )
        return self

    @property
    def code(self) -> Mapping[str, Sequence[str]]:
        return {
            "rewards": [use for term in self.rewards for use in term.code],
            "tools": self.tools,
            "environment": [self.environment] if self.environment else [],
        }

    def without_tools(self) -> GRPOConfig:
        if not self.has_tools:
            return self
        return self.model_copy(update={"tools": (), "environment": None})

    @property
    def has_tools(self) -> bool:
        """Whether the model may call functions in its answers."""
        return bool(self.tools) or self.environment is not None

    @property
    def texts_per_row(self) -> int:
        """A prompt with all of its answers."""
        return self.answers

    @property
    def needs_reference(self) -> bool:
        return self.kl > 0

    @property
    def clips(self) -> tuple[float, float]:
        """The bounds of the ratio, as set or the loss's own."""
        low, high = CLIP[self.loss]
        return (
            low if self.clip_low is None else self.clip_low,
            high if self.clip_high is None else self.clip_high,
        )

    @property
    def normalises(self) -> bool:
        """Whether advantages are divided by the group's deviation."""
        return self.loss not in ("dr_grpo", "rloo") if self.normalise is None else self.normalise


# Rows of prompts, and the groups of answers that a step learns from.


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, and the fields of its record.

    Attributes:
        asked: Text or messages, as JSON.
        reference: The row's own answer, where it has one.
        known: All fields of its record, as JSON: reward functions get them as columns.
    """

    input_ids: tuple[int, ...]
    asked: str
    reference: str | None
    known: str
    source: str

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of its record."""
        return dict(json.loads(self.known))


@dataclass(slots=True, eq=False)
class Group:
    """A prompt and those of its answers that are trained on.

    Attributes:
        answers: Tokens of each, with the one that ended it.
        advantages: Of each answer.
        learnt: Which tokens of each the model wrote itself; None: all.
        old, reference: Log-probabilities of those, where the loss needs them.
    """

    prompt: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]
    advantages: tuple[float, ...]
    source: str
    learnt: tuple[tuple[bool, ...], ...] | None = None
    old: Tensor | None = None
    reference: Tensor | None = None

    @property
    def documents(self) -> list[Row]:
        """Each answer after the prompt, as a row."""
        n = len(self.prompt)
        return [
            Row(self.prompt + ids, (IGNORE,) * n + labels, (n + len(ids),), self.source)
            for ids, labels in zip(self.answers, self.labels, strict=True)
        ]

    @property
    def labels(self) -> Sequence[tuple[int, ...]]:
        """The answers' tokens; what the model did not write itself is IGNORE."""
        if self.learnt is None:
            return self.answers
        return [
            tuple(token if own else IGNORE for token, own in zip(ids, mask, strict=True))
            for ids, mask in zip(self.answers, self.learnt, strict=True)
        ]

    @property
    def input_ids(self) -> tuple[int, ...]:
        """All tokens, the prompt once."""
        return self.prompt + tuple(token for answer in self.answers for token in answer)


class PromptEncoder(RowEncoder):
    """Encoder of prompts; drops those that leave no room for an answer."""

    kind: ClassVar[type[Prompt]] = Prompt
    drops: Mapping[str, str] = {"no room for an answer": "raise data.max_length"}

    def __init__(
        self,
        tokenizer: Any,
        style: Style,
        max_prompt: int,
        schemas: Callable[[], Sequence[Mapping[str, Any]]] = tuple,
    ) -> None:
        self._tokenizer, self._style, self._max_prompt = tokenizer, style, max_prompt
        self._schemas = schemas

    @cached_property
    def _tools(self) -> Sequence[Mapping[str, Any]]:
        return self._schemas()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_tools": self._tools, "_schemas": tuple}  # for other processes

    def key(self, where: str) -> object:
        style = (self._style.kind, self._style.chat_template)
        return (*tokenizer_key(self._tokenizer), *style, self._max_prompt, json.dumps(self._tools))

    def read(self, records: Sequence[Record], where: str) -> list[tuple[PromptExample, str]]:
        prompts, _ = read_prompts(records, where=where)
        fields = (json.dumps(record.fields, default=str) for record in records)
        return list(zip(prompts, fields, strict=True))

    def rows(self, read: list[tuple[PromptExample, str]]) -> EncodedRows:
        rows: list[Prompt | Dropped] = []
        for one, fields in read:
            ids = tuple(
                prompt_ids(self._tokenizer, one.prompt, self._style, self._tools or one.tools)
            )
            if len(ids) > self._max_prompt:
                rows.append(Dropped(one.source, 0))
            else:
                prompt = json.dumps(one.prompt, default=str)
                rows.append(Prompt(ids, prompt, one.reference, fields, one.source))
        agreed, shared = {"style": str(self._style.kind)}, shared_system(one for one, _ in read)
        return EncodedRows(rows, agreed, Counter(), shared=shared)
