"""`peftkit serve`: an OpenAI-compatible HTTP server for adapters."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from peftkit_cli.arguments import Base, Force, note
from peftkit_cli.talk import MaxNewTokens, Temperature, named_adapters, note_system

if TYPE_CHECKING:
    from peftkit.inference.bank import AdapterBank


def serve(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]RUN...",
            help="Adapters of one base: folders, or USER/NAME[@REVISION] on the hub. "
            "The name is the model's; by default the folder's.",
        ),
    ],
    host: Annotated[
        str, typer.Option(metavar="HOST", help="Address to listen on; others need a key.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="0 picks a free port.")
    ] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            envvar="PEFTKIT_API_KEY",
            help="Key that clients must send. Set it in the environment: others can see arguments.",
        ),
    ] = None,
    base: Base = None,
    max_batch: Annotated[
        int, typer.Option(metavar="N", min=1, help="Answers generated at once.")
    ] = 32,
    max_waiting: Annotated[
        int, typer.Option(metavar="N", min=1, help="Queue limit; beyond it, HTTP 429.")
    ] = 64,
    max_new_tokens: MaxNewTokens = 1024,
    temperature: Temperature = 0.0,
    force: Force = False,
) -> None:
    """Run a local OpenAI-compatible server. Prints the address.

    The models are the adapters and `base`. A request may set its own temperature and max_tokens.
    """
    folders = named_adapters(runs)
    from peftkit.inference.open_engine import tokens_that_fit, why_plain
    from peftkit.serve.server import serve_adapters, vllm_command
    from peftkit_cli.render import Renderer

    def announce(url: str, bank: AdapterBank) -> None:
        screen.close()  # loading is over; serving may take days
        typer.echo(f"{url}/v1")
        models = ", ".join([*bank.names, "base"])
        note(f"Models: {models}. Ctrl-C ends it. Also there: {url}/health")
        for name in bank.names:
            note_system(bank.style(name), f"{name}: ")
        if (tokens := tokens_that_fit(bank.base.model)) is not None:
            note(f"Memory for {tokens:,} tokens of prompts and answers at once.")
        if (why := why_plain(bank.base.model, bank.base.tokenizer)) is not None:
            note(f"Requests are answered batch by batch (this model has {why}).")
        if command := vllm_command(bank):
            note(f"For production, vLLM loads the same folders:\n  {command}")

    with ExitStack() as screen:
        on_event = screen.enter_context(Renderer(transient=True))
        serve_adapters(
            folders,
            base,
            host=host,
            port=port,
            key=api_key or None,
            max_batch=max_batch,
            max_waiting=max_waiting,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            force=force,
            on_event=on_event,
            on_ready=announce,
        )
