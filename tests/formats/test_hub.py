"""Adapters to a hub and back, against a hub on the loopback."""

import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest

from peftkit.errors import AdapterError, OutputError
from peftkit.events import Event, Notice
from peftkit.formats.exchange import export_adapter
from peftkit.formats.find_adapter import adapter_folder
from peftkit.formats.folders import START, TOKENIZER_FILES, HubId, is_hub_id, parse_hub_id
from peftkit.formats.hub import FILES, pull_adapter, push_adapter
from peftkit.formats.peft.folder import AdapterFolder
from peftkit.formats.peft.low_rank import read_low_rank, save_low_rank
from peftkit.formats.peft.notes import Provenance
from peftkit.methods.lora import LoRA
from tests.helpers.adapters import model_with_adapter
from tests.helpers.hub_server import Hub, Repo, joined_hub

NAME = "me/json"
# how huggingface_hub uploads a large file
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with joined_hub(monkeypatch, tmp_path / "cache") as running:
        yield running
    assert threading.active_count() < 10


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, tiny = model_with_adapter("llama", LoRA(rank=2, targets=("q", "v")))
    folder = tmp_path_factory.mktemp("adapter")
    start = {name: tensor / 2 for name, tensor in tiny.state().items()}
    AdapterFolder(tiny, Provenance(base="org/base"), start=start).save(folder)
    return folder


@pytest.fixture
def run_folder(adapter: Path, tmp_path: Path) -> Path:
    """What a run leaves: an adapter and much that is nobody else's business."""
    folder = Path(shutil.copytree(adapter, tmp_path / "run"))
    (folder / "recipe.yaml").write_text("base: {model: org/base}\n")
    (folder / "proof.json").write_text("{}")
    for name in TOKENIZER_FILES:  # of an adapter with new tokens
        (folder / name).write_text(f"its {name}")
    (folder / "metrics.jsonl").write_text('{"secret": 1}\n')
    (folder / "checkpoints" / "step-1").mkdir(parents=True)
    (folder / "checkpoints" / "step-1" / "adapter_model.safetensors").write_text("x")
    (folder / ".env").write_text("TOKEN=x")
    return folder


@pytest.mark.smoke
def test_pushed_and_pulled_it_is_the_same(hub, run_folder, tmp_path):
    done = push_adapter(run_folder, NAME, private=True)
    repo = hub.repos[NAME]
    assert repo.private
    assert repo.main == done.commit
    assert len(repo.commits) == 2  # the empty one, and a single one of ours
    assert set(repo.commits[repo.main]) == set(FILES) == set(done.files) > set(TOKENIZER_FILES)
    pulled = pull_adapter(NAME, tmp_path / "pulled")
    assert pulled.commit == done.commit
    for name in set(FILES) - {"README.md"}:
        assert (tmp_path / "pulled" / name).read_bytes() == (run_folder / name).read_bytes()
    record = json.loads((tmp_path / "pulled" / "pulled.json").read_text())
    assert record == {"hub_id": NAME, "revision": None, "commit": done.commit}
    file, _ = read_low_rank(tmp_path / "pulled")
    assert file.provenance.base == "org/base"


def test_what_it_began_with_goes_to_peft_where_its_notes_go(adapter, tmp_path):
    for dtype, has_start in (("fp32", True), ("bf16", False)):
        export_adapter(adapter, tmp_path / dtype, to="peft", dtype=dtype)
        assert (tmp_path / dtype / START).is_file() == has_start
        assert (tmp_path / dtype / "peftkit.json").is_file() == has_start


def test_what_another_began_with_does_not_stay(hub, run_folder, tmp_path):
    push_adapter(run_folder, NAME)
    pull_adapter(NAME, tmp_path / "pulled")
    (run_folder / START).unlink()
    notes = json.loads((run_folder / "peftkit.json").read_text())
    del notes["sha256"][START]
    (run_folder / "peftkit.json").write_text(json.dumps(notes))
    push_adapter(run_folder, "me/plain")
    pull_adapter("me/plain", tmp_path / "pulled", force=True)
    assert not (tmp_path / "pulled" / START).exists()


def test_a_tokenizer_of_many_tokens_comes_down(hub, run_folder, tmp_path):
    (run_folder / "tokenizer_config.json").write_bytes(b"x" * (5 << 20))
    push_adapter(run_folder, NAME)
    pull_adapter(NAME, tmp_path / "pulled")


def test_a_revision_is_pinned(hub, run_folder, tmp_path):
    first = push_adapter(run_folder, NAME).commit
    (run_folder / "recipe.yaml").unlink()
    second = push_adapter(run_folder, NAME).commit
    assert first != second
    assert "recipe.yaml" not in hub.repos[NAME].commits[second]  # it is not of this adapter
    pull_adapter(f"{NAME}@{first}", tmp_path / "old")
    assert (tmp_path / "old" / "recipe.yaml").exists()
    assert json.loads((tmp_path / "old" / "pulled.json").read_text())["revision"] == first
    with pytest.raises(AdapterError, match="no such revision"):
        pull_adapter(f"{NAME}@nowhere", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_an_adapter_has_a_hub_id(hub, run_folder, monkeypatch):
    commit = push_adapter(run_folder, NAME).commit
    folder = adapter_folder(NAME)
    assert folder.name == commit
    read_low_rank(folder)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert adapter_folder(NAME) == folder  # out of the cache
    assert hub.requests == []
    with pytest.raises(AdapterError, match="not in the cache"):
        adapter_folder("me/other")


def test_only_the_files_of_an_adapter_come_down(hub, run_folder, tmp_path):
    push_adapter(run_folder, NAME)
    files = hub.repos[NAME].commits[hub.repos[NAME].main]
    hub.repos[NAME].commit(files | {"evil.py": b"1/0", "adapter_model.bin": b"x", "a/b.json": b""})
    hub.requests.clear()
    pull_adapter(NAME, tmp_path / "pulled")
    names = {path.name for path in (tmp_path / "pulled").iterdir()}
    assert names == {*FILES, "pulled.json"}
    assert not [request for request in hub.requests if "evil" in request or ".bin" in request]


def test_a_listing_outside_the_folder_is_refused(hub, run_folder, tmp_path):
    push_adapter(run_folder, NAME)
    repo = hub.repos[NAME]
    files = repo.commits[repo.main]
    for name in ("../x", "/etc/x", "a/../../x", "a\\..\\x", "C:x"):
        repo.commit(files | {name: b"x"})
        with pytest.raises(AdapterError, match="points outside the folder"):
            pull_adapter(NAME, tmp_path / "pulled")
    assert not (tmp_path / "pulled").exists()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "it holds nothing"),
        ({"adapter_config.json": b"{}", "adapter_model.bin": b"x"}, "A pickle can run code"),
        ({"config.json": b"{}", "model.safetensors": b"x"}, "a full model"),
        (
            {
                "adapter_config.json": b'{"peft_type": "LORA"}',
                "adapter_model.safetensors": b"<html>",
            },
            "web page",
        ),
        ({"adapter_config.json": b"[", "adapter_model.safetensors": b"\x80\x04x"}, "a pickle"),
        ({"adapter_config.json": b"x" * (5 << 20), "adapter_model.safetensors": b"x"}, "limit"),
    ],
)
def test_an_invalid_adapter_never_appears_in_the_cache(files, message, hub, tmp_path):
    hub.repos[NAME] = Repo()
    hub.repos[NAME].commit(files)
    with pytest.raises(AdapterError, match=message):
        pull_adapter(NAME, tmp_path / "pulled")
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == []


def test_an_existing_folder_is_not_requested(hub, run_folder, tmp_path):
    push_adapter(run_folder, NAME)
    pull_adapter(NAME, tmp_path / "pulled")
    hub.requests.clear()
    with pytest.raises(OutputError):
        pull_adapter(NAME, tmp_path / "pulled")
    assert hub.requests == []
    (run_folder / "recipe.yaml").unlink()
    push_adapter(run_folder, NAME)
    pull_adapter(NAME, tmp_path / "pulled", force=True)
    assert not (tmp_path / "pulled" / "recipe.yaml").exists()  # it was the other one's


def test_a_push_that_fails_leaves_nothing(hub, run_folder):
    for failing, status, message in (
        ("GET /api/models/me/json", 401, "Log in|not valid"),
        ("POST /api/repos/create", 403, "no write access"),
        ("PUT /upload", 403, "no write access"),
        ("POST /api/models/me/json/commit", 412, "changed the repository"),
    ):
        hub.failing = {failing: status}
        with pytest.raises(OutputError, match=message) as error:
            push_adapter(run_folder, NAME)
        assert error.value.exit_code == 2
    assert all(not files for repo in hub.repos.values() for files in repo.commits.values())


def test_a_public_repository_is_not_taken_for_a_private_one(hub, run_folder):
    hub.repos[NAME] = Repo(private=False)
    with pytest.raises(OutputError, match="is public"):
        push_adapter(run_folder, NAME, private=True)
    assert len(hub.repos[NAME].commits) == 1


def test_no_token_no_request(hub, run_folder, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(OutputError, match=r"not logged in(.|\n)*hf auth login"):
        push_adapter(run_folder, NAME)
    assert hub.requests == []


def test_a_local_base_is_reported(hub, run_folder, tmp_path):
    file, modules = read_low_rank(run_folder)
    save_low_rank(modules, tmp_path / "run", replace(file.provenance, base="/home/me/base"))
    events: list[Event] = []
    push_adapter(tmp_path / "run", NAME, on_event=events.append)
    assert any(isinstance(e, Notice) and "/home/me/base" in e.text for e in events)


def test_no_repository_and_no_network_are_told_apart(hub, run_folder, tmp_path, monkeypatch):
    with pytest.raises(AdapterError, match="repository does not exist"):
        pull_adapter("me/nothing", tmp_path / "x")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    with pytest.raises(AdapterError, match=r"cannot be reached(.|\n)*HF_ENDPOINT"):
        pull_adapter(NAME, tmp_path / "x")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(AdapterError, match="not in the cache"):
        pull_adapter(NAME, tmp_path / "x")
    with pytest.raises(OutputError, match="HF_HUB_OFFLINE is set"):
        push_adapter(run_folder, NAME)


@pytest.mark.parametrize(
    "text",
    ["x", "a/b/c", "../x", "a/..", "/etc/x", "a/b@", "a/b@../x", "a\\b/c", "a/b c", "a/.b", ""],
)
def test_what_names_no_repository_is_refused(text):
    assert not is_hub_id(text)
    with pytest.raises(AdapterError, match="is not the name of a repository"):
        parse_hub_id(text)


def test_a_path_is_not_taken_for_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("runs/demo")
    assert parse_hub_id("runs/demo@refs/pr/1") == HubId("runs/demo", "refs/pr/1")
    (tmp_path / "runs").mkdir()
    assert not is_hub_id("runs/demo")
