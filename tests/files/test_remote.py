"""Object storage: copies and uploads are complete or absent, and every failure is one error."""

import io
import json
from functools import partial
from pathlib import Path

import fsspec
import pytest

from peftkit.base.locate import locate
from peftkit.errors import BaseError, ConfigError, DataError, RunError
from peftkit.files import remote
from peftkit.files.disk import LOCKS
from peftkit.files.remote import STARTED, check_writable, fetch, fetch_folder, matching, upload

LENGTH = {"max_length": 64, "packing": False}


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store in memory, whose URLs begin with memory://, and an empty cache."""
    monkeypatch.setenv("PEFTKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(remote.PACKAGES, "memory", "fsspec")
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    for cached in (remote.fetch, remote.fetch_folder):
        cached.cache_clear()
    yield fs
    fs.store.clear()


def files_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if p.is_file() and LOCKS not in p.parts)


def test_a_file_and_a_folder_are_copied_once(store, tmp_path, monkeypatch):
    store.pipe({"/b/rows.jsonl": b"rows", "/b/model/config.json": b"{}", "/b/model/x/y": b"z"})
    copy = fetch("memory://b/rows.jsonl")
    assert (copy.name, copy.read_bytes()) == ("rows.jsonl", b"rows")
    folder = fetch_folder("memory://b/model/")
    assert files_in(folder) == ["config.json", "y"]
    assert (folder / "x" / "y").read_bytes() == b"z"
    monkeypatch.setattr(store, "open", None)  # a second call reads nothing
    assert fetch("memory://b/rows.jsonl") == copy
    assert fetch_folder("memory://b/model") == folder


def test_patterns_name_files(store):
    store.pipe({"/b/2.jsonl": b"", "/b/1.jsonl": b"", "/b/1.txt": b""})
    assert matching("memory://b/*.jsonl") == ["memory:///b/1.jsonl", "memory:///b/2.jsonl"]
    with pytest.raises(DataError, match="no file fits"):
        matching("memory://b/*.csv")


def test_a_missing_object_is_named(store):
    with pytest.raises(
        DataError, match=r"cannot read memory://b/rows\.jsonl\.\n  There is no such"
    ):
        fetch("memory://b/rows.jsonl")
    with pytest.raises(DataError, match="There is no such folder"):
        fetch_folder("memory://b/model")


def test_a_base_of_the_hub_by_its_url_is_the_same_base(store):
    assert locate("hf://org/name@v1") == locate("org/name", "v1")
    with pytest.raises(BaseError, match=r"Leave base\.revision out"):
        locate("memory://b/model", "v1")
    with pytest.raises(BaseError, match="cannot be listed over https"):
        locate("https://host/model")


@pytest.mark.parametrize("kind", ["short", "error"])
def test_a_broken_download_leaves_nothing(store, tmp_path, monkeypatch, kind):
    store.pipe({"/b/rows.jsonl": b"12345678", "/b/m/a": b"1", "/b/m/b": b"12345678"})
    whole = type(store).open

    class Broken(io.BytesIO):
        def read(self, size: int = -1) -> bytes:
            if kind == "error" and self.tell() >= 4:
                raise ConnectionResetError("reset by peer")
            return super().read(4)

    def open_(self, path, mode="rb", **options):
        content = whole(self, path).read()
        return io.BytesIO(content) if len(content) < 8 else Broken(content[:4])

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "open", open_)
        for get, url in ((fetch, "memory://b/rows.jsonl"), (fetch_folder, "memory://b/m")):
            words = "after 4 of 8 bytes" if kind == "short" else "ConnectionResetError: reset"
            with pytest.raises(RunError, match=words):
                get(url)
    assert files_in(tmp_path / "cache") == []
    assert fetch("memory://b/rows.jsonl").read_bytes() == b"12345678"


def test_the_mark_of_an_upload_is_written_last_and_withdrawn_first(store, tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / name).write_text(name * 3)
    files = {name: tmp_path / name for name in "ab"}
    check_writable("memory://b/run")
    assert store.find("/b") == []
    mark = ("finished.json", b"{}")
    upload(files, "memory://b/run", mark, b"{}".__eq__)
    assert store.find("/b") == ["/b/run/a", "/b/run/b", "/b/run/finished.json"]

    put = type(store).put_file

    def put_file(self, source, target, **options):
        if target.endswith("b"):
            raise ConnectionResetError("reset by peer")
        put(self, source, target, **options)

    monkeypatch.setattr(type(store), "put_file", put_file)
    with pytest.raises(RunError, match="reset by peer"):
        upload(files, "memory://b/run", mark, b"{}".__eq__)
    assert store.find("/b") == []


@pytest.mark.parametrize("there", ["finished.json", STARTED, "a"])
def test_an_upload_replaces_no_other_one(store, tmp_path, there):
    (tmp_path / "a").write_text("new")
    send = partial(upload, {"a": tmp_path / "a"}, "memory://b/run", ("finished.json", b"{}"))
    before = {"/b/run/a": b"old", f"/b/run/{there}": b"other"}
    store.pipe(before)
    with pytest.raises(ConfigError, match="It holds another run, or files of another origin"):
        send(b"{}".__eq__)
    assert {name: store.cat(name) for name in before} == before
    if there != "a":  # the same run, finished or killed in an upload, uploads again
        store.pipe(f"/b/run/{there}", b"{}")
        send(b"{}".__eq__)
        assert store.find("/b") == ["/b/run/a", "/b/run/finished.json"]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3x://bucket/rows.jsonl", "URLs begin with s3://"),
        ("https://user:secret@host/rows.jsonl", "Set the credentials in the environment"),
        ("https://host/rows.jsonl?X-Amz-Signature=secret", "Set the credentials in the env"),
    ],
)
def test_urls_that_cannot_be_used_are_refused_without_their_secret(url, words):
    with pytest.raises(ConfigError, match=words) as caught:
        fetch(url)
    assert "secret" not in str(caught.value)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
    with pytest.raises(ConfigError, match="pip install gcsfs"):
        fetch("gs://bucket/rows.jsonl")


def test_a_run_reads_its_data_and_base_from_a_store_and_uploads_itself(
    store, tmp_path, model_folder
):
    from peftkit.recipe import Recipe
    from peftkit.run import run
    from tests.helpers.command_line import turn

    rows = [json.dumps(turn("what is it?", f"the {word}")) for word in ("fox", "dog")] * 2
    store.pipe("/b/train.jsonl", "\n".join(rows).encode())
    for path in model_folder.iterdir():
        store.pipe(f"/b/base/{path.name}", path.read_bytes())
    recipe = Recipe(
        base={"model": "memory://b/base", "dtype": "fp32"},
        method={"type": "lora", "rank": 2, "targets": ["q"]},
        data={"train": "memory://b/*.jsonl", "eval": "memory://b/train.jsonl", **LENGTH},
        train={"output_dir": tmp_path / "run", "max_steps": 2, "upload": "memory://b/runs/demo"},
    )
    result = run(recipe, resume="auto")
    adapter = (tmp_path / "run" / "adapter_model.safetensors").read_bytes()
    assert store.cat("/b/runs/demo/adapter_model.safetensors") == adapter
    names = {path.rpartition("/")[2] for path in store.find("/b/runs/demo")}
    assert {"peftkit.json", "recipe.yaml", "README.md", "metrics.jsonl", "finished.json"} <= names
    record = json.loads(store.cat("/b/runs/demo/finished.json"))
    assert record == json.loads((tmp_path / "run" / "finished.json").read_text())
    assert record["result"]["step"] == result.step == 2
    notes = json.loads(store.cat("/b/runs/demo/peftkit.json"))
    assert "memory://b/base" in json.dumps(notes)
    assert run(recipe, resume="auto").step == 2
    moved = recipe.train.model_copy(update={"upload": "memory://b/runs/other"})
    run(recipe.model_copy(update={"train": moved}), resume="auto")
    assert "/b/runs/other/finished.json" in store.find("/b/runs/other")


def test_a_failed_upload_keeps_the_adapter_and_is_repeated(store, asked_upload, monkeypatch):
    from peftkit.run import run

    def put_file(self, source, target, **options):
        raise ConnectionResetError("reset by peer")

    folder = asked_upload.train.output_dir
    with monkeypatch.context() as patch:
        patch.setattr(type(store), "put_file", put_file)
        with pytest.raises(RunError, match=r"run the command with --resume auto") as caught:
            run(asked_upload)
    assert "reset by peer" in str(caught.value)
    assert (folder / "adapter_model.safetensors").exists()
    assert not (folder / "finished.json").exists()
    assert store.find("/b/runs") == []
    run(asked_upload, resume="auto")
    assert "/b/runs/demo/finished.json" in store.find("/b/runs")


@pytest.fixture
def asked_upload(tmp_path, model_folder):
    from peftkit.recipe import Recipe
    from tests.helpers.command_line import turn
    from tests.helpers.folders import write_rows

    rows = write_rows(tmp_path / "rows.jsonl", [turn("what is it?", "the fox")] * 2)
    return Recipe(
        base={"model": str(model_folder), "dtype": "fp32"},
        method={"type": "lora", "rank": 2, "targets": ["q"]},
        data={"train": str(rows), **LENGTH},
        train={"output_dir": tmp_path / "run", "max_steps": 1, "upload": "memory://b/runs/demo"},
    )
