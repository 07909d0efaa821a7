"""`peftkit serve`, as a process: the address, an answer, and how it ends."""

import json
import signal
import sys
from urllib.request import Request, urlopen

import pytest

from peftkit.errors import AdapterError
from peftkit_cli.talk import named_adapters
from tests.helpers.command_line import start

pytest.importorskip("uvicorn", reason="the extra peftkit[serve] is not installed")


@pytest.mark.covers("peftkit", "cli")
@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_a_server_prints_its_address_answers_and_ends_on_ctrl_c(trained):
    process = start("serve", "demo=runs/demo", "--port", "0", cwd=trained)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:"), process.communicate()
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": "what is the quick?"}],
            "max_tokens": 16,
        }
        request = Request(f"{url}/chat/completions", json.dumps(body).encode())
        with urlopen(request, timeout=60) as answer:
            (choice,) = json.load(answer)["choices"]
        assert choice["message"]["content"].strip()
    finally:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Models: demo, base." in err
    assert "vllm serve" in err
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGTERM")
def test_sigterm_ends_an_answer_and_the_server_without_a_traceback(trained):
    process = start("serve", "demo=runs/demo", "--port", "0", cwd=trained)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        body = {"model": "base", "prompt": "the", "max_tokens": 100_000, "stream": True}
        request = Request(f"{url}/completions", json.dumps(body).encode())
        with urlopen(request, timeout=60) as answer:
            assert answer.readline().startswith(b"data: ")
            process.send_signal(signal.SIGTERM)
            rest = answer.read()
    finally:
        process.terminate()
        _, err = process.communicate(timeout=30)
    assert b"shutting down" in rest or b"[DONE]" in rest
    assert process.returncode in (143, -signal.SIGTERM)
    assert "Traceback" not in err


def test_runs_are_named_after_their_folders_or_as_asked(tmp_path):
    for name in ("json", "sql"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").touch()
    json_run, sql_run = tmp_path / "json", tmp_path / "sql"
    assert named_adapters([str(json_run), f"q={sql_run}"]) == {"json": json_run, "q": sql_run}
    with pytest.raises(AdapterError, match="named 'json'"):
        named_adapters([str(json_run), f"json={sql_run}"])


def test_a_run_that_is_not_there_is_told(peftkit):
    assert "./nowhere" in peftkit("serve", "./nowhere").refusal()


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("--limit", "key_file=5", "key_files"),
        ("--limit", "max_batch=5", "--max-batch 5"),
        ("--host", "0.0.0.0", "PEFTKIT_API_KEY"),
    ],
)
def test_a_refused_option_names_a_right_one(option, value, text, peftkit, tmp_path):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "adapter_config.json").touch()
    assert text in peftkit("serve", "demo", option, value, "--port", "0").refusal()
