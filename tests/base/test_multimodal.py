"""Processors of models that could read videos too, where no videos are read."""

import json

import transformers

from peftkit.base.processors import UnreadVideos, without_video_support
from tests.helpers.vision import tokenizer

MARKS = [f"{kind}{end}_token" for kind in ("image", "video") for end in ("", "_start", "_end")]


def test_a_processor_that_would_save_a_font_for_videos_is_saved_without(tmp_path):
    processor = without_video_support(transformers.Ernie4_5_VLMoeProcessor)(
        image_processor=transformers.Qwen2VLImageProcessorPil(),
        tokenizer=tokenizer(**{name: f"<{name}>" for name in MARKS}),
        video_processor=UnreadVideos({"font": "a.ttf"}),
    )
    processor.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "processor_config.json").read_text())
    assert saved["video_processor"] == {"font": "a.ttf"}
