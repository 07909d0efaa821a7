"""What a kind of card wants, or lacks: older cards, cards without a number, one card a process."""

import itertools
import os
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor, nn

from peftkit.base.load import load_base
from peftkit.execution import environment, gpu_support
from peftkit.execution.environment import as_current, select_device
from peftkit.execution.gpu_support import DISABLED, gpu_fallbacks
from peftkit.execution.gpu_support import ENABLED as SEGMENTS
from peftkit.execution.out_of_memory import is_out_of_memory
from peftkit.execution.world import World
from peftkit.forward.attention_kernels import KERNELS, Call
from peftkit.kernels import device as device_kinds
from peftkit.kernels import fused
from peftkit.kernels.packed import absmax_of, unpack
from peftkit.quant.layers import pack
from tests.simulated_gpu.same import train
from tests.simulated_gpu.simulation import on_cpu, simulated
from tests.simulated_gpu.tensors import Card


def test_a_card_without_a_number_is_the_current_one(model_folder):
    with simulated(Card(count=2)) as card:
        assert as_current(torch.device("cuda", 1)) == torch.device("cuda", 1)
        assert card.current == 1
        assert as_current(torch.device("cuda")) == torch.device("cuda", 1)
        base = load_base(str(model_folder), quantize="nf4", placement="stream", device="cuda")
        assert base.device == torch.device("cuda", 1)
        ids = torch.arange(5, device=base.device)[None]
        with torch.no_grad():
            found = on_cpu(base.model(input_ids=ids, use_cache=False).logits)
    assert bool(found.isfinite().all())


@pytest.mark.smoke
@pytest.mark.needs_simulation  # torch reads them before the first allocation
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": SEGMENTS}),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"},
            {"PYTORCH_CUDA_ALLOC_CONF": f"max_split_size_mb:128,{SEGMENTS}"},
        ),
        (
            {"PYTORCH_ALLOC_CONF": "garbage_collection_threshold:0.8"},
            {"PYTORCH_ALLOC_CONF": f"garbage_collection_threshold:0.8,{SEGMENTS}"},
        ),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"},) * 2,
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"},) * 2,
    ],
)
def test_allocator_settings_join_those_of_the_user(given, expected, monkeypatch):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with simulated():
        select_device()
    asked = {name: text for name, text in os.environ.items() if name.endswith("_ALLOC_CONF")}
    assert asked == expected
    for settings in asked.values():
        if "backend" not in settings:  # torch 2.11 refuses another one at run time
            torch._C._accelerator_setAllocatorSettings(settings)  # raises what it cannot read
        keys = {part.partition(":")[0] for part in settings.split(",")}
        # of pinned memory both keys or neither: rounding less without a limit of the cache
        # lets torch 2.13 hand out blocks that are too small
        assert not {key for key in keys if key.startswith("pinned_")}
    torch._C._accelerator_setAllocatorSettings("")


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the allocator's environment variables out, and as they were."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "")


@pytest.mark.usefixtures("no_settings")
def test_wsl_allocates_without_expandable_segments(tmp_path):
    with simulated(Card(is_wsl=True)):
        select_device()
        found, _ = train("cuda", tmp_path)
        assert gpu_fallbacks() == []
    assert len(found.losses) == 2


@pytest.mark.usefixtures("no_settings")
def test_a_driver_without_expandable_segments_is_noticed(model_folder, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    notices: list[str] = []
    with simulated(Card(has_segments=False)) as card:
        base = load_base(
            str(model_folder), on_event=lambda e: notices.append(getattr(e, "text", ""))
        )
        assert base.device.type == "cuda"
        assert card.allocator == f"max_split_size_mb:128,{DISABLED}"
        assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == card.allocator
    (notice,) = [text for text in notices if "segments" in text]
    assert "operation not supported" in notice
    assert "Update the driver" in notice


@pytest.mark.needs_simulation  # torch finds a real one
@pytest.mark.parametrize(
    ("files", "cuda", "words"),
    [
        (("nvidia0",), None, "is for CPUs only"),
        (("nvidia0",), "13.0", "Update the NVIDIA driver"),
        (("dxg",), "13.0", "Update the NVIDIA driver"),
        (("kfd",), None, "is for CPUs only"),
        (("null",), "13.0", ""),
    ],
)
def test_a_gpu_that_torch_does_not_find_is_noticed(
    files, cuda, words, model_folder, tmp_path, monkeypatch
):
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(gpu_support, "DEVICES", tmp_path)
    monkeypatch.setattr(gpu_support.shutil, "which", lambda name: None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    for name in gpu_support.HIDING:
        monkeypatch.delenv(name, raising=False)
    notices: list[str] = []
    load_base(str(model_folder), on_event=lambda e: notices.append(getattr(e, "text", "")))
    found = [text for text in notices if "is not used" in text]
    assert len(found) == bool(words)
    assert all(words in text and "tens of times slower" in text for text in found)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hidden on purpose
    assert gpu_fallbacks() == []


@pytest.mark.parametrize(
    ("capability", "arch_list", "is_noticed"),
    [
        ((7, 0), ("sm_75", "sm_80", "sm_120"), True),
        ((7, 5), ("sm_75", "sm_80", "sm_120"), False),
        ((9, 0), ("sm_80", "sm_90a", "compute_120"), False),
        ((6, 1), (), False),
    ],
)
def test_a_card_older_than_torch_is_noticed(capability, arch_list, is_noticed):
    with simulated(Card(capability=capability, arch_list=arch_list, name="Tesla V100")):
        found = gpu_fallbacks()
    assert len(found) == is_noticed
    assert all("Tesla V100 is too old" in one.text and "12.6" in one.text for one in found)


NVML = 'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp":1124'
CUBLAS = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"


@pytest.mark.parametrize("text", [NVML, CUBLAS, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"])
def test_a_card_that_is_full_in_other_words_gets_a_smaller_plan(text, tmp_path):
    with simulated() as card:
        expected, _ = train("cuda", tmp_path)
        needed = card.peak
    with simulated(Card(memory=int(0.8 * needed), full_says=text)):
        found, _ = train("cuda", tmp_path)
    assert found.notices
    assert found.losses == pytest.approx(expected.losses, rel=1e-4)


@pytest.mark.smoke
def test_a_library_that_fails_on_an_empty_card_is_not_out_of_memory():
    engine = "Unable to find an engine to execute this computation"
    with simulated(Card(memory=80 * 10**9)):
        assert not is_out_of_memory(RuntimeError(CUBLAS))
        assert not is_out_of_memory(RuntimeError(engine))
    with simulated(Card(memory=10**8)):
        assert is_out_of_memory(RuntimeError(CUBLAS))
        assert is_out_of_memory(RuntimeError(engine))
    assert not is_out_of_memory(RuntimeError(CUBLAS))


@pytest.mark.parametrize("names", [("gated",), ("gated_backward", "rotated"), None])
def test_torch_replaces_triton_without_cc(names, tmp_path):
    """Triton compiles a helper in C at the first launch; slim images have no compiler."""
    expected, _ = train("cpu", tmp_path)
    every = ("gated", "gated_backward", "rotated")
    with simulated(Card(broken=frozenset(names or every))):
        found, _ = train("cuda", tmp_path)
        launched = fused.TRITON._kernels.launched
    assert found.losses == pytest.approx(expected.losses, rel=1e-4)
    assert len(launched) == len(set(launched)) == len(names or every)  # each tried once
    (notice,) = found.notices
    assert "apt-get install gcc python3-dev" in notice
    assert "Failed to find C compiler" in notice


def test_a_kernel_whose_dtype_an_old_card_lacks_says_which_one_it_has():
    with simulated(Card(capability=(7, 5), broken=frozenset({"gated"}))):
        gate = torch.randn(3, 8, dtype=torch.bfloat16, device="cuda")
        found = fused.gated(gate, gate, "silu")
        assert "base.dtype: fp16" in fused.TRITON.report()
        assert fused.TRITON.report() == ""
    values = on_cpu(gate)
    assert torch.equal(on_cpu(found), torch.nn.functional.silu(values) * values)


def test_kernels_are_launched_on_the_card_of_their_tensors():
    """Triton takes the thread's current card, which is the first one in a new thread."""
    seen: list[int] = []

    class Noted:
        def gated(self, *args: Any) -> Tensor:
            seen.append(torch.cuda.current_device())
            return torch.empty(0)

    with simulated(Card(count=2)):
        launcher, gate = fused.Launcher(Noted()), torch.ones(3, device="cuda:1")
        for _ in range(2):
            launcher.launch("gated", gate, gate, "silu")
        assert torch.cuda.current_device() == 0
    assert seen == [1, 1]


def test_a_kernel_that_computes_other_numbers_is_launched_once(monkeypatch):
    class Wrong:
        num_launched = 0

        def gated(self, gate: Tensor, up: Tensor, name: str) -> Tensor:
            self.num_launched += 1
            return 1.1 * torch.nn.functional.silu(gate) * up

        def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, back: bool) -> Tensor:
            return out.copy_(x * cos[:, None])

    # the card runs the functions of these operators, which launch kernels
    with simulated(Card(broken=frozenset({"gated", "rotated"}))):
        wrong = Wrong()
        monkeypatch.setattr(fused, "TRITON", fused.Launcher(wrong))
        gate, x = torch.randn(3, 8, device="cuda"), torch.randn(1, 2, 3, 8, device="cuda")
        cos, sin = torch.randn(2, 1, 3, 8, device="cuda")
        found = [fused.gated(gate, gate, "silu") for _ in range(2)]
        turned = fused.rotated(x, cos, sin, False)
        report = fused.TRITON.report()
    assert wrong.num_launched == 1
    values = on_cpu(gate)
    for one in found:
        assert torch.equal(on_cpu(one), torch.nn.functional.silu(values) * values)
    assert torch.equal(on_cpu(turned), fused.rotated(*map(on_cpu, (x, cos, sin)), False))
    assert "gated silu (float32), rotate (float32)" in report
    assert "other numbers than torch: 10% off" in report


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("is_right", [True, False])
def test_four_bit_weights_are_unpacked_by_one_launch_that_computes_the_same(
    kind, double_quant, is_right, monkeypatch
):
    class Unpacking:
        num_launched = 0

        def unpack_4bit(
            self, out: Tensor, codes: Tensor, scales: Any, levels: Tensor, *_: Any
        ) -> Tensor:
            self.num_launched += 1
            each = torch.cat([codes >> 4, codes & 15], 1).view(out.shape).long()
            return out.copy_(levels[each] * absmax_of(scales)[:, None] * (1.0 if is_right else 1.1))

    codes, packing = pack(torch.randn(5, 191), kind, double_quant=double_quant)
    expected = unpack(packing.weight(codes), torch.float32)
    with simulated():
        kernels = Unpacking()
        monkeypatch.setattr(fused, "TRITON", fused.Launcher(kernels))
        on_card = packing.to("cuda").weight(codes.to("cuda"))
        found = [unpack(on_card, torch.float32) for _ in range(3)]
        report = fused.TRITON.report()
    assert kernels.num_launched == (3 if is_right else 1)
    assert all(torch.equal(on_cpu(one), expected) for one in found)
    assert report.startswith("Triton kernels do not run here: unpack_4bit") != is_right


@pytest.mark.smoke
def test_memory_that_runs_out_is_no_broken_kernel():
    class Full:
        def gated(self, *args: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with simulated():
        launcher, gate = fused.Launcher(Full()), torch.ones(3, device="cuda")
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                launcher.launch("gated", gate, gate, "silu")
        assert launcher.report() == ""


def call(device: str, key_heads: int, mask: Any = None) -> Call:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, n, 5, 8).to(device) for n in (4, key_heads, key_heads))
    module = nn.Identity()
    module.num_key_value_groups = 4 // key_heads
    rest: tuple[Any, ...] = (True, None, None, None, None, {})
    return Call(module, query, key, value, mask, 0.0, 8**-0.5, *rest)


@pytest.mark.parametrize(
    ("capability", "key_heads", "name"),
    [((7, 5), 2, "sdpa, heads repeated"), ((7, 5), 4, "sdpa"), ((8, 0), 2, "sdpa")],
)
def test_slow_kernels_repeat_heads(capability, key_heads, name):
    expected = KERNELS[-1].run(call("cpu", key_heads))
    with simulated(Card(capability=capability)):
        asked = call("cuda", key_heads)
        kernel = next(kernel for kernel in KERNELS if kernel.takes(asked))
        assert kernel.name == name
        torch.testing.assert_close(on_cpu(kernel.run(asked)), expected)


def test_processes_wait_for_each_other_for_hours(monkeypatch):
    """NCCL's own ten minutes are less than an evaluation that generates."""
    seen: dict[str, Any] = {}
    real = accelerate.Accelerator

    def noted(**how: Any) -> Any:
        seen.update(how)
        return real(**how)

    monkeypatch.setattr(accelerate, "Accelerator", noted)
    World(torch.device("cpu"))
    (handler,) = seen["kwargs_handlers"]
    assert handler.timeout.total_seconds() >= 3600


def test_waiting_names_no_card_that_may_be_absent(monkeypatch):
    ranks = World(torch.device("cpu"))

    def refused() -> None:
        raise AssertionError("accelerate's barrier takes LOCAL_RANK for a card")

    monkeypatch.setattr(ranks._accelerator, "wait_for_everyone", refused)
    ranks.wait()


@pytest.mark.parametrize(("seconds", "expected"), [(5e-3, 11e-3), (5.2e-3, 11e-3), (10e-3, 22e-3)])
def test_the_launch_time_of_a_block_is_measured_and_rounded(seconds, expected, monkeypatch):
    """40 small layers, half of a block's time; a factor of 1.4 separates the values."""
    clock = itertools.count()
    measure = device_kinds.measured_launch_seconds.__wrapped__
    monkeypatch.setattr(
        device_kinds, "time", SimpleNamespace(perf_counter=lambda: next(clock) * seconds)
    )
    with simulated():
        assert measure() == pytest.approx(expected, rel=0.03)


def test_plans_use_the_measured_launch_time_only_with_a_card(monkeypatch):
    assert device_kinds.launch_seconds() == device_kinds.ASSUMED_LAUNCH_SECONDS
    with simulated():
        monkeypatch.setattr(device_kinds, "measured_launch_seconds", lambda: 0.01)
        assert device_kinds.launch_seconds() == 0.01
        # a 3B needs twice as many tokens as with the assumed 5 ms
        assert device_kinds.busy_tokens(132e12, 3 * 10**9, 32) == 3520


def test_autograds_thread_computes_its_first_kernel_before_a_run(monkeypatch):
    """Also in inference mode, in which a server loads its base; a CPU has no such thread."""
    started: list[Any] = []
    start = device_kinds.start_backward_thread.__wrapped__

    def counted(device: torch.device) -> None:
        start(device)
        started.append(device)

    monkeypatch.setattr(environment, "start_backward_thread", counted)
    with simulated(), torch.inference_mode():
        as_current(torch.device("cuda", 0))
        as_current(torch.device("cpu"))
    assert started == [torch.device("cuda", 0)]
