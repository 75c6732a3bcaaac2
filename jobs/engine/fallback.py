"""Fallback runner: runs other architectures with their own forward pass, sequence by sequence.

Scheduling is the same: sequences join and leave at any token and get the same tokens as alone. But
nothing is batched, and prefixes are not cached. Between two tokens the model's own cache is kept.
If the cache does not hold the whole state of a sequence (a model may keep a part in its modules, or
have no cache), each token is computed from the whole sequence; the log and the jobs say so.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer
from transformers.utils.generic import ModelOutput

from ..compute.levels import NATIVE
from .image_encoding import VisionEncoder
from .parts import Part

log = logging.getLogger(__name__)

_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}  # share of the range of logits
_TOLERANCE_16_BIT = 0.05


@dataclass(eq=False)
class FallbackSequence:
    """The tokens of a sequence so far, and the model's cache (None: not created yet, or never)."""

    cache: Any = None
    ids: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.ids)


@dataclass
class _ImageFeatures(ModelOutput):
    """Image features in the form that the model's own vision tower returns."""

    pooler_output: Any = None
    deepstack_features: Any = None


class FallbackRunner:
    """Computes logits with the model's own `forward`. Same interface as Decoder."""

    chunk: int | None = None  # prompts are computed in one pass
    forks = True
    verifies_drafts = False
    precision = NATIVE
    uncached: str | None  # why each token is computed from the whole sequence (None: it is not)

    def __init__(self, model: Any) -> None:
        self._model = model
        self._parameters = inspect.signature(model.forward).parameters
        # Some models pass the option on as one of their keyword arguments.
        self._takes_use_cache = "use_cache" in self._parameters or any(
            one.kind is one.VAR_KEYWORD for one in self._parameters.values()
        )
        self._has_axes = VisionEncoder.is_in(model)  # M-RoPE: positions of time, row and column
        self._cache_name, self.uncached = self._find_cache()
        if self.uncached is not None:
            log.warning("%s", self.uncached)
        self._bytes_alone, self._bytes_each = self._measure_bytes()

    def num_bytes(self, capacity: int) -> int:
        """Estimate the bytes of a sequence, from the growth of a short one's cache."""
        return self._bytes_alone + capacity * self._bytes_each

    def new(self, capacity: int) -> FallbackSequence:
        """Return an empty sequence."""
        return FallbackSequence()

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
            logits = [self._logits(step, self._cache_name) for step in self._steps(part)]
            if part.num_logits:
                wanted.append(torch.cat(logits)[-part.num_logits :])
        return torch.cat(wanted) if wanted else torch.empty(0, 0)

    def _steps(self, part: Part) -> list[Part]:
        """Return a part as what can be appended to its sequence in one pass each."""
        if not part.kv.length or self._cache_name is None or _is_of_attention(part.kv.cache):
            return [part]
        # Several tokens begin the state of recurrent layers anew in some models (Mamba).
        return [replace(part, ids=(token,)) for token in part.ids]

    def _logits(self, part: Part, cache_name: str | None) -> torch.Tensor:
        """Append tokens to a sequence; return the logits wanted, at least the last: (N, V).

        `cache_name`: the argument that takes the cache (None: the whole sequence is computed).
        """
        count = max(part.num_logits, 1)
        cache: dict[str, Any] | None = None
        if cache_name is not None:
            cache = {} if part.kv.cache is None else {cache_name: part.kv.cache}
        out = self._output(part, count, cache)
        if cache_name is not None:
            part.kv.cache = out[cache_name]
        logits: torch.Tensor = out.logits[0, -count:]
        return logits

    def _output(self, part: Part, count: int, cache: dict[str, Any] | None) -> Any:
        """Append tokens to a sequence; return what the model's forward returns.

        `cache`: the argument with the cache so far; empty: the model creates one; None: the whole
        sequence is computed, without a cache.
        """
        kv = part.kv
        how = self._images(part) if self._has_axes else {}
        given = part.ids if cache is not None else [*kv.ids, *part.ids]
        kv.ids += part.ids
        if "position_ids" in self._parameters and not self._has_axes:
            # Some models count positions wrongly after a cache (Bamba).
            places = torch.arange(kv.length - len(given), kv.length, device=self._model.device)
            how["position_ids"] = places[None]
        if "logits_to_keep" in self._parameters:
            how["logits_to_keep"] = count
        if cache is not None:
            how |= {"use_cache": True, **cache} if self._takes_use_cache else cache
        elif "use_cache" in self._parameters:
            how["use_cache"] = False
        return self._model(input_ids=torch.tensor([given], device=self._model.device), **how)

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
            given["mm_encoder_outputs"] = {"image": _ImageFeatures(first, deep)}
        return given

    # --- The cache ----------------------------------------------------------------------------

    @torch.inference_mode()
    def _find_cache(self) -> tuple[str | None, str | None]:
        """Return the argument of `forward` that takes the model's cache, or why none is used.

        The model is asked, as the name differs between models and versions of transformers: it is
        what a forward pass returns by the name of one of its arguments.
        """
        why = "it returns no cache"
        try:
            out = self._output(Part(FallbackSequence(), (1, 2), True), 1, {})
            names = [name for name in out if name in self._parameters]
            for name in sorted(names, key=lambda name: not isinstance(out[name], Cache)):
                why = f"`{name}` lacks a part of its state"
                if self._is_cache_complete(name):
                    return name, None
        except Exception as error:  # any error: the model needs another kind of cache
            why = f"its cache cannot be used: {error}"
        model = type(self._model).__name__
        return None, f"{model} computes each token from the whole sequence, which is slow: {why}"

    def _is_cache_complete(self, name: str) -> bool:
        """Whether decoding from the cache gives the logits of a full pass, to rounding.

        Another sequence is computed in between: a model may keep state in its modules.
        """
        whole = self._logits(Part(FallbackSequence(), (1, 2, 3), True), None)
        sequence, other = FallbackSequence(), FallbackSequence()
        self._logits(Part(sequence, (1, 2), True), name)
        self._logits(Part(other, (4, 3), True), name)
        found = self._logits(Part(sequence, (3,), True), name)
        rounding = _TOLERANCE.get(whole.dtype, _TOLERANCE_16_BIT)
        return bool((found - whole).abs().max() <= rounding * (whole.max() - whole.min()))

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


def _is_of_attention(cache: Any) -> bool:
    """Whether a cache consists of the keys and values of attention."""
    layers = cache.layers if isinstance(cache, Cache) else []
    return bool(layers) and all(
        isinstance(layer, DynamicLayer) and not isinstance(layer, LinearAttentionLayer)
        for layer in layers
    )


def _num_bytes(cache: Any) -> int:
    return sum(tensor.nbytes for tensor in _tensors(cache))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, also in nested caches, layers, dicts and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "__dict__") and not isinstance(value, type | torch.nn.Module):
        yield from _tensors(vars(value))
