"""Continuous batching: answers join and leave the batch at any token.

All tokens of a prompt but the last are computed in chunks, common prefixes of prompts once. Then
the answer grows by one token a step, beginning with its prompt's last. A step waits for the device
once, when the tokens of all rows are read.
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
from peftkit.forward.compat import cache_name
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
    registered,
)
from peftkit.inference.engine import FEWEST_TOKENS, Completion, Engine, Limits
from peftkit.inference.recorder import Batch, Recorder, Step, static_block, why_not_recorded

MAX_RECORDED = 32
"""CUDA graphs of decoding steps at most; the oldest goes."""
LOOK_AHEAD = 128
"""Waiting prompts that are searched for common prefixes."""


class CachedEngine(Engine):
    """An engine with a key-value cache of its own, which attention reads in place."""

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
        self._prefixes = Prefixes(self.limits.prefix_tokens)
        self._recent: deque[Completion] = deque(maxlen=32 if self.limits.prefix_tokens else 0)

    def _prepare(self, stack: ExitStack) -> None:
        config = self.model.config.get_text_config()
        window = getattr(config, "sliding_window", None)
        self._attention = CachedAttention(config.num_hidden_layers, window)
        stack.enter_context(registered(self.model, self._attention))
        stack.callback(self._steps.clear)

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
        """Drop what is kept of answers: those of an adapter, or all but one."""
        for one in [*self._kept]:
            if one is not but and adapter in (None, one.request.adapter):
                self.release(one)

    @torch.no_grad()
    def _advance(self) -> None:
        """Compute some tokens of prompts, and the next token of each growing answer."""
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

    def _take_back(self) -> list[Completion]:
        running = self._running()
        self._prompts, self._arenas, self._batch, self._steps = {}, {}, None, {}
        self._kept = {}
        self._prefixes = Prefixes(self.limits.prefix_tokens)
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
        """Start waiting requests as long as there is room for them."""
        room = self.limits.rows - self.num_running
        for completion in list(self._waiting):
            if room <= 0 or not self._has_room(completion):
                return
            if self._begin(completion):
                self._waiting.remove(completion)
                room -= 1

    def _has_room(self, completion: Completion) -> bool:
        """Whether an answer may start: the cache holds it, or nothing else runs."""
        most = self.limits.tokens
        if most is None or self._tokens_with(completion) <= most:
            return True
        is_alone = not (self._growing() or self._prompts)
        if is_alone:
            self._drop_kept(but=completion.request.after)
            self._prefixes.drop()
        if is_alone or self._tokens_with(completion, shrunk=True) <= most:
            self._shrink()
            return True
        return False

    def _tokens_with(self, completion: Completion, *, shrunk: bool = False) -> int:
        """Return the tokens of the cache with another answer, as `_num_tokens` counts them."""
        base = self._base_of(completion)
        start = 0 if base is None or not base.is_read else len(base.tokens)
        length = slot_length(completion.num_tokens - start)
        return self._num_tokens(length, shrunk=shrunk) + len(completion.tokens) - start

    def _num_tokens(self, *further: int, shrunk: bool = False) -> int:
        """Return the tokens for which the cache allocates memory, once all prompts have slots.

        Args:
            further: Slots of other answers, by their final length.
            shrunk: Whether empty slots are given back before.
        """
        lengths = self._final_lengths()
        for length in further:
            lengths.setdefault(power_of_two(length), []).append(length)
        total = self._prefixes.num_tokens
        total += sum(len(span.tokens) for span, one in self._prompts.items() if one is not None)
        total += sum(len(span.tokens) for span in self._kept.values())
        for size in lengths.keys() | self._arenas.keys():
            group, arena = lengths.get(size, []), self._arenas.get(size)
            num_slots, longest = len(group), max(group, default=0)
            if arena is not None and not shrunk:
                num_slots = max(num_slots, arena.num_slots)
                longest = max(longest, arena.capacity)
            total += num_slots * longest
        return total

    def _final_lengths(self) -> dict[int, list[int]]:
        """Return the final lengths of the slots of all running answers, by arena."""
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
        """Start a request; False if its shared prefix is not computed yet."""
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
        most = self.limits.tokens
        has_room = most is None or self._tokens_with(completion) + size <= most
        if has_room and size > (0 if base is None else len(base.tokens)):
            self._share(target[:size], request.adapter, base, users)
            return False
        if base is not None:
            self._prefixes.touch(base)
        self._recent.append(completion)
        if base is not None and base.is_read:
            span = Span(target[len(base.tokens) :], request.adapter, len(base.tokens), base=base)
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
        """Start to compute a common prefix, from a shorter one if there is any."""
        span = Span(tokens, adapter, is_read=len(tokens) * users >= MIN_READ)
        if shorter is not None:
            span.copy_from(shorter)
        self._prompts[span] = None
        self._prefixes.add(span)

    def _prefill(self, most: int) -> int:
        """Compute at most so many tokens of prompts; return how many, with padding."""
        chunks = self._chunks(most)
        self.num_passes += 1
        width = max(size for _, size in chunks)
        ids = torch.zeros(len(chunks), width, dtype=torch.long)
        positions = torch.zeros_like(ids)
        for row, (span, size) in enumerate(chunks):
            ids[row, :size] = torch.tensor(span.tokens[span.filled : span.filled + size])
            positions[row, :size] = torch.arange(span.end, span.end + size)
        using = self._using([span.adapter for span, _ in chunks])
        self._run(Prefill(chunks), ids, positions, using)
        for span, size in chunks:
            span.filled += size
        self._finish_prompts()
        return len(chunks) * width

    def _chunks(self, most: int) -> list[tuple[Span, int]]:
        """Choose prompts, and a number of tokens of each.

        By turns the oldest prompt, so that none starves, and the one with the fewest tokens left,
        so that short prompts need not wait for long ones. Prompts of similar length join it.
        """
        spans = [span for span in self._prompts if not span.is_ready]
        if self.num_passes % 2:
            spans.sort(key=lambda span: span.num_left)
        width = min(spans[0].num_left, most)
        chunks: list[tuple[Span, int]] = []
        for span in spans:
            size = min(span.num_left, width)
            if (len(chunks) + 1) * width <= max(most, width) and 2 * size >= width:
                chunks.append((span, size))
        return chunks

    def _finish_prompts(self) -> None:
        """Move the answers whose prompts are computed into arenas."""
        for span in [span for span in self._prompts if span.is_ready]:
            completion = self._prompts.pop(span)
            if completion is not None:
                self._place(Row(completion, span.base, span.filled), span.layers)
                self._batch = None

    # ------------------------------------------------------------- answers

    def _place(self, row: Row, layers: dict[int, tuple[Tensor, Tensor]]) -> None:
        size = power_of_two(row.final_length)
        arena = self._arenas.setdefault(size, Arena())
        if arena.is_full or row.length >= arena.capacity:
            self._resize(arena, [*arena.rows, row])
        arena.add(row, layers)

    def _resize(self, arena: Arena, rows: list[Row]) -> None:
        """Grow an arena for some rows: to twice the slots and length where they can be of use."""
        final = max(row.final_length for row in rows)
        length = power_of_two(1 + max(row.length for row in rows))
        capacity = max(arena.capacity, min(max(length, SMALLEST), final))
        num_slots = max(arena.num_slots, len(rows))
        if num_slots > arena.num_slots:
            num_slots = max(num_slots, min(2 * arena.num_slots, self._most_slots(rows, capacity)))
        self._forget_steps(arena)
        arena.resize(num_slots, capacity)

    def _most_slots(self, rows: list[Row], capacity: int) -> int:
        """Return the slots that an arena with some rows may have beside all that runs."""
        if self.limits.tokens is None:
            return self.limits.rows
        joining = [row.final_length for row in rows if row.arena is None]
        running = self._final_lengths().get(power_of_two(rows[0].final_length), []) + joining
        spare = self.limits.tokens - self._num_tokens(*joining)
        return min(self.limits.rows, len(running) + spare // max(capacity, *running))

    def _shrink(self) -> None:
        """Give back empty slots, and lengths that no row needs."""
        self._drop_empty()
        for arena in self._arenas.values():
            num_slots = len(arena.rows)
            capacity = min(arena.capacity, max(row.final_length for row in arena.rows))
            if (num_slots, capacity) != (arena.num_slots, arena.capacity):
                self._forget_steps(arena)
                arena.resize(num_slots, capacity)

    def _drop_empty(self) -> None:
        """Free arenas without rows, and the steps that were recorded with them."""
        for size, arena in list(self._arenas.items()):
            if not arena.rows:
                del self._arenas[size]
                self._forget_steps(arena)

    def _forget_steps(self, arena: Arena) -> None:
        """Drop the steps that read an arena's tensors, which change."""
        self._batch = None
        self._steps = {
            key: step
            for key, step in self._steps.items()
            if all(block.arena is not arena for block in step.blocks)
        }

    def _decode(self) -> None:
        """Compute the next token of each growing answer."""
        if self._batch is None or not self._batch.decode.has_room:
            for arena in self._arenas.values():
                if not all(row.has_room for row in arena.rows):
                    self._resize(arena, arena.rows)
            self._batch = Batch(self._next_step())
        self._batch.step()
        self._drop_ended()

    def _next_step(self) -> Step:
        """Return the forward pass for the rows that grow, recorded where that is possible."""
        arenas = [self._arenas[size] for size in sorted(self._arenas) if self._arenas[size].rows]
        rows = [row for arena in arenas for row in arena.rows]
        if self.recorder is None or any(row.base is not None for row in rows):
            return self._step([Block(arena, len(arena.rows)) for arena in arenas])
        blocks = [static_block(arena) for arena in arenas]
        # mixed adapters are stacked once for each order of rows
        names = [row.owner.request.adapter for row in rows]
        key = (tuple(blocks), tuple(names if len(set(names)) > 1 else names[:1]))
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
        """Free the slots of answers that have ended or were cancelled."""
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
        for completion in [one for one in self._waiting if one.ended_by is not None]:
            self._waiting.remove(completion)
        if self.recorder is None:  # else empty arenas stay for their recorded steps
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
    ) -> Tensor:
        """Return the logits of the last column."""
        self._attention.now = now
        device = self.model.device
        try:
            with using:
                out = self.model(
                    input_ids=ids.to(device),
                    position_ids=positions.to(device),
                    use_cache=True,
                    logits_to_keep=1,
                    **{str(cache_name(self.model)): self._attention},
                )
        finally:
            self._attention.now = None
        logits: Tensor = out.logits[:, -1]
        return logits
