"""The base and the adapter of a job, built by transformers, bitsandbytes and PEFT.

Runs in the peers' environments: imports nothing of peftkit.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import BitsAndBytesConfig

from benchmarks import shapes

AUTO = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
}


def peft_model(job: dict[str, Any], device: torch.device) -> Any:
    """Return the base with a fresh LoRA on it, in training mode."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[job["dtype"]]
    model = _shape(job, dtype, device) if "shape" in job else _loaded(job, dtype, device)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # otherwise gradients vanish after an eval
    if "adapter" in job:
        return PeftModel.from_pretrained(model, job["adapter"], is_trainable=True).train()
    lora = LoraConfig(
        r=job["rank"],
        lora_alpha=2 * job["rank"],
        target_modules=job.get("target_modules", "all-linear"),
        target_parameters=job.get("target_parameters"),
    )
    # adapters in the base's dtype are faster on a CPU than the float32 that PEFT chooses
    model = get_peft_model(model, lora, autocast_adapter_dtype=job.get("adapters") == "fp32")
    return model.train()


def _loaded(job: dict[str, Any], dtype: torch.dtype, device: torch.device) -> Any:
    quantization = None
    if job["quantize"] == "nf4":
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_quant_storage=job.get("storage", "uint8"),
        )
    attention = {"attn_implementation": job["attention"]} if "attention" in job else {}
    model = getattr(transformers, AUTO[job["task"]]).from_pretrained(
        job["source"],
        dtype=dtype,
        quantization_config=quantization,
        device_map={"": device},
        **attention,
    )
    if layers := job.get("num_layers"):
        model.model.layers = model.model.layers[:layers]
        model.config.num_hidden_layers = layers
    return model


def _shape(job: dict[str, Any], dtype: torch.dtype, device: torch.device) -> Any:
    """Return a model with random weights, with bitsandbytes' linear layers if requested."""

    def pack(block: nn.Module) -> None:
        for module in list(block.modules()):
            for name, linear in module.named_children():
                if job["quantize"] == "nf4" and type(linear) is nn.Linear:
                    setattr(module, name, _packed(linear, dtype, device))

    changes = job.get("sizes", {})
    shape = shapes.SHAPES[job["shape"]]
    model = shapes.build(shape, dtype=dtype, device=device, each_block=pack, **changes)
    model.is_loaded_in_4bit = job["quantize"] == "nf4"  # PEFT checks this
    return model


def _packed(linear: nn.Linear, dtype: torch.dtype, device: torch.device) -> nn.Module:
    from bitsandbytes.nn import Linear4bit, Params4bit

    made = Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=dtype, device="meta"
    )
    kind = {"quant_type": "nf4", "compress_statistics": True, "requires_grad": False}
    made.weight = Params4bit(linear.weight.detach(), **kind).to(device)
    return made
