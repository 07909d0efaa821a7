"""A run over an S3 server (moto's): data, base, upload, and connections that break."""

import json
import sys

import pytest

from peftkit.errors import ConfigError, DataError, RunError
from peftkit.files import remote
from peftkit.run import run
from tests.helpers.children import free_port
from tests.helpers.small_run import service, small_recipe

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # of botocore


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory):
    for package in ("moto.server", "s3fs", "flask"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", port]
    url = f"http://127.0.0.1:{port}"
    with service(command, f"{url}/moto-api/", tmp_path_factory.mktemp("moto")):
        yield url


@pytest.fixture
def bucket(endpoint, tmp_path, monkeypatch):
    """The file system with an empty bucket `models`; credentials come from the environment."""
    import s3fs

    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "FSSPEC_S3_ENDPOINT_URL": endpoint,
        "PEFTKIT_CACHE": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    for cached in (remote.fetch, remote.fetch_folder):
        cached.cache_clear()
    s3fs.S3FileSystem.clear_instance_cache()
    fs = s3fs.S3FileSystem(use_listings_cache=False)
    if not fs.exists("models"):
        fs.mkdir("models")
    yield fs
    fs.invalidate_cache()
    fs.rm("models", recursive=True)


def test_a_run_reads_and_writes_s3(bucket, tmp_path, model_folder):
    recipe = small_recipe(tmp_path, model_folder, upload="s3://models/runs/demo")
    bucket.put(str(model_folder), "models/base", recursive=True)
    bucket.put_file(str(tmp_path / "rows.jsonl"), "models/rows.jsonl")
    data = {"train": "s3://models/*.jsonl", "eval": "s3://models/rows.jsonl"}
    remote_recipe = recipe.model_copy(
        update={
            "data": recipe.data.model_copy(update=data),
            "base": recipe.base.model_copy(update={"model": "s3://models/base"}),
        }
    )
    run(remote_recipe, resume="auto")
    adapter = (tmp_path / "run" / "adapter_model.safetensors").read_bytes()
    assert bucket.cat("models/runs/demo/adapter_model.safetensors") == adapter
    record = json.loads(bucket.cat("models/runs/demo/finished.json"))
    assert record["result"]["step"] == 4
    assert not bucket.exists("models/runs/demo/.peftkit-probe")
    assert not bucket.exists("models/runs/demo/checkpoints")
    local = small_recipe(tmp_path, model_folder, output_dir=tmp_path / "local")
    run(local)
    assert (tmp_path / "local" / "adapter_model.safetensors").read_bytes() == adapter


def test_a_changed_object_is_fetched_again(bucket):
    bucket.pipe_file("models/a.jsonl", b"one")
    first = remote.fetch("s3://models/a.jsonl")
    bucket.pipe_file("models/a.jsonl", b"two")
    assert remote.fetch("s3://models/a.jsonl") == first, "a process reads one version"
    remote.fetch.cache_clear()
    assert remote.fetch("s3://models/a.jsonl").read_bytes() == b"two"


def test_missing_objects_and_buckets_are_one_error(bucket):
    with pytest.raises(DataError, match=r"cannot read s3://models/none\.jsonl"):
        remote.fetch("s3://models/none.jsonl")
    with pytest.raises(ConfigError, match="cannot write to s3://nowhere-58/run"):
        remote.check_writable("s3://nowhere-58/run")


def test_a_server_that_is_gone_is_one_error_and_leaves_nothing(bucket, tmp_path, monkeypatch):
    import s3fs

    bucket.pipe_file("models/a.jsonl", b"one")
    with monkeypatch.context() as patch:
        for name in ("AWS_ENDPOINT_URL", "FSSPEC_S3_ENDPOINT_URL"):
            patch.setenv(name, f"http://127.0.0.1:{free_port()}")
        patch.setenv("AWS_MAX_ATTEMPTS", "1")
        s3fs.S3FileSystem.clear_instance_cache()
        with pytest.raises(RunError, match=r"Check the connection, and the credentials"):
            remote.fetch("s3://models/a.jsonl")
    s3fs.S3FileSystem.clear_instance_cache()
    assert not list((tmp_path / "cache").rglob("a.jsonl"))
    assert remote.fetch("s3://models/a.jsonl").read_bytes() == b"one"
