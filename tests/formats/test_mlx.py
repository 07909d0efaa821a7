"""MLX folders: written and read again they are the same adapter, and compute as mlx-lm would."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from peftkit.errors import AdapterError
from peftkit.formats.exchange import export_adapter, import_adapter
from peftkit.formats.mlx import MLX_TENSORS, read_mlx
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.load import load_adapter
from peftkit.formats.peft.low_rank import read_low_rank
from peftkit.methods.dora import DoRA
from peftkit.methods.lora import LoRA
from tests.helpers.adapters import base_folder, logits, model_with_adapter
from tests.helpers.folders import change_json

METHODS = {
    "lora": LoRA(rank=4, alpha=8),
    "odd": LoRA(rank=3, alpha=5, targets=("q", "down")),
    "patterns": LoRA(
        rank=4,
        alpha=8,
        rank_pattern={"o": 2, r"layers\.1\.mlp\.up_proj": 1},
        alpha_pattern={"v": 5},
    ),
    "rslora-patterns": LoRA(rank=4, alpha=8, rslora=True, rank_pattern={"k": 3}),
    "dora-patterns": DoRA(rank=4, alpha=8, targets=("q", "v"), rank_pattern={"v": 2}),
}


@pytest.mark.parametrize(
    ("name", "family"),
    [*((name, "llama") for name in METHODS), ("patterns", "qwen2"), ("dora-patterns", "gemma2")],
)
def test_there_and_back_it_is_the_same_adapter(name, family, tmp_path):
    model, adapter = model_with_adapter(family, METHODS[name])
    expected = logits(model)
    save_adapter(adapter, tmp_path / "one")
    export_adapter(tmp_path / "one", tmp_path / "mlx", to="mlx")
    base = base_folder(family, tmp_path / "base")
    done = import_adapter(tmp_path / "mlx", tmp_path / "two", base=base)
    assert done.source == "mlx"
    _, before = read_low_rank(tmp_path / "one")
    _, after = read_low_rank(tmp_path / "two")
    assert before.keys() == after.keys()
    for path, module in before.items():
        assert torch.equal(after[path].a[: module.rank], module.a)
        scaled = module.scaling * module.b
        again = (after[path].scaling * after[path].b)[:, : module.rank]
        torch.testing.assert_close(again, scaled, rtol=2.5e-7, atol=0)  # two roundings of float32
        if module.magnitude is not None:
            assert after[path].magnitude is not None
            assert torch.equal(after[path].magnitude, module.magnitude)
    adapter.detach()
    load_adapter(model, tmp_path / "two")
    # the folded scales are rounded once in float32; logits are of order one
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", METHODS)
def test_the_file_computes_by_mlx_own_formula(name, tmp_path):
    _, adapter = model_with_adapter("llama", METHODS[name])
    save_adapter(adapter, tmp_path / "one")
    export_adapter(tmp_path / "one", tmp_path / "mlx", to="mlx")
    config = json.loads((tmp_path / "mlx" / "adapter_config.json").read_text())
    tensors = load_file(tmp_path / "mlx" / MLX_TENSORS)
    given = config["lora_parameters"]
    assert config["num_layers"] == -1
    assert config["fine_tune_type"] == METHODS[name].type
    for path, module in adapter.modules.items():
        assert path.split(".", 3)[3] in given["keys"]
        x = torch.randn(5, module.in_features)
        a, b, w = tensors[path + ".lora_a"], tensors[path + ".lora_b"], module.base.weight
        assert a.shape[1] == b.shape[0] == given["rank"]
        y = x @ w.T + given["scale"] * (x @ a) @ b
        if "dora" in name:
            y *= tensors[path + ".m"] / (w + (given["scale"] * b.T) @ a.T).norm(dim=1)
        module.base.bias = None
        torch.testing.assert_close(y, module(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "target", "message"), [("gpt2", "q", "Conv1D"), ("llama", "lm_head", "lm_head is")]
)
def test_other_mlx_names_are_errors(family, target, message, tmp_path):
    _, adapter = model_with_adapter(family, LoRA(rank=2, targets=(target,)))
    save_adapter(adapter, tmp_path / "one")
    with pytest.raises(AdapterError, match=message):
        export_adapter(tmp_path / "one", tmp_path / "mlx", to="mlx")
    assert not (tmp_path / "mlx").exists()


@pytest.fixture
def mlx(tmp_path: Path) -> Path:
    _, adapter = model_with_adapter("llama", LoRA(rank=2, targets=("q", "v")))
    save_adapter(adapter, tmp_path / "one")
    return export_adapter(tmp_path / "one", tmp_path / "mlx", to="mlx").path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fine_tune_type": "full"}, "fine_tune_type is 'full'"),
        ({"fine_tune_type": "dora"}, r"missing: .*q_proj\.m"),
        ({"lora_parameters": {"rank": 2}}, "scale None"),
        ({"lora_parameters": {"rank": 3, "scale": 1.0}}, "misshapen: .* but rank 3"),
        ({"lora_parameters": {"rank": True, "scale": 1.0}}, "rank True"),
    ],
)
def test_a_wrong_config_is_reported(change, message, mlx):
    change_json(mlx / "adapter_config.json", **change)
    with pytest.raises(AdapterError, match=message):
        read_mlx(mlx)


def test_an_adapter_of_another_base_is_told_layer_by_layer(mlx, tmp_path):
    tensors = load_file(mlx / MLX_TENSORS)
    name = "model.layers.0.self_attn.q_proj.lora_a"
    tensors[name] = torch.ones(48, 2)
    tensors = {n.replace("layers.1", "layers.7"): t for n, t in tensors.items()}
    save_file(tensors, mlx / MLX_TENSORS)
    base = base_folder("llama", tmp_path / "base")
    with pytest.raises(AdapterError) as error:
        import_adapter(mlx, tmp_path / "two", base=base)
    assert "layers.0.self_attn.q_proj is 48 -> 32, not 32 -> 32" in str(error.value)
    assert "no such layer: model.layers.7.self_attn.v_proj" in str(error.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "mlx", "one"]


def written_by_mlx(tensors: dict[str, Tensor], file: Path) -> None:
    """Write a file as mlx does when it is given no metadata: with null."""
    save_file(tensors, file)
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8 : 8 + length]) | {"__metadata__": None}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


def test_a_folder_of_mlx_lms_trainer_is_imported(tmp_path):
    model, adapter = model_with_adapter("llama", METHODS["lora"])
    expected = logits(model)
    save_adapter(adapter, tmp_path / "ours")
    export_adapter(tmp_path / "ours", tmp_path / "mlx", to="mlx")
    last = tmp_path / "mlx" / MLX_TENSORS
    tensors = load_file(last)
    written_by_mlx(tensors, last)
    earlier = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    written_by_mlx(earlier, tmp_path / "mlx" / "0000100_adapters.safetensors")
    base = base_folder("llama", tmp_path / "base")
    import_adapter(tmp_path / "mlx", tmp_path / "back", base=base)
    adapter.detach()
    load_adapter(model, tmp_path / "back")
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=0)
    with pytest.raises(AdapterError, match="peftkit import"):
        load_adapter(model, tmp_path / "mlx")
