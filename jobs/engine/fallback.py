"""Fallback runner: runs other architectures with their own forward pass, sequence by sequence.

Scheduling is the same: sequences join and leave at any token and get the same tokens as alone. But
nothing is batched, and prefixes are not cached. Between two tokens the model's own cache is kept.
If the cache does not hold the whole state of a sequence (a model may keep a part in its modules, or
have no cache), each token is computed from the whole sequence.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from ..compute.levels import NATIVE
from .image_encoding import VisionEncoder
from .parts import Part

log = logging.getLogger(__name__)

_CACHE_NAMES = ("past_key_values", "cache_params")  # argument names of caches
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}  # share of the range of logits
_TOLERANCE_16_BIT = 0.05


@dataclass(eq=False)
class FallbackSequence:
    """The tokens of a sequence so far, and the model's cache (None: it has none)."""

    cache: Any
    ids: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.ids)


class FallbackRunner:
    """Computes logits with the model's own `forward`. Same interface as Decoder."""

    chunk: int | None = None  # prompts are computed in one pass
    precision = NATIVE

    def __init__(self, model: Any) -> None:
        self._model = model
        self._parameters = inspect.signature(model.forward).parameters
        self._has_axes = VisionEncoder.is_in(model)  # M-RoPE: positions of time, row and column
        names = [name for name in _CACHE_NAMES if name in self._parameters]
        self._cache_name = names[0] if names and self._is_cache_complete(names[0]) else None
        self._bytes_alone, self._bytes_each = self._measure_bytes()

    def num_bytes(self, capacity: int) -> int:
        """Estimate the bytes of a sequence, from the growth of a short one's cache."""
        return self._bytes_alone + capacity * self._bytes_each

    def new(self, capacity: int) -> FallbackSequence:
        """Return an empty sequence."""
        return FallbackSequence(self._new_cache() if self._cache_name else None)

    def fork(self, kv: FallbackSequence, length: int, capacity: int) -> FallbackSequence:
        """Return a copy of a whole sequence; `length` is its length."""
        return FallbackSequence(copy.deepcopy(kv.cache), list(kv.ids))

    def idle_step(self) -> bool:
        """Return False: there is nothing to do while idle."""
        return False

    def forward(self, parts: Sequence[Part]) -> torch.Tensor:
        """Compute the parts; return the wanted logits, in the order of the parts: (N, V)."""
        wanted = []
        for part in parts:
            logits = self._logits(part, self._cache_name)
            if part.num_logits:
                wanted.append(logits)
        return torch.cat(wanted) if wanted else torch.empty(0, 0)

    def _logits(self, part: Part, cache_name: str | None) -> torch.Tensor:
        """Append tokens to a sequence; return the logits wanted, at least the last: (N, V)."""
        count = max(part.num_logits, 1)
        kv = part.kv
        how = self._images(part) if self._has_axes else {}
        given = part.ids if cache_name is not None else [*kv.ids, *part.ids]
        kv.ids += part.ids
        if "position_ids" in self._parameters and not self._has_axes:
            # Some models count positions wrongly after a cache (Bamba).
            places = torch.arange(kv.length - len(given), kv.length, device=self._model.device)
            how["position_ids"] = places[None]
        if "use_cache" in self._parameters:
            how["use_cache"] = cache_name is not None
        if cache_name is not None:
            how[cache_name] = kv.cache
        if "logits_to_keep" in self._parameters:
            how["logits_to_keep"] = count
        out = self._model(input_ids=torch.tensor([given], device=self._model.device), **how)
        logits: torch.Tensor = out.logits[0, -count:]
        return logits

    def _images(self, part: Part) -> dict[str, Any]:
        """Return M-RoPE positions and image features as arguments of the model's forward."""
        begin = part.kv.length + part.offset
        places = part.positions
        if places is None:
            places = torch.arange(begin, begin + len(part.ids)).expand(3, -1)
        given: dict[str, Any] = {"position_ids": places[:, None].to(self._model.device)}
        if part.features:
            levels = zip(*(features for _, features in part.features), strict=True)
            first, *deep = map(list, levels)
            # The output of the model's own vision tower.
            seen = SimpleNamespace(pooler_output=first, deepstack_features=deep)
            given["mm_encoder_outputs"] = {"image": seen}
        return given

    # --- The cache ----------------------------------------------------------------------------

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self._model.config)

    @torch.inference_mode()
    def _is_cache_complete(self, name: str) -> bool:
        """Whether decoding from the cache gives the logits of a full pass, to rounding.

        Another sequence is computed in between: a model may keep state in its modules.
        """
        whole = self._logits(Part(FallbackSequence(None), (1, 2, 3), True), None)
        try:
            sequence, other = (
                FallbackSequence(self._new_cache()),
                FallbackSequence(self._new_cache()),
            )
            self._logits(Part(sequence, (1, 2), True), name)
            self._logits(Part(other, (4, 3), True), name)
            found = self._logits(Part(sequence, (3,), True), name)
        except Exception as error:  # any error: the model needs another kind of cache
            log.info("%s is computed without a cache: %s", type(self._model).__name__, error)
            return False
        rounding = _TOLERANCE.get(whole.dtype, _TOLERANCE_16_BIT)
        is_same = (found - whole).abs().max() <= rounding * (whole.max() - whole.min())
        if not is_same:
            name = type(self._model).__name__
            log.info("%s is computed without a cache: the cache lacks a part of its state", name)
        return bool(is_same)

    @torch.inference_mode()
    def _measure_bytes(self) -> tuple[int, int]:
        """Return the bytes of a sequence's cache: the constant part, and those per position."""
        if self._cache_name is None:
            return 0, 0
        sequence = self.new(3)
        self._logits(Part(sequence, (1, 2), True), self._cache_name)
        of_two = _num_bytes(sequence.cache)
        self._logits(Part(sequence, (3,), True), self._cache_name)
        each = _num_bytes(sequence.cache) - of_two
        return of_two - 2 * each, each


def _num_bytes(cache: Any) -> int:
    return sum(tensor.nbytes for layer in cache.layers for tensor in _tensors(vars(layer)))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, also in nested dicts and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
