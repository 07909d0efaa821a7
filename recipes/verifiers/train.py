"""An environment of verifiers 0.4 teaches SmolLM2-135M, through a server that answers and trains.

    peftkit serve smollm2-135m --train runs/verifiers --port 8001     # peftkit's environment
    ENV/bin/python recipes/verifiers/train.py --tokenizer FOLDER      # this program's own

The environment runs as it is: its harness, its tool over MCP, its reward. What the model writes in
it comes from /inference/v1/generate as tokens with their log-probabilities; each branch of an
episode is a row, of which the tokens that were sampled are learnt from. Six plain products show how
a call is written; then 16 episodes a step on problems that no step has seen.

Needs: a Python environment of its own, for verifiers wants openai < 3 (see the guide, Tools);
the server; uv and a package index, from which verifiers' harness installs its program.
Gives: rewards of held-out problems before and after, and weights that the server keeps.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

import tinker
import verifiers.v1 as vf
from calculator import CalculatorConfig
from calculator import problems as products
from renderer import TemplateConfig, TemplateRenderer
from tinker import types
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.envs.single_agent.env import SingleAgentEnvConfig
from verifiers.v1.harnesses.null import NullHarnessConfig
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import load_environment

HERE = Path(__file__).parent
SHOWN, PASSES = 6, 1
PROBLEMS, ANSWERS = 2, 8
HELD_OUT, MAX_TURNS = 16, 3
TOOL = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def shown(renderer: TemplateRenderer, a: int, b: int) -> types.Datum:
    """Return a dialogue in which a product is asked for plainly, and what the model says there."""
    call = {"type": "function", "function": {"name": "multiply", "arguments": {"a": a, "b": b}}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": f"What is {a} times {b}?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "multiply", "content": str(a * b)},
        {"role": "assistant", "content": f"The answer is {a * b}."},
    ]
    ids, said = renderer.render_ids(turns, tools=[TOOL]), set[int]()
    for number, turn in enumerate(turns):
        if turn["role"] == "assistant":
            asked = {"tools": [TOOL], "add_generation_prompt": True}
            begin = len(renderer.render_ids(turns[:number], **asked))
            said |= set(range(begin, len(renderer.render_ids(turns[: number + 1], tools=[TOOL]))))
    weights = [float(place in said) for place in range(len(ids))]
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:], "weights": weights[1:]},
    )


def learnt_from(branch: Any, worth: float) -> types.Datum:
    """Return a branch of an episode; the tokens that were sampled are worth something."""
    ids, mask, told = [*branch.token_ids], [*branch.sampled_mask], iter(branch.logprobs)
    log_probs = [next(told) if is_sampled else 0.0 for is_sampled in mask]
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={
            "target_tokens": ids[1:],
            "logprobs": log_probs[1:],
            "advantages": [worth * is_sampled for is_sampled in mask[1:]],
        },
    )


async def episodes(
    env: Any, tasks: list[Any], number: int, context: ModelContext
) -> list[list[Any]]:
    """Run so many episodes of each task, all at once; return their traces."""
    slots = [(place, slot) for place, task in enumerate(tasks) for slot in env.slots(task, number)]
    done = await asyncio.gather(*(env.run_slot(slot, context) for _, slot in slots))
    found: list[list[Any]] = [[] for _ in tasks]
    for (place, _), episode in zip(slots, done, strict=True):
        problems = [*episode.errors, *(p for trace in episode.traces for p in trace.errors)]
        for problem in problems[:1]:
            print("an episode failed:", problem.message[:500], file=sys.stderr)
        found[place] += [trace for trace in episode.traces if trace.ok]
    return found


async def main() -> None:
    """Show, measure, learn from rewards, measure again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8001")
    parser.add_argument("--tokenizer", required=True, help="folder of the base's tokenizer")
    parser.add_argument("--steps", type=int, default=10)
    asked = parser.parse_args()
    os.environ.setdefault("PEFTKIT_KEY", "tml-none")
    client = tinker.ServiceClient(base_url=asked.url, api_key=os.environ["PEFTKIT_KEY"])
    training = await client.create_lora_training_client(base_model="base", rank=8, seed=1)
    renderer = TemplateRenderer(_tokenizer(asked.tokenizer), TemplateConfig(template="chatml"))

    async def learn(rows: list[types.Datum], loss: Any, rate: float) -> None:
        passed = training.forward_backward(rows, loss)
        step = training.optim_step(types.AdamParams(learning_rate=rate))
        await passed
        await step

    async def context(name: str, temperature: float) -> ModelContext:
        saved = await training.save_weights_for_sampler(name)
        written_by = {"name": "custom", "import_path": f"{HERE}/renderer.py:TemplateRenderer"}
        endpoint = TrainClientConfig(
            base_url=f"{asked.url}/v1",
            api_key_var="PEFTKIT_KEY",
            renderer={**written_by, "template": "chatml"},
            renderer_model_name=asked.tokenizer,
        )
        sampling = SamplingConfig(temperature=temperature, max_tokens=64)
        return ModelContext(model=saved.path, client=endpoint, sampling=sampling)

    harness, here = NullHarnessConfig(id="null"), vf.SubprocessConfig()
    config = SingleAgentEnvConfig(
        taskset=CalculatorConfig(id="calculator"),
        agent=AgentConfig(harness=harness, runtime=here, max_turns=MAX_TURNS),
    )
    env = load_environment(config)
    tasks = iter(env.taskset)
    held_out = [*itertools.islice(tasks, HELD_OUT)]
    for _ in range(PASSES):
        for _, a, b in itertools.islice(products(seed=1), SHOWN):
            await learn([shown(renderer, a, b)], "cross_entropy", 6e-4)
    async with env.serving():
        before = await episodes(env, held_out, 1, await context("shown", 0.0))
        for step in range(asked.steps):
            began = time.monotonic()
            groups = await episodes(
                env, [*itertools.islice(tasks, PROBLEMS)], ANSWERS, await context(f"s{step}", 1.0)
            )
            rows = [
                learnt_from(branch, trace.reward - mean(one.reward for one in group))
                for group in groups
                for trace in group
                for branch in trace.branches
            ]
            if rows:
                await learn(rows, "importance_sampling", 2e-4)
            print(f"step {step}: {told(groups)}, {time.monotonic() - began:.0f} s", flush=True)
        after = await episodes(env, held_out, 1, await context("learnt", 0.0))
    print(f"held-out problems: {told(before)} -> {told(after)}")


def told(groups: list[list[Any]]) -> str:
    """Return the mean reward of traces, and their turns."""
    traces = [trace for group in groups for trace in group]
    if not traces:
        return "no episode"
    turns = mean(trace.num_turns for trace in traces)
    return f"reward {mean(trace.reward for trace in traces):.2f} ({turns:.1f} turns)"


def _tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


if __name__ == "__main__":
    asyncio.run(main())
