"""Prove the adapter of an OpenAI-compatible server by its answers."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http.client import HTTPException
from typing import Any

from peftkit.errors import ConfigError, RunError, first_few
from peftkit.proof.judge import Proof, Seen, Verdict, judge, with_rendered

MAX_REQUESTS, NUM_TOP = 40, 5
Tops = Mapping[str, float]
"""Log-probabilities that a server returned for a position, by the token's text."""


class Server:
    """A client of an OpenAI-compatible server with limits of time and requests."""

    def __init__(self, url: str, key: str, seconds: float) -> None:
        path = url.rstrip("/").removesuffix("/chat/completions").removesuffix("/completions")
        self.url = path if path.rpartition("/")[2].startswith("v") else f"{path}/v1"
        self.key, self.end, self.left = key, time.monotonic() + seconds, MAX_REQUESTS
        self.model = ""

    def request(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """Return a response; None if the server refuses the request.

        Raises:
            RunError: It cannot be reached, refuses the key, or the time is over.
        """
        seconds = self.end - time.monotonic()
        if seconds <= 0 or not self.left:
            raise RunError(
                f"{self.url} was not proved in the given time",
                found=f"{MAX_REQUESTS - self.left} requests were sent.",
                fix="Raise --timeout, or try again when the server is idle.",
            )
        self.left -= 1
        data = None if body is None else json.dumps({"model": self.model, **body}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(f"{self.url}/{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=seconds) as response:
                found = json.loads(response.read(64 << 20))
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                fix = "Set PEFTKIT_API_KEY, or --api-key."
                raise RunError(f"{self.url} refuses the key", fix=fix) from None
            if error.code >= 500:  # further requests may do harm
                fix = "Read the server's log, and start it again if it has ended."
                raise RunError(f"{self.url} failed", found=str(error), fix=fix) from None
            return None
        except (OSError, ValueError, HTTPException) as error:
            fix = "Check the address and that the server has started."
            raise RunError(f"cannot read from {self.url}", found=str(error), fix=fix) from error
        return found if isinstance(found, dict) and "error" not in found else None

    def choices(self, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the choices of a completion in order, [] if the request is refused."""
        response = self.request(path, {"temperature": 0, "max_tokens": 1, **body}) or {}
        choices = response.get("choices") or []
        for choice in choices:
            choice["usage"] = response.get("usage") or {}
        return sorted(choices, key=lambda choice: choice.get("index", 0))


def prove_server(
    url: str, proof: Proof, model: str | None = None, key: str = "", seconds: float = 120.0
) -> Verdict:
    """Prove the model of a server by the best log-probabilities that it returns."""
    server = Server(url, key, seconds)
    listed = [one["id"] for one in (server.request("models") or {}).get("data") or ()]
    names = {"base", proof.base["name"], proof.base["hub_id"]}
    server.model = model or _only([name for name in listed if name not in names] or listed, url)
    for method, observe in METHODS.items():
        seen = observe(server, proof)
        if not seen:
            continue
        base: list[Seen] = []
        bare = next((name for name in listed if name in names and name != server.model), None)
        if bare and server.left > MAX_REQUESTS - 5:  # all positions in one request
            chosen, server.model = server.model, bare
            base, server.model = observe(server, proof), chosen
        verdict = judge(proof, seen, base=base, method=method)
        if verdict.is_applied and method == BY_TOKENS:
            return with_rendered(verdict, proof, seen, _rendered(server, proof))
        return verdict
    raise RunError(
        f"{url} completes no prompt",
        found=f"It refuses completions and chats of the model '{server.model}'.",
        fix="Name a model with --model.",
    )


def _only(names: Sequence[str], url: str) -> str:
    if len(names) != 1:
        raise ConfigError(
            f"{url} serves {'several models' if names else 'no model that it lists'}.",
            found=first_few(names, 8, ", ") if names else "",
            fix="Choose one: --model NAME",
        )
    return names[0]


def _next_tokens(server: Server, proof: Proof) -> list[Seen]:
    """Return the first token's log-probabilities after each position's tokens."""
    prefixes = [list(proof.prompts[p.prompt].ids[: p.at]) for p in proof.positions]
    body = {"logprobs": NUM_TOP}
    choices = server.choices("completions", {"prompt": prefixes, **body})
    if len(choices) != len(prefixes):  # one prompt a request
        first = server.choices("completions", {"prompt": prefixes[0], **body})
        if not first or not _tops(first[0]):
            return []
        rest = [server.choices("completions", {"prompt": ids, **body}) for ids in prefixes[1:]]
        choices = [each[0] if each else {} for each in (first, *rest)]
    seen = []
    for n, choice in enumerate(choices):
        seen += _matched(proof, n, (_tops(choice) or [{}])[0])
    return seen


def _sent(server: Server, proof: Proof, number: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a prompt in the form that clients send; {} if it is refused."""
    prompt = proof.prompts[number]
    if prompt.messages:
        found = server.choices("chat/completions", {"messages": prompt.messages, **body})
    else:
        body = {**body, "prompt": prompt.text} | (
            {"logprobs": NUM_TOP} if body.get("logprobs") else {}
        )
        body.pop("top_logprobs", None)
        found = server.choices("completions", body)
    return found[0] if found else {}


def _along(server: Server, proof: Proof, body: Mapping[str, Any]) -> list[Seen]:
    """Return what a server returns along answers, up to the first token that differs."""
    seen: list[Seen] = []
    for number, prompt in enumerate(proof.prompts):
        if prompt.text is None or not server.left:
            continue
        length = len(prompt.ids) - prompt.length
        choice = _sent(server, proof, number, {**body, "max_tokens": length})
        text = str((choice.get("message") or choice).get("content") or choice.get("text") or "")
        tops = iter(_tops(choice))
        for n, position in enumerate(proof.positions):
            if position.prompt != number or not text:
                continue
            likely = next(tops, None) if body else None
            if body and likely is None:
                break
            starts = [i for i, t in enumerate(position.texts) if t and text.startswith(t)]
            token = max(starts, key=lambda i: len(position.texts[i]), default=-1)
            seen += [Seen(n, token)] if likely is None else _matched(proof, n, likely)
            if token < 0 or position.ids[token] != prompt.ids[position.at]:
                break  # the answers part: later tokens follow another prefix
            text = text[len(position.texts[token]) :]
    return seen


TOPS = {"logprobs": True, "top_logprobs": NUM_TOP}
"""Fields of a chat whose answer has log-probabilities."""
METHODS: Mapping[str, Callable[[Server, Any], list[Any]]] = {
    "log-probabilities of the next tokens": _next_tokens,
    "log-probabilities of answers": partial(_along, body=TOPS),
    "texts of answers": partial(_along, body={}),
}
BY_TOKENS = next(iter(METHODS))
"""The method that sends token ids, and sees no template."""


def _rendered(server: Server, proof: Proof) -> dict[int, tuple[list[Seen], int | None]]:
    """Return what follows prompts that the server renders and tokenizes, and their tokens."""
    found = {}
    for number, prompt in enumerate(proof.prompts):
        if prompt.text is not None and server.left:
            choice = _sent(server, proof, number, TOPS)
            at = next(n for n, p in enumerate(proof.positions) if p.prompt == number)
            seen = _matched(proof, at, tops[0]) if (tops := _tops(choice)) else []
            found[number] = seen, choice.get("usage", {}).get("prompt_tokens")
    return found


def _tops(choice: Mapping[str, Any]) -> list[Tops]:
    """Return the likeliest tokens of each position of a response, in any of its formats."""
    log_probs = choice.get("logprobs") or {}
    if content := log_probs.get("content"):
        rows = [[one, *(one.get("top_logprobs") or ())] for one in content]
        return [{t["token"]: t["logprob"] for t in row if "logprob" in t} for row in rows]
    tokens = log_probs.get("tokens") or ()
    values = log_probs.get("token_logprobs") or [None] * len(tokens)
    tops = log_probs.get("top_logprobs") or [None] * len(tokens)
    triples = zip(tokens, values, tops, strict=False)
    return [
        {**(top or {}), **({token: value} if value is not None else {})}
        for token, value, top in triples
    ]


def _matched(proof: Proof, number: int, tops: Tops) -> list[Seen]:
    """Return what a server returned of the tokens of a position; absent ones are less likely."""
    texts = proof.positions[number].texts
    found = {text: value for text, value in tops.items() if value is not None}
    if not found.keys() & set(texts):  # programs that write spaces in their own way
        texts, found = tuple(map(_plain, texts)), {_plain(t): v for t, v in found.items()}
    highest = sorted(found.values(), reverse=True)[:NUM_TOP]
    unique, seen = Counter(texts), []
    for token, text in enumerate(texts):
        if unique[text] > 1 or "\ufffd" in text:  # a part of a character: several tokens
            continue
        if text in found:
            seen.append(Seen(number, token, found[text]))
        elif len(highest) == NUM_TOP:
            seen.append(Seen(number, token, highest[-1], is_bound=True))
    return seen


def _plain(text: str) -> str:
    return text.replace("\u2581", " ").strip() or text
