"""Adapters on a model hub: pushed in one commit, pulled from one, and checked both times.

Only the files of an adapter are transferred; other files of the folder or repository are ignored.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    errors,
    get_token,
    snapshot_download,
)
from huggingface_hub.constants import is_offline_mode
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from peftkit.base.pretrained import quiet
from peftkit.errors import AdapterError, OutputError, PeftkitError, RunError, first_few
from peftkit.events import Listener, Notice, Stage, ignore
from peftkit.files.disk import write_json
from peftkit.files.strict_json import shown
from peftkit.formats.card import Card, adapter_usage, render_card
from peftkit.formats.folders import (
    CARD,
    CONFIG,
    NOTES,
    ORIGIN,
    PROOF,
    START,
    TENSORS,
    TOKENIZER_FILES,
    copy_files,
    new_adapter_folder,
    parse_hub_id,
)
from peftkit.formats.guard import MAX_PAYLOAD_BYTES, check_safetensors, read_tensors
from peftkit.formats.peft.load import AdapterFile, read_adapter
from peftkit.formats.serving import served_rank

FILES = (CONFIG, TENSORS, CARD, NOTES, START, PROOF, "recipe.yaml", *TOKENIZER_FILES)
NEEDED = (CONFIG, TENSORS)
_MAX_BYTES = {
    **dict.fromkeys((TENSORS, START), MAX_PAYLOAD_BYTES),
    **dict.fromkeys(TOKENIZER_FILES, 64 << 20),  # of 262,144 tokens: 33 MB
}
_MAX_TEXT_BYTES = 4 << 20
_LOG_IN = "Log in with: hf auth login (or set HF_TOKEN)."


@dataclass(frozen=True, slots=True)
class Pushed:
    """A commit on the hub: its page, its hash, and the names of its files."""

    url: str
    commit: str
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pulled:
    """An adapter of the hub on this machine."""

    folder: Path
    repo: str
    commit: str


def push_adapter(
    folder: str | Path, name: str, *, private: bool = False, on_event: Listener = ignore
) -> Pushed:
    """Upload an adapter folder in a single commit.

    Args:
        folder: An adapter folder; a run's checkpoints and metrics are not uploaded.
        name: USER/NAME; the repository is created if it does not exist.
        private: Whether a new repository is private. An existing public repository is refused.

    Raises:
        AdapterError: The adapter is missing or damaged, or the name is invalid.
        OutputError: There is no network, no login, or no right to write. Nothing was changed.
    """
    target = parse_hub_id(name)
    message = f"cannot push {folder} to {name}"
    if target.revision:
        raise OutputError(message, found="A push goes to the main branch.", fix="Leave @... out.")
    file = _checked(Path(folder))
    uploads = _uploads(file, target.repo)
    if file.provenance.base and Path(file.provenance.base).is_absolute():
        on_event(
            Notice(
                f"The adapter records its base as a local path, {file.provenance.base}: "
                "others will need --base MODEL."
            )
        )
    api = _api()
    on_event(Stage(f"Pushing {', '.join(uploads)} to {target.repo}"))
    with _translating(message, OutputError):
        if is_offline_mode():
            raise OfflineModeIsEnabled
        if not api.token and get_token() is None:
            raise OutputError(message, found="You are not logged in.", fix=_LOG_IN)
        existing, parent = _prepared(api, target.repo, private, message)
        commit = api.create_commit(
            target.repo,
            [
                *(CommitOperationAdd(name, source) for name, source in uploads.items()),
                *(CommitOperationDelete(n) for n in FILES if n in existing and n not in uploads),
            ],
            commit_message="Upload an adapter with peftkit",
            parent_commit=parent,
        )
    return Pushed(str(commit.commit_url), str(commit.oid), tuple(uploads))


def _checked(folder: Path) -> AdapterFile:
    """Read an adapter folder completely, to refuse damaged ones."""
    file = read_adapter(folder)
    read_tensors(folder / TENSORS)
    return file


def _uploads(file: AdapterFile, repo: str) -> dict[str, str | bytes]:
    """Return the files to upload; a folder without a card gets one."""
    uploads: dict[str, str | bytes] = {
        name: str(file.folder / name) for name in FILES if (file.folder / name).is_file()
    }
    if CARD not in uploads:
        base = file.provenance.hub_id or file.provenance.base
        usage = adapter_usage(base, repo, rank=served_rank(file.method))
        card = Card(title=repo.partition("/")[2], base=base, usage=usage)
        uploads[CARD] = render_card(card).encode()
    return uploads


def _prepared(
    api: HfApi, repo: str, private: bool, message: str
) -> tuple[Sequence[str], str | None]:
    """Create the repository if needed; return its files and its newest commit."""
    try:
        info = api.model_info(repo)
    except RepositoryNotFoundError:
        api.create_repo(repo, private=private)
        return (), None
    if private and not info.private:
        raise OutputError(
            message,
            found="The repository exists, and is public.",
            fix="Choose another name; or make it private on its page, or push without --private.",
        )
    return [file.rfilename for file in info.siblings or ()], info.sha


def pull_adapter(
    name: str, out: str | Path, *, force: bool = False, on_event: Listener = ignore
) -> Pulled:
    """Download an adapter into a new folder, with a record of the commit.

    Args:
        name: USER/NAME or USER/NAME@REVISION.
        force: Replace the adapter in that folder.

    Raises:
        AdapterError: There is no such repository, no right to read it, no network, or no usable
            adapter in it.
        OutputError: The folder exists or is not writable.
    """
    out = Path(out).expanduser()
    with new_adapter_folder(out, force=force) as folder:
        fetched = fetch(name, on_event=on_event)
        copy_files(fetched.folder, folder, FILES)
        revision = parse_hub_id(name).revision
        record = {"hub_id": fetched.repo, "revision": revision, "commit": fetched.commit}
        write_json(record, folder / ORIGIN)
        _checked(folder)
    return Pulled(out, fetched.repo, fetched.commit)


def fetch(name: str, message: str = "", *, on_event: Listener = ignore) -> Pulled:
    """Download an adapter into the hub's cache and check it; offline, use the cached copy."""
    message = message or f"cannot get the adapter {name}"
    hub_id, commit = parse_hub_id(name), None
    with _translating(message, AdapterError):
        if not is_offline_mode():
            on_event(Stage(f"Fetching the adapter {name}"))
            info = _api().model_info(hub_id.repo, revision=hub_id.revision, files_metadata=True)
            _check_listing({file.rfilename: file.size for file in info.siblings or ()}, message)
            commit = info.sha
        with quiet():
            folder = Path(
                snapshot_download(
                    hub_id.repo,
                    revision=hub_id.revision,
                    allow_patterns=list(FILES),
                    endpoint=os.environ.get("HF_ENDPOINT"),
                    local_files_only=is_offline_mode(),
                )
            )
        if commit not in (None, folder.name):
            raise AdapterError(
                message, found="The repository changed in the meantime.", fix="Try again."
            )
    check_safetensors(folder / TENSORS)
    read_adapter(folder)
    return Pulled(folder, hub_id.repo, folder.name)


def _check_listing(sizes: dict[str, int | None], message: str) -> None:
    """Refuse a repository by the names and sizes of its files."""
    for name in sizes:
        parts = PurePosixPath(name).parts
        windows = PureWindowsPath(name)
        if ".." in parts or name.startswith("/") or windows.drive or "\\" in name or "\0" in name:
            raise AdapterError(
                message,
                found=f"The repository contains a file {shown(name)}.",
                fix="This name points outside the folder: do not use this repository.",
            )
    missing = [name for name in NEEDED if name not in sizes]
    if missing:
        has = first_few(sorted(sizes), 8, ", ") or "nothing"
        pickled = any(name.endswith((".bin", ".pt", ".pth")) for name in sizes)
        fix = "Use a repository of a PEFT adapter."
        if CONFIG in sizes and pickled:
            fix = "A pickle can run code when it is read: request safetensors from its owner."
        elif "config.json" in sizes:
            fix = "It is a full model, not an adapter: use it as a base."
        raise AdapterError(message, found=f"It has no {missing[0]}; it holds {has}.", fix=fix)
    for name in FILES:
        limit = _MAX_BYTES.get(name, _MAX_TEXT_BYTES)
        if (size := sizes.get(name)) and size > limit:
            raise AdapterError(message, found=f"{name} has {size:,} bytes; the limit is {limit:,}.")


def _api() -> HfApi:
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"))


_REACH = "Check the network and HF_ENDPOINT; HF_HUB_OFFLINE=1 uses earlier downloads."
_REASONS: tuple[tuple[type[Exception], str, str], ...] = (
    (OfflineModeIsEnabled, "HF_HUB_OFFLINE is set.", "Unset it, or use a folder on this machine."),
    (
        LocalEntryNotFoundError,
        "It is not in the cache of this machine, and the hub cannot be reached.",
        _REACH,
    ),
    (
        GatedRepoError,
        "Access requires its owner's approval.",
        f"Request access on its page. {_LOG_IN}",
    ),
    (RevisionNotFoundError, "The repository has no such revision.", "See its page for branches."),
    (
        RepositoryNotFoundError,
        "The repository does not exist, or it is private and you have no access.",
        f"Check the name. {_LOG_IN}",
    ),
)
_STATUS = {
    401: f"The token is not valid. {_LOG_IN}",
    403: "Your token has no write access: create one that has, and log in with it.",
    409: "Someone else changed the repository meanwhile: try again.",
    412: "Someone else changed the repository meanwhile: try again.",
    429: "Too many requests: wait a few minutes.",
}


@contextlib.contextmanager
def _translating(message: str, error: type[PeftkitError]) -> Iterator[None]:
    try:
        yield
    except PeftkitError:
        raise
    except Exception as problem:
        # huggingface_hub wraps errors of an upload in a RuntimeError
        cause = problem.__cause__ if type(problem) is RuntimeError else None
        raise _translated(cause or problem, message, error) from problem


def _translated(
    problem: BaseException, message: str, error: type[PeftkitError]
) -> PeftkitError | BaseException:
    """Return the error to raise; errors that do not concern the hub are returned unchanged."""
    for kind, reason, fix in _REASONS:
        if isinstance(problem, kind):
            return error(message, found=reason, fix=fix)
    if isinstance(problem, HfHubHTTPError):
        status = getattr(problem.response, "status_code", 0)
        response = problem.server_message or str(problem).partition("\n")[0]
        fix = _STATUS.get(status, "Try again later." if status >= 500 else "")
        return error(message, found=f"The hub answered {status}: {response}", fix=fix)
    if getattr(problem, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return RunError(message, found=str(problem), fix="Make room on the disk.")
    if isinstance(problem, (errors.HTTPError, OSError)):  # type: ignore[attr-defined] # its client's
        reason = f"The hub cannot be reached: {problem or type(problem).__name__}"
        return error(message, found=reason, fix=_REACH)
    if isinstance(problem, ValueError):  # the library's checks, such as on the card's front matter
        return error(message, found=str(problem))
    return problem
