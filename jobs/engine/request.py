"""What a job asks of an engine, and what it gets back. Knows neither jobs nor torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 1.0  # 0: the likeliest
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0

    @property
    def is_penalised(self) -> bool:
        return self.frequency_penalty != 0 or self.presence_penalty != 0


@dataclass(frozen=True, eq=False)
class Picture:
    """An image in a prompt, which has `num_tokens` tokens for it from position `start` on."""

    start: int
    num_tokens: int
    grid: tuple[int, int, int]  # of patches: times, rows, columns
    patches: Any  # (patches, values) float32, as the model's image processor makes them
    digest: int  # of what they were made from: 63 bits
    size: tuple[int, int] = (0, 0)  # width and height of the image as it came


@dataclass(frozen=True)
class Piece:
    """Some text of one choice; the last one of a choice says why it ends."""

    index: int
    text: str
    tokens: int
    finish_reason: str | None = None  # "stop", "length", "cancelled"


@dataclass
class Measures:
    """Where the time of a generation went. Written in its engine's turns."""

    cached_tokens: int = 0
    queued_s: float = 0.0
    vision_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True)
class End:
    """Nothing comes after it. `error` is what went wrong in the engine."""

    error: BaseException | None = None


@dataclass(kw_only=True, eq=False)
class Generation:
    """One prompt and its completions. Given to an engine once."""

    ids: Sequence[int]  # of the prompt, at least one
    sampling: Sampling
    pictures: Sequence[Picture] = ()  # in their order
    num_choices: int = 1
    max_tokens: int
    stop: tuple[str, ...] = ()
    grammar: Any = None  # engine.grammar.Grammar that each completion keeps to
    is_cancelled: Callable[[], bool] = field(default=lambda: False)  # looked at for every token
    pieces: SimpleQueue[Piece | End] = field(default_factory=SimpleQueue)
    measures: Measures = field(default_factory=Measures)
