"""Word problems with a calculator, as an environment of verifiers 0.4: a tool over MCP, a reward.

train.py learns from it; nothing in it knows of peftkit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import verifiers.v1 as vf
from verifiers.v1.types import content_text

STORIES = (
    "A box holds {a} apples. How many apples are in {b} boxes?",
    "There are {b} rows of {a} seats in a hall. How many seats is that?",
    "Tom earns {a} dollars a day. What does he earn in {b} days?",
    "A book has {a} pages. How many pages do {b} such books have?",
)
NUM_PROBLEMS = 512


def problems(seed: int) -> Iterator[tuple[str, int, int]]:
    """Yield questions and their two numbers."""
    draw = random.Random(seed)
    for number in range(NUM_PROBLEMS):
        a, b = draw.randint(112, 989), draw.randint(12, 99)
        yield STORIES[number % len(STORIES)].format(a=a, b=b), a, b


class CalculatorToolset(vf.Toolset[vf.SharedToolsetConfig]):
    """The tool, which keeps nothing: one server is enough for all episodes."""

    TOOL_PREFIX = None

    @vf.tool
    def multiply(self, a: int, b: int) -> str:
        """Multiply two numbers."""
        return str(int(a) * int(b))


class CalculatorData(vf.TaskData):
    product: int = 0


class CalculatorTask(vf.Task[CalculatorData, vf.State, vf.TaskConfig]):
    """A problem."""

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        """Return 1 where the last message has the product."""
        last = content_text(trace.last_message.content or "").replace(",", "")
        return float(trace.last_message.role == "assistant" and str(self.data.product) in last)


class CalculatorConfig(vf.TasksetConfig):
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()
    seed: int = 0


class CalculatorTaskset(vf.Taskset[CalculatorTask, CalculatorConfig]):
    """The problems of a seed."""

    @classmethod
    def toolsets(cls, config: CalculatorConfig) -> list[vf.Toolset]:
        return [CalculatorToolset(config.tools)]

    def load(self) -> list[CalculatorTask]:
        return [
            CalculatorTask(CalculatorData(idx=n, prompt=text, product=a * b), self.config.task)
            for n, (text, a, b) in enumerate(problems(self.config.seed))
        ]


__all__ = ["CalculatorTaskset"]

if __name__ == "__main__":  # verifiers starts the tool's server so
    CalculatorToolset.run()
