"""Word problems with a calculator: an environment of verifiers 0.4 with a tool over MCP.

train.py trains on it. The environment does not depend on peftkit.
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
    """The stateless calculator; all episodes share one server."""

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
        """Return 1 if the last message contains the product, else 0."""
        last = content_text(trace.last_message.content or "").replace(",", "")
        return float(trace.last_message.role == "assistant" and str(self.data.product) in last)


class CalculatorConfig(vf.TasksetConfig):
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()
    seed: int = 0


class CalculatorTaskset(vf.Taskset[CalculatorTask, CalculatorConfig]):
    """The problems for a seed."""

    @classmethod
    def toolsets(cls, config: CalculatorConfig) -> list[vf.Toolset]:
        return [CalculatorToolset(config.tools)]

    def load(self) -> list[CalculatorTask]:
        return [
            CalculatorTask(CalculatorData(idx=n, prompt=text, product=a * b), self.config.task)
            for n, (text, a, b) in enumerate(problems(self.config.seed))
        ]


__all__ = ["CalculatorTaskset"]

if __name__ == "__main__":  # verifiers starts the tool server by running this file
    CalculatorToolset.run()
