"""Compare losses with PEFT: the same adapter, rows and steps in peftkit and in a plain loop.

    python -m benchmarks.parity                      # fp32: within 1e-4 at every step
    python -m benchmarks.parity --quantize nf4       # NF4: within 2e-2

Exits 1 if a step differs by more.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import peft
import torch
import transformers
from torch.nn.utils import clip_grad_norm_

from benchmarks.orders import make_rows
from peftkit.adapter import attach
from peftkit.base.load import Base, load_base
from peftkit.base.locate import locate
from peftkit.data.pack import Row
from peftkit.events import Event, StepDone
from peftkit.formats.peft.folder import save_adapter
from peftkit.methods.lora import LoRA
from peftkit.settings import DataConfig, TrainConfig
from peftkit.tasks.tokens import CausalLM
from peftkit.train.batches import StatelessSampler
from peftkit.train.loop import fit
from peftkit.train.optim import learning_rate

TOLERANCES = {"none": 1e-4, "nf4": 2e-2}
"""float32: sums in another order. NF4: the same 4-bit weights, dequantised by other kernels."""


def ours(base: Base, rows: list[Row], task: CausalLM, config: TrainConfig) -> list[float]:
    """Train with peftkit; return the loss of every step."""
    losses: list[float] = []

    def listen(event: Event) -> None:
        if isinstance(event, StepDone):
            losses.append(event.loss)

    fit(base.model, task, rows, config=config, on_event=listen)
    return losses


def theirs(model: torch.nn.Module, rows: list[Row], pad: int, config: TrainConfig) -> list[float]:
    """Train with PEFT in a plain loop; return the loss of every step."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.0)
    order = StatelessSampler(len(rows), config.batch_size, config.seed)
    num_steps = config.num_steps(len(rows))
    losses = []
    model.train()
    for step in range(num_steps):
        group = [rows[index] for index in order.step_indices(step)]
        length = max(len(row.input_ids) for row in group)
        ids = torch.full((len(group), length), pad)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
        for n, row in enumerate(group):
            size = len(row.input_ids)
            ids[n, :size], mask[n, :size] = torch.tensor(row.input_ids), 1
            labels[n, :size] = torch.tensor(row.labels)
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(parameters, config.max_grad_norm or float("inf"))
        for group_ in optimizer.param_groups:
            group_["lr"] = learning_rate(step, num_steps, config)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def peft_model(name: str, quantize: str, adapter: Path) -> torch.nn.Module:
    """Load the base with transformers, quantised by bitsandbytes, and the adapter with PEFT."""
    config = None
    if quantize == "nf4":
        config = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        locate(name).source, dtype=torch.float32, quantization_config=config
    )
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # else gradients are lost
    return peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)


def main() -> int:
    """Run both and print the losses side by side."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantize", choices=TOLERANCES, default="none")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = make_rows(Path(folder))
        config = TrainConfig(
            output_dir=Path(folder) / "run",
            max_steps=args.steps,
            batch_size=args.batch_size,
            save_every=None,
            learning_rate=1e-3,
        )
        base = load_base(args.model, dtype="fp32", quantize=args.quantize)
        adapter = attach(base.model, LoRA(rank=16, alpha=32))
        task = CausalLM(base.model, base.tokenizer, DataConfig(train=str(data), packing=False))
        rows = task.load(str(data))
        save_adapter(adapter, Path(folder) / "start")
        our_losses = ours(base, rows, task, config)
        model = peft_model(args.model, args.quantize, Path(folder) / "start")
        their_losses = theirs(model, rows, base.tokenizer.pad_token_id, config)
    print("step  peftkit     PEFT        difference")
    differences = [abs(a - b) for a, b in zip(our_losses, their_losses, strict=True)]
    for step, (a, b) in enumerate(zip(our_losses, their_losses, strict=True), start=1):
        print(f"{step:4}  {a:.6f}  {b:.6f}  {abs(a - b):.1e}")
    tolerance = TOLERANCES[args.quantize]
    print(f"largest difference {max(differences):.1e}, allowed {tolerance:.0e} ({args.quantize})")
    return int(max(differences) > tolerance)


if __name__ == "__main__":
    raise SystemExit(main())
