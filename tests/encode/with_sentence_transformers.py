"""What sentence-transformers computes. Argument: a JSON file of `folder`, `texts` and `queries`.

Prints a JSON list: embeddings of the texts, or for each query the scores of the texts.
"""
# mypy: ignore-errors

from __future__ import annotations

import json
import sys
from pathlib import Path

from sentence_transformers import CrossEncoder, SentenceTransformer

given = json.loads(Path(sys.argv[1]).read_text())
folder, texts = given["folder"], given["texts"]
if given["queries"]:
    model = CrossEncoder(folder, device="cpu")
    found = [
        model.predict([(query, text) for text in texts]).tolist() for query in given["queries"]
    ]
    model.save_pretrained(f"{folder}-saved")  # as this version writes it
else:
    found = SentenceTransformer(folder, device="cpu").encode(texts).tolist()
sys.stdout.write(json.dumps(found) + "\n")
