"""The sections `base`, `data` and `train` of a recipe: every setting, with its default."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from peftkit.config.schema import OPENED, Config, Location
from peftkit.errors import first_few


class BaseConfig(Config):
    """The base model, and how it is stored in memory."""

    model: Location
    """Folder, GGUF file, hub id, or a short name (smollm2-135m, all-minilm-l6-v2)."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """dtype of computation and of unquantised weights; auto: the fastest on this machine."""
    quantize: Literal["none", "nf4", "fp4", "int8"] = "none"
    """Store the weights of linear layers in 4 or 8 bits. none: as in the files, which may already
    be quantised (AWQ, GPTQ, compressed-tensors, FP8 and others keep their bits)."""
    double_quant: bool = True
    """Quantise the scales of nf4 and fp4 as well: 4.1 bits per weight instead of 4.5."""
    quantize_embeddings: Literal["none", "nf4", "fp4", "int8"] = "none"
    """Also store the token embedding and the output layer in 4 or 8 bits (with quantize): they are
    a third of an 8B model in nf4. A shared tensor stays shared."""
    quantize_towers: bool = False
    """Also quantise image and audio towers and their projectors; by default they stay in 16 bits
    and only the language model is quantised."""
    placement: Literal["auto", "device", "stream"] = "auto"
    """Where blocks keep their quantised weights: on the device, or in main memory, from which two
    blocks at a time are streamed. auto: stream a quantised base that does not fit a GPU."""
    store: Literal["auto", "off"] = "auto"
    """auto: store a large quantised base in the cache (PEFTKIT_CACHE), which opens in seconds; see
    peftkit base ls. off: quantise it at each start."""
    rope_scaling: dict[str, Any] | None = None
    """Rotary positions for rows longer than the base's context, as transformers' rope_parameters:
    {rope_type: yarn, factor: 4.0}. Saved with the adapter and in merged models."""
    new_tokens: tuple[str, ...] = ()
    """Tokens to add; their rows in the embedding and the head are also trained."""


CHAT = ("chat_template", "chat_template_kwargs")
"""Fields of the data section for rendering a conversation as text."""
EVERY_TASK = ("train", "eval", "max_dropped", "drop_invalid")
"""Fields of the data section that every task reads."""
FormatName = Literal["messages", "sharegpt", "alpaca", "prompt_completion", "text"]
Tracker = Literal[
    "aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"
]


class Source(Config):
    """One of several training files or data sets."""

    path: Location
    """A file, pattern, folder or data set, as `train`."""
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Repetitions of each row per epoch; 0.25: every fourth row once."""


class DataConfig(Config):
    """The data, and how it is tokenised."""

    train: Location | tuple[Source, ...]
    """A .jsonl, .json, .csv, .tsv or .parquet file, a folder or a hub data set: "org/name",
    "org/name:split", "org/name:config:split", each also with "@revision" after the name; files by a
    pattern ("data/*.jsonl"); or a list: [{path: a.jsonl, weight: 2}, {path: b.jsonl}]."""
    eval: Location | Annotated[float, Field(gt=0, lt=1)] | None = None
    """Rows to evaluate on: a file or data set; or a share of the training rows, 0.02, split by a
    hash of each row's content, which stays stable when rows are added; null: none."""
    format: Literal["auto"] | FormatName = "auto"
    """Format of the rows; auto: detected from their field names."""
    max_length: Annotated[int, Field(ge=2)] | None = 1024
    """Maximum length of a row in tokens; longer rows are truncated; null: the model's maximum."""
    packing: bool = True
    """Pack short rows into one sequence, without attention between them, instead of padding;
    train.batch_size then counts packed rows. If the model does not support it, an explicit true is
    an error and the default becomes false, with a notice; also if fewer than 192 rows would
    remain."""
    chat_template: Location | None = None
    """Template that renders conversations; null: the tokenizer's; "chatml": ChatML; or a .jinja
    file."""
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    """Variables of the chat template: {enable_thinking: false}. Saved with the adapter."""
    reasoning: Literal["learn", "context", "drop"] = "learn"
    """Whether the assistant's reasoning (reasoning_content, or <think> in its text), if the
    template renders it, is trained on, used as context only, or left out."""
    max_pixels: Annotated[int, Field(ge=1)] | None = None
    """Maximum pixels of an image; larger images are scaled down before the model's processor reads
    them, since their cost grows with their pixels; null: the processor's limit."""
    video_frames: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Frames per video, evenly spaced; null: 16."""
    max_dropped: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Maximum share of rows that may be dropped because they have no target tokens, or are
    invalid."""
    drop_invalid: bool = False
    """Drop rows that cannot be used, such as rows without an assistant turn or that the chat
    template refuses, and count them; false: such rows are an error, which lists them."""

    @property
    def names_style(self) -> bool:
        """Whether the section fixes the prompt style, instead of the rows or the adapter."""
        has_default_format = self.format == "auto" and self.chat_template is None
        has_default_options = self.chat_template_kwargs is None and self.reasoning == "learn"
        return not (has_default_format and has_default_options)

    @property
    def train_name(self) -> str:
        """The training data, for messages."""
        if isinstance(self.train, str):
            return self.train
        return first_few([source.path for source in self.train], 4, ", ")

    @property
    def packing_is_explicit(self) -> bool:
        """Whether packing is set, not true by default."""
        return self.packing and "packing" in self.model_fields_set

    def without_packing(self) -> DataConfig:
        """Return the same data with one document in each row."""
        return self.model_copy(update={"packing": False})


class EarlyStopping(Config):
    """When to stop a run whose evaluations no longer improve."""

    patience: int = Field(default=3, ge=1)
    """Stop after this many consecutive evaluations without a better `train.best_metric`."""
    min_delta: float = Field(default=0.0, ge=0)
    """Minimum change that counts as better."""


class DriftConfig(Config):
    """How far training may move the model on text unrelated to the task."""

    on: Location = "self"
    """self: KL from the model before training, on its own answers to 24 general prompts; text: rise
    of the cross entropy on 12 general texts, or on a text file."""
    tokens: int = Field(default=2048, ge=2)
    """Maximum tokens of the text."""
    limit: float | None = Field(default=None, gt=0)
    """keep_best ignores evaluations with more drift, in nats per token; null: no limit."""


class TrainConfig(Config):
    """How to train, when to evaluate and what to save."""

    output_dir: Path = Path("runs/adapter")
    """Folder of the run: checkpoints, metrics.jsonl, and at the end the adapter."""
    epochs: float = Field(default=3.0, gt=0)
    """Passes over the training rows; may be fractional."""
    max_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps; overrides `epochs`."""
    batch_size: int = Field(default=8, ge=1)
    """Rows per process and micro-batch; packed rows if data.packing packs them."""
    gradient_accumulation: int = Field(default=1, ge=1)
    """Micro-batches per optimizer step: a step has batch_size x this x processes rows."""
    tokens_per_batch: Literal["auto"] | Annotated[int, Field(ge=1)] | None = "auto"
    """Maximum tokens per forward pass, padding included: the rows of a step are sorted by length
    and split accordingly, and a single row may be longer; null: no limit. auto: 1,280 on a CPU,
    which is no faster with more; 16,384 on a GPU. It does not change the rows of a step."""
    learning_rate: float = Field(default=2e-4, gt=0)
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate decays after the warm-up."""
    warmup_ratio: float = Field(default=0.03, ge=0, lt=1)
    """Fraction of the steps during which the learning rate rises from zero."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's weight decay for matrices, not for vectors such as DoRA's magnitudes."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Gradients with a larger total norm are scaled down to it; null: never."""
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"] = "adamw"
    """adamw: torch's fused AdamW; the others: bitsandbytes. Paged optimizers need a GPU."""
    loraplus_ratio: float = Field(default=1.0, gt=0)
    """LoRA+ (arXiv:2402.12354): learning rate of lora_B relative to lora_A; 16 is usual."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Random seed for the order of rows, dropout and a new adapter's initial values."""
    eval_every: int | None = Field(default=100, ge=1)
    """Steps between evaluations, and one at the end; null: at the end only."""
    save_every: int | None = Field(default=100, ge=1)
    """Steps between checkpoints, and one at the best eval loss and one at the end."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep; the best one is also kept."""
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Recompute activations in the backward pass: less memory, up to 1.4 times the work.
    auto: only if a single row does not fit without it."""
    memory: Literal["auto"] | Annotated[float, Field(gt=0)] = "auto"
    """Budget in GB (10^9 bytes): for the process on a CPU, for all processes on a GPU. Before step
    1, the first strategy that fits is chosen: the requested one, fewer tokens at once (on a GPU at
    least 4,096, which keep it busy), recomputed activations, and on a GPU activations offloaded to
    main memory. auto: on a CPU most of the free memory; on a GPU the next strategy is tried when
    memory runs out, which Windows does not report."""
    compile: Literal["auto"] | bool = "auto"
    """Compile the model's blocks (torch.compile). auto: if the run is long enough to gain time."""
    record: bool = True
    """Capture the passes of a step as CUDA graphs, on a GPU and for models and tasks that allow it:
    one launch instead of thousands, and batches of few different sizes (5 % more tokens)."""
    quantize_for: Literal["none", "q4_0", "q4_1", "q8_0", "int4_32", "int4_128"] = "none"
    """Quantisation-aware training: adapted layers compute with fq(W + s B A), so the adapter fits
    the merged and quantised model; about twice the time of a step. For method lora."""
    quantize_from: float = Field(default=0.5, ge=0, lt=1)
    """Share of the steps after which quantize_for begins."""
    group_layers: bool = True
    """Compute LoRA layers with the same input together (q, k and v; gate and up). false:
    separately, which is slower, and on a CPU in bf16 also rounds more."""
    eval_before: bool = False
    """Also evaluate before the first step: the base without the adapter."""
    eval_generate: int | None = Field(default=None, ge=1)
    """Number of eval rows to generate completions for at each evaluation, scored against the rows'
    references (exact_match, rouge_l); null: none."""
    early_stopping: EarlyStopping | None = None
    """Stop when best_metric no longer improves; null: never."""
    keep_best: bool = False
    """Save the weights of the best evaluation as the adapter, not the last ones."""
    best_metric: str = "loss"
    """Metric of the evaluations that keep_best and early_stopping compare, such as accuracy or
    f1_macro; losses and error rates are better if lower, all others if higher."""
    drift: DriftConfig | None = None
    """Measure drift at each evaluation: how much the model changes on unrelated text; null: not
    measured."""
    sample_every: int | None = Field(default=None, ge=1)
    """Steps between generated samples, also before the first step and at the end; printed, and
    written to samples.jsonl and the report; null: none."""
    sample_prompts: tuple[str, ...] = ()
    """Prompts of the samples; by default the first eval rows."""
    sample_tokens: int = Field(default=64, ge=1)
    """Maximum tokens per sample."""
    shard: Literal["auto", "none", "base", "offload"] = "auto"
    """With several processes: base shards the frozen base over them, block by block; offload also
    keeps the shards in main memory. Each process has the complete adapter. auto: base if a device
    cannot hold the base and a step of one row, estimated before loading."""
    log_to: tuple[Tracker, ...] = ()
    """Trackers that also receive the metrics; metrics.jsonl is always written."""
    trackers: Annotated[dict[Tracker, dict[str, Any] | None], OPENED] = Field(default={})
    """Trackers with their options: {mlflow: {experiment: support, tags: {team: a}}}."""
    proof: (
        Literal["auto", "off"] | Annotated[tuple[str, ...], Field(min_length=1, max_length=4)]
    ) = "auto"
    """Write proof.json with the adapter, for peftkit prove: prompts and log-probabilities. auto:
    the two shortest prompts of the eval rows, and general ones; one to four prompts instead;
    off: none. Of private rows, set your own prompts before you share the adapter."""
    upload: Location | None = None
    """Where to upload the finished run: s3://bucket/folder, gs://, az:// or hf://user/name."""

    @model_validator(mode="before")
    @classmethod
    def _without_removed(cls, values: object) -> object:
        """Drop settings of earlier versions that have no effect."""
        if isinstance(values, Mapping) and values.get("context_parallel") == 1:
            return {name: value for name, value in values.items() if name != "context_parallel"}
        return values

    @property
    def shards_base(self) -> bool:
        """Whether the base is sharded; false for auto, which is decided before loading."""
        return self.shard in ("base", "offload")

    @property
    def name_of_best_loss(self) -> str:
        """The name of the best evaluation's loss, which is the lowest only by best_metric loss."""
        return "best_eval_loss" if self.best_metric == "loss" else "eval_loss_of_best_step"

    @property
    def evaluates(self) -> tuple[str, ...]:
        """The settings in use that need eval rows."""
        names = ("eval_before", "eval_generate", "early_stopping", "keep_best", "drift")
        used = [name for name in names if getattr(self, name)]
        if self.sample_every is not None and not self.sample_prompts:
            used.append("sample_every, without sample_prompts,")
        return tuple(used)

    def rows_per_step(self, num_processes: int = 1) -> int:
        """Return the number of rows of an optimizer step."""
        return self.batch_size * self.gradient_accumulation * num_processes

    def num_steps(self, num_rows: int, num_processes: int = 1) -> int:
        """Return the number of optimizer steps of a run over `num_rows` rows."""
        if self.max_steps is not None:
            return self.max_steps
        steps_per_epoch = math.ceil(num_rows / self.rows_per_step(num_processes))
        return max(1, math.ceil(self.epochs * steps_per_epoch - 1e-9))  # 0.1 x 30 is 3, not 4
