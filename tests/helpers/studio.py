"""Run folders as a run writes them, and requests to a studio."""

import json
import platform
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

KEY = "a-key"
HTML = "<img src=x onerror=alert(1)><script>alert(2)</script>"


def write_run(folder: Path, steps: int, rank: int = 16, done: bool = True) -> None:
    """Write the files of a run with 10 planned steps."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = {
        "task": {"type": "causal_lm"},
        "base": {"model": "smollm2-135m"},
        "method": {"type": "lora", "rank": rank},
        "train": {"output_dir": str(folder)},
    }
    facts = {"recipe": recipe, "recipe_yaml": "task: causal_lm\n", "notices": [HTML]}
    facts |= {"row": [["", "What? "], ["learnt", HTML]], "row_source": "train.jsonl:1"}
    (folder / "run.json").write_text(json.dumps(facts))
    started = {"event": "RunStarted", "time": time.time(), "num_steps": 10, "start_step": 0}
    started |= {"num_rows": 5, "num_trainable": 10, "num_parameters": 1000, "device": "cpu"}
    (folder / "metrics.jsonl").write_text(json.dumps(started) + "\n")
    append_steps(folder, range(1, steps + 1))
    if done:
        append(folder, {"event": "RunDone", "step": steps, "seconds": 3.0, "metrics": {}})
    sample = {"step": 0, "prompt": "Hello", "completion": HTML, "reference": "Hi"}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")


def append_steps(folder: Path, steps: range) -> None:
    for step in steps:
        line = {"event": "StepDone", "step": step, "num_steps": 10, "epoch": step / 10}
        line |= {"loss": 2.0 / step, "learning_rate": 1e-3, "grad_norm": 1.0}
        line |= {"num_tokens": 100 * step, "tokens_per_second": 50.0, "peak_bytes": 1 << 28}
        append(folder, {**line, "seconds_left": 1.0, "figures": {}})


def hold(folder: Path, pid: int, since: float | None = None) -> None:
    """Write the lock of a run that a process trains."""
    (folder / ".locks").mkdir()
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since))
    text = f"Process {pid} on {platform.node()}, since {when}.\n"
    (folder / ".locks" / "holder").write_text(text)


def append(folder: Path, line: dict[str, Any]) -> None:
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


class Answer(NamedTuple):
    status: int
    headers: Any
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)


class Client:
    """Requests with the key, unless the headers have another."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str, key: str = KEY, **headers: str) -> Answer:
        return self._send(urllib.request.Request(self.url + path, headers=headers), key)

    def post(self, path: str, **body: Any) -> Answer:
        return self._send(urllib.request.Request(self.url + path, json.dumps(body).encode()), KEY)

    def put(self, path: str, content: bytes) -> Answer:
        return self._send(urllib.request.Request(self.url + path, content, method="PUT"), KEY)

    def delete(self, path: str) -> Answer:
        return self._send(urllib.request.Request(self.url + path, method="DELETE"), KEY)

    def _send(self, request: urllib.request.Request, key: str) -> Answer:
        if key:
            request.add_header("Authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return Answer(answer.status, answer.headers, answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, error.headers, error.read())
