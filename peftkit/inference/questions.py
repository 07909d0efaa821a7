"""Questions for a teacher that nobody has written: made by the base from the prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence

from peftkit.base.load import Base
from peftkit.data.encode import default_style, prompt_ids, stop_ids
from peftkit.data.format import Message
from peftkit.errors import DataError
from peftkit.events import Listener, Progress, Stage, ignore
from peftkit.inference.generate import decoded, generate_ids
from peftkit.tasks.distill_rows import TeacherPrompt

ASK = "Write one message that a user sends."
FRAME = "You write messages that users send to an assistant which has these instructions:\n\n{}"
MAX_TOKENS, BATCH_SIZE, TEMPERATURE, TOP_P = 96, 16, 1.0, 0.95
ROUNDS = 4
"""Times that as many messages are drawn as are asked for: some come twice, or are empty."""
SHOWN_EXAMPLES = 4
"""Examples of the prompt that one draw sees, others each time."""
LEAST = 8


def make_questions(
    base: Base, prompt: TeacherPrompt, number: int, *, seed: int = 0, on_event: Listener = ignore
) -> list[str]:
    """Return different messages that users may send, as the base imagines them.

    Args:
        prompt: The examples in it, if any, are shown as messages of users.
        number: The most that are returned.
        seed: Of the draws.

    Raises:
        DataError: The base makes none, or has no chat template.
    """
    on_event(Stage(f"Making up to {number:,} questions"))
    style, rng = default_style(base.tokenizer), random.Random(seed)
    stops, found = stop_ids(base.tokenizer, style), dict.fromkeys(prompt.examples)
    known = len(found)
    for draw in range(ROUNDS * -(-number // BATCH_SIZE)):
        if len(found) - known >= number:
            break
        on_event(Progress("Making questions", len(found) - known, number))
        asked = [
            prompt_ids(base.tokenizer, _messages(prompt, rng), style) for _ in range(BATCH_SIZE)
        ]
        answers = generate_ids(
            base.model,
            base.tokenizer,
            asked,
            stops=stops,
            max_new_tokens=MAX_TOKENS,
            temperature=TEMPERATURE,
            top_p=TOP_P,
            seed=seed + draw,
            batch_size=BATCH_SIZE,
        )
        lines = (decoded(base.tokenizer, ids).strip().splitlines() for ids in answers)
        found |= dict.fromkeys(line[0] for line in lines if line)
    made = list(found)[known:][:number]
    if len(made) < LEAST:
        raise DataError(
            "the base makes no questions from this prompt.",
            found=f"{len(made)} different ones came of {ROUNDS * number} draws.",
            fix='Write some yourself, one {"prompt": ...} a line, and give them: --data FILE.jsonl',
        )
    return made


def _messages(prompt: TeacherPrompt, rng: random.Random) -> Sequence[Message]:
    """Return what the base is asked, with some of the prompt's examples as its answers."""
    shown = rng.sample(prompt.examples, min(SHOWN_EXAMPLES, len(prompt.examples)))
    turns = [
        {"role": role, "content": text}
        for example in shown
        for role, text in (("user", ASK), ("assistant", example))
    ]
    system = [{"role": "system", "content": FRAME.format(prompt.system)}] if prompt.system else []
    return [*system, *turns, {"role": "user", "content": ASK}]
