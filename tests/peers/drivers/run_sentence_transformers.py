"""sentence-transformers: a merged folder as it is, or a base with the adapter on it."""

import json
import sys

from sentence_transformers import SentenceTransformer

request = json.load(sys.stdin)
model = SentenceTransformer(request["base"], device="cpu")
if "adapter" in request:  # the base's folder says nothing of pooling: the mean is what it takes
    model.load_adapter(request["adapter"])
vectors = model.encode(request["texts"], normalize_embeddings="adapter" in request)
print(json.dumps(vectors.tolist()))
