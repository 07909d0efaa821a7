"""The laws of virtual tokens, of prompt and prefix tuning alike, and the files that PEFT reads."""

import json
from itertools import product
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

from peftkit.adapter import Adapter, attach
from peftkit.errors import AdapterError, DataError, MergeError, TargetError
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.load import load_adapter
from peftkit.formats.peft.notes import Provenance
from peftkit.formats.serving import check_serving
from peftkit.forward.blocks import Blocks
from peftkit.forward.compat import cache_in, cache_name
from peftkit.forward.probes import check_packing
from peftkit.merging.fold import merge_into
from peftkit.methods.base import Method
from peftkit.methods.prefix import PrefixTuning
from peftkit.methods.prompt import PromptTuning
from peftkit.quant.quantize import quantize_model
from tests.helpers.cell import perturb_trained
from tests.helpers.cell import tiny_model as build
from tests.helpers.families import ARCHITECTURES, PAD
from tests.helpers.spread import spread
from tests.helpers.virtual_tokens import IDS, inputs_of, logits

pytestmark = pytest.mark.filterwarnings(
    # PEFT uses old names
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
    "ignore:`past_key_values` is deprecated:FutureWarning",
)
METHODS: dict[str, Method] = {
    "prompt": PromptTuning(num_virtual_tokens=4),
    "prefix": PrefixTuning(num_virtual_tokens=4),
}
CAUSAL = ("llama", "gpt2", "gemma2", "mixtral")
SEQ2SEQ = ("t5", "bart")
TOLERANCE = 1e-5
"""float32 sums in products of other shapes; logits are of order one."""


def each_of(*families: str) -> list[tuple[str, str]]:
    """Return each family with one of the methods, in turn; and the first with the other too."""
    names = [*METHODS]
    return [(names[1], families[0]), *((names[n % 2], f) for n, f in enumerate(families))]


def train_a_little(adapter: Adapter) -> list[float]:
    """Take three steps toward one token; return the losses before each and after the last."""
    losses = []
    optimizer = torch.optim.AdamW(list(adapter.parameters()), lr=0.05)
    for step in range(4):
        out = adapter.model(**inputs_of(adapter.model)).logits.flatten(0, -2)
        loss = nn.functional.cross_entropy(out, torch.ones(len(out), dtype=torch.long))
        losses.append(float(loss.detach()))
        if step < 3:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return losses


@pytest.mark.parametrize(("name", "family"), each_of(*CAUSAL, "gpt_oss", "qwen2_vl", "bloom"))
def test_a_sampled_start_is_random_tokens_before_the_input(name, family):
    model = build(family)
    generator = torch.Generator().manual_seed(3)
    sampled = torch.randint(384, (4,), generator=generator).expand(2, -1)
    expected = logits(model, torch.cat([sampled, IDS], 1))[:, 4:]
    attach(model, METHODS[name], seed=3)
    torch.testing.assert_close(logits(model), expected, atol=TOLERANCE, rtol=0)
    hidden = model(input_ids=IDS, output_hidden_states=True).hidden_states
    assert {h.shape[1] for h in hidden} == {9}


@pytest.mark.parametrize(("name", "family"), each_of("gemma3_text", "qwen2_vl", *SEQ2SEQ, "gpt2"))
def test_generation_with_a_cache_gives_the_tokens_of_generation_without(name, family):
    model, ids = build(family), IDS[:1]
    train_a_little(attach(model, METHODS[name]))
    of_decoder = bool(model.config.is_encoder_decoder)
    expected = torch.full((1, 1), PAD) if of_decoder else ids
    for _ in range(5):
        called = {"decoder_input_ids": expected} if of_decoder else {}
        called |= {"input_ids": ids if of_decoder else expected, "use_cache": False}
        with torch.no_grad():
            last = model(**called).logits[:, -1:]
        expected = torch.cat([expected, last.argmax(-1)], 1)
    settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    settings |= {"forced_eos_token_id": None, "pad_token_id": PAD}
    assert torch.equal(model.generate(ids, **settings), expected)
    padded = torch.cat([torch.full((1, 3), PAD), ids], 1)
    mask = (torch.arange(12)[None] >= 3).long()
    actual = model.generate(padded, attention_mask=mask, **settings)
    if family != "bart":  # which gives other tokens then without an adapter, too
        assert torch.equal(actual if of_decoder else actual[:, 3:], expected)
    beams = model.generate(ids, **settings, num_beams=2)
    assert beams.shape == expected.shape


@pytest.mark.parametrize(("name", "family"), each_of("gemma2", "t5", "llama", "bart", "mixtral"))
def test_gradient_checkpointing_changes_nothing(name, family):
    model = build(family)
    adapter = attach(model, METHODS[name])
    (parameter,) = adapter.parameters()
    actual = []
    for recompute in (False, True):
        if recompute:
            Blocks(model).set_activations("recompute")
        torch.manual_seed(1)
        model.train()
        out = model(**inputs_of(model))
        (grad,) = torch.autograd.grad(out.logits.square().mean(), parameter)
        actual.append((out.logits.detach(), grad))
    assert getattr(out, "past_key_values", None) is None
    torch.testing.assert_close(actual[0], actual[1], atol=TOLERANCE, rtol=1e-4)
    flags = {getattr(m, "_can_checkpoint_with_cache", False) for m in model.modules()}
    assert flags == {False}  # as it was


@pytest.mark.parametrize("name", METHODS)
def test_the_dtype_of_a_model_stays_its_own_and_4_bit_bases_work(name, tmp_path):
    model = build("llama")
    quantize_model(model, "nf4", double_quant=True, compute_dtype=torch.float32)
    adapter = attach(model, METHODS[name])
    losses = train_a_little(adapter)
    assert losses[-1] < losses[0]
    narrow = build("llama").bfloat16()
    attach(narrow, METHODS[name])
    assert narrow.dtype == torch.bfloat16
    assert logits(narrow).dtype == torch.bfloat16


# ------------------------------------------------------------------------------- PEFT


def classifier(family: str) -> Any:
    torch.manual_seed(0)
    config = ARCHITECTURES[family]().config
    config.num_labels = 3
    return transformers.AutoModelForSequenceClassification.from_config(config).eval()


def case(family: str, task: str) -> Any:
    return classifier(family) if task == "SEQ_CLS" else build(family)


TASKS = [(f, "CAUSAL_LM") for f in (*CAUSAL, "gemma3_text")]
TASKS += [(f, "SEQ_2_SEQ_LM") for f in SEQ2SEQ]
TASKS += [(f, "SEQ_CLS") for f in ("bert", "roberta", "llama")]


def of_peft(model: Any) -> Tensor:
    """Logits of a model of PEFT at the real tokens, the last ones."""
    try:
        with torch.no_grad():
            actual = model(**inputs_of(model), attention_mask=torch.ones_like(IDS)).logits
    except ValueError as error:
        if "does not support past key values" not in str(error):
            raise
        pytest.skip(f"PEFT {peft.__version__} does not find the cache of this transformers")
    return actual[:, -9:] if actual.ndim == 3 else actual


def head_of(family: str, task: str) -> tuple[str, ...]:
    if task != "SEQ_CLS":
        return ()
    return ("score",) if family == "llama" else ("classifier",)


@pytest.mark.parametrize(("task", "name"), spread(product(TASKS, METHODS), 3))
def test_peft_loads_our_files_and_we_load_theirs(task, name, tmp_path):
    family, task = task
    model = case(family, task)
    method = METHODS[name].model_copy(update={"train_fully": head_of(family, task)})
    adapter = attach(model, method)
    train_a_little(adapter)
    save_adapter(adapter, tmp_path, Provenance(task_type=task))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert "target_modules" not in config
    theirs = peft.PeftModel.from_pretrained(case(family, task), tmp_path).eval()
    torch.testing.assert_close(of_peft(theirs), logits(model), atol=TOLERANCE, rtol=0)
    theirs.requires_grad_(True)  # as loaded, it is frozen
    perturb_trained(theirs, parts=("prompt",))
    theirs.save_pretrained(tmp_path / "theirs")
    adapter.detach()
    adapter = load_adapter(model, tmp_path / "theirs")
    torch.testing.assert_close(logits(model), of_peft(theirs), atol=TOLERANCE, rtol=0)


# ---------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(("name", "family"), each_of("mllama", "vit", "clip"))
def test_models_without_tokens_of_their_own_are_refused(name, family):
    model = build(family)
    with pytest.raises(TargetError, match=r"has none|attend to an image"):
        attach(model, METHODS[name])
    assert not any(hook for m in model.modules() for hook in m._forward_pre_hooks)


@pytest.mark.parametrize("name", METHODS)
def test_what_cannot_be_is_refused_by_name(name, tmp_path):
    model, method = build("llama"), METHODS[name]
    with pytest.raises(TargetError, match="has no targets to choose"):
        attach(model, method.model_copy(update={"targets": ("q", "v")}))
    adapter = attach(model, method)
    with pytest.raises(MergeError, match="it adds tokens to the input"):
        merge_into(adapter)
    with pytest.raises(AdapterError, match="packed documents"):
        model(input_ids=IDS, attention_mask=torch.zeros(2, 1, 9, 9))
    with pytest.raises(AdapterError, match="a dynamic cache"):
        model.generate(IDS, cache_implementation="static", max_new_tokens=2, pad_token_id=PAD)
    with adapter.disabled():
        cache = cache_in(model(input_ids=IDS[:, :8], use_cache=True))
    more: dict[str, Any] = {str(cache_name(model)): cache}
    with pytest.raises(AdapterError, match="Its mask has 9 tokens"):
        model(input_ids=IDS[:, 8:], attention_mask=torch.ones(2, 9), **more)
    save_adapter(adapter, tmp_path)
    with pytest.raises(AdapterError, match="only LORA is served"):
        check_serving(tmp_path)
    with pytest.raises(DataError, match=r"data\.packing: false"):
        check_packing(model)
