"""What is counted on tensors without data is what the allocator counts of the real step."""

from typing import Any

import pytest
import torch
import transformers

from benchmarks.plan import Measured, planned, reckoner_of
from peftkit.base.skeleton import with_depth
from peftkit.errors import ConfigError
from peftkit.execution.plan import Activations
from peftkit.planning.counter import Counter
from peftkit.planning.plan import parse_size
from peftkit.planning.step_estimator import CountError, _period_after
from peftkit.quant.layers import empty_packed, pack
from peftkit.tasks.pairs.reward import RewardConfig
from peftkit.tasks.table import TASKS
from peftkit.tasks.text.masked_lm import MaskedLMConfig
from peftkit.tasks.text.seq2seq import Seq2SeqConfig
from tests.helpers.families import ARCHITECTURES, FAMILIES, llama
from tests.helpers.hybrids import HYBRIDS, RECENT
from tests.helpers.listening import HEARING
from tests.helpers.speech import hears_frames

GB = 10**9


@pytest.mark.covers("peftkit")
@pytest.mark.parametrize(
    ("quantize", "way", "length"),
    [
        ("none", "keep", 256),
        pytest.param("none", "recompute", 512, marks=pytest.mark.slow),
        pytest.param("nf4", "keep", 256, marks=pytest.mark.slow),
        pytest.param("nf4", "recompute", 512, marks=pytest.mark.slow),
    ],
)
def test_planned_peak_is_what_the_allocator_counts(quantize, way, length):
    config = llama(vocab_size=16384)
    # in 16 bits a CPU without units for them multiplies in float32, in memory of its library
    steps = reckoner_of(config, quantize, dtype="fp32")
    measured = Measured(config, quantize, dtype=torch.float32)
    assert planned(steps, way, length) == pytest.approx(measured.peak(way, length), rel=0.02)


@pytest.mark.slow
def test_unpacked_copies_that_a_cpu_keeps_are_counted():
    config = llama(vocab_size=8192)
    steps = reckoner_of(config, "nf4", free=GB, dtype="fp32")
    measured = Measured(config, "nf4", kept=True, dtype=torch.float32)
    assert steps.keeps_copies
    assert not reckoner_of(config, "nf4", free=3_000_000, dtype="fp32").keeps_copies
    ways: tuple[tuple[Activations, int], ...] = (("keep", 128), ("recompute", 256))
    for way, length in ways:
        told, found = planned(steps, way, length), measured.peak(way, length)
        assert told == pytest.approx(found, rel=0.05), (way, length)


@pytest.mark.covers("peftkit")
@pytest.mark.parametrize("task", [RewardConfig()], ids=lambda task: task.type)
def test_rows_of_two_texts_take_twice_as_much(task):
    config = llama(num_hidden_layers=2)
    found, one = reckoner_of(config, "none", task), reckoner_of(config, "none")
    alone = one.count(2, 64, "recompute")
    pairs = found.count(1, 64, "recompute")
    blocks = 6 * sum(p.numel() for n, p in one.whole.named_parameters() if "layers" in n) * 128
    assert 0.6 * blocks < pairs.flops <= 1.05 * alone.flops
    assert pairs.block_input == alone.block_input
    head = found.num_trained - one.num_trained  # trained whole; its model has no other head
    assert head == (2 * config.hidden_size if task.type == "reward" else 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "task"),
    [
        ("vit", "image_classification"),
        ("llava", "image_text"),
        ("qwen2_audio", "audio_text"),
        ("bert", "token_classification"),
        ("llama", "sequence_classification"),
        ("bert", "embedding"),
        ("t5", "seq2seq"),
        ("Parakeet", "ctc"),
        ("Wav2Vec2Bert", "ctc"),
    ],
)
def test_steps_of_every_kind_of_task_are_counted(family, task):
    if family in HEARING:
        config = HEARING[family].model().config
    elif task == "ctc":
        config = hears_frames(family)[0].config
    else:
        config = (FAMILIES | ARCHITECTURES)[family]().config
    steps = reckoner_of(config, "none", TASKS[task]())
    small, large = (steps.count(rows, 32, steps.activation_modes()[-1]) for rows in (1, 3))
    assert large.flops == pytest.approx(3 * small.flops, rel=0.1)
    assert large.peak["activations"] > small.peak["activations"] > 0


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("share", [0.06, 0.23, 0.375, 1])
def test_bytes_of_a_token_are_counted_within_the_positions_of_the_model(rows, share):
    config = FAMILIES["bert"]().config
    steps = reckoner_of(config, "none", TASKS["sequence_classification"]())
    length = int(share * config.max_position_embeddings)
    assert steps.bytes_per_token(rows, length, "keep") > 0


def test_products_in_place_have_the_flops_of_others():
    out, x, weight = torch.zeros(3, 5), torch.zeros(3, 4), torch.zeros(4, 5)
    with Counter() as counter:
        torch.addmm(out, x, weight)
        assert counter.flops == 2 * 3 * 4 * 5
        out.addmm_(x, weight)
        assert counter.flops == 2 * 2 * 3 * 4 * 5


def test_a_model_that_converts_weights_while_it_is_built_is_counted():
    assert reckoner_of(RECENT["deepseek_v4"]().config, "nf4").count(1, 16, "keep").flops > 0


@pytest.mark.parametrize("family", ["falcon_mq", "deberta_v1"])
def test_a_step_that_cannot_be_counted_is_told_by_name(family):
    config, task = ARCHITECTURES[family]().config, MaskedLMConfig()
    if family == "deberta_v1":  # in bf16 its own code mixes dtypes
        with pytest.raises(CountError, match="DebertaForMaskedLM cannot be counted"):
            reckoner_of(config, "nf4", task).count(1, 16, "keep")
    else:  # its layers are called once when they are packed
        assert reckoner_of(config, "nf4").count(1, 16, "keep").flops > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", "t5"])
def test_few_blocks_tell_what_all_of_them_take(family):
    config = with_depth(ARCHITECTURES[family]().config, 2)
    task = Seq2SeqConfig() if family == "t5" else None
    few, all_of_them = (reckoner_of(_deeper(config, 5), "nf4", task) for _ in range(2))
    all_of_them._depth = 5
    found, known = few.count(2, 64, "recompute"), all_of_them.count(2, 64, "recompute")
    for name, value in known.peak.items():
        assert found.peak[name] == pytest.approx(value, rel=0.1, abs=2e4), name
    assert found.flops == pytest.approx(known.flops, rel=0.02)


def hybrid(family: str, *layers: str) -> Any:
    """Return the config of a tiny hybrid with these layers."""
    config = HYBRIDS[family]().config
    config.num_hidden_layers, config.layer_types = len(layers), list(layers)
    config.max_position_embeddings = 1024
    return config


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layers", "period"),
    [
        ("lfm2", ["conv", "full_attention"] * 4, 2),
        ("granitehybrid_dense", ["linear_attention", "linear_attention", "full_attention"] * 3, 3),
        ("qwen3_5", ["linear_attention", "full_attention"] * 3, 2),
        ("minimax", ["linear_attention", "full_attention"] * 3, 2),
    ],
)
def test_a_hybrid_takes_what_the_allocator_counts_with_each_token(family, layers, period):
    config = hybrid(family, *layers)
    steps, measured = reckoner_of(config, "none"), Measured(config, "none")
    assert steps._period == period
    counted = [steps.count(1, length, "keep").peak["activations"] for length in (96, 256)]
    peaks = [measured.peak("keep", length) for length in (96, 256)]
    # the count has no documents, and transformers' own delta rule
    assert counted[1] - counted[0] == pytest.approx(peaks[1] - peaks[0], rel=0.1)


def test_the_further_blocks_have_the_mix_of_all_the_others():
    assert _period_after(2, [["a", "a", "a", "a"], ["b", "b", "b"]]) == 1
    assert _period_after(4, [list("aaab" * 4)]) == 4
    assert _period_after(3, [list("aabaabaababababa")]) == 8  # LFM 2: 3 of 8 for 5 of 13
    assert _period_after(6, [list("aaaaabaaaa" * 4)]) == 10  # Granite 4 H
    assert _period_after(8, [list("aab")]) == 1


def _deeper(config: object, depth: int) -> transformers.PreTrainedConfig:
    fields = config.to_dict()  # type: ignore[attr-defined]
    for name in ("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer"):
        if name in fields:
            fields[name] = depth
    fields.pop("layer_types", None)
    made: transformers.PreTrainedConfig = type(config)(**fields)
    return made


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
@pytest.mark.parametrize("double_quant", [True, False])
def test_packed_weight_without_values_has_the_form_of_one_with_them(kind, double_quant):
    for shape in ((9, 41), (3, 64, 32)):
        packed, packing = pack(torch.randn(shape), kind, double_quant=double_quant)
        empty, other = empty_packed(
            torch.Size(shape), kind, torch.float32, double_quant=double_quant
        )
        assert (empty.shape, empty.dtype) == (packed.shape, packed.dtype)
        assert [(s.shape, s.dtype) for s in other.scales] == [
            (s.shape, s.dtype) for s in packing.scales
        ]
        assert (other.form, other.dtype) == (packing.form, packing.dtype)


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GB", 8 * GB), ("7.5GiB", int(7.5 * 2**30)), ("12", 12 * GB), ("512 mb", 512 * 10**6)],
)
def test_sizes_are_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "8Q", "-1GB", "0", "GB", "8B", "1e3", "eight"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError):
        parse_size(text)
