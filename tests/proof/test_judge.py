"""The judge names planted faults of models in memory, and accuses no honest model."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from peftkit.adapter import Adapter, attach
from peftkit.base.load import Base, load_base
from peftkit.errors import AdapterError, ConfigError
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.low_rank import LowRank
from peftkit.methods.lora import LoRA
from peftkit.proof.files import prove_updates
from peftkit.proof.judge import ADAPTER, Proof, Seen, judge, kind_of
from peftkit.proof.record import prove, read_proof, record, save_proof
from tests.helpers.adapters import perturb
from tests.helpers.families import FAMILIES, tiny_tokenizer

CAUSAL = ("llama", "qwen3", "gemma2", "phi3", "gpt2")


class Case(NamedTuple):
    """A base with an adapter that changes its answers, and the proof of it."""

    base: Base
    adapter: Adapter
    proof: Proof
    folder: Path

    def logits(self, ids: list[int]) -> Any:
        """Return logits without gradients, as a program that is not torch's would."""
        with torch.no_grad():
            return self.base.model(input_ids=torch.tensor([ids])).logits[0].numpy()


@pytest.fixture(scope="module", params=CAUSAL)
def case(request, tmp_path_factory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    FAMILIES[request.param]().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    base = load_base(str(folder), device="cpu")
    adapter = attach(base.model, LoRA(rank=4, targets="all-linear"))
    perturb(adapter.parameters(), 0.1, seed=3)
    return Case(base, adapter, record(base, adapter), folder)


def factors(path: str) -> tuple[str, str]:
    return f"{path}.lora_A.weight", f"{path}.lora_B.weight"


def scaled(factor: Callable[[str], float]) -> Callable[[Case], AbstractContextManager[None]]:
    def fault(case: Case) -> AbstractContextManager[None]:
        state = {name: tensor.clone() for name, tensor in case.adapter.state().items()}
        for path in case.adapter.modules:
            state[factors(path)[1]] *= factor(path)
        return case.adapter.swapped_state(state)

    return fault


def transposed(case: Case) -> AbstractContextManager[None]:
    state = dict(case.adapter.state())
    for path in case.adapter.modules:
        name = factors(path)[1]
        state[name] = state[name].T.reshape(state[name].shape)
    return case.adapter.swapped_state(state)


def other_adapter(case: Case) -> AbstractContextManager[None]:
    state = {name: tensor.clone() for name, tensor in case.adapter.state().items()}
    generator = torch.Generator().manual_seed(77)
    for tensor in state.values():
        tensor.normal_(std=float(tensor.std()), generator=generator)
    return case.adapter.swapped_state(state)


@contextmanager
def other_base(case: Case) -> Iterator[None]:
    kept = {name: p.detach().clone() for name, p in case.base.model.named_parameters()}
    frozen = [p for p in case.base.model.parameters() if not p.requires_grad]
    perturb(frozen, 0.15, seed=5)
    try:
        yield
    finally:
        with torch.no_grad():
            for name, parameter in case.base.model.named_parameters():
                parameter.copy_(kept[name])


FAULTS = {
    "applied": (scaled(lambda path: 1.0), "applied"),
    "off": (lambda case: case.adapter.disabled(), "not_applied"),
    "alpha halved": (scaled(lambda path: 0.5), "strength"),
    "alpha doubled": (scaled(lambda path: 2.0), "strength"),
    "without 1/sqrt(r)": (scaled(lambda path: 2.1), "strength"),
    "half of the layers": (scaled(lambda path: float(".0." in path)), "part"),
    "feed-forward alone": (
        scaled(lambda path: float("mlp" in path or "c_fc" in path)),
        "part",
    ),
    "transposed": (transposed, "transposed"),
    "other adapter": (other_adapter, "other_adapter"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_a_model_in_memory_is_named(case, fault):
    planted, kind = FAULTS[fault]
    with planted(case):
        verdict = prove(case.logits, case.proof)
    assert verdict.kind == kind, verdict
    assert verdict.fix or verdict.is_applied


def test_another_base_is_named_by_its_answers_without_the_adapter(case):
    with other_base(case):
        assert prove(case.base.model, case.proof).kind == "other_base"


@pytest.mark.parametrize("std", [0.0, 0.02, 0.05, 0.1])
def test_noise_of_a_precision_is_no_fault(case, std):
    """Noise up to that of 4 bits, independent at each token, as rounding is."""
    generator = torch.Generator().manual_seed(1)
    shape = (-1, case.base.model.config.vocab_size)

    def noisy(ids: list[int]) -> Any:
        logits = torch.as_tensor(case.logits(ids)).view(shape)
        return logits + std * torch.randn(logits.shape, generator=generator)

    verdict = prove(noisy, case.proof)
    assert verdict.kind == "applied"
    assert verdict.share is not None
    assert abs(verdict.share - 1) < 0.1


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # PEFT's
def test_peft_s_own_model_is_proved_with_its_switch(case, tmp_path):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    save_adapter(case.adapter, tmp_path)
    save_proof(case.proof, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(loaded, tmp_path)
    verdict = prove(model, tmp_path, tokenizer=case.base.tokenizer)
    assert verdict.kind == "applied", verdict
    assert verdict.method.endswith("without the adapter")
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["default"] *= 0.5
    assert prove(model, tmp_path).kind == "strength"
    assert prove(model.unload(), tmp_path).kind == "not_applied"


def test_templates_and_second_bos_of_a_tokenizer_are_named_and_a_date_is_not(case):
    """A prompt in other words gives other answers; a changed word far back hardly does."""
    tokenizer = tiny_tokenizer()
    assert prove(case.base.model, case.proof, tokenizer=tokenizer).kind == "applied"
    own = tokenizer.chat_template
    for template, kind in {
        "{{ bos_token }}" + own: "second_bos",
        "{{ messages[0]['content'] }}": "template",
    }.items():
        tokenizer.chat_template = template
        assert prove(case.base.model, case.proof, tokenizer=tokenizer).kind == kind


def test_a_small_effect_or_nothing_seen_is_undecided(case):
    assert judge(case.proof, []).line == "not proved: undecided"
    with scaled(lambda path: 1e-4)(case):
        weak = record(case.base, case.adapter)
    assert prove(case.logits, weak).line == "not proved: undecided"


def test_texts_alone_decide_between_base_and_adapter(case):
    def chosen(name: str) -> list[Seen]:
        rows = case.proof.log_probs[name]
        return [Seen(n, row.index(max(row))) for n, row in enumerate(rows) if row]

    assert judge(case.proof, chosen(ADAPTER)).kind == "applied"
    assert judge(case.proof, chosen("base")).kind == "not_applied"
    assert (
        judge(case.proof, [Seen(n, -1) for n in range(len(case.proof.positions))]).kind != "applied"
    )


def test_every_recorded_hypothesis_is_its_own_verdict(case):
    """The exact answers of each hypothesis are judged as its kind, or undecided if two are one."""
    for name, rows in case.proof.log_probs.items():
        seen = [Seen(n, i, v) for n, row in enumerate(rows) for i, v in enumerate(row or ())]
        assert judge(case.proof, seen).kind == kind_of(name), name


def test_a_proof_is_deterministic_and_survives_its_file(case, tmp_path):
    assert record(case.base, case.adapter) == case.proof
    save_proof(case.proof, tmp_path)
    assert read_proof(tmp_path) == case.proof
    assert (tmp_path / "proof.json").stat().st_size < 40_000
    with pytest.raises(AdapterError, match=r"no proof\.json"):
        read_proof(tmp_path / "nowhere")
    (tmp_path / "proof.json").write_text('{"version": 1}')
    with pytest.raises(ConfigError):
        read_proof(tmp_path)


def update(seed: int, scaling: float = 2.0) -> LowRank:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(shape, generator=generator) for shape in ((3, 9), (9, 3))]
    return LowRank(*drawn, scaling)


def test_weights_of_a_copy_name_what_a_conversion_changed():
    source = {"a": update(1), "b": update(2)}
    turned = {p: LowRank(u.a, u.b.T.reshape(u.b.shape), u.scaling) for p, u in source.items()}
    refactored = {p: LowRank(2 * u.a, u.b, u.scaling / 2) for p, u in source.items()}
    swapped = {p: LowRank(u.b.T, u.a.T, u.scaling) for p, u in source.items()}
    zero = {p: LowRank(u.a, 0 * u.b, u.scaling) for p, u in source.items()}
    copies = {
        "applied": refactored,
        "strength": {p: LowRank(u.a, u.b, 1.0) for p, u in source.items()},
        "part": {"a": source["a"]},
        "transposed": turned,
        "other_adapter": {"a": update(3), "b": update(4)},
        "not_applied": zero,
    }
    assert {kind: prove_updates(c, source).kind for kind, c in copies.items()} == {
        k: k for k in copies
    }
    assert prove_updates(swapped, source).kind == "transposed"


def test_a_layer_without_an_update_may_be_absent_and_a_magnitude_may_not_change():
    first, second = update(1), update(2)
    zero = LowRank(second.a, 0 * second.b, 2.0)
    source = {"a": first, "b": zero}
    assert prove_updates(source, source).is_applied
    assert prove_updates({"a": first}, source).is_applied
    scaled = {"a": replace(first, magnitude=torch.linspace(1, 2, 9))}
    assert prove_updates(scaled, scaled).is_applied
    for magnitude in (None, torch.ones(9)):
        copy = {"a": replace(first, magnitude=magnitude)}
        assert prove_updates(copy, scaled).kind == "part"
