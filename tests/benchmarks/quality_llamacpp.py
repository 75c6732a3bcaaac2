"""llama.cpp as a child of `quality.py`: computes the logits of texts.

    python tests/benchmarks/quality_llamacpp.py GGUF

stdin: a JSON list of lists of tokens. stdout: the logits of all tokens, float32, in their order.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

import llama_cpp as llama  # type: ignore[import-not-found, unused-ignore]
from peer_child import THREADS


def main() -> None:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    llama.llama_backend_init()
    weights = llama.llama_model_default_params()
    weights.use_extra_bufts = False  # repacked for AMX, it dies here of an illegal instruction
    model = llama.llama_model_load_from_file(sys.argv[1].encode(), weights)
    every = json.load(sys.stdin)
    most = max(map(len, every))
    options = llama.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = most
    options.n_threads = options.n_threads_batch = THREADS
    context = llama.llama_init_from_model(model, options)
    size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    batch = llama.llama_batch_init(most, 0, 1)
    for ids in every:
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        for place, token in enumerate(ids):
            batch.token[place], batch.pos[place] = token, place
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
            batch.logits[place] = True
        batch.n_tokens = len(ids)
        if status := llama.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode: status {status}")
        logits: Any = llama.llama_get_logits(context)
        replies.write(ctypes.string_at(logits, len(ids) * size * 4))
    replies.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
