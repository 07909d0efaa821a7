"""`peftkit generate`, `chat`, `predict` and `eval`: use an adapter on its base."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peftkit.errors import AdapterError, ConfigError, DataError, neighbours
from peftkit.formats.find_adapter import adapter_folder
from peftkit.formats.folders import is_hub_id
from peftkit_cli.arguments import Adapter, Base, Force, Json, System, note

if TYPE_CHECKING:
    from peftkit.data.style import Style
    from peftkit.formats.open_adapter import Opened
    from peftkit.inference.bank import AdapterBank

MaxNewTokens = Annotated[int, typer.Option(metavar="N", min=1, help="Maximum length of an answer.")]
Temperature = Annotated[float, typer.Option(metavar="X", min=0.0, help="0: greedy; above: sample.")]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Seed for sampling.")]


def generate(
    adapter: Adapter,
    prompt: str | None = None,
    image: list[Path] | None = None,
    audio: list[Path] | None = None,
    video: list[Path] | None = None,
    system: System = None,
    base: Base = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    force: Force = False,
) -> None:
    """Complete a prompt, or transcribe audio. Prints the text only.

    Args:
        prompt (TEXT): Prompt to complete; - reads it from stdin.
        image (FILE): An image to put before the prompt. Repeatable.
        audio (FILE): Audio to put before the prompt; transcribed without --prompt. Repeatable.
        video (FILE): A video to put before the prompt. Repeatable.
    """
    _check_there(*image or (), *audio or (), *video or ())
    if audio and prompt is None and system is None:
        opened = _open(adapter, base, force)
        from peftkit.evaluation.predict import transcribe

        with _answering():
            transcripts = transcribe(opened, audio)
        typer.echo("\n".join(transcripts))
        return
    text = sys.stdin.read().rstrip("\n") if prompt == "-" else prompt
    if not text:
        raise DataError("the prompt is empty.", fix="Give at least one word with --prompt.")
    opened = _open(adapter, base, force)
    from peftkit.data.generation import style_with_system
    from peftkit.data.media.files import KINDS
    from peftkit.evaluation.predict import generate_with_media
    from peftkit.inference.generate import generate as generate_text

    settings: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
    }
    files = {"image": image, "audio": audio, "video": video}
    media = [kind(path, str(path)) for kind in KINDS for path in files[kind.name] or ()]
    style, tokenizer = opened.style, opened.base.tokenizer
    if system is None:
        note_system(style)
    if media or opened.task.prompt_media:
        if system is not None:
            style = replace(style, system=system or None)
        with _answering():
            answer = generate_with_media(opened, text, media, style=style, **settings)
    else:
        if system is not None:
            style = style_with_system(tokenizer, style, system)
        with _answering():
            (answer,) = generate_text(opened.base.model, tokenizer, text, style=style, **settings)
    typer.echo(answer)


@contextmanager
def _answering() -> Iterator[None]:
    """Show within the context that the model answers."""
    from peftkit.events import Stage
    from peftkit_cli.render import Renderer

    with Renderer(transient=True) as on_event:
        on_event(Stage("Answering"))
        yield


def evaluate(
    adapter: Adapter,
    data: Path | None = None,
    tasks: str | None = None,
    include: Path | None = None,
    limit: Annotated[int | None, typer.Option(min=1)] = None,
    fewshot: Annotated[int | None, typer.Option(min=0)] = None,
    chat_template: bool = False,
    compare: bool = False,
    run_rewards: bool = False,
    row_style: bool = False,
    drift: bool = False,
    base: Base = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Evaluate an adapter on a data file or on benchmarks.

    Args:
        data (FILE): Rows in any training format.
        tasks (NAME,...): Tasks of lm-evaluation-harness, for base and adapter: arc_easy,gsm8k.
        include (DIR): With --tasks: a folder with your own task files.
        limit (N): With --tasks: maximum number of rows per task.
        fewshot (N): With --tasks: number of few-shot examples.
        chat_template: With --tasks: apply the chat template.
        compare: With --data: also evaluate the base without the adapter.
        run_rewards: Run the Python reward functions that the adapter names.
        row_style: With --data: use the prompt style of the rows, such as texts for a chat adapter.
        drift: Also measure how far training moved the model on its answers to unrelated prompts, in
            nats per token.
    """
    if (data is None) == (tasks is None) and not (drift and tasks is None):
        raise DataError("eval needs either --data or --tasks.", fix="Give one of the two.")
    if tasks is not None:
        options = {"include": include, "limit": limit, "num_fewshot": fewshot}
        names = [name.strip() for name in tasks.split(",")]
        opened = _open(adapter, base, force)
        _run_tasks(opened, names, as_json=as_json, chat_template=chat_template, **options)
        return
    if data is not None:
        _check_there(data)
    opened = _open(adapter, base, force)
    metrics, by_label = dict[str, dict[str, Any]](adapter={}), dict[str, dict[str, Any]]()
    if data is not None:
        metrics, by_label = _measured(opened, data, run_rewards, compare, row_style)
    if drift:
        metrics["adapter"] |= _drift(opened)
    if as_json:
        for side, report in by_label.items():
            metrics[side] |= report
        typer.echo(json.dumps(metrics if compare else metrics["adapter"]))
        return
    _show_metrics(metrics)


def _measured(
    opened: Opened, data: Path, run_code: bool, compare: bool, row_style: bool
) -> tuple[dict[str, dict[str, object]], dict[str, dict[str, object]]]:
    """Return the metrics of "adapter" and, with `compare`, of "base"; and of each label."""
    from peftkit.evaluation.evaluate import evaluate as measure
    from peftkit.evaluation.evaluate import trained_length
    from peftkit.events import ClassReport, Event, Progress, Stage
    from peftkit.formats.open_adapter import before_training
    from peftkit_cli.render import Renderer

    metrics, by_label = dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()
    style = opened.style if opened.is_causal else opened.file.provenance.prompt_style
    if row_style:
        style = None
    sides: dict[str, Callable[[], AbstractContextManager[None]]] = {"adapter": nullcontext}
    if compare:
        sides["base"] = opened.adapter.disabled
    with Renderer(transient=True) as on_event:

        def listen(event: Event) -> None:
            if isinstance(event, ClassReport):
                by_label[side] = {"labels": event.labels, "confusion": event.confusion}
            # the adapter's pass has reported the rows
            if side == "adapter" or isinstance(event, Stage | Progress):
                on_event(event)

        for side, context in sides.items():
            with context():
                metrics[side] = measure(
                    opened.base,
                    data,
                    task=opened.task,
                    style=style,
                    before=before_training(opened.adapter, opened.file.folder),
                    run_code=run_code,
                    max_length=trained_length(opened.file.folder),
                    on_event=listen,
                )
    return metrics, by_label


def _drift(opened: Opened) -> dict[str, float]:
    """Return the drift of an adapter; see `peftkit.evaluation.drift`."""
    from peftkit.evaluation.drift import Drift
    from peftkit.formats.open_adapter import before_training
    from peftkit.settings import DriftConfig
    from peftkit_cli.render import Renderer

    if not opened.is_causal:
        raise DataError(
            "--drift measures causal language models.",
            found=f"The adapter was trained for the task {opened.task.type}.",
        )
    before = before_training(opened.adapter, opened.file.folder)
    options: dict[str, Any] = {}
    if opened.task.prompt_media:
        from peftkit.evaluation.predict import media_task

        options["prompt_format"] = media_task(opened).prompt_format
    model, tokenizer = opened.base.model, opened.base.tokenizer
    with Renderer(transient=True) as on_event:
        options["on_event"] = on_event
        return Drift(model, tokenizer, before, DriftConfig(), **options).measure()


def _show_metrics(metrics: Mapping[str, Mapping[str, float]]) -> None:
    """Print one line per metric, or a table of base and adapter."""
    from peftkit.figures import metric, metric_name

    adapter = metrics["adapter"]
    if "base" not in metrics:
        width = max(len(metric_name(name)) for name in adapter)
        for name, value in adapter.items():
            typer.echo(f"{metric_name(name):{width}}  {metric(name, value)}")
        return
    from peftkit_cli.render import print_table

    rows = []
    for name, value in adapter.items():
        before = metrics["base"].get(name, float("nan"))
        change = "" if name.startswith("num_") else f"{value - before:+.4g}"
        rows.append((metric_name(name), metric(name, before), metric(name, value), change))
    print_table("", ("metric", "base", "adapter", "change"), rows)


def _run_tasks(opened: Opened, names: list[str], *, as_json: bool, **options: Any) -> None:
    """Print benchmark scores of base and adapter; save them for the report of a run."""
    from rich.console import Console

    from peftkit.files.disk import write_json
    from peftkit.report.history import TASKS, is_run
    from peftkit_cli.harness import run_tasks
    from peftkit_cli.render import Renderer

    tables = Console(stderr=as_json, highlight=False)
    with Renderer(tables=tables, transient=True) as on_event:
        scores = run_tasks(opened, names, on_event=on_event, **options)
    entries = [asdict(score) for score in scores]
    if as_json:
        typer.echo(json.dumps(entries))
    if is_run(folder := opened.file.folder):
        write_json({"scores": entries}, folder / TASKS)
        note(f"Next: peftkit report {folder}, which includes these scores.")


def predict(
    adapter: Adapter,
    text: list[str] | None = None,
    data: Path | None = None,
    out: Path | None = None,
    base: Base = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Classify, score or embed texts.

    Prints the most likely label of each text, a tab, and its probability. With --data, writes each
    row with its prediction, score or embedding.

    Args:
        text (TEXT): Text to classify. Repeatable.
        data (FILE): Predict each row of this file.
        out (FILE): Write the rows here, as JSON Lines. Default: stdout.
    """
    if (text is None) == (data is None) or (data is None and out is not None):
        raise DataError(
            "predict needs either --text or --data.",
            fix="Give one of the two (--out needs --data).",
        )
    if data is not None:
        _check_there(data)
        opened = _open(adapter, base, force)
        from peftkit.evaluation.predict import predict_file, write_rows
        from peftkit_cli.render import Renderer

        with Renderer(transient=True) as on_event:
            rows = predict_file(opened, data, on_event=on_event)
        if out is None:
            for row in rows:
                typer.echo(json.dumps(row, ensure_ascii=False))
        else:
            write_rows(rows, out)
            typer.echo(out)
        return
    assert text is not None
    opened = _open(adapter, base, force)
    from peftkit.evaluation.predict import predict as classify

    predictions = classify(opened, text)
    if as_json:
        typer.echo(json.dumps(predictions))
        return
    for scores in predictions:
        label, value = next(iter(scores.items()))
        typer.echo(f"{label}\t{value:.4g}")


def chat(
    adapter: Annotated[str | None, typer.Argument()] = None,
    named: Annotated[list[str] | None, typer.Option("--adapter")] = None,
    base: Base = None,
    max_new_tokens: MaxNewTokens = 1024,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    system: System = None,
    tool: list[str] | None = None,
    run_tools: bool = False,
    force: Force = False,
) -> None:
    """Chat with one or several adapters, and with the base.

    /base and /adapter switch, /compare shows all answers, /help lists the commands.

    Args:
        adapter ([ADAPTER]): A folder saved by peftkit or PEFT, or USER/NAME[@REVISION] on the hub.
        named ([NAME=]ADAPTER): One of several adapters on one base; /adapter NAME switches.
            Repeatable.
        tool (FILE.py:FUNCTION): A function that the model may call, after you confirm. Repeatable.
        run_tools: Run the functions without confirmation.
    """
    _check_tools(tool or (), run_tools)
    source = _open_all(adapter, named, base, force)
    from peftkit_cli.chat_tools import ChatTools
    from peftkit_cli.conversation import Conversation

    tools = ChatTools(source.base.tokenizer, tool, confirm=not run_tools) if tool else None
    settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    talk = Conversation(source, system=system, tools=tools, **settings)
    if talk.on_terminal:
        names = ", ".join(named) if named else adapter
        note(f"{names} on {source.base.name}. /help lists the commands.")
    for line in talk.lines():
        if not talk.take(line):
            break


def _check_tools(uses: Sequence[str], run_tools: bool) -> None:
    """Check the tools before the base is loaded."""
    if not uses:
        return
    from peftkit.tasks.user_code import file_of

    if not (run_tools or (sys.stdin.isatty() and sys.stdout.isatty())):
        raise ConfigError(
            "--tool needs a terminal, where you confirm each call.",
            fix="To run the functions without confirmation, add --run-tools.",
        )
    for use in uses:
        file_of(use)


def _open_all(
    adapter: str | None, named: Sequence[str] | None, base: str | None, force: bool
) -> Opened | AdapterBank:
    if (adapter is None) == (not named):
        raise AdapterError(
            "no adapter is given." if adapter is None else "both ADAPTER and --adapter are given.",
            found=neighbours(Path("runs/any")) if not named and Path("runs").is_dir() else "",
            fix="Give one as `peftkit chat ADAPTER`, or several, each as --adapter NAME=ADAPTER.",
        )
    if adapter is not None:
        return _open(adapter, base, force)
    folders = named_adapters(named or ())
    from peftkit_cli.render import Renderer

    with Renderer(transient=True) as on_event:
        from peftkit.base.new_tokens import notify_split_tokens
        from peftkit.inference.bank import open_bank

        bank = open_bank(folders, base, force=force, on_event=on_event)
        notify_split_tokens(folders, bank.base.tokenizer, on_event)
        return bank


def named_adapters(texts: Sequence[str]) -> dict[str, Path]:
    """Parse arguments [NAME=]ADAPTER into folders by name, by default the name of the folder.

    Raises:
        AdapterError: A folder does not exist, or a name is used twice or is "base".
    """
    folders: dict[str, Path] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or not name or "/" in name:
            name, path = "", text
        if not path:
            raise AdapterError(f"{text} names no adapter.", fix="Write it as json=runs/json.")
        folder = adapter_folder(path)
        if not name:
            name = path.partition("@")[0].rpartition("/")[2] if is_hub_id(path) else ""
            name = name or folder.resolve().name
        if name == "base" or name in folders:
            raise AdapterError(
                f"two adapters would be named '{name}'.",
                found="The name 'base' is reserved for the base."
                if name == "base"
                else f"They are {folders[name]} and {folder}.",
                fix=f"Give names: NAME={path}",
            )
        folders[name] = folder
    return folders


def note_system(style: Style, prefix: str = "") -> None:
    """Print the system prompt of a style, if it has one."""
    from peftkit.data.chat_template import shortened

    if style.system:
        note(f"{prefix}System prompt, as in training: {shortened(style.system)}")


def _open(adapter: str, base: str | None, force: bool) -> Opened:
    folder = adapter_folder(adapter)
    from peftkit_cli.render import Renderer

    with Renderer(transient=True) as on_event:
        from peftkit.formats.open_adapter import open_adapter

        return open_adapter(folder, base, force=force, on_event=on_event)


def _check_there(*files: Path) -> None:
    """Check that files exist, before the base is loaded."""
    for file in files:
        if not file.exists():
            near = neighbours(file, f"*{file.suffix}")
            raise DataError(f"there is no file '{file}'.", found=near)
