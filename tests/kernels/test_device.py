"""What depends on the kind of device asks one table; Apple's is played by torch's own functions.

No Apple hardware was at hand: these tests show what is asked of torch there, not what it answers.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig

from peftkit.base.load import load_base
from peftkit.base.request import fast_dtype
from peftkit.config.schema import from_dict
from peftkit.execution import rng
from peftkit.execution.environment import select_device, used_bytes
from peftkit.execution.out_of_memory import release_memory
from peftkit.execution.plan import Activations, ExecutionPlan
from peftkit.forward.blocks import Blocks
from peftkit.kernels import device
from peftkit.kernels.device import GPUS, forked_generators, gpu_of, in_float64, local_gpu
from peftkit.planning.step_estimator import StepEstimator
from peftkit.recipe import Recipe
from peftkit.train.batches import on_device
from peftkit.train.metrics import device_name, peak_bytes
from tests.helpers.families import FAMILIES

MPS = torch.device("mps", 0)


class Played:
    """What torch.mps would keep: a generator, and how often memory was released."""

    def __init__(self) -> None:
        self.state = torch.arange(8, dtype=torch.uint8)
        self.released = 0

    def release(self) -> None:
        self.released += 1


@pytest.fixture
def apple(monkeypatch: pytest.MonkeyPatch) -> Played:
    """Let torch say that this is a Mac of 16 GB, on macOS 14."""
    played = Played()
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *v: v <= (14, 0))
    for name, value in {
        "recommended_max_memory": lambda: 12 << 30,
        "current_allocated_memory": lambda: 2 << 30,
        "driver_allocated_memory": lambda: 3 << 30,
        "empty_cache": played.release,
        "get_rng_state": lambda device="mps": played.state.clone(),
        "set_rng_state": lambda state, device="mps": setattr(played, "state", state.clone()),
    }.items():
        monkeypatch.setattr(torch.mps, name, value)
    return played


def test_without_a_gpu_all_is_the_cpu_s():
    assert local_gpu() is None
    assert gpu_of(torch.device("cpu")) is None
    assert select_device() == torch.device("cpu")
    assert device_name(torch.device("cpu"), 2) == "2 x cpu"


def test_auto_is_bf16_on_a_cpu_with_bf16_units(bf16_units, model_folder, monkeypatch):
    fast = torch.bfloat16 if bf16_units else torch.float32
    assert fast_dtype(torch.device("cpu")) == fast
    assert load_base(str(model_folder), store="off").model.dtype == fast
    recipe = from_dict(Recipe, {"base": {"model": str(model_folder)}, "data": {"train": ""}}, "it")
    config = AutoConfig.from_pretrained(model_folder)
    assert StepEstimator(recipe, config, "cpu").dtype == fast
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "avx512_core")  # then its products leave the units out
    assert fast_dtype(torch.device("cpu")) == torch.float32
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_AMX")
    assert fast_dtype(torch.device("cpu")) == fast


@pytest.mark.usefixtures("apple")
def test_a_mac_trains_on_its_gpu_in_what_it_can(monkeypatch):
    assert select_device() == MPS
    assert fast_dtype(MPS) == torch.bfloat16
    assert device_name(MPS, 1) == "Apple GPU"
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *v: v <= (13, 3))
    assert fast_dtype(MPS) == torch.float32


def test_its_memory_is_what_torch_says(apple):
    assert used_bytes(MPS) == 2 << 30
    assert peak_bytes(MPS) == 3 << 30
    assert GPUS["mps"].total(MPS) == 12 << 30
    release_memory()
    assert apple.released == 1


def test_its_generator_is_saved_and_set_again(apple):
    before = rng.capture(MPS)
    assert torch.equal(before["mps"], apple.state)
    apple.state = torch.zeros(8, dtype=torch.uint8)
    with forked_generators(MPS):
        apple.state = torch.ones(8, dtype=torch.uint8)
    assert not apple.state.any()
    rng.restore(before, MPS)
    assert torch.equal(apple.state, torch.arange(8, dtype=torch.uint8))
    rng.restore({n: t for n, t in before.items() if n != "mps"}, MPS)  # saved on a CPU


def test_cached_files_count_as_free_memory(tmp_path, monkeypatch):
    """A container that has read 6 GB of weights from its disk has not used them up."""
    monkeypatch.setattr(device, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(device, "CGROUP", tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable: 20000000 kB\n")
    assert device.free_bytes() == 20_480_000_000
    (tmp_path / "memory.current").write_text("7000000000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert device.free_bytes() == 20_480_000_000
    (tmp_path / "memory.max").write_text("8000000000\n")
    assert device.free_bytes() == 1_000_000_000
    (tmp_path / "memory.stat").write_text("anon 1000000000\nactive_file 2000\ninactive_file 6000\n")
    assert device.free_bytes() == 1_000_008_000


def test_numbers_come_to_any_device():
    assert on_device([1.0], torch.device("meta")).device.type == "meta"
    assert on_device([1.0], torch.device("cpu")).tolist() == [1.0]


def test_generators_of_the_cpu_are_as_before():
    before = torch.get_rng_state()
    with forked_generators(torch.device("cpu")):
        torch.rand(3)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("way", ["recompute", "offload"])
def test_dropout_repeats_on_a_mac(way, monkeypatch):
    """torch sets back the generators of the CPU and of CUDA, not that of MPS."""
    generator = torch.Generator().manual_seed(1)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "get_rng_state", generator.get_state)
    monkeypatch.setattr(torch.mps, "set_rng_state", generator.set_state)

    class Dropping(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.bernoulli(torch.full_like(x, 0.5), generator=generator)

    def gradients(mode: Activations) -> list[torch.Tensor]:
        generator.manual_seed(1)
        torch.manual_seed(0)
        model = FAMILIES["llama"]().train()
        for block in model.model.layers:
            block.mlp.act_fn = torch.nn.Sequential(block.mlp.act_fn, Dropping())
        blocks = Blocks(model, ExecutionPlan(device="mps"))
        blocks._recompute._device = MPS
        blocks.set_activations(mode)
        for _ in range(2):
            model.zero_grad()
            model(input_ids=torch.arange(9)[None] + 3, use_cache=False).logits.sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for expected, again in zip(gradients("keep"), gradients(way), strict=True):
        torch.testing.assert_close(again, expected)


def test_what_a_mac_has_no_numbers_for_is_computed_on_the_cpu():
    with FakeTensorMode():
        assert in_float64(torch.empty(3, device="mps")).device.type == "cpu"
        assert in_float64(torch.empty(3, device="cuda")).device.type == "cuda"
