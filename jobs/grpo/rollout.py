"""Generation of the completions of a GRPO step: one prefill per prompt, early exit per sequence.

`generate` samples from what computes logits: `Sequences` of the engine's runners, or a
`PaddedBatch` of a model's own forward pass. Imports torch and transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.generation import logits_process

from ..context import Ranks
from ..engine.low_rank import Adapter
from ..engine.parts import Part
from ..engine.sampling import BatchSampler, entropy, logp
from ..models.adapters import unwrapped
from .trajectories import Segment

# (ids (B, T) padded on the left, logits (B, V)) to logits, as those of transformers.
Processor = Callable[[Tensor, Tensor], Tensor]

TOLERANCE = 1e-3  # share of the range of logits within which two computations of them are equal


class Logits(Protocol):
    """Computes the logits of a batch of sequences, token by token."""

    def read(self, prompts: Sequence[Sequence[int]], room: int) -> Tensor:
        """Begin a sequence for each prompt, for `room` more tokens; return logits (B, V)."""

    def append(self, tokens: Tensor, kept: Tensor) -> Tensor:
        """Keep some sequences, kept: (B,) bool; append a token to each; return logits (B', V)."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn.

    Entropies and log-probabilities are at `temperature`, over the whole vocabulary, before top-k
    and top-p. `processors` change the logits before the sampler; `pad_id` is for their ids.
    """

    sampler: BatchSampler
    temperature: float
    max_new_tokens: int
    end_ids: Sequence[int]
    processors: Sequence[Processor] = ()
    pad_id: int = 0
    wants_logps: bool = False


@torch.no_grad()
def generate(
    logits_of: Logits,
    prompts: Sequence[Sequence[int]],
    uniform: NDArray[np.float64],
    how: Sampling,
    *,
    device: torch.device,
) -> list[Segment]:
    """Return one completion per prompt.

    `uniform`: (B, max_new_tokens) in [0, 1), the number that decides each token, so that a
    completion does not depend on the others. Raises NotFiniteError.
    """
    completions = [Segment() for _ in prompts]
    rows = torch.arange(len(prompts))  # indices of the unfinished completions
    numbers = torch.from_numpy(uniform).to(device)
    ends = torch.tensor(list(how.end_ids), device=device)
    history = _padded(prompts, how.pad_id, device) if how.processors else None
    logits = logits_of.read(prompts, how.max_new_tokens).float()
    for step in range(how.max_new_tokens):
        scored, drawn = logits, numbers[rows, step]
        if history is not None:
            nats = entropy(logits, how.temperature)
            for process in how.processors:
                logits = process(history, logits)
            tokens, _ = how.sampler.draw(logits, drawn)
        else:
            tokens, nats = how.sampler.draw(logits, drawn)
        for row, *written in zip(rows.tolist(), tokens.tolist(), nats.tolist(), strict=True):
            completions[row].ids.append(written[0])
            completions[row].entropies.append(written[1])
        if how.wants_logps:
            found = logp(scored, how.temperature, tokens).tolist()
            for row, value in zip(rows.tolist(), found, strict=True):
                completions[row].logps.append(value)
        going = ~torch.isin(tokens, ends)
        if step == how.max_new_tokens - 1 or not bool(going.any()):
            break
        rows, tokens = rows[going.cpu()], tokens[going]
        if history is not None:
            history = torch.cat([history[going], tokens[:, None]], dim=1)
        logits = logits_of.append(tokens, going).float()
    return completions


def generate_in_ranks(
    logits_of: Logits,
    prompts: Sequence[Sequence[int]],
    uniform: NDArray[np.float64],
    how: Sampling,
    *,
    device: torch.device,
    ranks: Ranks,
) -> list[Segment]:
    """Return the result of `generate`; each rank generates a contiguous part and gets all."""
    own = run_of(len(prompts), ranks)
    completions = []
    if own.start < own.stop:
        completions = generate(logits_of, prompts[own], uniform[own], how, device=device)
    if ranks.size == 1:
        return completions
    written: list[Any] = [[one.ids, one.entropies, one.logps] for one in completions]
    return [Segment(*fields) for part in ranks.gather(written) for fields in part]


def run_of(count: int, ranks: Ranks) -> slice:
    """Return a rank's contiguous part of `count` items; parts are nearly equal, in rank order."""
    return slice(count * ranks.rank // ranks.size, count * (ranks.rank + 1) // ranks.size)


def split_processors(
    processors: Sequence[Any], sampler: BatchSampler
) -> tuple[list[Any], BatchSampler]:
    """Split the logits processors of transformers from temperature, top-k and top-p.

    The sampler applies those three faster, unless another processor follows one of them.
    """
    known = (
        logits_process.TemperatureLogitsWarper,
        logits_process.TopKLogitsWarper,
        logits_process.TopPLogitsWarper,
    )
    is_known = [isinstance(process, known) for process in processors]
    if is_known != sorted(is_known):
        return list(processors), BatchSampler()
    return [p for p, does in zip(processors, is_known, strict=True) if not does], sampler


class Sequences:
    """Sequences of a runner of the engine (Decoder, FallbackRunner), each with its own KV cache.

    Equal prompts are read once. `adapter`: the LoRA adapter of all tokens.
    """

    def __init__(self, runner: Any, adapter: Adapter | None = None) -> None:
        self._runner = runner
        self._adapter = adapter
        self._caches: list[Any] = []

    def read(self, prompts: Sequence[Sequence[int]], room: int) -> Tensor:
        places = {prompt: place for place, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        first = [self._runner.new(len(prompt) + room) for prompt in places]
        logits = self._forward(first, list(places))
        of_rows = [places[tuple(prompt)] for prompt in prompts]
        self._caches = []
        for row, place in enumerate(of_rows):
            kv, prompt = first[place], prompts[row]
            if place in of_rows[row + 1 :]:  # the last one of a prompt takes the cache itself
                kv = self._runner.fork(kv, len(prompt), len(prompt) + room)
            self._caches.append(kv)
        return logits[of_rows]

    def append(self, tokens: Tensor, kept: Tensor) -> Tensor:
        self._caches = [kv for kv, stays in zip(self._caches, kept.tolist(), strict=True) if stays]
        return self._forward(self._caches, [(token,) for token in tokens.tolist()])

    def _forward(self, caches: Sequence[Any], ids: Sequence[Sequence[int]]) -> Tensor:
        parts = [
            Part(kv, tokens, True, adapter=self._adapter)
            for kv, tokens in zip(caches, ids, strict=True)
        ]
        logits: Tensor = self._runner.forward(parts)
        return logits


class PaddedBatch:
    """Sequences as one batch of a model's own forward pass and cache, prompts padded on the left.

    Every token has its position; ended sequences stay in the batch, and nothing is read of them.
    """

    def __init__(self, model: Any, pad_id: int) -> None:
        self._model = model
        self._pad_id = pad_id
        self._cache: Any = None
        self._mask = torch.empty(0)  # (B, T) int64 of the tokens so far
        self._going = torch.empty(0)  # (B',): the rows of the sequences that are kept
        self._takes = inspect.signature(unwrapped(model).forward).parameters
        # Its name differs between versions of transformers.
        names = ("cache", "past_key_values")
        self._cache_name = next((name for name in names if name in self._takes), None)

    @torch.no_grad()
    def is_exact(self) -> bool:
        """Whether the model computes a padded batch as each sequence alone, to rounding."""
        if self._cache_name is None or not {"attention_mask", "position_ids"} <= self._takes.keys():
            return False
        prompts, ends = ([1, 2], [3, 2, 1, 4]), torch.tensor([5, 1], device=self._model.device)
        stays = torch.tensor([True, True])
        try:
            found = [self.read(prompts, 1), self.append(ends, stays)]
            for row, prompt in enumerate(prompts):
                one = slice(row, row + 1)
                alone = [self.read([prompt], 1), self.append(ends[one], stays[one])]
                for batch, single in zip(found, alone, strict=True):
                    off = (batch[row] - single[0]).abs().max()
                    if not bool(off <= TOLERANCE * (single.max() - single.min())):
                        return False
        except Exception:  # any error: the model needs another kind of cache
            return False
        return True

    def read(self, prompts: Sequence[Sequence[int]], room: int) -> Tensor:
        device = self._model.device
        longest = max(map(len, prompts))
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        places = torch.arange(longest, device=device)[None]
        self._mask = (places >= longest - lengths[:, None]).long()
        self._going = torch.arange(len(prompts), device=device)
        self._cache = None
        return self._forward(_padded(prompts, self._pad_id, device))

    def append(self, tokens: Tensor, kept: Tensor) -> Tensor:
        self._going = self._going[kept]
        ids = torch.full((len(self._mask), 1), self._pad_id, device=tokens.device)
        ids[self._going, 0] = tokens
        self._mask = torch.cat([self._mask, torch.ones_like(ids)], 1)
        return self._forward(ids)[self._going]

    def _forward(self, ids: Tensor) -> Tensor:
        assert self._cache_name is not None
        more = {self._cache_name: self._cache}
        if "logits_to_keep" in self._takes:
            more["logits_to_keep"] = 1
        output = self._model(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=(self._mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :],
            use_cache=True,
            **more,
        )
        self._cache = output[self._cache_name]
        logits: Tensor = output.logits[:, -1]
        return logits


def _padded(prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> Tensor:
    longest = max(map(len, prompts))
    rows = [[pad_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    return torch.tensor(rows, device=device)
