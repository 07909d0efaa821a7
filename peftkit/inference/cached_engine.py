"""Continuous batching: completions join and leave the batch at any token.

All tokens of a prompt except the last are computed in chunks, and shared prefixes once. Then the
completion grows by one token per step, starting from its prompt's last token. A step synchronises
with the device once, to read the tokens of all rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from peftkit.inference.budget import CacheBudget, Footprint, footprint
from peftkit.inference.cache import (
    MIN_READ,
    SMALLEST,
    Arena,
    Prefixes,
    Row,
    Span,
    power_of_two,
    slot_length,
    worth_sharing,
)
from peftkit.inference.cached_attention import CachedAttention, Decode, Prefill, cached_attention
from peftkit.inference.engine import FEWEST_TOKENS, Completion, Engine, Limits
from peftkit.inference.ready import on_device
from peftkit.inference.recorder import Graphs
from peftkit.inference.states import copied, has_states

LOOK_AHEAD = 128
"""Number of queued prompts that are searched for shared prefixes."""


class Scheduler:
    """Chooses the prompts of each forward pass in one step of an engine, up to its limit of tokens.

    Args:
        has_states: Whether the model has states: only new rows can be padded, see `Prefill`.
    """

    def __init__(self, limits: Limits, *, has_states: bool) -> None:
        self._left, self._limits, self._has_states = limits.prefill, limits, has_states

    def prefill(self, spans: list[Span], number: int) -> Prefill | None:
        """Return the next pass over incomplete prompts, the oldest first; None: it is time to grow.

        Alternates between the oldest prompt, which must not starve, and the prompt with the fewest
        remaining tokens, which should not wait for long ones. Prompts of similar length join it.

        Args:
            number: Number of the pass.
        """
        if not spans or self._left <= 0:
            return None
        max_tokens = min(self._left, self._limits.pass_tokens)
        if number % 2:
            spans = sorted(spans, key=lambda span: span.num_left)
        width = min(spans[0].num_left, max_tokens)
        if self._has_states and not spans[0].end:  # longer ones join it whole: a rest costs a pass
            new = [span.num_left for span in spans if not span.end]
            width = max((n for n in new if n <= min(2 * width, max_tokens)), default=width)
        chunks: list[tuple[Span, int]] = []
        for span in spans:
            size = min(span.num_left, width)
            if (len(chunks) + 1) * width <= max(max_tokens, width) and 2 * size >= width:
                chunks.append((span, size))
        if self._has_states:
            width = min((size for span, size in chunks if span.end), default=width)
        chunks = [(span, min(size, width)) for span, size in chunks]
        now = Prefill(chunks, pads_left=self._has_states)
        self._left -= now.tokens.numel()
        return now


class CachedEngine(Engine):
    """An engine with a separate key-value cache, which attention reads in place."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.graphs = Graphs(self.model)
        self._has_states = has_states(self.model.config.get_text_config())
        self._state_tokens = 0
        self._recent: deque[Completion] = deque(maxlen=32 if self.limits.prefix_tokens else 0)
        self._clear()

    def _clear(self) -> None:
        """Start with an empty cache; a prompt without a completion is a shared prefix."""
        self._prompts: dict[Span, Completion | None] = {}
        self._kept: dict[Completion, Span] = {}
        self._arenas: dict[int, Arena] = {}
        self._prefixes = Prefixes(self.limits.prefix_tokens, self._state_tokens)
        self.graphs.forget()

    def _prepare(self, stack: ExitStack) -> None:
        self._attention = CachedAttention.of(self.model)
        stack.enter_context(cached_attention(self.model, self._attention))
        # captured steps refer to the engine, and both would wait for a collection
        stack.callback(self.graphs.forget)
        if self._has_states and self.limits.tokens is not None:
            self._state_tokens = self.footprint().state_tokens
            self._prefixes = Prefixes(self.limits.prefix_tokens, self._state_tokens)

    @torch.no_grad()
    def footprint(self) -> Footprint:
        """Return the memory of its cache per token and row."""
        with on_device(self.model.device):
            return footprint(self.model, self._attention)

    def _running(self) -> list[Completion]:
        prompts = [one for one in self._prompts.values() if one is not None]
        return [*(row.owner for row in self._growing()), *prompts]

    def forget(self, adapter: str) -> None:
        self.graphs.forget()
        self._prompts = {
            span: one for span, one in self._prompts.items() if span.adapter != adapter
        }
        for completion in [one for one in self._kept if one.request.adapter == adapter]:
            self.release(completion)
        self._prefixes.forget(adapter)

    def release(self, completion: Completion) -> None:
        if (span := self._kept.pop(completion, None)) is not None:
            self._release(span.base)

    @torch.no_grad()
    def _advance(self) -> None:
        """Compute some tokens of prompts, and the next token of each growing completion."""
        self._drop_ended()
        schedule = Scheduler(self.limits, has_states=self._has_states)
        self._admit()
        while now := schedule.prefill([*self._prompts], self.num_passes):
            self._prefill(now)
            self._admit()
        if self._growing():
            self.num_passes += 1
            self._decode()
        self._prefixes.trim(one.request.ids for one in self._waiting)
        self._forget_prefixes()

    def _take_back(self) -> list[Completion]:
        running = self._running()
        for arena in self._arenas.values():  # rows refer back to it: a cycle
            arena.rows.clear()
        self._clear()
        return running

    def _lower_limits(self, num_running: int) -> Limits | None:
        rows, tokens = max(num_running // 2, 1), self.limits.pass_tokens
        if num_running == 1 and tokens <= FEWEST_TOKENS:
            return None
        return replace(self.limits, rows=rows, pass_tokens=max(tokens // 2, FEWEST_TOKENS))

    # ------------------------------------------------------------- admission

    def _growing(self) -> list[Row]:
        return [row for arena in self._arenas.values() for row in arena.rows]

    def _admit(self) -> None:
        """Start queued requests within the limits."""
        room = self.limits.rows - self.num_running
        for completion in list(self._waiting):
            if room <= 0 or not self._has_room(completion):
                return
            running = [row.owner.request.adapter for row in self._growing()]
            running += [span.adapter for span in self._prompts]
            if not self._can_join(completion.request.adapter, running):
                return
            if self._begin(completion):
                self._waiting.remove(completion)
                room -= 1

    def _budget(self) -> CacheBudget:
        """Return what the cache will allocate for the running completions."""
        prompts = {span: one for span, one in self._prompts.items() if one is not None}
        held = sum(
            len(span.tokens) + self._state_tokens for span in (*prompts, *self._kept.values())
        )
        lengths = [row.final_length for row in self._growing()]
        lengths += [slot_length(one.num_tokens - span.start) for span, one in prompts.items()]
        return CacheBudget(
            self.limits.tokens,
            self._state_tokens,
            self._prefixes.num_tokens + held,
            {size: (arena.num_slots, arena.capacity) for size, arena in self._arenas.items()},
            tuple(lengths),
        )

    def _budget_with(self, completion: Completion) -> CacheBudget:
        """Return the budget with the slot and the prompt of another completion."""
        base = self._base_of(completion)
        start = 0 if base is None or not base.is_read else len(base.tokens)
        held = len(completion.tokens) - start + self._state_tokens
        return self._budget().plus(slot_length(completion.num_tokens - start), held=held)

    def _has_room(self, completion: Completion) -> bool:
        """Return whether a completion can start: it fits into the cache, or would run alone."""
        budget = self._budget_with(completion)
        if budget.fits:
            return True
        is_alone = not (self._growing() or self._prompts)
        if is_alone:
            for other in [one for one in self._kept if one is not completion.request.after]:
                self.release(other)
            self._prefixes.drop()
            self._forget_prefixes()
        if is_alone or budget.shrunk().fits:
            self._shrink()
            return True
        return False

    def _base_of(self, completion: Completion) -> Span | None:
        return self._prefixes.find(completion.tokens[:-1], completion.request.adapter)

    def _begin(self, completion: Completion) -> bool:
        """Start a request; return False if its shared prefix is not computed yet."""
        request, target = completion.request, completion.tokens[:-1]
        kept = None if request.after is None else self._kept.pop(request.after, None)
        if kept is not None:
            span = Span(target[kept.start :], request.adapter, kept.start, base=kept.base)
            span.copy_from(kept)
        else:
            base = self._base_of(completion)
            if base is not None and not base.is_ready:
                return False
            others = [
                one.tokens[:-1]
                for one in (*islice(self._waiting, LOOK_AHEAD), *self._recent)
                if one is not completion and one.request.adapter == request.adapter
            ]
            size, users = worth_sharing(target, others)
            is_longer = size > (0 if base is None else len(base.tokens))
            prefix = size + self._state_tokens
            if is_longer and self._budget_with(completion).plus(held=prefix).fits:
                self._share(target[:size], request.adapter, base, users)
                return False
            self._recent.append(completion)
            span = self._span_after(base, target, request.adapter)
        self._prompts[span] = completion
        self._finish_prompts()
        return True

    def _span_after(self, base: Span | None, target: list[int], adapter: str | None) -> Span:
        """Return the span of a prompt, which reads or copies a shared prefix, if any."""
        if base is None:
            return Span(target, adapter)
        self._prefixes.touch(base)
        if not base.is_read:
            span = Span(target, adapter)
            span.copy_from(base)
            return span
        span = Span(target[len(base.tokens) :], adapter, len(base.tokens), base=base)
        span.states = copied(base.states)
        base.num_users += 1
        return span

    def _share(
        self, tokens: list[int], adapter: str | None, shorter: Span | None, users: int
    ) -> None:
        """Start the computation of a shared prefix, from a shorter one if possible."""
        span = Span(tokens, adapter, is_read=len(tokens) * users >= MIN_READ)
        if shorter is not None:
            span.copy_from(shorter)
        self._prompts[span] = None
        self._prefixes.add(span)

    def _prefill(self, now: Prefill) -> None:
        """Compute some tokens of prompts."""
        self.num_passes += 1
        with self._using([span.adapter for span in now.spans]):
            self._attention.run(self.model, now)
        now.advance()
        self._finish_prompts()

    def _finish_prompts(self) -> None:
        """Move completions with computed prompts into arenas."""
        for span in [span for span in self._prompts if span.is_ready]:
            completion = self._prompts.pop(span)
            if completion is not None:
                self._place(Row(completion, span.base, span.filled), span)

    # ------------------------------------------------------------- answers

    def _place(self, row: Row, span: Span) -> None:
        size = power_of_two(row.final_length)
        arena = self._arenas.setdefault(size, Arena())
        if arena.is_full or row.length >= arena.capacity:
            self._resize(arena, [*arena.rows, row])
        arena.add(row, span)

    def _resize(self, arena: Arena, rows: list[Row]) -> None:
        """Grow an arena for some rows; slots and lengths double up to the rows' needs."""
        final = max(row.final_length for row in rows)
        length = power_of_two(1 + max(row.length for row in rows))
        capacity = max(arena.capacity, min(max(length, SMALLEST), final))
        num_slots = max(arena.num_slots, len(rows))
        if num_slots > arena.num_slots:
            joining = [row.final_length for row in rows if row.arena is None]
            fit = self._budget().plus(*joining).max_slots(power_of_two(final), capacity)
            most = self.limits.rows if fit is None else min(self.limits.rows, fit)
            num_slots = max(num_slots, min(2 * arena.num_slots, most))
        self._forget_arena(arena)
        arena.resize(num_slots, capacity)

    def _shrink(self) -> None:
        """Free empty slots, and lengths that no row needs."""
        self._drop_empty()
        for arena in self._arenas.values():
            num_slots = len(arena.rows)
            capacity = min(arena.capacity, max(row.final_length for row in arena.rows))
            if (num_slots, capacity) != (arena.num_slots, arena.capacity):
                self._forget_arena(arena)
                arena.resize(num_slots, capacity)

    def _drop_empty(self) -> None:
        """Free arenas without rows, and the steps captured with them."""
        for size, arena in list(self._arenas.items()):
            if not arena.rows:
                del self._arenas[size]
                self._forget_arena(arena)

    def _forget_arena(self, arena: Arena) -> None:
        """Drop the steps that read an arena's tensors, before these change."""
        self.graphs.forget(lambda decode: arena in decode.arenas)

    def _forget_prefixes(self) -> None:
        """Drop the steps that read dropped prefixes."""
        self.graphs.forget(
            lambda decode: not all(span in self._prefixes for span in decode.prefixes)
        )

    def _decode(self) -> None:
        """Compute the next token of each growing completion."""
        for arena in self._arenas.values():
            if not all(row.has_room for row in arena.rows):
                self._resize(arena, arena.rows)
        arenas = [self._arenas[size] for size in sorted(self._arenas) if self._arenas[size].rows]
        self.graphs.batch(arenas, self._forward).step()
        self._drop_ended()

    def _forward(self, decode: Decode) -> Callable[[], Tensor]:
        """Return a function that computes the logits of the next tokens."""
        first = next(row for row in decode.rows if row is not None).owner.request.adapter
        using = self._using(
            [first if row is None else row.owner.request.adapter for row in decode.rows]
        )

        def run() -> Tensor:
            with using:
                return self._attention.run(self.model, decode)

        return run

    def _drop_ended(self) -> None:
        """Free the slots of ended and cancelled completions."""
        for row in [row for row in self._growing() if row.owner.ended_by is not None]:
            assert row.arena is not None
            if row.owner.request.keeps and row.owner.end is not None:
                self._kept[row.owner] = row.as_span()
            else:
                self._release(row.base)
            row.arena.remove(row)
        for span, completion in list(self._prompts.items()):
            if completion is not None and completion.ended_by is not None:
                del self._prompts[span]
                self._release(span.base)
        for completion in [c for c in self._waiting if c.ended_by is not None]:
            self._waiting.remove(completion)
        if not self.graphs.records:  # captured steps need their empty arenas
            self._drop_empty()

    def _release(self, base: Span | None) -> None:
        if base is not None:
            base.num_users -= 1
            self._prefixes.touch(base)
