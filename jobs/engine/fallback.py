"""Models of any other structure: their own forward pass, one sequence after the other.

Sequences still join and leave at any token, and each gets what it would get alone. They share no
computation, and no prefixes. Between two tokens the model's own kind of cache is kept. Where that
does not hold all of a sequence (a model may keep a part in its modules, or have no cache), every
token is computed from the whole sequence.
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
from .image_encoding import Eyes
from .parts import Part

log = logging.getLogger(__name__)

_CACHE_NAMES = ("past_key_values", "cache_params")  # how models call what they keep of a sequence
_ROUNDING = {torch.float64: 1e-3, torch.float32: 1e-3}  # of the range of logits
_ROUNDING_OF_HALF = 0.05


@dataclass(eq=False)
class OwnSequence:
    """The tokens of a sequence so far and the model's cache of them, None where it has none."""

    cache: Any
    ids: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.ids)


class AsIs:
    """Computes logits with the model's own forward."""

    chunk: int | None = None  # prompts are computed whole
    precision = NATIVE

    def __init__(self, model: Any) -> None:
        self._model = model
        self._parameters = inspect.signature(model.forward).parameters
        self._has_axes = Eyes.are_in(model)  # positions of time, row and column
        names = [name for name in _CACHE_NAMES if name in self._parameters]
        self._cache_name = names[0] if names and self._caches_all(names[0]) else None
        self._bytes_alone, self._bytes_each = self._measured()

    def num_bytes(self, capacity: int) -> int:
        """The memory of a sequence, about: as that of a short one has grown."""
        return self._bytes_alone + capacity * self._bytes_each

    def new(self, capacity: int) -> OwnSequence:
        """Return an empty sequence."""
        return OwnSequence(self._new_cache() if self._cache_name else None)

    def fork(self, kv: OwnSequence, length: int, capacity: int) -> OwnSequence:
        """Return a copy of a sequence; `length` is all of it."""
        return OwnSequence(copy.deepcopy(kv.cache), list(kv.ids))

    def settle(self) -> bool:
        """Do nothing: it is as fast as it can be."""
        return False

    def forward(self, parts: Sequence[Part]) -> torch.Tensor:
        """Compute the parts; return the logits after each that wants them: (wanting, V)."""
        wanted = []
        for part in parts:
            logits = self._logits(part, self._cache_name)
            if part.wants_logits:
                wanted.append(logits)
        return torch.stack(wanted) if wanted else torch.empty(0, 0)

    def _logits(self, part: Part, cache_name: str | None) -> torch.Tensor:
        """Append tokens to a sequence; return the logits after the last one: (V,)."""
        kv = part.kv
        how = self._images(part) if self._has_axes else {}
        given = part.ids if cache_name is not None else [*kv.ids, *part.ids]
        kv.ids += part.ids
        if "position_ids" in self._parameters and not self._has_axes:
            # Some count wrong by themselves from a cache on (Bamba).
            places = torch.arange(kv.length - len(given), kv.length, device=self._model.device)
            how["position_ids"] = places[None]
        if "use_cache" in self._parameters:
            how["use_cache"] = cache_name is not None
        if cache_name is not None:
            how[cache_name] = kv.cache
        if "logits_to_keep" in self._parameters:
            how["logits_to_keep"] = 1
        out = self._model(input_ids=torch.tensor([given], device=self._model.device), **how)
        logits: torch.Tensor = out.logits[0, -1]
        return logits

    def _images(self, part: Part) -> dict[str, Any]:
        """The positions of a part on three axes, and the features of its images."""
        begin = part.kv.length + part.offset
        places = part.places
        if places is None:
            places = torch.arange(begin, begin + len(part.ids)).expand(3, -1)
        given: dict[str, Any] = {"position_ids": places[:, None].to(self._model.device)}
        if part.seen:
            levels = zip(*(features for _, features in part.seen), strict=True)
            first, *deep = map(list, levels)
            # What the model's own vision part would return.
            seen = SimpleNamespace(pooler_output=first, deepstack_features=deep)
            given["mm_encoder_outputs"] = {"image": seen}
        return given

    # What the model keeps.

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self._model.config)

    @torch.inference_mode()
    def _caches_all(self, name: str) -> bool:
        """Whether going on from a cache gives the logits of the whole sequence.

        Another sequence comes between: a model may keep something in its modules, which all share.
        """
        whole = self._logits(Part(OwnSequence(None), (1, 2, 3), True), None)
        try:
            sequence, other = OwnSequence(self._new_cache()), OwnSequence(self._new_cache())
            self._logits(Part(sequence, (1, 2), True), name)
            self._logits(Part(other, (4, 3), True), name)
            found = self._logits(Part(sequence, (3,), True), name)
        except Exception as error:  # it takes a cache of another kind, and raises anything
            log.info("%s is computed without a cache: %s", type(self._model).__name__, error)
            return False
        rounding = _ROUNDING.get(whole.dtype, _ROUNDING_OF_HALF)
        is_same = (found - whole).abs().max() <= rounding * (whole.max() - whole.min())
        if not is_same:
            name = type(self._model).__name__
            log.info("%s is computed without a cache: that holds too little", name)
        return bool(is_same)

    @torch.inference_mode()
    def _measured(self) -> tuple[int, int]:
        """The bytes of a sequence: those that it always has, and those of each position."""
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
    """The tensors in a value, through dicts and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
