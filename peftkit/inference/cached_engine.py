"""Continuous batching: completions join and leave the batch at any token.

All tokens of a prompt except the last are computed in chunks, and shared prefixes once. Then the
completion grows by one token per step, starting from its prompt's last token. A step synchronises
with the device once, to read the tokens of all rows.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from peftkit.execution.plan import ExecutionPlan
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
from peftkit.inference.cached_attention import (
    Block,
    CachedAttention,
    Decode,
    Prefill,
    readers_of,
    registered,
)
from peftkit.inference.engine import FEWEST_TOKENS, Completion, Engine, Limits
from peftkit.inference.footprint import Footprint, footprint
from peftkit.inference.ready import on_device
from peftkit.inference.recorder import Batch, Recorder, Step, static_block, why_not_recorded
from peftkit.inference.states import copied, has_states

MAX_RECORDED = 32
"""Maximum CUDA graphs of decoding steps; the oldest is dropped."""
LOOK_AHEAD = 128
"""Number of queued prompts that are searched for shared prefixes."""


class CachedEngine(Engine):
    """An engine with a separate key-value cache, which attention reads in place."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._prompts: dict[Span, Completion | None] = {}
        self._kept: dict[Completion, Span] = {}
        self._arenas: dict[int, Arena] = {}
        self._batch: Batch | None = None
        plan = ExecutionPlan.for_model(self.model)
        records = plan.records_decoding and not why_not_recorded(self.model)
        self.recorder = Recorder(self.model) if records else None
        self._steps: dict[Any, Step] = {}
        config = self.model.config.get_text_config()
        self._has_states, self._state_tokens = has_states(config), 0
        self._prefixes = Prefixes(self.limits.prefix_tokens)
        self._recent: deque[Completion] = deque(maxlen=32 if self.limits.prefix_tokens else 0)

    def _prepare(self, stack: ExitStack) -> None:
        self._attention = CachedAttention.of(self.model)
        stack.enter_context(registered(self.model, self._attention))
        stack.callback(self._leave)
        if self._has_states and self.limits.tokens is not None:
            self._state_tokens = self.footprint().state_tokens
            self._prefixes = Prefixes(self.limits.prefix_tokens, self._state_tokens)

    @torch.no_grad()
    def footprint(self) -> Footprint:
        """Return the memory of its cache per token and row."""
        with on_device(self.model.device):
            return footprint(self.model, self._attention)

    @property
    def num_running(self) -> int:
        return len(self._running())

    def _running(self) -> list[Completion]:
        prompts = [one for one in self._prompts.values() if one is not None]
        return [*(row.owner for row in self._growing()), *prompts]

    def forget(self, adapter: str) -> None:
        self._batch, self._steps = None, {}
        self._prompts = {
            span: one for span, one in self._prompts.items() if span.adapter != adapter
        }
        self._drop_kept(adapter)
        self._prefixes.forget(adapter)

    def release(self, completion: Completion) -> None:
        if (span := self._kept.pop(completion, None)) is not None:
            self._release(span.base)

    def _drop_kept(self, adapter: str | None = None, *, but: Completion | None = None) -> None:
        """Release the cached states of an adapter's completions, or of all except one."""
        for completion in [*self._kept]:
            if completion is not but and adapter in (None, completion.request.adapter):
                self.release(completion)

    @torch.no_grad()
    def _advance(self) -> None:
        """Compute some tokens of prompts, and the next token of each growing completion."""
        self._drop_ended()
        left = self.limits.prefill
        self._admit()
        while self._prompts and left > 0:
            left -= self._prefill(min(left, self.limits.pass_tokens))
            self._admit()
        if self._growing():
            self.num_passes += 1
            self._decode()
        self._prefixes.trim(one.request.ids for one in self._waiting)
        self._forget_prefixes()

    def _leave(self) -> None:
        """Drop captured steps: they refer to the engine, and both would wait for a collection."""
        self._steps.clear()

    def _take_back(self) -> list[Completion]:
        running = self._running()
        for arena in self._arenas.values():  # rows refer back to it: a cycle
            arena.rows.clear()
        self._prompts, self._arenas, self._batch, self._steps = {}, {}, None, {}
        self._kept = {}
        self._prefixes = Prefixes(self.limits.prefix_tokens, self._state_tokens)
        return [one for one in running if one.ended_by is None]

    def _lower_limits(self, num_running: int) -> Limits | None:
        rows, tokens = max(num_running // 2, 1), self.limits.pass_tokens
        if num_running == 1 and tokens <= FEWEST_TOKENS:
            return None
        return replace(self.limits, rows=rows, pass_tokens=max(tokens // 2, FEWEST_TOKENS))

    # ------------------------------------------------------------- prompts

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

    def _has_room(self, completion: Completion) -> bool:
        """Return whether a completion can start: it fits into the cache, or would run alone."""
        max_tokens = self.limits.tokens
        if max_tokens is None or self._tokens_with(completion) <= max_tokens:
            return True
        is_alone = not (self._growing() or self._prompts)
        if is_alone:
            self._drop_kept(but=completion.request.after)
            self._prefixes.drop()
            self._forget_prefixes()
        if is_alone or self._tokens_with(completion, shrunk=True) <= max_tokens:
            self._shrink()
            return True
        return False

    def _tokens_with(self, completion: Completion, *, shrunk: bool = False) -> int:
        """Return `_num_tokens` with another completion."""
        base = self._base_of(completion)
        start = 0 if base is None or not base.is_read else len(base.tokens)
        length = slot_length(completion.num_tokens - start)
        tokens = self._num_tokens(length, shrunk=shrunk) + len(completion.tokens) - start
        return tokens + self._state_tokens

    def _num_tokens(self, *further: int, shrunk: bool = False) -> int:
        """Return the tokens for which the cache allocates memory after all prompts have slots.

        The states of a row count as `_state_tokens`.

        Args:
            further: Final slot lengths of further completions.
            shrunk: Whether empty slots are freed before.
        """
        lengths = self._final_lengths()
        for length in further:
            lengths.setdefault(power_of_two(length), []).append(length)
        total = self._prefixes.num_tokens
        spans = [span for span, one in self._prompts.items() if one is not None]
        spans += self._kept.values()
        total += sum(len(span.tokens) + self._state_tokens for span in spans)
        for size in lengths.keys() | self._arenas.keys():
            group, arena = lengths.get(size, []), self._arenas.get(size)
            num_slots, longest = len(group), max(group, default=0)
            if arena is not None and not shrunk:
                num_slots = max(num_slots, arena.num_slots)
                longest = max(longest, arena.capacity)
            total += num_slots * (longest + self._state_tokens)
        return total

    def _final_lengths(self) -> dict[int, list[int]]:
        """Return the final slot lengths of all running completions, by arena."""
        lengths: dict[int, list[int]] = {}
        ends = [row.final_length for row in self._growing()]
        ends += [
            slot_length(one.num_tokens - span.start)
            for span, one in self._prompts.items()
            if one is not None
        ]
        for length in ends:
            lengths.setdefault(power_of_two(length), []).append(length)
        return lengths

    def _base_of(self, completion: Completion) -> Span | None:
        return self._prefixes.find(completion.tokens[:-1], completion.request.adapter)

    def _begin(self, completion: Completion) -> bool:
        """Start a request; return False if its shared prefix is not computed yet."""
        request, target = completion.request, completion.tokens[:-1]
        if request.after is not None and (kept := self._kept.pop(request.after, None)) is not None:
            span = Span(target[kept.start :], request.adapter, kept.start, base=kept.base)
            span.copy_from(kept)
            self._prompts[span] = completion
            self._finish_prompts()
            return True
        base = self._base_of(completion)
        if base is not None and not base.is_ready:
            return False
        others = [
            one.tokens[:-1]
            for one in (*islice(self._waiting, LOOK_AHEAD), *self._recent)
            if one is not completion and one.request.adapter == request.adapter
        ]
        size, users = worth_sharing(target, others)
        max_tokens = self.limits.tokens
        prefix = size + self._state_tokens
        has_room = max_tokens is None or self._tokens_with(completion) + prefix <= max_tokens
        if has_room and size > (0 if base is None else len(base.tokens)):
            self._share(target[:size], request.adapter, base, users)
            return False
        if base is not None:
            self._prefixes.touch(base)
        self._recent.append(completion)
        if base is not None and base.is_read:
            span = Span(target[len(base.tokens) :], request.adapter, len(base.tokens), base=base)
            span.states = copied(base.states)
            base.num_users += 1
        else:
            span = Span(target, request.adapter)
            if base is not None:
                span.copy_from(base)
        self._prompts[span] = completion
        self._finish_prompts()
        return True

    def _share(
        self, tokens: list[int], adapter: str | None, shorter: Span | None, users: int
    ) -> None:
        """Start the computation of a shared prefix, from a shorter one if possible."""
        span = Span(tokens, adapter, is_read=len(tokens) * users >= MIN_READ)
        if shorter is not None:
            span.copy_from(shorter)
        self._prompts[span] = None
        self._prefixes.add(span)

    def _prefill(self, max_tokens: int) -> int:
        """Compute some tokens of prompts; return their number, including padding."""
        chunks = self._chunks(max_tokens)
        self.num_passes += 1
        width = max(size for _, size in chunks)
        ids = torch.zeros(len(chunks), width, dtype=torch.long)
        positions = torch.zeros_like(ids)
        now = Prefill(chunks, pads_left=self._has_states)
        for row, ((span, size), at) in enumerate(zip(chunks, now.columns, strict=True)):
            ids[row, at] = torch.tensor(span.tokens[span.filled : span.filled + size])
            positions[row, at] = torch.arange(span.end, span.end + size)
        using = self._using([span.adapter for span, _ in chunks])
        self._run(now, ids, positions, using, now.mask)
        for span, size in chunks:
            span.filled += size
        self._finish_prompts()
        return len(chunks) * width

    def _chunks(self, max_tokens: int) -> list[tuple[Span, int]]:
        """Choose prompts, and a number of tokens of each.

        Alternates between the oldest prompt, which must not starve, and the prompt with the fewest
        remaining tokens, which should not wait for long ones. Prompts of similar length join it.
        """
        spans = [span for span in self._prompts if not span.is_ready]
        if self.num_passes % 2:
            spans.sort(key=lambda span: span.num_left)
        width = min(spans[0].num_left, max_tokens)
        if self._has_states and not spans[0].end:  # longer ones join it whole: a rest costs a pass
            new = [span.num_left for span in spans if not span.end]
            width = max((n for n in new if n <= min(2 * width, max_tokens)), default=width)
        chunks: list[tuple[Span, int]] = []
        for span in spans:
            size = min(span.num_left, width)
            if (len(chunks) + 1) * width <= max(max_tokens, width) and 2 * size >= width:
                chunks.append((span, size))
        if self._has_states:  # only new rows can be padded, see `Prefill`
            width = min((size for span, size in chunks if span.end), default=width)
        return [(span, min(size, width)) for span, size in chunks]

    def _finish_prompts(self) -> None:
        """Move completions with computed prompts into arenas."""
        for span in [span for span in self._prompts if span.is_ready]:
            completion = self._prompts.pop(span)
            if completion is not None:
                self._place(Row(completion, span.base, span.filled), span)
                self._batch = None

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
            num_slots = max(num_slots, min(2 * arena.num_slots, self._most_slots(rows, capacity)))
        self._forget_steps(arena)
        arena.resize(num_slots, capacity)

    def _most_slots(self, rows: list[Row], capacity: int) -> int:
        """Return the maximum slots of an arena with some rows within the token limit."""
        if self.limits.tokens is None:
            return self.limits.rows
        joining = [row.final_length for row in rows if row.arena is None]
        running = self._final_lengths().get(power_of_two(rows[0].final_length), []) + joining
        spare = self.limits.tokens - self._num_tokens(*joining)
        slot = max(capacity, *running) + self._state_tokens
        return min(self.limits.rows, len(running) + spare // slot)

    def _shrink(self) -> None:
        """Free empty slots, and lengths that no row needs."""
        self._drop_empty()
        for arena in self._arenas.values():
            num_slots = len(arena.rows)
            capacity = min(arena.capacity, max(row.final_length for row in arena.rows))
            if (num_slots, capacity) != (arena.num_slots, arena.capacity):
                self._forget_steps(arena)
                arena.resize(num_slots, capacity)

    def _drop_empty(self) -> None:
        """Free arenas without rows, and the steps captured with them."""
        for size, arena in list(self._arenas.items()):
            if not arena.rows:
                del self._arenas[size]
                self._forget_steps(arena)

    def _forget_steps(self, arena: Arena) -> None:
        """Drop the steps that read an arena's tensors, before these change."""
        self._batch = None
        self._steps = {
            key: step
            for key, step in self._steps.items()
            if all(block.arena is not arena for block in step.blocks)
        }

    def _forget_prefixes(self) -> None:
        """Drop the steps that read dropped prefixes."""
        self._steps = {
            key: step
            for key, step in self._steps.items()
            if all(span in self._prefixes for span in step.decode.prefixes)
        }

    def _decode(self) -> None:
        """Compute the next token of each growing completion."""
        if self._batch is None or not self._batch.decode.has_room:
            for arena in self._arenas.values():
                if not all(row.has_room for row in arena.rows):
                    self._resize(arena, arena.rows)
            self._batch = Batch(self._next_step())
        self._batch.step()
        self._drop_ended()

    def _next_step(self) -> Step:
        """Return the forward pass of the growing rows, as a CUDA graph if possible."""
        arenas = [self._arenas[size] for size in sorted(self._arenas) if self._arenas[size].rows]
        rows = [row for arena in arenas for row in arena.rows]
        if self.recorder is None:
            return self._step([Block(arena, len(arena.rows)) for arena in arenas])
        blocks = [static_block(arena) for arena in arenas]
        # mixed adapters are stacked once for each order of rows
        names = [row.owner.request.adapter for row in rows]
        readers = readers_of(rows, is_padded=True)
        prefixes = frozenset((span, len(at)) for span, at in readers.items())
        key = tuple(blocks), tuple(names if len(set(names)) > 1 else names[:1]), prefixes
        if key in self._steps:
            self._steps[key].decode.fill()
        else:
            if len(self._steps) >= MAX_RECORDED:
                del self._steps[next(iter(self._steps))]
            self._steps[key] = self._step(blocks, self.recorder)
        return self._steps[key]

    def _step(self, blocks: list[Block], recorder: Recorder | None = None) -> Step:
        decode = Decode(blocks, self.model.device)
        first = next(row for row in decode.rows if row is not None).owner.request.adapter
        using = self._using(
            [first if row is None else row.owner.request.adapter for row in decode.rows]
        )

        def run() -> Tensor:
            return self._run(decode, decode.tokens, decode.positions, using)

        return Step(blocks, decode, run if recorder is None else recorder.step(run))

    def _drop_ended(self) -> None:
        """Free the slots of ended and cancelled completions."""
        for row in [row for row in self._growing() if row.owner.ended_by is not None]:
            assert row.arena is not None
            if row.owner.request.keeps and row.owner.end is not None:
                self._kept[row.owner] = row.as_span()
            else:
                self._release(row.base)
            row.arena.remove(row)
            self._batch = None
        for span, completion in list(self._prompts.items()):
            if completion is not None and completion.ended_by is not None:
                del self._prompts[span]
                self._release(span.base)
        for completion in [c for c in self._waiting if c.ended_by is not None]:
            self._waiting.remove(completion)
        if self.recorder is None:  # captured steps need their empty arenas
            self._drop_empty()

    def _release(self, base: Span | None) -> None:
        if base is not None:
            base.num_users -= 1
            self._prefixes.touch(base)

    # ------------------------------------------------------------- the model

    def _run(
        self,
        now: Prefill | Decode,
        ids: Tensor,
        positions: Tensor,
        using: AbstractContextManager[None],
        mask: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of the last column."""
        with using:
            return self._attention.run(self.model, now, ids, positions, mask)
