"""Requests to an engine and their results. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple

from .thinking import Thinking


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_p: float = 0.0  # minimum probability, relative to that of the most likely token
    bias: tuple[tuple[int, float], ...] = ()  # token ids and their logit biases
    seed: int = 0

    @property
    def is_penalized(self) -> bool:
        return self.frequency_penalty != 0 or self.presence_penalty != 0


class Patches:
    """The pixel patches of an image, (patches, values) float32, from the model's image processor.

    They take 4 kB per token and are used only while the image is encoded. A dialogue holds its
    images for many requests: `release` frees the patches, and a later call makes them again.
    """

    def __init__(self, made: Any, make: Callable[[], Any]) -> None:
        """`made`: the patches; `make` returns equal ones."""
        self._made = made
        self._make = make

    def __call__(self) -> Any:
        if self._made is None:
            self._made = self._make()
        return self._made

    def release(self) -> None:
        """Free the memory of the patches."""
        self._made = None


@dataclass(frozen=True, eq=False)
class Image:
    """An image in a prompt, with `num_tokens` placeholder tokens from position `start` on."""

    start: int
    num_tokens: int
    grid: tuple[int, int, int]  # patches: time, rows, columns
    patches: Patches
    digest: int  # of the image file and its resizing: 63 bits
    size: tuple[int, int] = (0, 0)  # width and height before resizing, in pixels


class TokenLogprob(NamedTuple):
    """The log-probability of a token, and of the most likely tokens at its position."""

    token: int
    logprob: float  # natural logarithm
    top: tuple[tuple[int, float], ...] = ()  # token and logprob, the most likely first


@dataclass(frozen=True)
class Piece:
    """A text delta of one completion. The last one of a completion has its finish reason."""

    index: int
    text: str
    ids: Sequence[int]  # token ids drawn since the previous piece, including an end token
    finish_reason: str | None = None  # "stop", "length", "cancelled"
    end_token: int | None = None  # the token that ended the completion
    # Where they are requested: of the tokens whose whole text was emitted, and in the last piece of
    # all others. An entry never precedes its text, which may be cut at a stop string.
    logprobs: tuple[TokenLogprob, ...] = ()
    # UTF-8 bytes of the text of `logprobs` that are in the completion; None: all of them.
    kept_bytes: int | None = None


@dataclass
class RequestStats:
    """Timings of a request, in seconds, and numbers of tokens. Written by the engine."""

    cached_tokens: int = 0  # of the prompt, from the prefix cache
    drafted_tokens: int = 0  # computed to verify them, see speculation.py
    accepted_tokens: int = 0  # of them, those that were drawn
    queued_s: float = 0.0
    vision_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True)
class End:
    """The end of a request. `error`: the engine's, if it failed."""

    error: BaseException | None = None


@dataclass(kw_only=True, eq=False)
class Request:
    """A prompt and how to complete it. Submitted to an engine once."""

    ids: Sequence[int]  # prompt tokens, at least one
    sampling: Sampling
    images: Sequence[Image] = ()  # in prompt order
    num_completions: int = 1
    max_tokens: int  # 0: the prompt is only scored
    stop: tuple[str, ...] = ()
    keeps_special: bool = False  # whether special tokens have a text
    owner: Hashable = None  # the job: requests of one owner share what the engine gives to it
    adapter: Any = None  # engine.low_rank.Adapter of all its tokens; None: the model's own
    num_top: int | None = None  # number of most likely tokens in logprobs; None: no logprobs
    # The first prompt token whose log-probability is wanted, from 1 on; None: no prompt token.
    scored_from: int | None = None
    grammar: Any = None  # engine.grammar.Grammar that constrains every completion
    # Not applied where `grammar` forbids the end-of-thinking token.
    thinking: Thinking | None = None
    is_canceled: Callable[[], bool] = field(default=lambda: False)  # polled at every step
    pieces: SimpleQueue[Piece | End] = field(default_factory=SimpleQueue)
    stats: RequestStats = field(default_factory=RequestStats)
    scores: list[TokenLogprob] = field(default_factory=list)  # of prompt tokens; by the engine

    @property
    def computed(self) -> Sequence[int]:
        """The prompt tokens that the model takes.

        Where the prompt is only scored, its last token is predicted, but predicts none.
        """
        is_only_scored = self.scored_from is not None and not self.max_tokens
        return self.ids[:-1] if is_only_scored and len(self.ids) > 1 else self.ids

    @property
    def computed_from(self) -> int:
        """The first prompt token that must be computed, though a cached prefix may be longer.

        Its logits, and those of the tokens after it, are needed.
        """
        last = len(self.computed) - 1
        return last if self.scored_from is None else min(self.scored_from - 1, last)
