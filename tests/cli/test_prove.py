"""`peftkit prove` over servers that return more or less, folders and files, with planted faults."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from peftkit.adapter import Adapter, attach
from peftkit.base.load import Base, load_base
from peftkit.errors import ConfigError, RunError
from peftkit.formats.exchange import export_adapter
from peftkit.formats.open_adapter import open_adapter
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.notes import Provenance
from peftkit.inference.bank import open_bank
from peftkit.methods.lora import LoRA
from peftkit.proof.judge import Proof
from peftkit.proof.record import read_proof, write_proof
from peftkit_cli.prove_server import MAX_REQUESTS, METHODS, prove_server
from tests.helpers.adapters import perturb
from tests.helpers.command_line import Run
from tests.helpers.families import FAMILIES, tiny_tokenizer

TARGETS = ("q", "v", "gate", "up", "down")


class Saved(NamedTuple):
    """A base and an adapter of it, in folders and in memory."""

    model: Path
    folder: Path
    base: Base
    adapter: Adapter
    proof: Proof


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    model, folder = (tmp_path_factory.mktemp(name) for name in ("base", "adapter"))
    torch.manual_seed(0)
    FAMILIES["llama"]().save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    base = load_base(str(model), device="cpu")
    adapter = attach(base.model, LoRA(rank=4, targets=TARGETS))
    perturb(adapter.parameters(), 0.1, seed=3)
    save_adapter(adapter, folder, Provenance(base=str(model), fingerprint=base.fingerprint))
    opened = open_adapter(folder, device="cpu")
    return Saved(model, folder, opened.base, opened.adapter, write_proof(opened))


class Api:
    """A server of a model that implements a part of OpenAI's API.

    Args:
        best: What it returns, a name of `METHODS`.
        is_single: It refuses several prompts in a request.
        template: It renders chats with this template.
        bos: It writes a BOS before each prompt that it tokenizes.
    """

    def __init__(
        self,
        saved: Saved,
        best: str,
        is_single: bool = False,
        template: str = "",
        bos: bool = False,
    ) -> None:
        self.saved, self.is_single, self.bos = saved, is_single, bos
        self.level = [*METHODS].index(best)
        self.tokenizer = tiny_tokenizer()
        self.tokenizer.chat_template = template or self.tokenizer.chat_template
        self.num_requests = 0

    def reply(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """Return the response to a request; None: refused."""
        self.num_requests += 1
        if path.endswith("/models"):
            return {"data": [{"id": "demo"}]}
        is_chat = path.endswith("/chat/completions")
        if self.level > 0 and not is_chat:
            return None
        if self.level > 1 and "logprobs" in body:
            return None
        if is_chat:
            text = self.tokenizer.apply_chat_template(
                body["messages"], tokenize=False, add_generation_prompt=True
            )
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            prompts = [[self.tokenizer.bos_token_id] * self.bos + ids]
        else:
            prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        if self.is_single and len(prompts) > 1:
            return None
        return {
            "choices": [
                {"index": n, **self.choice(ids, body, is_chat)} for n, ids in enumerate(prompts)
            ],
            "usage": {"prompt_tokens": len(prompts[0])},
        }

    @torch.no_grad()
    def choice(self, ids: list[int], body: dict[str, Any], is_chat: bool) -> dict[str, Any]:
        ids, rows = list(ids), []
        start = len(ids)
        for _ in range(body["max_tokens"]):
            logits = self.saved.base.model(input_ids=torch.tensor([ids])).logits[0]
            rows.append(logits[-1].log_softmax(-1))
            ids.append(int(rows[-1].argmax()))
        text = "".join(map(self.text, ids[start:]))
        found: dict[str, Any] = {"message": {"content": text}} if is_chat else {"text": text}
        if is_chat and "logprobs" in body:
            named = [self.top(row, 5) for row in rows]
            tokens = [[{"token": t, "logprob": v} for t, v in top.items()] for top in named]
            content = [{**top[0], "top_logprobs": top} for top in tokens]
            return found | {"logprobs": {"content": content}}
        if "logprobs" in body:
            shown = list(zip(ids[start:], rows, strict=True))
            found["logprobs"] = {
                "tokens": [self.text(token) for token, _ in shown],
                "token_logprobs": [float(row[token]) for token, row in shown],
                "top_logprobs": [self.top(row, 5) for row in rows],
            }
        return found

    def text(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))

    def top(self, row: torch.Tensor, number: int) -> dict[str, float]:
        values, ids = row.topk(number)
        return {self.text(i): v for i, v in zip(ids.tolist(), values.tolist(), strict=True)}


@contextmanager
def serving(reply: Callable[[str, dict[str, Any]], dict[str, Any] | None]) -> Iterator[str]:
    """Serve JSON on a loopback port; yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            found = reply(self.path, json.loads(self.rfile.read(length) or b"{}"))
            data = json.dumps(found or {"error": {"message": "unsupported"}}).encode()
            self.send_response(400 if found is None else 200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def factor(saved: Saved, number: Callable[[str], float]) -> Any:
    state = {n: t * number(n) if "lora_B" in n else t for n, t in saved.adapter.state().items()}
    return saved.adapter.swapped_state(state)


FAULTS = {
    "applied": lambda saved: factor(saved, lambda name: 1.0),
    "not_applied": lambda saved: saved.adapter.disabled(),
    "strength": lambda saved: factor(saved, lambda name: 0.5),
    "part": lambda saved: factor(saved, lambda name: float(".0." in name)),
}


@pytest.mark.parametrize("is_single", [False, True], ids=["batch", "single"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_by_whatever_a_server_returns(saved, method, fault, is_single):
    """Answers part after few tokens, so their verdict may stay undecided."""
    api = Api(saved, method, is_single)
    with FAULTS[fault](saved), serving(api.reply) as url:
        verdict = prove_server(url, saved.proof)
    is_short = "answers" in method  # compared until the answers part
    assert verdict.kind == fault or (is_short and verdict.kind == "undecided"), verdict
    assert verdict.method == method
    assert api.num_requests <= MAX_REQUESTS


@pytest.mark.parametrize("method", [*METHODS][:2])
@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"bos": True}, "second_bos"),
        ({"template": "{{ messages[-1]['content'] }}"}, "template"),
        ({"template": "user: {{ messages[-1]['content'] }} assistant:"}, "template"),
    ],
)
def test_a_server_with_other_prompts_is_not_applied(saved, method, settings, kind):
    with serving(Api(saved, method, **settings).reply) as url:
        verdict = prove_server(url, saved.proof)
    assert verdict.kind == kind or (
        method == "log-probabilities of answers" and not verdict.is_applied
    )


@pytest.mark.smoke
def test_our_server_is_proved(saved):
    pytest.importorskip("starlette", reason="the extra peftkit[serve] is not installed")
    from peftkit_server.app import make_app
    from tests.helpers.serving import served_app

    bank = open_bank({"demo": saved.folder})
    with served_app(make_app(bank)) as port:
        url = f"http://127.0.0.1:{port}"
        verdict = prove_server(url, saved.proof)
        assert (verdict.kind, verdict.is_certain) == ("applied", True), verdict
        assert verdict.method == "log-probabilities of the next tokens"
        assert prove_server(url, saved.proof, "base").kind == "not_applied"


def test_limits_and_refusals_name_the_next_step(saved):
    with serving(lambda path, body: None) as url, pytest.raises(ConfigError, match="--model"):
        prove_server(url, saved.proof)
    empty = {"object": "list", "data": None}  # of Ollama without models
    with serving(lambda path, body: empty) as url, pytest.raises(ConfigError, match="--model"):
        prove_server(url, saved.proof)
    with serving(lambda path, body: None) as url, pytest.raises(RunError, match="completes no"):
        prove_server(url, saved.proof, "demo")
    with (
        serving(Api(saved, next(iter(METHODS))).reply) as url,
        pytest.raises(RunError, match="--timeout"),
    ):
        prove_server(url, saved.proof, seconds=0)
    with pytest.raises(RunError, match="has started"):
        prove_server("http://127.0.0.1:9", saved.proof)


@pytest.mark.smoke
def test_the_command_writes_and_proves_in_ten_lines(saved, peftkit: Run, tmp_path):
    folder = save_adapter(saved.adapter, tmp_path / "plain", Provenance(base=str(saved.model)))
    (folder / "peftkit.json").unlink()  # as PEFT writes it
    missing = peftkit("prove", folder)
    assert missing.code == 2
    assert "--write" in missing.err
    assert peftkit("prove", folder, "--write", "--prompt", "what is the fox?").code == 0
    (prompt,) = read_proof(folder).prompts
    assert prompt.text == "what is the fox?"
    done = peftkit("prove", folder)
    assert done.code == 0, done.err
    assert done.out.startswith("proved: applied, 100% of the update\n")
    assert len(done.out.splitlines()) <= 10
    with saved.adapter.disabled(), serving(Api(saved, next(iter(METHODS))).reply) as url:
        failed = peftkit("prove", url, "--proof", saved.folder, "--json")
    assert failed.code == 1
    assert json.loads(failed.out)["kind"] == "not_applied"
    assert "--proof" in peftkit("prove", "http://127.0.0.1:9").err


@pytest.mark.parametrize("to", ["peft", "mlx", "gguf"])
def test_a_copy_is_proved_by_its_weights_and_by_its_answers(saved, peftkit: Run, tmp_path, to):
    if to == "gguf":
        pytest.importorskip("gguf")
    out = tmp_path / f"copy.{to}"
    done = peftkit("export", saved.folder, "--to", to, "--out", out)
    assert done.code == 0, done.err
    assert "proved: applied, 100% of the update" in done.err
    proof = ("--proof", saved.folder / "proof.json") if to == "gguf" else ()
    assert peftkit("prove", out, *proof).out.startswith("proved: applied, 100%")


def test_a_file_that_cannot_be_proved_is_written(saved, peftkit: Run, tmp_path, monkeypatch):
    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("peftkit.proof.files.prove_files", full)
    done = peftkit("export", saved.folder, "--to", "peft", "--out", tmp_path / "copy")
    assert done.code == 0, done.err
    assert "not proved: OutOfMemoryError: CUDA out of memory." in done.err
    assert done.out.strip() == str(tmp_path / "copy")


def test_a_merged_model_carries_its_proof(saved, peftkit: Run, tmp_path):
    done = peftkit("merge", saved.folder, "--out", tmp_path / "merged")
    assert done.code == 0, done.err
    assert "proved: applied, 100% of the update" in done.err
    assert peftkit("prove", tmp_path / "merged").code == 0
    other = peftkit("prove", saved.model, "--proof", saved.folder)
    assert other.code == 1
    assert other.out.startswith("proved: not applied")


def test_a_copy_with_another_scale_is_named(saved, tmp_path, peftkit: Run):
    export_adapter(saved.folder, tmp_path / "mlx", to="mlx")
    config = tmp_path / "mlx" / "adapter_config.json"
    fields = json.loads(config.read_text())
    fields["lora_parameters"]["scale"] /= 2
    config.write_text(json.dumps(fields))
    done = peftkit("prove", tmp_path / "mlx", "--proof", saved.folder)
    assert done.code == 1
    assert done.out.startswith("proved: strength, 50% of the update")
