"""llama.cpp as a child of `peers.py`, from either Python package.

    python tests/benchmarks/peer_llamacpp.py xllamacpp|llama-cpp-python GGUF FOLDER

`xllamacpp` is llama.cpp's own server loop in this process, compiled for AVX2; `llama-cpp-python` is
compiled on this machine, and has llama.cpp's C functions: here stands the loop around them.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from peer_child import MOST_SEQUENCES, THREADS, Answer, Burst, serve

CONTEXT = 1024  # tokens of one sequence
WARM_UP = 8  # new tokens


def xllamacpp(gguf: str) -> tuple[str, Burst]:
    import xllamacpp as llama  # type: ignore[import-not-found, unused-ignore]

    params = llama.CommonParams()
    params.model.path = gguf
    params.n_parallel, params.n_ctx = MOST_SEQUENCES, MOST_SEQUENCES * CONTEXT
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
    params.fit_params = params.use_jinja = params.enable_chat_template = False
    params.cache_ram_mib = params.n_gpu_layers = 0
    server = llama.Server(params)
    threads = ThreadPoolExecutor(MOST_SEQUENCES)

    def burst(prompts: Sequence[Sequence[int]], tokens: int) -> Answer:
        began = time.perf_counter()

        def one(slot: int) -> tuple[float, float, str]:
            reply = server.handle_completions(
                {
                    "prompt": prompts[slot], "n_predict": tokens, "id_slot": slot,
                    "temperature": 0, "samplers": ["top_k"], "top_k": 1, "ignore_eos": True,
                }
            )  # fmt: skip
            last_s = time.perf_counter() - began
            assert reply["timings"]["predicted_n"] == tokens, reply
            # From the first new token to the last one.
            decode_s = reply["timings"]["predicted_ms"] / 1000
            return last_s - decode_s, last_s, reply["choices"][0]["text"]

        first_s, last_s, texts = zip(*threads.map(one, range(len(prompts))), strict=True)
        return Answer(list(first_s), list(last_s), list(texts))

    burst([[1000, 1001, 1002]], WARM_UP)
    return f"llama.cpp, xllamacpp {llama.__version__}, {_features(llama.get_system_info())}", burst


def llama_cpp_python(gguf: str, folder: str) -> tuple[str, Burst]:
    import llama_cpp as llama  # type: ignore[import-not-found, unused-ignore]
    import numpy as np
    from tokenizers import Tokenizer

    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(gguf.encode(), llama.llama_model_default_params())
    if not model:
        raise RuntimeError(f"{gguf}: llama.cpp cannot load it; delete it and run again")
    params = llama.llama_context_default_params()
    params.n_seq_max, params.n_ctx = MOST_SEQUENCES, MOST_SEQUENCES * CONTEXT
    params.n_batch = MOST_SEQUENCES * CONTEXT
    params.n_threads = params.n_threads_batch = THREADS
    context = llama.llama_init_from_model(model, params)
    memory = llama.llama_get_memory(context)
    vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    batch = llama.llama_batch_init(params.n_batch, 0, 1)
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    cached: list[list[int]] = [[] for _ in range(MOST_SEQUENCES)]  # prompts in the KV cache

    def step(pieces: Sequence[Sequence[int]], begins: Sequence[int]) -> list[int]:
        """Compute some tokens of each sequence; return the likeliest next token of each."""
        at = 0
        outputs = []
        for sequence, (ids, begin) in enumerate(zip(pieces, begins, strict=True)):
            for offset, token in enumerate(ids):
                batch.token[at], batch.pos[at] = token, begin + offset
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
                batch.logits[at] = offset == len(ids) - 1
                at += 1
            outputs.append(at - 1)
        batch.n_tokens = at
        if status := llama.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode: status {status}")

        def likeliest(output: int) -> int:
            logits: Any = llama.llama_get_logits_ith(context, output)
            array = np.ctypeslib.as_array(
                ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (vocabulary,)
            )
            return int(array.argmax())

        return [likeliest(output) for output in outputs]

    def burst(prompts: Sequence[Sequence[int]], tokens: int) -> Answer:
        began = time.perf_counter()
        begins = []
        for sequence, prompt in enumerate(prompts):
            # As the server does: a prompt that is in the cache is computed from its last token on.
            begins.append(len(prompt) - 1 if cached[sequence] == list(prompt) else 0)
            llama.llama_memory_seq_rm(memory, sequence, begins[-1], -1)
            cached[sequence] = list(prompt)
        latest = step([p[b:] for p, b in zip(prompts, begins, strict=True)], begins)
        written = [[token] for token in latest]
        first_s = time.perf_counter() - began
        for number in range(tokens - 1):
            latest = step([[t] for t in latest], [len(prompt) + number for prompt in prompts])
            for ids, token in zip(written, latest, strict=True):
                ids.append(token)
        last_s = time.perf_counter() - began
        count = len(prompts)
        return Answer([first_s] * count, [last_s] * count, tokenizer.decode_batch(written))

    burst([[1000, 1001, 1002]], WARM_UP)
    words = _features(llama.llama_print_system_info().decode())
    return f"llama.cpp, llama-cpp-python {llama.__version__}, {words}", burst


def _features(system_info: str) -> str:
    """The instruction sets that it was compiled for: `AVX2 FMA ...` of `AVX2 = 1 | FMA = 1`."""
    pairs = (part.split("=") for part in system_info.split(":", 1)[-1].split("|") if "=" in part)
    return " ".join(name.strip() for name, value in pairs if value.strip() == "1")


if __name__ == "__main__":
    package, path, model_folder = sys.argv[1:]
    if package == "xllamacpp":
        serve(lambda: xllamacpp(path))
    else:
        serve(lambda: llama_cpp_python(path, model_folder))
