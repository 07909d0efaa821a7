"""Build a small vision-language model from SmolLM2-135M and train it to read numbers in images.

Training follows the usual two stages. A vision tower, pretrained on digits, is connected to the
language model by a projector. Stage 1 aligns them: the projector is trained fully, the tower with
LoRA. Stage 2 trains the language model with LoRA to answer. All images use the digits of
scikit-learn.

Needs: 2 CPU cores, 7 minutes; pip install -e ".[images]" scikit-learn.
Gives: the fraction of held-out numbers that are read correctly, before and after each stage, and an
adapter in runs/read-digits/adapter.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_digits
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    CLIPVisionModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from peftkit import (
    ImageTextConfig,
    LoRA,
    Recipe,
    evaluate,
    load_base,
    load_recipe,
    merge,
    open_adapter,
    run_recipe,
)
from peftkit_cli.render import Renderer

HERE = Path(__file__).parent
OUT = Path("runs/read-digits")
NUM_TOWER, NUM_TRAIN = 600, 900  # of 1,797 digits: for the tower, and for training images
NUM_PICTURES = {"train": 400, "held_out": 32}
TOWER_STEPS, TOWER_BATCH = 150, 32
CELL, SIDE = 8, 24  # pixels of a digit (one patch) and of an image
BLANK = 10
QUESTION = "Which number is this?"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Digit = tuple[np.ndarray, int]


def read_digits() -> list[Digit]:
    """Return the digits of scikit-learn, shuffled: 8 x 8 pixels, white on black, and labels."""
    found = load_digits()
    scaled = (found.images * 255 / 16).astype("uint8")
    digits = [(image, int(label)) for image, label in zip(scaled, found.target, strict=True)]
    random.Random(0).shuffle(digits)
    return digits


def image_processor() -> CLIPImageProcessorPil:
    """Return the image processor."""
    size = {"height": SIDE, "width": SIDE}
    return CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=size)


def make_tower(digits: Sequence[Digit]) -> CLIPVisionModel:
    """Train a tower of 100,000 parameters to classify the digit in each of nine cells."""
    torch.manual_seed(0)
    config = CLIPVisionConfig(
        image_size=SIDE,
        patch_size=CELL,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    tower, head = CLIPVisionModel(config), torch.nn.Linear(64, BLANK + 1)
    optimizer = torch.optim.AdamW([*tower.parameters(), *head.parameters()], lr=2e-3)
    processor, draw = image_processor(), random.Random(1)
    mean, std = (
        torch.tensor(values)[:, None, None]
        for values in (processor.image_mean, processor.image_std)
    )
    for _ in range(TOWER_STEPS):
        filled = [
            [draw.choice(digits) if draw.random() < 0.5 else None for _ in range(9)]
            for _ in range(TOWER_BATCH)
        ]
        labels = [[BLANK if cell is None else cell[1] for cell in cells] for cells in filled]
        boards = torch.from_numpy(np.stack([board(cells) for cells in filled]))
        pixels = (boards[:, None] / 255 - mean) / std  # as in the image processor
        seen = tower(pixel_values=pixels).last_hidden_state[:, 1:]
        loss = F.cross_entropy(head(seen).flatten(0, 1), torch.tensor(labels).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    right = (head(seen).argmax(-1) == torch.tensor(labels)).float().mean()
    say(f"The tower classifies {right:.0%} of the cells of its last batch correctly.")
    return tower


def board(cells: Sequence[Digit | None]) -> np.ndarray:
    """Return the gray pixels of three rows of three cells."""
    found = np.zeros((SIDE, SIDE), dtype="uint8")
    for number, cell in enumerate(cells):
        if cell is not None:
            top, left = CELL * (number // 3), CELL * (number % 3)
            found[top : top + CELL, left : left + CELL] = cell[0]
    return found


def assemble(tower: CLIPVisionModel, folder: Path) -> None:
    """Combine the tower, a random projector and SmolLM2-135M into a LLaVA model."""
    language = load_base("smollm2-135m", dtype="fp32", device="cpu")
    tokenizer, model = language.tokenizer, language.model
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    config = LlavaConfig(
        text_config=model.config,
        vision_config=tower.config,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )
    whole = LlavaForConditionalGeneration(config)
    whole.model.language_model.load_state_dict(model.model.state_dict())
    whole.model.vision_tower.load_state_dict(tower.state_dict())
    whole.tie_weights()
    whole.save_pretrained(folder)
    processor = LlavaProcessor(
        image_processor=image_processor(),
        tokenizer=tokenizer,
        patch_size=CELL,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    processor.save_pretrained(folder)


def write_pictures(digits: Sequence[Digit], folder: Path, count: int) -> None:
    """Write images with a number in one of three rows, and the conversations about them."""
    folder.mkdir(parents=True, exist_ok=True)
    draw, rows = random.Random(count), []
    for number in range(count):
        chosen, line = [draw.choice(digits) for _ in range(3)], draw.randrange(3)
        cells: list[Digit | None] = [None] * 9
        cells[3 * line : 3 * line + 3] = chosen
        name = f"{number:04}.png"
        Image.fromarray(board(cells)).convert("RGB").save(folder / name)
        question = [{"type": "image", "image": name}, {"type": "text", "text": QUESTION}]
        answer = "".join(str(label) for _, label in chosen)
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append(json.dumps({"messages": turns}) + "\n")
    (folder / "rows.jsonl").write_text("".join(rows))


def first_stage(settings: Recipe) -> Recipe:
    """Return the recipe of stage 1: the projector is trained fully, the tower with LoRA."""
    method = LoRA(
        rank=8, alpha=16, targets=("vision.attention",), train_fully=("multi_modal_projector",)
    )
    train = {"output_dir": OUT / "seeing", "epochs": 3, "learning_rate": 3e-3}
    return settings.model_copy(
        update={
            "base": settings.base.model_copy(update={"model": str(OUT / "base")}),
            "method": method,
            "train": settings.train.model_copy(update=train),
        }
    )


def main() -> None:
    """Create the base and the images; evaluate before, between and after the two stages."""
    began = time.monotonic()
    digits = read_digits()
    assemble(make_tower(digits[:NUM_TOWER]), OUT / "base")
    parts = {"train": digits[NUM_TOWER : NUM_TOWER + NUM_TRAIN]}
    parts["held_out"] = digits[NUM_TOWER + NUM_TRAIN :]
    for name, count in NUM_PICTURES.items():
        write_pictures(parts[name], OUT / name, count)
    say(f"Base and images are ready after {time.monotonic() - began:.0f} s.")

    settings = load_recipe(HERE.parent / "read-digits.yaml")
    held_out, task, scores = OUT / "held_out" / "rows.jsonl", ImageTextConfig(), []
    with Renderer() as on_event:
        base = load_base(str(OUT / "base"), purpose=task.purpose, on_event=on_event)
        scores.append(evaluate(base, held_out, task=task, on_event=on_event))
        run_recipe(first_stage(settings), overwrite=True, on_event=on_event)
        shutil.rmtree(OUT / "aligned", ignore_errors=True)
        merge(OUT / "seeing", OUT / "aligned", on_event=on_event)
        aligned = load_base(str(OUT / "aligned"), purpose=task.purpose, on_event=on_event)
        scores.append(evaluate(aligned, held_out, task=task, on_event=on_event))
        run_recipe(settings, overwrite=True, on_event=on_event)
        opened = open_adapter(settings.train.output_dir, on_event=on_event)
        scores.append(evaluate(opened.base, held_out, task=opened.task, on_event=on_event))
    stages = ("before", "after stage 1 (vision)", "after stage 2 (language)")
    for stage, score in zip(stages, scores, strict=True):
        say(
            f"{stage}: {score['exact_match']:.0%} of {score['num_rows']} held-out numbers read, "
            f"loss {score['loss']:.2f}."
        )
    say(f"Total time: {time.monotonic() - began:.0f} s.")


def say(text: str) -> None:
    """Print a line and flush it."""
    print(text, flush=True)


if __name__ == "__main__":
    main()
