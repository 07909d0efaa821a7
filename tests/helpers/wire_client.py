"""A client of Tinker's interface that is made of the wire module alone."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("google.protobuf", reason="the extra peftkit[train-api] is not installed")
from peftkit_server.tinker import wire

API = "/api/v1"


def datum(
    ids: Sequence[int], targets: Sequence[int] | Tensor | None = None, **inputs: Any
) -> tuple[list[int], dict[str, Tensor]]:
    """Return tokens and the loss's inputs; by default each token's target is the next one."""
    given = {name: torch.as_tensor(value, dtype=torch.float32) for name, value in inputs.items()}
    if targets is None:
        return list(ids[:-1]), {"target_tokens": torch.tensor(ids[1:]), **given}
    return list(ids), {"target_tokens": torch.as_tensor(targets), **given}


def message(
    model_id: str,
    seq_id: int,
    data: Sequence[tuple[Sequence[int], Mapping[str, Tensor]]],
    loss: str = "cross_entropy",
    config: Mapping[str, float | str] | None = None,
    *,
    forward_only: bool = False,
) -> bytes:
    """Return the body of forward_backward."""
    out = wire.MESSAGES["ForwardBackward"](
        model_id=model_id, seq_id=seq_id, loss=loss, forward_only=forward_only
    )
    for name, value in (config or {}).items():
        field = "text" if isinstance(value, str) else "number"
        setattr(out.config[name], field, value)
    for ids, inputs in data:
        one = out.data.add()
        one.chunks.add().text.tokens = wire.bytes_of(ids, torch.int32)
        for name, values in inputs.items():
            dtype = torch.int64 if values.dtype == torch.int64 else torch.float32
            tensor = one.inputs[name]
            tensor.dense, tensor.dtype = wire.bytes_of(values, dtype), wire.NUMBERS[dtype]
            tensor.shape.extend(values.shape)
    return bytes(out.SerializeToString())


class Client:
    """One session; `http` is a test client of the application, or an httpx client."""

    def __init__(self, http: Any, key: str | None = None) -> None:
        self.http, self.headers = http, {} if key is None else {"X-API-Key": key}
        self.session = self.post("create_session", tags=[], user_metadata=None, sdk_version="test")[
            "session_id"
        ]
        self._numbers, self._samples = itertools.count(), itertools.count()

    def ask(self, what: str, /, **body: Any) -> Any:
        """Return the response."""
        return self.http.post(f"{API}/{what}", json=body, headers=self.headers)

    def post(self, what: str, /, **body: Any) -> Any:
        """Return the fields of the response."""
        response = self.ask(what, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def get(self, path: str) -> Any:
        response = self.http.get(f"{API}/{path}", headers=self.headers)
        assert response.status_code == 200, response.text
        return response.json()

    def retrieve(self, id: str) -> Any:
        """Return a result: bytes, or fields."""
        while True:
            response = self.ask("retrieve_future", request_id=id)
            if response.status_code != 408:
                break
        assert response.status_code == 200, response.text
        is_message = response.headers["content-type"] == "application/x-protobuf"
        return response.content if is_message else response.json()

    def result(self, what: str, /, **body: Any) -> Any:
        """Return the result of what is answered with an id."""
        return self.retrieve(self.post(what, **body)["request_id"])

    def model(self, **config: Any) -> Model:
        """Make a model."""
        number = next(self._numbers)
        given = {"rank": 4, "seed": 1, "train_unembed": False, **config}
        made = self.result(
            "create_model",
            session_id=self.session,
            model_seq_id=number,
            base_model="base",
            lora_config=given,
        )
        assert made.get("model_id") == f"{self.session}:train:{number}", made
        return Model(self, made["model_id"])

    def load(self, path: str, *, optimizer: bool) -> Model:
        """Make a model of saved weights."""
        number = next(self._numbers)
        made = self.result(
            "load_weights",
            session_id=self.session,
            model_seq_id=number,
            path=path,
            optimizer=optimizer,
        )
        assert "model_id" in made, made
        return Model(self, made["model_id"])

    def sampler(self, path: str | None = None) -> str:
        number = next(self._samples)
        where = {"base_model": "base"} if path is None else {"model_path": path}
        return str(
            self.post(
                "create_sampling_session",
                session_id=self.session,
                sampling_session_seq_id=number,
                **where,
            )["sampling_session_id"]
        )

    def ask_sample(self, sampler: str, ids: Sequence[int], number: int = 0, **more: Any) -> Any:
        """Return the response to a request for a sample."""
        params = {"max_tokens": 6, "seed": 3, **more.pop("params", {})}
        prompt = {"chunks": [{"type": "encoded_text", "tokens": list(ids)}]}
        named = {"sampling_session_id": sampler, "seq_id": number, "prompt": prompt}
        return self.ask("asample", **named, sampling_params=params, **more)

    def sample(self, *args: Any, **more: Any) -> Any:
        """Return a message `Sampled`, or an error."""
        response = self.ask_sample(*args, **more)
        assert response.status_code == 200, response.text
        found = self.retrieve(response.json()["request_id"])
        return wire.parsed("Sampled", found) if isinstance(found, bytes) else found


class Model:
    """A model that is trained."""

    def __init__(self, client: Client, id: str) -> None:
        self.client, self.id, self.next = client, id, 1

    def send(self, data: bytes) -> Any:
        """Send the body of forward_backward; return the response."""
        headers = {**self.client.headers, "Content-Type": "application/x-protobuf"}
        return self.client.http.post(f"{API}/forward_backward", content=data, headers=headers)

    def submit(self, *args: Any, number: int | None = None, **named: Any) -> str:
        """Send a forward_backward; return the id of its result."""
        if number is None:
            number, self.next = self.next, self.next + 1
        response = self.send(message(self.id, number, *args, **named))
        assert response.status_code == 200, response.text
        return str(response.json()["request_id"])

    def forward(self, *args: Any, **named: Any) -> Any:
        """Return the sum of losses and each datum's tensors, or an error."""
        return read(self.client.retrieve(self.submit(*args, **named)))

    def call(self, what: str, /, **body: Any) -> Any:
        """Return the result of an operation that is JSON."""
        number, self.next = self.next, self.next + 1
        return self.client.result(what, model_id=self.id, seq_id=number, **body)

    def step(self, **settings: Any) -> Any:
        return self.call("optim_step", adam_params={"learning_rate": 1e-2, **settings})


def read(found: Any) -> Any:
    """Return the sum of losses and each datum's tensors, or an error as it is."""
    if not isinstance(found, bytes):
        return found
    out = wire.parsed("ForwardBackwardOutput", found)
    rows: list[dict[str, Tensor]] = []
    for record in out.records:
        fields: list[dict[str, Tensor]] = [{} for _ in range(record.num_datums)]
        for name, batched in record.fields.items():
            offsets = wire.numbers_of(batched.offsets, torch.int64, name).tolist()
            for row, (start, stop) in zip(fields, itertools.pairwise(offsets), strict=True):
                values = wire.numbers_of(batched.data[start:stop], torch.float32, name)
                row[name] = values.view(-1, *batched.trailing_shape)
        rows += fields
    return out.metrics["loss:sum"], rows
