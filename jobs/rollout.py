"""Write a group of completions per prompt: every prompt is read once, and rows leave when done.

The loop of `transformers.generate`, for models that take packs: the prompts are read in one pass
without padding, the keys and values of a prompt are copied to the rows of its group, and a row that
has ended is computed no further. Imports torch and transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.generation import logits_process

from .packing import Pack, Row, hidden_states, packed_attention
from .sampling import Sampler, entropy, logp

# (ids (B, T) padded on the left, logits (B, V)) to logits, as those of transformers.
Processor = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Completion:
    """What was written after one prompt."""

    ids: list[int] = field(default_factory=list)  # to the first end token, that one included
    entropies: list[float] = field(default_factory=list)  # in nats, of all tokens at each place
    logps: list[float] = field(default_factory=list)  # of its tokens, where they are asked for


@torch.no_grad()
def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    sampler: Sampler,
    temperature: float,
    max_new_tokens: int,
    end_ids: Sequence[int],
    processors: Sequence[Processor] = (),
    pad_id: int = 0,
    wants_logps: bool = False,
) -> list[Completion]:
    """Return one completion for each prompt; those of equal prompts share the reading of it.

    For each token it takes one number for every prompt from the global generator of the model's
    device, also for rows that have ended: what a row becomes does not depend on the others.
    `temperature` is that of the entropies and the log-probabilities, also where a processor does
    what the sampler would; both are of all tokens, before top-k and top-p.
    Raises NotFiniteError.
    """
    device = model.device
    completions = [Completion() for _ in prompts]
    rows = torch.arange(len(prompts), device=device)  # which completions are still being written
    ends = torch.tensor(list(end_ids), device=device)
    history = _padded(prompts, pad_id, device) if processors else None
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    with packed_attention(model):
        states, cache = _read(model, prompts, room=max_new_tokens)
        positions = torch.tensor([[len(prompt)] for prompt in prompts], device=device)
        for step in range(max_new_tokens):
            logits = scored = head(states).float()
            uniform = torch.rand(len(prompts), dtype=torch.float64, device=device)[rows]
            if history is not None:
                nats = entropy(logits, temperature)
                for process in processors:
                    logits = process(history, logits)
                tokens, _ = sampler.draw(logits, uniform)
            else:
                tokens, nats = sampler.draw(logits, uniform)
            for row, *written in zip(rows.tolist(), tokens.tolist(), nats.tolist(), strict=True):
                completions[row].ids.append(written[0])
                completions[row].entropies.append(written[1])
            if wants_logps:
                found = logp(scored, temperature, tokens).tolist()
                for row, value in zip(rows.tolist(), found, strict=True):
                    completions[row].logps.append(value)
            going = ~torch.isin(tokens, ends)
            if step == max_new_tokens - 1 or not bool(going.any()):
                break
            if not bool(going.all()):
                rows, tokens, positions = rows[going], tokens[going], positions[going]
                history = None if history is None else history[going]
                cache.keep(going)
            if history is not None:
                history = torch.cat([history, tokens[:, None]], dim=1)
            states = hidden_states(model, embed(tokens[:, None]), positions, cache)[:, 0]
            cache.used += 1
            positions = positions + 1
    return completions


def ways(processors: Sequence[Any], sampler: Sampler) -> tuple[list[Any], Sampler]:
    """Split transformers' list: what must be asked each time, and what the sampler does faster.

    When something comes after temperature, top-k or top-p, all of it is left to the list.
    """
    known = (
        logits_process.TemperatureLogitsWarper,
        logits_process.TopKLogitsWarper,
        logits_process.TopPLogitsWarper,
    )
    is_known = [isinstance(process, known) for process in processors]
    if is_known != sorted(is_known):
        return list(processors), Sampler()
    return [p for p, does in zip(processors, is_known, strict=True) if not does], sampler


class _Cache:
    """The keys and values of every row, right-aligned at the ends of the prompts."""

    def __init__(self, lengths: Sequence[int], room: int, device: torch.device) -> None:
        self.lengths = lengths
        self.longest = max(lengths)
        self.used = self.longest
        self.size = self.longest + room
        self.device = device
        self.keys: list[Tensor] = []  # of each layer: (B, key heads, size, D)
        self.values: list[Tensor] = []
        self._padding: Tensor | None = None  # (B, 1, 1, size), -inf where a row has nothing
        if min(lengths) < self.longest:
            starts = self.longest - torch.tensor(lengths, device=device)[:, None]
            is_padding = torch.arange(self.size, device=device)[None] < starts
            padding = torch.zeros(is_padding.shape, device=device)
            self._padding = padding.masked_fill_(is_padding, -torch.inf)[:, None, None]

    def fill(self, key: Tensor, value: Tensor, places: Sequence[slice]) -> None:
        """Take a layer's (1, key heads, N, D) of the packed prompts, one place for each row."""
        for states, layers in ((key, self.keys), (value, self.values)):
            store = states.new_zeros((len(places), states.shape[1], self.size, states.shape[3]))
            for row, place in enumerate(places):
                length = place.stop - place.start
                store[row, :, self.longest - length : self.longest] = states[0, :, place]
            layers.append(store)

    def keep(self, going: Tensor) -> None:
        """Drop the rows that are not going on: (B,) bool."""
        self.keys = [keys[going] for keys in self.keys]
        self.values = [values[going] for values in self.values]
        if self._padding is not None:
            self._padding = self._padding[going]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Store one more token of each row and return what it sees."""
        at = slice(self.used, self.used + 1)
        self.keys[layer][:, :, at] = key
        self.values[layer][:, :, at] = value
        batch, heads, _, size = query.shape
        seen = F.scaled_dot_product_attention(
            query.reshape(batch, key.shape[1], -1, size),  # heads of one key head: queries on it
            self.keys[layer][:, :, : at.stop],
            self.values[layer][:, :, : at.stop],
            attn_mask=None if self._padding is None else self._padding[..., : at.stop],
            scale=scale,
        )
        return seen.reshape(batch, 1, heads, size)


class _Reading:
    """The pass over the prompts, which fills the cache on its way."""

    def __init__(self, pack: Pack, cache: _Cache, places: Sequence[slice]) -> None:
        self.pack, self.cache, self.places = pack, cache, places

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        self.cache.fill(key, value, self.places)
        return self.pack.attend(layer, query, key, value, scale)


def _read(model: Any, prompts: Sequence[Sequence[int]], *, room: int) -> tuple[Tensor, _Cache]:
    """Return the hidden state after each prompt, (B, H), and their keys and values."""
    places: dict[tuple[int, ...], slice] = {}
    for prompt in map(tuple, prompts):
        start = sum(map(len, places))
        places.setdefault(prompt, slice(start, start + len(prompt)))
    of_rows = [places[tuple(prompt)] for prompt in prompts]
    pack = Pack([Row(0, prompt, ()) for prompt in places], model.device)
    cache = _Cache([len(prompt) for prompt in prompts], room, model.device)
    embedded = model.get_input_embeddings()(pack.ids)
    states = hidden_states(model, embedded, pack.positions, _Reading(pack, cache, of_rows))
    return states[0, [place.stop - 1 for place in of_rows]], cache


def _padded(prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> Tensor:
    longest = max(map(len, prompts))
    rows = [[pad_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    return torch.tensor(rows, device=device)
