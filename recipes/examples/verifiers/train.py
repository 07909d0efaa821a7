"""Train SmolLM2-135M in an environment of verifiers 0.4, through peftkit's training server.

    peftkit serve smollm2-135m --train runs/verifiers --port 8001     # peftkit's Python environment
    ENV/bin/python recipes/examples/verifiers/train.py --tokenizer FOLDER  # its environment

The environment runs unmodified, with its harness, its tool over MCP and its reward. Completions
come from /inference/v1/generate as tokens with log-probabilities. Each branch of an episode is a
row whose sampled tokens are the targets. Training starts with six demonstrations of a call. Each
step then runs 16 episodes on new problems.

Needs: a separate Python environment, because verifiers requires openai < 3 (see docs/tools.md); the
server; uv and a package index, from which the harness of verifiers installs its program.
Gives: rewards on held-out problems before and after, and weights stored by the server.
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
    """Return a demonstration of a call, with the assistant's tokens as targets."""
    call = {"type": "function", "function": {"name": "multiply", "arguments": {"a": a, "b": b}}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": f"What is {a} times {b}?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "multiply", "content": str(a * b)},
        {"role": "assistant", "content": f"The answer is {a * b}."},
    ]
    ids, sampled = renderer.render_ids(turns, tools=[TOOL]), set[int]()
    for number, turn in enumerate(turns):
        if turn["role"] == "assistant":
            options = {"tools": [TOOL], "add_generation_prompt": True}
            start = len(renderer.render_ids(turns[:number], **options))
            end = len(renderer.render_ids(turns[: number + 1], tools=[TOOL]))
            sampled |= set(range(start, end))
    weights = [float(place in sampled) for place in range(len(ids))]
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:], "weights": weights[1:]},
    )


def datum(branch: Any, advantage: float) -> types.Datum:
    """Return a branch of an episode with the advantage of its sampled tokens."""
    ids, mask, sampled = [*branch.token_ids], [*branch.sampled_mask], iter(branch.logprobs)
    log_probs = [next(sampled) if is_sampled else 0.0 for is_sampled in mask]
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={
            "target_tokens": ids[1:],
            "logprobs": log_probs[1:],
            "advantages": [advantage * is_sampled for is_sampled in mask[1:]],
        },
    )


async def episodes(
    env: Any, tasks: list[Any], number: int, context: ModelContext
) -> list[list[Any]]:
    """Run `number` episodes of each task concurrently; return their traces."""
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
    """Train on demonstrations, evaluate, train with rewards, evaluate again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8001")
    parser.add_argument("--tokenizer", required=True, help="folder of the base's tokenizer")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    os.environ.setdefault("PEFTKIT_KEY", "tml-none")
    client = tinker.ServiceClient(base_url=args.url, api_key=os.environ["PEFTKIT_KEY"])
    training = await client.create_lora_training_client(base_model="base", rank=8, seed=1)
    renderer = TemplateRenderer(_tokenizer(args.tokenizer), TemplateConfig(template="chatml"))

    async def learn(rows: list[types.Datum], loss: Any, rate: float) -> None:
        passed = training.forward_backward(rows, loss)
        step = training.optim_step(types.AdamParams(learning_rate=rate))
        await passed
        await step

    async def context(name: str, temperature: float) -> ModelContext:
        saved = await training.save_weights_for_sampler(name)
        written_by = {"name": "custom", "import_path": f"{HERE}/renderer.py:TemplateRenderer"}
        endpoint = TrainClientConfig(
            base_url=f"{args.url}/v1",
            api_key_var="PEFTKIT_KEY",
            renderer={**written_by, "template": "chatml"},
            renderer_model_name=args.tokenizer,
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
        for step in range(args.steps):
            began = time.monotonic()
            groups = await episodes(
                env, [*itertools.islice(tasks, PROBLEMS)], ANSWERS, await context(f"s{step}", 1.0)
            )
            rows = [
                datum(branch, trace.reward - mean(one.reward for one in group))
                for group in groups
                for trace in group
                for branch in trace.branches
            ]
            if rows:
                await learn(rows, "importance_sampling", 2e-4)
            print(f"step {step}: {summary(groups)}, {time.monotonic() - began:.0f} s", flush=True)
        after = await episodes(env, held_out, 1, await context("learnt", 0.0))
    print(f"held-out problems: {summary(before)} -> {summary(after)}")


def summary(groups: list[list[Any]]) -> str:
    """Format the mean reward and the mean number of turns."""
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
