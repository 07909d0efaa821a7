"""CTranslate2, which faster-whisper runs on: a merged Whisper, converted, hears in float32."""

import json
import sys
import tempfile

import ctranslate2
import numpy as np
import transformers
from ctranslate2.converters import TransformersConverter

request = json.load(sys.stdin)
extractor = transformers.WhisperFeatureExtractor.from_pretrained(request["base"])
heard = [np.array(sound, dtype="float32") for sound in request["sounds"]]
mels = extractor(heard, sampling_rate=extractor.sampling_rate, return_tensors="np").input_features
with tempfile.TemporaryDirectory() as folder:
    TransformersConverter(request["base"]).convert(folder, quantization="float32", force=True)
    model = ctranslate2.models.Whisper(folder, device="cpu", intra_threads=1)
    found = model.generate(
        ctranslate2.StorageView.from_array(np.ascontiguousarray(mels)),
        [request["prompt"]] * len(heard),
        beam_size=1,
        max_length=2 * request["num_tokens"],  # half of it is a prompt's
        suppress_blank=False,
        suppress_tokens=[],
        return_scores=True,
    )
print(json.dumps([{"ids": each.sequences_ids[0], "score": each.scores[0]} for each in found]))
