"""Every test runs offline, seeded, on the CPU with one thread, and leaves no file at home.

The CPU counts as one without bf16 units, so that the machine decides nothing; PEFTKIT_TEST_BF16=1
runs the suite as on one that has them. `bf16_units` runs a test as on both.
"""

import atexit
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

# What a shell starts in the background ignores SIGINT, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
_HOME = tempfile.TemporaryDirectory(prefix="peftkit-tests-")
atexit.register(_HOME.cleanup)
# Before anything imports a Hugging Face library: they read these once. Programs that tests start
# inherit them.
os.environ.update(
    HF_HOME=_HOME.name,
    PEFTKIT_CACHE=os.path.join(_HOME.name, "peftkit"),
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    DO_NOT_TRACK="1",
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS="1",
)
# oneDNN then leaves the units alone, and `base.dtype: auto` is fp32, in every process of a test.
WITH_BF16 = os.environ.get("PEFTKIT_TEST_BF16") == "1"
os.environ["ONEDNN_MAX_CPU_ISA"] = "ALL" if WITH_BF16 else "AVX512_CORE"
# The tests mean the CPU, whatever the machine has, unless they are asked to run on its card.
if os.environ.get("PEFTKIT_REAL_CARD") != "1":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

# No test cuts the power. A run of a test flushes dozens of files, each in milliseconds.
os.fsync = lambda descriptor: None

import gc  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

import pytest  # noqa: E402 - the environment comes first

from tests.helpers.changed import changed_since, due_of, is_left_out  # noqa: E402

# xdist's first process, for which the others wait, only distributes tests: it imports no torch.
if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

if WITH_BF16:
    from peftkit.base import request as base_request

    if not base_request.has_bf16_units():  # processes of their own look for themselves
        base_request.CPUINFO = Path(_HOME.name, "cpuinfo")
        base_request.CPUINFO.write_text("flags : avx512_bf16", encoding="utf-8")


@pytest.fixture(params=[False, True], ids=["without bf16 units", "with bf16 units"])
def bf16_units(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Run a test as on a CPU without bf16 units, and as on one with them."""
    from peftkit.base import request as base_request

    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags : avx512f" + " avx512_bf16" * request.param, encoding="utf-8")
    monkeypatch.setattr(base_request, "CPUINFO", cpuinfo)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    return bool(request.param)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    import torch

    os.environ.pop("COLUMNS", None)  # a runner may set it; tables in files are then cut
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def deprecated() -> Iterator[list[str]]:
    """Messages on names that transformers will remove and that code of peftkit uses: none."""
    from tests.helpers.deprecations import deprecations

    with deprecations() as messages:
        yield messages
    assert messages == []


@pytest.fixture(autouse=True)
def _processes_end_with_their_test() -> Iterator[None]:
    yield
    for child in multiprocessing.active_children():
        child.kill()
    commands = sys.modules.get("tests.helpers.command_line")  # not imported where no test needs it
    for process in commands.STARTED if commands is not None else ():
        if process.poll() is None:
            process.kill()
        process.communicate()
    if commands is not None:
        commands.STARTED.clear()


@pytest.fixture
def llama() -> "PreTrainedModel":
    """A tiny Llama with random weights, in eval mode: 2 layers, hidden size 32, 4 heads, 2 kv."""
    from tests.helpers.families import FAMILIES

    return FAMILIES["llama"]().eval()


@pytest.fixture(scope="session")
def tokenizer() -> "PreTrainedTokenizerFast":
    """A real byte-level tokenizer with a ChatML template; its ids fit every tiny model."""
    from tests.helpers.families import tiny_tokenizer

    return tiny_tokenizer()


@pytest.fixture(scope="session")
def model_folder(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: "PreTrainedTokenizerFast"
) -> Path:
    """A folder as on a hub: the tiny Llama in float32 and its tokenizer. Do not write into it."""
    import torch

    from tests.helpers.families import FAMILIES

    folder = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(0)
    FAMILIES["llama"]().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--changed",
        metavar="REV",
        help="leave out the tests of which no covered file changed since a revision; "
        "empty: all tests that are chosen by change (tests/helpers/changed.py)",
    )


def pytest_report_header(config: pytest.Config) -> str | None:
    revision = config.getoption("changed")
    if revision and changed_since(revision) is None:
        return f"git does not know the revision {revision!r}: no test is left out for its files"
    return None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no test file that `--changed` leaves out as a whole."""
    revision = config.getoption("changed")
    changed = None if revision is None else changed_since(revision)
    return True if changed is not None and is_left_out(collection_path, changed) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that cover other files than those that changed since `--changed`."""
    revision = config.getoption("changed")
    changed = None if revision is None else changed_since(revision)
    if changed is None:
        return
    due = dict(zip(items, due_of(items, changed), strict=True))
    config.hook.pytest_deselected(items=[item for item in items if not due[item]])
    items[:] = [item for item in items if due[item]]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Let garbage collection pass over libraries and tests: it then takes no second each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
