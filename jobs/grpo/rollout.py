"""Generation of the completions of a GRPO step: one prefill per prompt, early exit per sequence.

The loop of `transformers.generate` on the engine's decoder: one packed prefill without padding, the
keys and values of a prompt are copied to the sequences of its group, and a sequence leaves the
batch at its end token. Imports torch and transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.generation import logits_process

from ..context import ONE_PROCESS, Ranks
from ..engine.decoder import Decoder
from ..engine.low_rank import Adapted
from ..engine.sampling import BatchSampler, entropy, logp
from ..packing.shared_prompts import Pack, Sample

# (ids (B, T) padded on the left, logits (B, V)) to logits, as those of transformers.
Processor = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Completion:
    """A generated completion."""

    ids: list[int] = field(default_factory=list)  # up to and including the first end token
    entropies: list[float] = field(
        default_factory=list
    )  # in nats, of the distribution at each token
    logps: list[float] = field(default_factory=list)  # of its tokens, if requested


@torch.no_grad()
def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    sampler: BatchSampler,
    temperature: float,
    max_new_tokens: int,
    end_ids: Sequence[int],
    processors: Sequence[Processor] = (),
    pad_id: int = 0,
    wants_logps: bool = False,
    adapted: Sequence[Adapted] = (),
    ranks: Ranks = ONE_PROCESS,
) -> list[Completion]:
    """Return one completion per prompt; equal prompts share one prefill.

    With several `ranks`, each generates a contiguous part and returns the completions of all. Each
    decode step draws one random number per prompt from the global generator of the device,
    also for ended sequences, so that a completion does not depend on the others. Entropies and
    log-probabilities are at `temperature`, over the whole vocabulary, before top-k and top-p.
    `adapted`: the LoRA adapter of all tokens, if there is one.
    Raises NotFiniteError.
    """
    device = decoder.embedding.device
    every = len(prompts)
    own = run_of(every, ranks)
    prompts = prompts[own]
    completions = [Completion() for _ in prompts]
    rows = torch.arange(len(prompts), device=device)  # indices of the unfinished completions
    drawn = 0
    ends = torch.tensor(list(end_ids), device=device)
    history = _padded(prompts, pad_id, device) if processors else None
    states, cache = _read(decoder, prompts, room=max_new_tokens, adapted=adapted)
    positions = torch.tensor([len(prompt) for prompt in prompts])
    for step in range(max_new_tokens):
        logits = scored = decoder.logits(states).float()
        uniform = torch.rand(every, dtype=torch.float64, device=device)[own][rows]
        drawn += 1
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
            rows, tokens, positions = rows[going], tokens[going], positions[going.cpu()]
            history = None if history is None else history[going]
            cache.keep(going)
        if history is not None:
            history = torch.cat([history, tokens[:, None]], dim=1)
        angles = decoder.rope.at(positions)
        embedded = decoder.embedding[tokens]
        states = decoder.hidden(embedded, *angles, cache.attend, adapted=adapted)
        cache.used += 1
        positions = positions + 1
    if ranks.size == 1:
        return completions
    written = [[one.ids, one.entropies, one.logps] for one in completions]
    found = ranks.gather({"drawn": drawn, "completions": written})
    for _ in range(max(part["drawn"] for part in found) - drawn):
        torch.rand(every, dtype=torch.float64, device=device)  # keeps all generators equal
    return [Completion(*fields) for part in found for fields in part["completions"]]


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


class _Cache:
    """The KV cache of all sequences, right-aligned at the ends of the prompts."""

    def __init__(self, decoder: Decoder, lengths: Sequence[int], room: int) -> None:
        device = decoder.embedding.device
        self._decoder = decoder
        self.longest = max(lengths)
        self.used = self.longest
        self.size = self.longest + room
        self.keys: list[Tensor] = []  # of each layer: (B, key heads, size, D)
        self.values: list[Tensor] = []
        self._padding: Tensor | None = None  # (B, 1, 1, size), -inf at empty places of a row
        if min(lengths) < self.longest:
            starts = self.longest - torch.tensor(lengths, device=device)[:, None]
            is_padding = torch.arange(self.size, device=device)[None] < starts
            padding = torch.zeros(is_padding.shape, device=device)
            self._padding = padding.masked_fill_(is_padding, -torch.inf)[:, None, None]

    def fill(self, key: Tensor, value: Tensor, places: Sequence[slice]) -> None:
        """Copy a layer's (1, key heads, N, D) of the packed prompts to the place of each row."""
        for states, layers in ((key, self.keys), (value, self.values)):
            store = states.new_zeros((len(places), states.shape[1], self.size, states.shape[3]))
            for row, place in enumerate(places):
                length = place.stop - place.start
                store[row, :, self.longest - length : self.longest] = states[0, :, place]
            layers.append(store)

    def keep(self, going: Tensor) -> None:
        """Keep only the rows that are still being generated: (B,) bool."""
        self.keys = [keys[going] for keys in self.keys]
        self.values = [values[going] for values in self.values]
        if self._padding is not None:
            self._padding = self._padding[going]

    def attend(self, qkv: Tensor, layer: int) -> Tensor:
        """Store one more token of each row and return its attention; see `parts.Attend`."""
        shape = self._decoder.shape
        heads, key_heads, size = shape.heads, shape.kv_heads, shape.head_dim
        query, key, value = torch.split(qkv, [heads, key_heads, key_heads], dim=1)
        self.keys[layer][:, :, self.used] = key
        self.values[layer][:, :, self.used] = value
        seen = slice(self.used + 1)
        attended = F.scaled_dot_product_attention(
            query.reshape(len(qkv), key_heads, -1, size),  # heads of one key head: queries on it
            self.keys[layer][:, :, seen],
            self.values[layer][:, :, seen],
            attn_mask=None if self._padding is None else self._padding[..., seen],
            scale=shape.scale,
        )
        return attended.reshape(len(qkv), heads, size)


def _read(
    decoder: Decoder, prompts: Sequence[Sequence[int]], *, room: int, adapted: Sequence[Adapted]
) -> tuple[Tensor, _Cache]:
    """Return the hidden state after each prompt, (B, H), and their keys and values."""
    places: dict[tuple[int, ...], slice] = {}
    for prompt in map(tuple, prompts):
        start = sum(map(len, places))
        places.setdefault(prompt, slice(start, start + len(prompt)))
    of_rows = [places[tuple(prompt)] for prompt in prompts]
    pack = Pack([Sample(0, prompt, ()) for prompt in places], decoder.embedding.device)
    cache = _Cache(decoder, [len(prompt) for prompt in prompts], room)

    shape = decoder.shape

    def attend(qkv: Tensor, layer: int) -> Tensor:
        states = qkv.transpose(0, 1)[None]  # (1, heads, N, D)
        query, key, value = torch.split(states, [shape.heads, *2 * [shape.kv_heads]], dim=1)
        cache.fill(key, value, of_rows)
        return pack.attend(layer, query, key, value, shape.scale)[0]

    rotation = decoder.rope.at(pack.positions[0].cpu())
    states = decoder.hidden(decoder.embedding[pack.ids[0]], *rotation, attend, adapted=adapted)
    return states[[place.stop - 1 for place in of_rows]], cache


def _padded(prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> Tensor:
    longest = max(map(len, prompts))
    rows = [[pad_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    return torch.tensor(rows, device=device)
