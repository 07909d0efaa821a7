"""GRPO: trains on groups of completions of each prompt, weighted by their advantages.

A row is a prompt with a group of its answers. A group is not split over micro-batches, and if the
model can share prefixes, a batch has each prompt once.

Shapes: n answer tokens of a batch, D answers, G answers of each prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from peftkit.data.encode import Encoder
from peftkit.data.generation import stop_ids
from peftkit.data.messages import Message
from peftkit.data.pack import IGNORE
from peftkit.data.style import Style
from peftkit.errors import AdapterError, ConfigError, PeftkitError
from peftkit.events import Listener, Notice, ScoredAnswer, Stage, ignore
from peftkit.forward.loss import unwrapped
from peftkit.inference.generate import ModelSampler, SampledAnswer, answers_to
from peftkit.model.modes import SideAdapter, adapters_off, evaluating
from peftkit.tasks.documents import OnPolicyTask, Rollout
from peftkit.tasks.metrics import exact_match
from peftkit.tasks.pairs.reward import adapter_rewards
from peftkit.tasks.rewards.grpo_losses import OF_TOKENS, advantages, kl_to_reference, policy_losses
from peftkit.tasks.rewards.grpo_rows import Group, Prompt, PromptEncoder
from peftkit.tasks.rewards.grpo_tools import Dialogue, Tools, figures
from peftkit.tasks.rewards.reward_functions import Rewards, RewardTerm
from peftkit.tasks.run_hooks import Run
from peftkit.tasks.tokens import IGNORED
from peftkit.tasks.user_code import UserCode, source_hashes


class GRPO(OnPolicyTask):
    """Policy-gradient losses over groups of completions, weighted by group-relative advantages."""

    ignored_targets: ClassVar[Mapping[str, int] | None] = {
        **IGNORED,
        "document": -1,
        "old": 0,
        "reference": 0,
    }
    why_nothing: ClassVar[str] = (
        "all answers to a prompt had the same reward, so all advantages were 0. Inspect answers "
        "(peftkit generate) and rewards (task.rewards). Then use rewards that differ between "
        "answers, raise task.answers, or train on supervised rows first."
    )

    def build(self, model: nn.Module) -> None:
        super().build(model)
        tokenizer, config = self.tokenizer, self.config
        kl = ("kl",) if config.kl else ()
        self.metric_names = ("entropy", "clipped_low", "clipped_high", *kl)
        rows = self.rows
        if rows.style is None:
            is_chat = Encoder(tokenizer, rows.template).has_template
            rows.style = Style("chat", rows.template) if is_chat else Style("plain")
        rows.encoder = PromptEncoder(tokenizer, rows.style, self._max_prompt, self._schemas)
        self._rewards: Rewards | None = None
        self._code = UserCode()
        self._adapters: dict[str, SideAdapter] = {}
        self.stops, self.updates = stop_ids(tokenizer, rows.style), config.updates
        self.needs_log_probs = config.updates > 1 or config.kl > 0

    def _schemas(self) -> Sequence[Mapping[str, Any]]:
        """Return the tools of prompts; called when rows are encoded, since opening runs no code."""
        return self._tools.schemas if self._tools is not None else ()

    @cached_property
    def _tools(self) -> Tools | None:
        if not self.config.has_tools:
            return None
        style, max_prompt = self.rows.prompt_style, self._max_prompt
        return Tools(self.tokenizer, style, self.config, self._code, max_prompt)

    @property
    def _max_prompt(self) -> int:
        return self.rows.max_length - self.config.max_new_tokens

    @property
    def paths(self) -> dict[str, str]:
        rows = "the prompt once" if self.layout.attention else "each with its prompt"
        return {"loss": f"{self.config.loss}, answer rows alone, in chunks", "answers": rows}

    @property
    def identity(self) -> Mapping[str, object]:
        """The source of the reward functions, and the reward adapters."""
        adapters = {folder: adapter.key for folder, adapter in self._adapters.items()}
        uses = [use for part in self.config.code.values() for use in part]
        return {"rewards": source_hashes(uses) | adapters}

    @property
    def other_adapters(self) -> Sequence[str]:
        """Reward adapters."""
        return [term.adapter for term in self.config.rewards if term.adapter is not None]

    def add_adapter(self, folder: str, adapter: SideAdapter) -> None:
        if adapter.task.get("type") != "reward" or not adapter.head:
            raise AdapterError(
                f"{folder} cannot be a reward adapter.",
                found=f"It was trained for the task {adapter.task.get('type', 'causal_lm')}.",
                fix="Train one with task: reward, on pairs of a better and a worse answer.",
            )
        self._adapters[folder] = adapter

    def spans(self, row: Prompt) -> list[tuple[str, str]]:
        """Return the prompt, since answers are sampled later."""
        return [("prompt", str(self.tokenizer.decode(row.input_ids)))]

    def metrics(
        self, model: nn.Module, rows: Sequence[Prompt], *, on_event: Listener = ignore
    ) -> dict[str, float]:
        """Return no metrics: `evaluate` and `completion_metrics` compute rewards."""
        return {}

    def completion_metrics(
        self,
        model: nn.Module,
        rows: Sequence[Prompt],
        *,
        run_code: bool = False,
        on_event: Listener = ignore,
    ) -> dict[str, float]:
        """Return the mean rewards of greedy completions, and their exact match with the rows.

        If a reward is not available, the weighted sum is left out.
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
            (answer.completion, row.reference)
            for answer, row in zip(rollout.answers, rows, strict=True)
            if row.reference is not None
        ]
        return means | ({"exact_match": exact_match(pairs)} if pairs else {})

    def _is_available(self, model: nn.Module, term: RewardTerm, on_event: Listener) -> bool:
        """Load the files of a built-in reward; emit a notice if that fails."""
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

    def setup(self, run: Run) -> None:
        """Load the reward functions: not in `build`, since opening an adapter runs no code."""
        self.check_alone(run)
        if not self.terms:
            raise ConfigError(
                "No reward is set for answers.",
                found=f"{self.config.environment} has no method get_reward.",
                fix="Add the method, or set task.rewards.",
            )
        self.use_rewards(run.model, self.terms)

    @property
    def terms(self) -> Sequence[RewardTerm]:
        """The rewards of the config and of the environment."""
        terms = self.config.rewards
        if self._tools is not None and self._tools.has_reward:
            terms = (*terms, RewardTerm(use=self.config.environment))
        return terms

    def use_rewards(self, model: nn.Module, terms: Sequence[RewardTerm]) -> None:
        """Load some or all rewards of the task, for all answers from now on."""
        scorer, generate = partial(self._scores, model), partial(self._base_answers, model)
        self._rewards = Rewards(terms, self.config.reward_timeout, scorer, self._code, generate)

    def _base_answers(
        self, model: nn.Module, prompts: Sequence[Sequence[Message]], settings: Mapping[str, object]
    ) -> list[str]:
        """Return the base's answers to conversations, with the policy's adapter off."""
        self.layout.forget()
        with adapters_off(model):
            return answers_to(unwrapped(model), self.tokenizer, prompts, **settings)

    def _scores(
        self, model: nn.Module, folder: str, prompts: Sequence[object], texts: Sequence[str]
    ) -> list[float]:
        """Return the rewards of answers by a reward adapter, with the policy's adapter off."""
        self.layout.forget()
        adapter, style = self._adapters[folder], self.rows.prompt_style
        return adapter_rewards(model, adapter, self.tokenizer, style, self.pad_id, prompts, texts)

    def evaluate(self, rows: Sequence[Prompt], run: Run) -> dict[str, float]:
        """Return the mean rewards of greedy answers; "loss" is the negative reward."""
        _, means = self.rolled_out(rows, None, run)
        return {"loss": -means["reward"], **means}

    def stop_reason(self, figures: Mapping[str, float]) -> str:
        limit, entropy = self.config.stop_entropy, figures.get("entropy")
        if limit is None or entropy is None or entropy >= limit:
            return ""
        reason = f"The model's entropy fell to {entropy:.4g}"
        return f"{reason}, below task.stop_entropy: {limit:g}. The run ends here."

    def roll_out(
        self, prompts: Sequence[Prompt], seeds: Sequence[int] | None, sampler: ModelSampler
    ) -> Rollout:
        """Sample and score answers; groups with equal rewards are left out of the rows."""
        prompts, sampled, dialogues = self._sampled(prompts, seeds, sampler)
        pairs = [(p, answer) for p, group in zip(prompts, sampled, strict=True) for answer in group]
        texts = [self.text(answer.ids, special=bool(dialogues)) for _, answer in pairs]
        totals, parts = self._scored([prompt for prompt, _ in pairs], texts, dialogues)
        all_advantages, groups, rewards = list[float](), list[Group](), iter(totals)
        for prompt, group in zip(prompts, sampled, strict=True):
            of_group = [next(rewards) for _ in group]
            values = advantages(self.config.loss, of_group, self.config.normalises)
            values = values or [0.0] * len(group)
            all_advantages += values
            groups += self._group(prompt, group, values)
        answers = tuple(
            ScoredAnswer(
                prompt=self.text(prompt.input_ids, special=False),
                completion=text,
                reward=total,
                parts={name: values[n] for name, values in parts.items()},
                advantage=advantage,
                is_cut=answer.is_cut,
                source=prompt.source,
            )
            for n, ((prompt, answer), text, total, advantage) in enumerate(
                zip(pairs, texts, totals, all_advantages, strict=True)
            )
        )
        means = self._means(answers, pairs, len(groups) / max(len(prompts), 1))
        return Rollout(groups, means | (figures(dialogues) if self._tools else {}), answers)

    def _sampled(
        self, prompts: Sequence[Prompt], seeds: Sequence[int] | None, sampler: ModelSampler
    ) -> tuple[Sequence[Prompt], list[list[SampledAnswer]], list[Dialogue]]:
        """Return prompts, the answers to each, and with tools the dialogues of all answers."""
        if self._tools is None:
            ids = [prompt.input_ids for prompt in prompts]
            answers = self.sample(ids, seeds, sampler, self.config.answers)
            return prompts, answers, []
        number = 1 if seeds is None else self.config.answers
        groups = self._tools.sample(prompts, seeds, sampler, number)
        pairs = zip(prompts, groups, strict=True)
        prompts = [replace(prompt, input_ids=group.prompt) for prompt, group in pairs]
        all_dialogues = [dialogue for group in groups for dialogue in group.dialogues]
        return prompts, [group.answers for group in groups], all_dialogues

    def _group(
        self, prompt: Prompt, group: Sequence[SampledAnswer], values: Sequence[float]
    ) -> list[Group]:
        """Return the answers to train on as a group; [] if all of their advantages are 0."""
        answers = [
            (answer.ids, advantage, answer.is_target or (True,) * len(answer.ids))
            for answer, advantage in zip(group, values, strict=True)
            if not (answer.is_cut and self.config.mask_cut)
        ]
        if not any(advantage for _, advantage, _ in answers):
            return []
        ids, group_advantages, masks = zip(*answers, strict=True)
        sampled = None if self._tools is None else masks
        return [Group(prompt.input_ids, ids, group_advantages, prompt.source, sampled)]

    def _scored(
        self, prompts: Sequence[Prompt], texts: Sequence[str], dialogues: Sequence[Dialogue]
    ) -> tuple[list[float], dict[str, list[float]]]:
        """Call the reward functions; they get conversations as messages, as in TRL."""
        assert self._rewards is not None
        fields = [prompt.fields for prompt in prompts]
        contents = [json.loads(prompt.content) for prompt in prompts]
        completions: list[object] = [
            text if isinstance(content, str) else [{"role": "assistant", "content": text}]
            for text, content in zip(texts, contents, strict=True)
        ]
        names = dict.fromkeys(name for row in fields for name in row)
        columns: dict[str, list[object]] = {
            name: [row.get(name) for row in fields] for name in names
        }
        columns["references"] = [prompt.reference for prompt in prompts]
        if dialogues:
            contents = [dialogue.prompt_messages for dialogue in dialogues]
            completions = [dialogue.messages for dialogue in dialogues]
            columns["environments"] = [dialogue.environment for dialogue in dialogues]
        for name in ("prompt", "prompts", "completions"):
            columns.pop(name, None)
        sources = [prompt.source for prompt in prompts]
        return self._rewards.judge(contents, completions, columns, sources, fields)

    def _means(
        self,
        answers: Sequence[ScoredAnswer],
        pairs: Sequence[tuple[Prompt, SampledAnswer]],
        share_with_signal: float,
    ) -> dict[str, float]:
        rewards = torch.tensor([answer.reward for answer in answers])
        number = max(len(pairs), 1)
        assert self._rewards is not None
        means = dict(zip(("reward", "reward_std"), _mean_and_std(rewards), strict=True))
        for name in self._rewards.names:
            values = torch.tensor([answer.parts[name] for answer in answers])
            means[f"reward_{name}"], _ = _mean_and_std(values)
        return {
            **means,
            "taught": share_with_signal,
            "cut": sum(answer.is_cut for _, answer in pairs) / number,
            "length": sum(answer.num_targets for _, answer in pairs) / number,
        }

    # The loss.

    def _as_group(self, row: Prompt | Group) -> Group:
        """Return a row as a group; a prompt gets answers of maximum length, for planning."""
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
        batch = self.documents([document for group in groups for document in group.documents])
        values = torch.tensor([value for group in groups for value in group.advantages])
        with_advantages = {**batch, "advantages": values}
        for name in ("old", "reference"):
            stored = [value for g in groups if (value := getattr(g, name)) is not None]
            if len(stored) == len(groups):
                with_advantages[name] = torch.cat(stored)
        return with_advantages

    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        """Return the divisor of the loss: the number of answer tokens, or of answers."""
        if self.config.loss in OF_TOKENS:
            return len(batch["targets"])
        return len(batch["advantages"])

    def add_log_probs(
        self, model: nn.Module, rows: Sequence[Group], batch: Mapping[str, Tensor]
    ) -> None:
        """Store the log-probabilities of the sampling policy and the reference with the rows."""
        log_probs = {}
        if self.config.updates > 1:
            log_probs["old"] = self.token_log_probs(model, batch)
        if self.config.kl:
            with self.reference.state():
                log_probs["reference"] = self.token_log_probs(model, batch)
        sizes = [sum(token != IGNORE for labels in g.labels for token in labels) for g in rows]
        for name, values in log_probs.items():
            for group, part in zip(rows, values.cpu().split(sizes), strict=True):
                setattr(group, name, part)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the sums of the loss, -log p (an entropy estimate), clipped tokens and KL."""
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
        return torch.stack([(losses * policy.weights).sum(), *(mean.sum() for mean in means)])


def _mean_and_std(values: Tensor) -> tuple[float, float]:
    """Return both over the values that are no NaN; 0 if there are none."""
    rated = values[~values.isnan()]
    return (float(rated.mean()), float(rated.std(correction=0))) if len(rated) else (0.0, 0.0)
