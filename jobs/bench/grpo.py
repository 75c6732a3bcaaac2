"""One side of the GRPO benchmark: some steps of one trainer on made-up work, timed.

    python -m warmd.jobs.bench.grpo trl|warmd WORK [STEPS]

The work is named, its model has random weights and the shape of Qwen2-0.5B, its prompts are random
words: nothing is read from anywhere. Each side runs in a process of its own, so that neither has
the other's memory. Prints one JSON object. Imports torch and trl.
"""

from __future__ import annotations

import ctypes
import random
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

SHAPE = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
HEAD = SHAPE["vocab_size"] * SHAPE["hidden_size"]
SAMPLED_S = 0.02  # between two looks at the memory


@dataclass(frozen=True, kw_only=True)
class Work:
    """One optimizer step: a group of completions for one prompt, all of the same length."""

    layers: int
    prompt: int  # tokens
    completion: int  # tokens
    generations: int
    accumulation: int = 1
    beta: float = 0.0

    def floor_s(self, parameters: int, flops: float, bytes_s: float) -> float:
        """Return the seconds that a step's products, decoding reads and AdamW take at least.

        The prompt counts once for its group; of decoding, every weight is read for each token.
        """
        backbone = parameters - HEAD
        tokens = self.prompt + self.generations * (self.completion - 1)
        scored = self.generations * self.completion
        passes = 3 if self.beta == 0 else 4  # forward, two products backward; the reference
        operations = 2 * passes * (tokens * backbone + scored * HEAD) + 2 * self.prompt * backbone
        moved = 4 * parameters * (self.completion + 7)  # AdamW reads four arrays, writes three
        return operations / flops + moved / bytes_s


WORKS = {
    "0.5b": Work(layers=24, prompt=73, completion=64, generations=2, accumulation=2, beta=0.1),
    "4-layers": Work(layers=4, prompt=128, completion=64, generations=8),
    "4-layers-long-prompt": Work(layers=4, prompt=512, completion=32, generations=8),
    "tiny": Work(layers=1, prompt=8, completion=4, generations=2),
}


def run(side: str, work: Work, steps: int) -> dict[str, Any]:
    """Train and return the seconds of each step but the first, which makes AdamW's memory."""
    from transformers import TrainerCallback

    from . import machine

    if side == "warmd":
        keep_freed_memory()
    seconds: list[float] = []
    of_processor: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter(), time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.started[0])
            of_processor.append(time.process_time() - self.started[1])

    rates = machine.measure()
    with tempfile.TemporaryDirectory() as folder, Peak() as peak, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing", FutureWarning)
        trainer = _trainer(side, work, steps + 1, folder)
        trainer.add_callback(Clock())
        trainer.train()
    parameters = trainer.model.num_parameters()
    return {
        "seconds": seconds[1:],
        "processor_s": of_processor[1:],  # with one thread, the same whoever else is computing
        "private_bytes": peak.private_bytes,
        "resident_bytes": peak.resident_bytes,
        "floor_s": work.floor_s(parameters, rates.flops, rates.bytes_s),
        "flops": rates.flops,
        "bytes_s": rates.bytes_s,
    }


def _trainer(side: str, work: Work, steps: int, folder: str) -> Any:
    import torch
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, PrinterCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.utils import add_fused_lm_head

    from ..packed_trainer import PackedTrainer

    torch.manual_seed(0)
    shape = AutoConfig.for_model("qwen2", **SHAPE, num_hidden_layers=work.layers)
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
    words = random.Random(0)
    prompts = [
        " ".join(str(words.randrange(10, SHAPE["vocab_size"])) for _ in range(work.prompt))
        for _ in range(steps)
    ]
    config = GRPOConfig(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=work.generations // work.accumulation,
        gradient_accumulation_steps=work.accumulation,
        num_generations=work.generations,
        max_completion_length=work.completion,
        temperature=0.7,
        top_p=0.9,
        loss_type="bnpo",
        learning_rate=2e-6,
        # TRL's own defaults are three times slower on a CPU: this is its best.
        bf16=False,
        activation_checkpointing=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    kind = PackedTrainer if side == "warmd" else GRPOTrainer
    trainer: Any = kind(
        model=model,
        args=config,
        processing_class=_tokenizer(),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        reward_funcs=_by_place,
    )
    trainer.remove_callback(PrinterCallback)
    if work.beta:
        torch.manual_seed(0)
        reference = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
        reference = reference.requires_grad_(False).eval()
        if isinstance(trainer, PackedTrainer):
            trainer.take_reference(reference, work.beta)
        else:
            config.beta = trainer.beta = work.beta
            add_fused_lm_head(reference, temperature=trainer.temperature)
            trainer.ref_model = reference
    return trainer


def _by_place(completions: Sequence[str], **_: Any) -> list[float | None]:
    """Give every completion of a group another reward: none is without an advantage."""
    return [float(place) for place, _ in enumerate(completions)]


def _tokenizer() -> Any:
    """Words are numbers, and a word's number is its token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    numbers = {str(number): number for number in range(SHAPE["vocab_size"])}
    core = Tokenizer(models.WordLevel(numbers, unk_token="0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=core, pad_token="0", eos_token="1", padding_side="left")


def keep_freed_memory() -> None:
    """Have glibc keep what is freed, as it does in a work horse."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-3, 2**31 - 1)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


class Peak:
    """The most memory that this process has had while inside, from /proc."""

    def __init__(self) -> None:
        self.private_bytes = 0  # anonymous: no other process could share it
        self.resident_bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._done.wait(SAMPLED_S):
            status = dict(
                line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
            )
            private, resident = (
                1024 * int(status[name].split()[0]) for name in ("RssAnon", "VmRSS")
            )
            self.private_bytes = max(self.private_bytes, private)
            self.resident_bytes = max(self.resident_bytes, resident)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


if __name__ == "__main__":
    side, name, *rest = sys.argv[1:]
    measured = run(side, WORKS[name], int(rest[0]) if rest else 2)
    sys.stdout.write(orjson.dumps(measured).decode() + "\n")
