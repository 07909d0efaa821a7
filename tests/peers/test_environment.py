"""An answer of another program is read, whatever the program says besides."""

import pytest

from tests.peers.environment import UnavailableError, answer_in, python_of


def test_an_answer_is_found_among_what_a_program_says_before_and_after_it():
    assert answer_in('loading\n[{"ids": [1]}]\n[rank0]: bye\n\nthe engine has ended\n') == [
        {"ids": [1]}
    ]
    with pytest.raises(AssertionError, match="no answer in 'loading"):
        answer_in("loading\n")


def test_a_missing_environment_names_its_command(tmp_path, monkeypatch):
    monkeypatch.setenv("PEFTKIT_PEERS", str(tmp_path))
    with pytest.raises(UnavailableError, match=r"python -m tests\.peers\.environment vLLM$"):
        python_of("vLLM")
    assert not list(tmp_path.iterdir())
