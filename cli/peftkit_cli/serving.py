"""`peftkit serve`, an OpenAI-compatible server for adapters; `peftkit studio`, a page for runs."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from peftkit.errors import ConfigError
from peftkit.formats.folders import CONFIG, PROOF
from peftkit_cli.arguments import Base, Force, note
from peftkit_cli.prove import prove_served
from peftkit_cli.talk import MaxNewTokens, Temperature, named_adapters, note_system

if TYPE_CHECKING:
    from peftkit_server.predictions.predictor import Predictor
    from peftkit_server.training import TrainingOptions

MAX_SAMPLES = 4096
"""Prompts that may wait on a server that trains."""


def serve(
    runs: list[str],
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    api_key: Annotated[list[str] | None, typer.Option(envvar="PEFTKIT_API_KEY")] = None,
    base: Base = None,
    max_batch: Annotated[int, typer.Option(min=1)] = 32,
    max_waiting: Annotated[int | None, typer.Option(min=1)] = None,
    max_new_tokens: MaxNewTokens = 1024,
    temperature: Temperature = 0.0,
    limit: list[str] | None = None,
    force: Force = False,
    train: Path | None = None,
    quantize: Literal["none", "nf4", "fp4", "int8"] = "none",
    names: Annotated[list[str] | None, typer.Option("--as")] = None,
    run_graders: bool = False,
) -> None:
    """Run an OpenAI-compatible server. Prints its address.

    The models are the adapters and `base`. A request may set its own temperature and max_tokens.
    With --train, clients can also upload rows, train on them, and use the result.

    Args:
        runs ([NAME=]RUN...): Adapters of one base: folders, or USER/NAME[@REVISION] on the hub.
            NAME is the model name, by default the folder name. With --train, the base comes first.
        host (HOST): Address to listen on; other addresses need a key.
        port (N): 0 picks a free port.
        api_key (KEY): Key that clients must send. Better set it in the environment (separate
            several with spaces), since other users can see arguments.
        max_batch (N): Maximum number of answers generated together.
        max_waiting (N): Queue limit; further requests get HTTP 429. Default: 64, with --train 4096.
        limit (NAME=VALUE): Another limit of requests or API keys, such as key_files=50. Repeatable;
            docs/limits.md lists them.
        train (DIR): Also train the base, for OpenAI and Tinker clients; DIR stores files, jobs and
            weights.
        quantize (KIND): With --train: quantisation of the base: none, nf4, fp4, int8.
        names (NAME): With --train: another name of the base. Repeatable.
        run_graders: With --train: run Python graders that clients send.
    """
    options = None
    if train is not None:
        options = _options(runs[0], train, quantize, names or [], run_graders, base)
    elif quantize != "none" or names or run_graders:
        raise ConfigError(
            "--quantize, --as and --run-graders need --train.",
            fix="Add --train DIR. Without it, the base is loaded as the adapters were trained.",
        )
    folders = named_adapters(runs if options is None else runs[1:])
    from peftkit_cli.render import Renderer

    with Renderer(transient=True):
        from peftkit.inference import open_engine
        from peftkit.inference.bank import AdapterBank
        from peftkit_server.limits import DEFAULTS, Limits, parse_limits
        from peftkit_server.server import serve_adapters, vllm_command

    # RL clients request all samples of a step together
    waiting = max_waiting or (DEFAULTS.max_waiting if train is None else MAX_SAMPLES)
    limits = Limits(max_batch, waiting, max_new_tokens=max_new_tokens, temperature=temperature)

    def announce(url: str, bank: AdapterBank | Predictor) -> None:
        screen.close()  # nothing to show while serving
        typer.echo(f"{url}/v1")
        if not isinstance(bank, AdapterBank):
            (name,) = folders
            note(f"Model: {name}. Endpoints: {', '.join(bank.endpoints)}. Stop with Ctrl-C.")
            return
        models = ", ".join([*bank.names, "base", *(names or ())])
        note(f"Models: {models}. Health check: {url}/health. Stop with Ctrl-C.")
        for name in bank.names:
            note_system(bank.style(name), f"{name}: ")
        from peftkit_server.app import LEFT_TO_TRAIN  # needs the extra

        left = 0.0 if train is None else LEFT_TO_TRAIN
        if (
            tokens := open_engine.tokens_that_fit(bank.base.model, bank.base.tokenizer, left=left)
        ) is not None:
            reserved = f" {left:.0%} of the free memory is reserved for training." if left else ""
            note(f"Memory for {tokens:,} tokens of concurrent prompts and answers.{reserved}")
            size = open_engine.cache_footprint(bank.base.model, bank.base.tokenizer)
            if size is not None and size.state_tokens:
                note(f"The states of an answer count as {size.state_tokens:,} tokens.")
        slower = open_engine.generation_fallbacks(bank.base.model, bank.base.tokenizer)
        for fallback in (*slower, *bank.fallbacks):
            note(fallback.text)
        if train is not None:
            note(f"Training is enabled. Files, jobs and weights are stored in {train}.")
        elif command := vllm_command(bank):
            note(f"For production, vLLM can serve the same folders:\n  {command}")
        proofs = {name: bank.file(name).folder / PROOF for name in bank.names}
        written = {name: path for name, path in proofs.items() if path.is_file()}
        key = next(iter(api_key or ()), "").partition(" ")[0]
        Thread(target=prove_served, args=(url, written, key), daemon=True).start()

    with ExitStack() as screen:
        on_event = screen.enter_context(Renderer(transient=True))
        serve_adapters(
            folders,
            base,
            host=host,
            port=port,
            key=api_key or (),
            limits=replace(limits, **parse_limits(limit or ())),
            force=force,
            training=options,
            on_event=on_event,
            on_ready=announce,
        )


def _options(
    model: str, folder: Path, quantize: str, names: list[str], allow_code: bool, base: str | None
) -> TrainingOptions:
    """Return the options of a server that trains."""
    if base is not None:
        raise ConfigError(
            "with --train, the base is the first argument, not --base.",
            fix=f"peftkit serve {base} --train {folder}",
        )
    if (Path(model) / CONFIG).is_file():
        raise ConfigError(
            f"'{model}' is an adapter; with --train, the first argument is the base.",
            fix=f"peftkit serve MODEL {model} --train {folder}",
        )
    from peftkit.config.schema import from_dict
    from peftkit.settings import BaseConfig
    from peftkit_server.training import TrainingOptions

    settings = from_dict(BaseConfig, {"model": model, "quantize": quantize}, "peftkit serve")
    return TrainingOptions(
        folder=folder, base=settings, names=(model, *names), allow_code=allow_code, say=note
    )


def studio(
    folder: Annotated[Path, typer.Argument()] = Path("."),
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8100,
    api_key: Annotated[list[str] | None, typer.Option(envvar="PEFTKIT_API_KEY")] = None,
    models: list[Path] | None = None,
    run_code: bool = False,
    urls: bool = False,
    open_browser: Annotated[bool, typer.Option("--open")] = False,
) -> None:
    """Serve a page to start, watch and compare runs, and to chat. Prints its address.

    Args:
        folder ([DIR]): Folder of data/, recipes/ and runs/.
        host (HOST): Address to listen on.
        port (N): 0 picks a free port.
        api_key (KEY): Key of the page. Default: a random key, which the printed address contains.
        models (DIR): Another folder whose files recipes may name. Repeatable.
        run_code: Start recipes that name Python functions.
        urls: Let recipes name URLs, with the credentials of this shell.
        open_browser: Open the page in a browser.
    """
    for path in (folder, *(models or ())):
        if not path.is_dir():
            raise ConfigError(f"there is no folder '{path}'.", fix="Create it, or name another.")
    from peftkit_studio.server import serve_studio

    def announce(url: str) -> None:
        typer.echo(url)
        note("Ctrl-C stops the page. Runs continue.")
        if open_browser:
            import webbrowser

            webbrowser.open(url)

    serve_studio(
        folder,
        host=host,
        port=port,
        keys=api_key or (),
        models=models or (),
        run_code=run_code,
        open_urls=urls,
        on_ready=announce,
    )
