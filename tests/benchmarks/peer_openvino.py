"""OpenVINO GenAI as a child of `peers.py`: its continuous batching, of a GGUF file.

    python tests/benchmarks/peer_openvino.py GGUF FOLDER

GenAI's own reader takes GGUF's F16 and Q8_0, but not F32 ("Unsupported quantization type"). Its
other way in, a folder exported by optimum-intel 2.2, needs transformers below 5.6, torchvision and
nncf, so it is not taken here.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from peer_child import MOST_SEQUENCES, THREADS, Answer, Burst, serve

CACHE_GB = 1  # keys and values, prefixes included
BATCH = 2048  # tokens computed at once, prompts included


def start(gguf: str, folder: str) -> tuple[str, Burst]:
    import numpy as np
    import openvino  # type: ignore[import-not-found, unused-ignore]
    import openvino_genai as genai  # type: ignore[import-not-found, unused-ignore]
    from tokenizers import Tokenizer

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching = CACHE_GB, True
    scheduler.max_num_seqs, scheduler.max_num_batched_tokens = MOST_SEQUENCES, BATCH
    properties = {"INFERENCE_NUM_THREADS": THREADS}
    pipeline = genai.ContinuousBatchingPipeline(gguf, scheduler, "CPU", properties)
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")

    def burst(prompts: Sequence[Sequence[int]], tokens: int) -> Answer:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        began = time.perf_counter()
        handles = [
            pipeline.add_request(number, openvino.Tensor(np.array([ids], np.int64)), config)
            for number, ids in enumerate(prompts)
        ]
        first_s, last_s = [0.0] * len(handles), [0.0] * len(handles)
        written: list[list[int]] = [[] for _ in handles]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = time.perf_counter() - began
            for number, handle in enumerate(handles):
                if handle.can_read():
                    for output in handle.read().values():
                        written[number] += output.generated_ids
                    first_s[number] = first_s[number] or now
                    last_s[number] = now
        if any(len(ids) != tokens for ids in written):
            raise RuntimeError(f"must give {tokens} tokens, got {[len(ids) for ids in written]}")
        return Answer(first_s, last_s, tokenizer.decode_batch(written))

    burst([[1000, 1001, 1002]], 8)
    return f"OpenVINO GenAI {genai.__version__.split('-')[0]}", burst


if __name__ == "__main__":
    serve(lambda: start(sys.argv[1], sys.argv[2]))
