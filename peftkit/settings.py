"""The sections `base`, `data` and `train` of a recipe: every setting, with its default."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from peftkit.config.schema import Config
from peftkit.errors import first_few


class BaseConfig(Config):
    """Which base model, and how it is held in memory."""

    model: str
    """Folder, GGUF file, hub id, or a short name (smollm2-135m, all-minilm-l6-v2)."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """dtype of the computation and of weights that are not quantised; auto: the fastest here."""
    quantize: Literal["none", "nf4", "fp4", "int8"] = "none"
    """Keep the weights of linear layers in 4 or 8 bits. none: as the files have them, which may be
    quantised already (AWQ, GPTQ, compressed-tensors, FP8 and others keep their bits)."""
    double_quant: bool = True
    """Quantise the scales of nf4 and fp4 as well: 4.1 bits for a weight instead of 4.5."""
    quantize_embeddings: Literal["none", "nf4", "fp4", "int8"] = "none"
    """Keep the embedding of tokens and the output layer in 4 or 8 bits too (with quantize): of 8B
    in nf4 they are a third of what is left. Where both are one tensor it stays one."""
    quantize_towers: bool = False
    """Quantise the towers for images and sound and their projectors too; by default only the
    language side of such a model is, and these stay in 16 bits."""
    placement: Literal["auto", "device", "stream"] = "auto"
    """Where the quantised weights of blocks stay: on the device, or in main memory, from where two
    blocks at a time are streamed to it. auto: streamed if a quantised base does not fit a GPU."""
    store: Literal["auto", "off"] = "auto"
    """auto: a large base that was quantised once is kept in the cache (PEFTKIT_CACHE) and opened in
    seconds; see peftkit base ls. off: it is quantised at each start."""
    rope_scaling: dict[str, Any] | None = None
    """Rotary positions for longer rows than the base was made for, as transformers'
    rope_parameters: {rope_type: yarn, factor: 4.0}. Kept with the adapter and in merged models."""
    new_tokens: tuple[str, ...] = ()
    """Tokens to add; their rows in the embedding and the head are trained too."""


CHAT = ("chat_template", "chat_template_kwargs")
"""Fields of the data section that say how a conversation becomes text."""
FormatName = Literal["messages", "sharegpt", "alpaca", "prompt_completion", "text"]


class Source(Config):
    """One of several training files or data sets."""

    path: str
    """A file, pattern, folder or data set, as `train`."""
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """How often an epoch has each of its rows; 0.25: every fourth row once."""


class DataConfig(Config):
    """The data, and how its rows become tokens."""

    train: str | tuple[Source, ...]
    """A .jsonl, .json, .csv, .tsv or .parquet file, a folder or a hub data set: "org/name",
    "org/name:split", "org/name:config:split", each also with "@revision" after the name; files by a
    pattern ("data/*.jsonl"); or a list of these: [{path: a.jsonl, weight: 2}, {path: b.jsonl}]."""
    eval: str | Annotated[float, Field(gt=0, lt=1)] | None = None
    """Rows to evaluate on: a file or data set; or a share of the training rows, 0.02, split
    by a hash of the row's content, so that it stays the same when rows are added; null: none."""
    format: Literal["auto"] | FormatName = "auto"
    """Format of the rows; auto: by the names of their fields."""
    max_length: Annotated[int, Field(ge=2)] | None = 1024
    """Maximum length of a row in tokens, longer ones are truncated; null: the model's maximum."""
    packing: bool = True
    """Pack several short rows into one, without attention between them, instead of padding: a row
    of train.batch_size is then a packed one. Where the model cannot do that, true is an error; the
    default then is false, with a notice, and also where it would leave fewer than 192 rows."""
    chat_template: str | None = None
    """How a conversation becomes text; null: the tokenizer's own template, "chatml": ChatML,
    else a .jinja file."""
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    """Variables of the chat template: {enable_thinking: false}. Saved with the adapter, for its
    prompts."""
    reasoning: Literal["learn", "context", "drop"] = "learn"
    """The assistant's reasoning before its answer (reasoning_content, or <think> in its text), as
    far as the template writes it: trained on, only read before the answer, or left out."""
    max_pixels: Annotated[int, Field(ge=1)] | None = None
    """Largest image in pixels; larger ones are scaled down before the model's processor sees them,
    since their cost grows with their pixels; null: the processor's own limit."""
    video_frames: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Frames of a video that the model sees, evenly over its length; null: 16."""
    max_dropped: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Largest share of rows that may be dropped because they have nothing to learn."""

    @property
    def names_style(self) -> bool:
        """Whether it says how rows become prompts, and does not leave that to rows or adapter."""
        is_left = self.format == "auto" and self.chat_template is None
        return not is_left or self.chat_template_kwargs is not None or self.reasoning != "learn"

    @property
    def train_name(self) -> str:
        """The training data, in words."""
        if isinstance(self.train, str):
            return self.train
        return first_few([source.path for source in self.train], 4, ", ")

    @property
    def packing_is_explicit(self) -> bool:
        """Whether packing is set, and not only true by default."""
        return self.packing and "packing" in self.model_fields_set

    def without_packing(self) -> DataConfig:
        """Return the same data with one document in each row."""
        return self.model_copy(update={"packing": False})


SHARDED = ("base", "offload")
"""Values of train.shard with which the base is spread; "auto" is settled before it is loaded."""


class EarlyStopping(Config):
    """When to stop a run that no longer improves."""

    patience: int = Field(default=3, ge=1)
    """Stop after this many evaluations in a row without a lower loss."""
    min_delta: float = Field(default=0.0, ge=0)
    """A loss counts as lower only if it is lower by more than this."""


class TrainConfig(Config):
    """How to train."""

    output_dir: Path = Path("runs/adapter")
    """Folder of the run: checkpoints, metrics.jsonl, and in the end the adapter."""
    epochs: float = Field(default=3.0, gt=0)
    """Passes over the training rows; a part of one is allowed."""
    max_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps, in place of `epochs` where given."""
    batch_size: int = Field(default=8, ge=1)
    """Rows per process and micro-batch; packed rows where data.packing packs them."""
    gradient_accumulation: int = Field(default=1, ge=1)
    """Micro-batches per optimizer step: a step has batch_size x this x processes rows."""
    tokens_per_batch: Literal["auto"] | Annotated[int, Field(ge=1)] | None = "auto"
    """Maximum number of tokens that go through the model at once, padding included: a step's rows
    are sorted by length and split accordingly. One longer row is allowed; null: no limit. auto:
    1,280 on a CPU, which is no faster with more; 16,384 on a GPU. It does not change which rows a
    step has."""
    learning_rate: float = Field(default=2e-4, gt=0)
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate decays after the warm-up."""
    warmup_ratio: float = Field(default=0.03, ge=0, lt=1)
    """Fraction of the steps during which the learning rate rises from zero."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's weight decay, for matrices only, not for vectors such as DoRA's magnitudes."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Gradients with a larger total norm are scaled down to it; null: never."""
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"] = "adamw"
    """The first is torch's fused AdamW, the others are bitsandbytes'; paged ones need a GPU."""
    loraplus_ratio: float = Field(default=1.0, gt=0)
    """LoRA+ (arXiv:2402.12354): learning rate of lora_B relative to lora_A; 16 is usual."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Random seed for the order of rows, dropout and a new adapter's values."""
    eval_every: int | None = Field(default=100, ge=1)
    """Steps between evaluations, with one more at the end; null: at the end only."""
    save_every: int | None = Field(default=100, ge=1)
    """Steps between checkpoints, with one more at the best eval and one at the end."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """How many of the newest checkpoints to keep; the best one is kept as well."""
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Recompute activations in the backward pass: less memory, up to 1.4 times the work.
    auto: only if not even one row fits without it."""
    memory: Literal["auto"] | Annotated[float, Field(gt=0)] = "auto"
    """GB (10^9 bytes) that the process may take on a CPU, or that may be taken of a GPU: a strategy
    that fits is chosen before step 1, in this order: all as asked for, fewer tokens at once (on a
    GPU at least 4,096, which keep it busy), activations recomputed, and on a GPU their rest in
    main memory. auto: on a CPU most of what is free; on a GPU the same is tried in turn when memory
    runs out, but on Windows, where it does not say so."""
    compile: Literal["auto"] | bool = "auto"
    """Compile the model's blocks (torch.compile). auto: if the run is long enough to repay it."""
    group_layers: bool = True
    """Compute LoRA layers that read one input together (q, k and v; gate and up). false: each on
    its own, which takes longer; on a CPU in bf16 it also rounds more."""
    eval_before: bool = False
    """Also evaluate before the first step: the base without the adapter."""
    eval_generate: int | None = Field(default=None, ge=1)
    """Eval rows to generate answers for at each evaluation, scored against the rows' own answers
    (exact_match, rouge_l); null: none."""
    early_stopping: EarlyStopping | None = None
    """Stop when the eval loss no longer falls; null: never."""
    keep_best: bool = False
    """Save the weights with the lowest eval loss as the adapter instead of the last ones."""
    sample_every: int | None = Field(default=None, ge=1)
    """Steps between generated samples, with more before the first step and at the end: shown on the
    screen, in samples.jsonl and in the report; null: none."""
    sample_prompts: tuple[str, ...] = ()
    """Prompts to sample from; by default the first eval rows."""
    sample_tokens: int = Field(default=64, ge=1)
    """Maximum number of tokens of a sample."""
    shard: Literal["auto", "none", "base", "offload"] = "auto"
    """With several processes: base shards the frozen base over them, block by block; offload also
    keeps the shards in main memory. Each process has the whole adapter. auto: base where one device
    cannot hold the base and one row's step, estimated before loading."""
    log_to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Trackers that also get the metrics; metrics.jsonl is always written."""

    @model_validator(mode="before")
    @classmethod
    def _without_removed(cls, values: object) -> object:
        """Drop settings of earlier recipes whose value changes nothing."""
        if isinstance(values, Mapping) and values.get("context_parallel") == 1:
            return {name: value for name, value in values.items() if name != "context_parallel"}
        return values

    @property
    def evaluates(self) -> tuple[str, ...]:
        """The settings in use that need eval rows."""
        names = ("eval_before", "eval_generate", "early_stopping", "keep_best")
        names_in_use = [name for name in names if getattr(self, name)]
        if self.sample_every is not None and not self.sample_prompts:
            names_in_use.append("sample_every, without sample_prompts,")
        return tuple(names_in_use)

    def rows_per_step(self, num_processes: int = 1) -> int:
        """Return how many rows one optimizer step learns from."""
        return self.batch_size * self.gradient_accumulation * num_processes

    def num_steps(self, num_rows: int, num_processes: int = 1) -> int:
        """Return how many optimizer steps a run over `num_rows` rows takes."""
        if self.max_steps is not None:
            return self.max_steps
        steps_per_epoch = math.ceil(num_rows / self.rows_per_step(num_processes))
        return max(1, math.ceil(self.epochs * steps_per_epoch - 1e-9))  # 0.1 x 30 is 3, not 4
