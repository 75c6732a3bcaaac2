"""llama.cpp as a child process: what it computes of a GGUF file.

    python llama_child.py GGUF [ADAPTER]

A line of JSON on stdin has a `prompt`, text or tokens; the reply has the number of its tokens and
the log probabilities of the `top` most likely next tokens by their ids: none where the most likely
one is a part of a character, which llama.cpp keeps back. Keys and values are in float32.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGES = ("gguf==0.19.0", "xllamacpp==2026.10.11549")
CONTEXT = 512


def install(folder: Path) -> None:
    """Install llama.cpp and `gguf` into a folder, which is no environment."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--target", str(folder), *PACKAGES], check=True)


@dataclass(frozen=True)
class Next:
    """What follows a prompt."""

    prompt_tokens: int
    log_probabilities: dict[int, float]  # by token, the most likely one first; or empty


class LlamaCpp:
    """A running llama.cpp with a model."""

    def __init__(self, packages: Path, *files: Path) -> None:
        """`files`: of the model, and perhaps of an adapter."""
        self._process = subprocess.Popen(
            [sys.executable, __file__, *map(str, files)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": str(packages)},
        )

    def next(self, prompt: str | list[int], *, top: int = 1) -> Next:
        """Return the most likely tokens behind a prompt."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"prompt": prompt, "top": top}) + "\n")
        self._process.stdin.flush()
        line = next(line for line in self._process.stdout if line.startswith("{"))
        reply = json.loads(line)
        return Next(
            reply["prompt_tokens"], {one["id"]: one["logprob"] for one in reply["most_likely"]}
        )

    def __enter__(self) -> LlamaCpp:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def _serve(model: str, adapter: str | None) -> None:
    import xllamacpp as llama  # type: ignore[import-not-found, unused-ignore]

    params = llama.CommonParams()
    params.model.path = model
    params.n_parallel, params.n_ctx = 1, CONTEXT
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.fit_params = params.use_jinja = params.enable_chat_template = False
    params.cache_ram_mib = params.n_gpu_layers = 0
    params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if adapter is not None:
        params.lora_adapters = [llama.CommonAdapterLoraInfo(adapter, 1.0)]
    server = llama.Server(params)
    for line in sys.stdin:
        asked = json.loads(line)
        reply: dict[str, Any] = server.handle_completions(
            {
                **{"prompt": asked["prompt"], "n_predict": 1, "logprobs": asked["top"]},
                **{"temperature": 0, "samplers": ["top_k"], "top_k": 1, "ignore_eos": True},
                "cache_prompt": False,
            }
        )
        content = (reply["choices"][0].get("logprobs") or {}).get("content")
        found = {
            "prompt_tokens": reply["usage"]["prompt_tokens"],
            "most_likely": content[0]["top_logprobs"] if content else [],
        }
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
