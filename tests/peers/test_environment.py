"""An answer of another program is read, whatever the program says besides."""

from __future__ import annotations

import pytest

from tests.peers.environment import answer_in


def test_an_answer_is_found_among_what_a_program_says_before_and_after_it() -> None:
    assert answer_in('loading\n[{"ids": [1]}]\n[rank0]: bye\n\nthe engine has ended\n') == [
        {"ids": [1]}
    ]
    with pytest.raises(AssertionError, match="no answer in 'loading"):
        answer_in("loading\n")
