"""The official clients against the server: loops of two tools, streams, structured output."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.chat_api import call
from tests.helpers.serving import served_app

pytest.importorskip("starlette", reason="the extra peftkit[serve] is not installed")
from peftkit_server.app import make_app
from peftkit_server.limits import Limits

KEY = "a-key"
PROPERTIES = {"n": {"type": "integer"}}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": PROPERTIES,
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def url(scripted: Any) -> Iterator[str]:
    limits = Limits(max_body=1 << 16, max_new_tokens=100)
    with served_app(make_app(scripted, keys=[KEY], limits=limits)) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.mark.slow
def test_openai_responses(url, says):
    openai = pytest.importorskip("openai", reason="the client is not installed")
    tools = [
        {"type": "function", "name": name, "parameters": SCHEMA, "strict": True}
        for name in ("add", "sub")
    ]
    says(call("add", 1), call("sub", 2), "Done")
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        items: list[Any] = [{"role": "user", "content": "Hi"}]
        for name, n in (("add", 1), ("sub", 2)):
            with client.responses.stream(model="tools", input=items, tools=tools) as stream:
                for _ in stream:
                    pass
                response = stream.get_final_response()
            (made,) = response.output
            assert (made.name, json.loads(made.arguments)) == (name, {"n": n})
            result = {"type": "function_call_output", "call_id": made.call_id, "output": "3"}
            items += [*response.output, result]
        whole = client.responses.create(model="tools", input=items, tools=tools)
        assert whole.output_text == "Done"
        assert client.responses.retrieve(whole.id).output_text == "Done"
        says(' {"n": 7}')
        format = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
        after = client.responses.create(
            model="tools", input="Hi", previous_response_id=whole.id, text={"format": format}
        )
        assert json.loads(after.output_text) == {"n": 7}
        with pytest.raises(openai.BadRequestError, match="conversation"):
            client.responses.create(model="tools", input="Hi", conversation="conv_1")


@pytest.mark.slow
def test_anthropic_messages(url, says):
    anthropic = pytest.importorskip("anthropic", reason="the client is not installed")
    tools = [{"name": name, "input_schema": SCHEMA} for name in ("add", "sub")]
    says(call("add", 1), call("sub", 2), "Done")
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as client:
        turns: list[Any] = [{"role": "user", "content": "Hi"}]
        settings = {"model": "tools", "max_tokens": 80, "tools": tools}
        for name, n in (("add", 1), ("sub", 2)):
            with client.messages.stream(messages=turns, **settings) as stream:
                message = stream.get_final_message()
            (used,) = message.content
            assert (used.name, used.input, message.stop_reason) == (name, {"n": n}, "tool_use")
            result = {"type": "tool_result", "tool_use_id": used.id, "content": "3"}
            turns += [
                {"role": "assistant", "content": message.content},
                {"role": "user", "content": [result]},
            ]
        whole = client.messages.create(messages=turns, **settings)
        assert whole.content[0].text == "Done"
        counted = client.messages.count_tokens(messages=turns, model="tools", tools=tools)
        assert counted.input_tokens == whole.usage.input_tokens
        with client.messages.stream(messages=turns[:1], model="tools", max_tokens=9) as stream:
            assert "".join(stream.text_stream) == "Done"
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(messages=turns[:1], model="no", max_tokens=9)
    with (
        anthropic.Anthropic(base_url=url, api_key="no", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError),
    ):
        client.messages.create(messages=turns[:1], model="tools", max_tokens=9)


@pytest.mark.slow
@pytest.mark.parametrize("is_streamed", [False, True])
def test_openai_agents(url, says, is_streamed):
    agents = pytest.importorskip("agents", reason="the client is not installed")
    import asyncio

    from openai import AsyncOpenAI

    said: list[tuple[str, int]] = []

    @agents.function_tool
    def add(n: int) -> str:
        """Add."""
        said.append(("add", n))
        return "3"

    @agents.function_tool
    def sub(n: int) -> str:
        """Subtract."""
        said.append(("sub", n))
        return "4"

    async def loop() -> str:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
            model = agents.OpenAIResponsesModel("tools", client)
            agent = agents.Agent(name="test", model=model, tools=[add, sub])
            if not is_streamed:
                return str((await agents.Runner.run(agent, "Hi")).final_output)
            result = agents.Runner.run_streamed(agent, "Hi")
            async for _ in result.stream_events():
                pass
            return str(result.final_output)

    agents.set_tracing_disabled(True)
    says(call("add", 1), call("sub", 2), "Done")
    assert asyncio.run(loop()) == "Done"
    assert said == [("add", 1), ("sub", 2)]
