"""A base fetched from a hub: told in bytes, and gone on with where the connection broke."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from peftkit.base import locate
from peftkit.base.load import load_base
from peftkit.events import Event, Progress
from tests.helpers.hub_server import Hub, Repo, running_hub

NAME = "org/tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub, and empty caches of its library's and ours."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr(locate, "is_hub_reachable", lambda: True)
    monkeypatch.setattr("peftkit.base.pretrained.is_hub_reachable", lambda: True)
    monkeypatch.setenv("PEFTKIT_CACHE", str(tmp_path / "ours"))
    before = threading.active_count()
    with running_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        # the library's functions belong to an object that reads the endpoint when it is imported
        monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", running.url)
        constants = huggingface_hub.constants
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, running.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        yield running
        huggingface_hub.close_session()
    assert threading.active_count() < before + 20


def publish(hub: Hub, folder: Path) -> int:
    """Put a folder on the hub; return the bytes of its weights."""
    repo = hub.repos[NAME] = Repo()
    repo.commit({path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()})
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def loaded(**more: Any) -> tuple[Any, list[Progress]]:
    seen: list[Event] = []
    base = load_base(NAME, dtype="fp32", device="cpu", on_event=seen.append, **more)
    return base, [e for e in seen if isinstance(e, Progress) and "Downloading" in e.text]


@pytest.mark.covers("peftkit")
def test_download_is_told_in_bytes_and_goes_on_where_it_broke(hub, model_folder):
    size = publish(hub, model_folder)
    hub.breaking["model.safetensors"] = size // 2
    base, told = loaded(quantize="nf4")
    assert base.hub_id == NAME
    assert base.fingerprint == load_base(str(model_folder)).fingerprint
    assert (told[-1].done, told[-1].total, told[-1].unit) == (size, size, "B")
    starts = [start for name, start in hub.ranges if name == "model.safetensors"]
    assert starts == [0, size // 2 // 1000 * 1000]
    hub.ranges.clear()
    _, told = loaded()
    assert told == []
    assert hub.ranges == []
