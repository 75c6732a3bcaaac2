"""Tiny parts for tests, made in code: a model with random weights, a tokenizer, a context."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from warmd.daemon.runs.checkpoints import Checkpoints
from warmd.daemon.runs.saving import Save
from warmd.jobs.context import Context, WarmModel
from warmd.jobs.errors import NotFound
from warmd.jobs.models.vocabulary import Vocabulary

SPECIAL = ("<pad>", "<bos>", "<eos>")
CHARACTERS = "0123456789+-*/=?.,:# \nabcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ{}$%"


def tokenizer() -> Any:
    """One token per character; no special tokens are added, padding is on the left."""
    vocabulary = {text: number for number, text in enumerate((*SPECIAL, *CHARACTERS))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    fast: Any = PreTrainedTokenizerFast
    return fast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        padding_side="left",
    )


def byte_tokenizer() -> Any:
    """One token per byte, after the end token 0."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate(["<eos>", *letters])}
    core = Tokenizer(models.BPE(vocabulary, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast
    made = fast(tokenizer_object=core, eos_token="<eos>")
    made.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return made


# Of a chat, append-only: what was written of a turn stays whatever follows.
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}a:{{ m['content'] }}<eos>\n"
    "{% else %}u:{{ m['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def chatting() -> tuple[Any, Any]:
    """A model with a chat template, and its tokenizer; digits end its turns, so most are short."""
    made, of_chats = model(positions=512), tokenizer()
    made.generation_config.eos_token_id = [2, *range(3, 13)]
    of_chats.chat_template = CHAT_TEMPLATE
    return made, of_chats


def model(seed: int = 0, *, positions: int = 64, dropout: float = 0.0, **other: Any) -> Any:
    """A Llama of two layers and about 10,000 parameters, in eval mode.

    `other`: settings of its configuration that differ.
    """
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": len(SPECIAL) + len(CHARACTERS),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": positions,
        "attention_dropout": dropout,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    llama: Any = LlamaForCausalLM(LlamaConfig(**settings | other))
    return llama.requires_grad_(False).eval()


class Models:
    """One warm model by the name of demo, handed out as it is."""

    def __init__(self, warm: Any) -> None:
        self.warm = warm
        self.path = Path("nowhere")  # nothing of the model may be read from disk again
        self.tokenizer = tokenizer()

    def take(self, name: str) -> WarmModel:
        if name != "demo":
            raise NotFound(f"model: no warm model {name}")
        vocabulary = Vocabulary.of(name, self.warm, self.tokenizer)
        return WarmModel(
            name=name,
            path=self.path,
            model=self.warm,
            tokenizer=self.tokenizer,
            unembedded=tuple(vocabulary.beyond(self.tokenizer)),
        )


class QuickDisk(Checkpoints):
    """Checkpoints that are written by the time that the next step begins."""

    def save(self, *args: Any, **kwargs: Any) -> Save:
        save = super().save(*args, **kwargs)
        save.outcome(patience_s=None)
        return save


class Alone(Context):
    """A context whose job shares its cache with those of its folder only."""

    @property
    def cache_dir(self) -> Path:
        return self.run_dir.parent / "cache"


class Surroundings:
    """A job's context in a folder, with the recorded events and the requests that a test makes."""

    def __init__(self, folder: Path, warm: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.events: list[dict[str, Any]] = []
        self.stop = threading.Event()
        self.stop_at_step: int | None = None
        self.kill_at_step: int | None = None
        self.raise_at_step: dict[int, BaseException] = {}
        self.ctx: Context = Alone(
            job_id="grpo-20261121-184200-x7f2",
            run_dir=folder,
            device="cpu",
            models=Models(warm),
            checkpoints=QuickDisk(
                folder / "checkpoints",
                keep=100,
                on_warning=lambda message: self.emit("warning", message=message),
            ),
            emit=self.emit,
            stop=self,
        )

    def emit(self, type: str, /, *, step: int | None = None, **fields: Any) -> None:
        self.events.append({"type": type, "step": step, **fields})
        if type == "step" and step is not None:
            if step == self.kill_at_step:
                os.kill(os.getpid(), signal.SIGKILL)
            if step in self.raise_at_step:
                raise self.raise_at_step[step]

    def is_set(self) -> bool:
        # It is looked at when a step ends, before the event of that step.
        is_due = self.stop_at_step is not None and self.last_step + 1 >= self.stop_at_step
        return self.stop.is_set() or is_due

    @property
    def last_step(self) -> int:
        return max((event["step"] for event in self.of_type("step")), default=0)

    def of_type(self, type: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == type]


def surroundings(folder: Path, warm: Any = None) -> Surroundings:
    """Make the surroundings of a job in `folder`, by default with a fresh tiny model."""
    return Surroundings(folder, model() if warm is None else warm)


def digit_share(
    prompts: list[str], completions: list[str], answers: list[str | None]
) -> list[float]:
    """Reward digits, which even a random model generates sometimes."""
    return [
        sum(letter.isdigit() for letter in completion) / (len(completion) + 1)
        for completion in completions
    ]


def begins_with_digit(
    prompts: list[str], completions: list[str], answers: list[str | None]
) -> list[float]:
    """Reward 1 or 0, so that many groups have equal rewards."""
    return [float(completion[:1].isdigit()) for completion in completions]
