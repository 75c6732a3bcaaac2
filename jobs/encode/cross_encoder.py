"""From a query and passages to scores: the model reads each pair, and its one label is the score.

The scores are those of CrossEncoder.predict of sentence-transformers. Imports torch: only `run` of
the encode kind imports it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..compute.aten_overrides import fast_kernels
from ..context import WarmModel
from ..errors import JobFailed
from ..models.architectures import check_can_score
from .journal import Floats
from .modules import IDENTITY, SIGMOID, activation_of
from .passages import Passage
from .text_encoder import Ints, TextEncoder, TokenizedPassage


class CrossEncoder(TextEncoder):
    """Scores passages against one query. Raises JobFailed for unsupported models."""

    width = 1

    def __init__(
        self,
        warm: WarmModel,
        *,
        query: str,
        passage_length: int | None,
        max_length: int | None,
        truncates: bool,
        device: str,
    ) -> None:
        """`passage_length`: maximum tokens of a passage, without the query; None: no limit."""
        check_can_score(warm.model)
        super().__init__(warm, max_length=max_length, truncates=truncates, device=device)
        self._check_modules()
        self.activation = activation_of(warm.path, warm.model.config)
        self._query = query
        self._passage_length = passage_length
        core = self._tokenizer.backend_tokenizer
        self._room = self.max_length - core.num_special_tokens_to_add(is_pair=True)
        if self._room < 2:
            raise JobFailed(
                f"max_length: must have room for a query and a passage, got {self.max_length}"
            )
        pad = getattr(warm.model.config.get_text_config(), "pad_token_id", None)
        # None: decoders take one pair at a time, as they score the last token that is no padding.
        self._pad_id = pad if pad is not None and 0 <= pad < self._vocabulary.size else None
        takes_types = "token_type_ids" in inspect.signature(warm.model.forward).parameters
        self._has_types = takes_types and "token_type_ids" in self._tokenizer.model_input_names

    def _check_modules(self) -> None:
        """Raise JobFailed for a step or a setting without which the scores would be others."""
        has_pooling = self.modules.pooling is not None or self.modules.normalize
        unsupported = self.modules.unsupported or ("step 'Pooling'" if has_pooling else None)
        if unsupported is not None:
            raise JobFailed(
                f"model: modules.json must have the step Transformer alone for scores, got "
                f"{unsupported}"
            )
        for ignored in self.modules.ignored:
            raise JobFailed(f"model: not supported for scores: {ignored}")

    @property
    def settings(self) -> dict[str, Any]:
        return {"activation": self.activation}

    @property
    def most_tokens(self) -> str:
        alone = "" if self._passage_length is None else f", or {self._passage_length} alone"
        return f"{self.max_length} tokens with the query{alone}"

    def encode(self, rows: Sequence[TokenizedPassage]) -> Floats:
        """Return the scores (n, 1) float32 of one batch."""
        if self._pad_id is None:
            return np.concatenate([self._scores([row]) for row in rows])
        return self._scores(rows)

    # Tokens.

    def _tokenized(self, passages: Sequence[Passage]) -> list[TokenizedPassage]:
        most = min(self._passage_length or self._room, self._room)
        if not self._truncates:
            self._check_characters("query:", self._query)
            if self._passage_length is None:
                for passage in passages:
                    self._check_characters(f"input: [{passage.id}]", passage.text)
        with self._lock:
            (query,) = self._encodings([self._query], self._room)
            if len(query) >= self._room and not self._truncates:
                raise JobFailed(
                    f"query: must have at most {self._room - 1} tokens for {self._name}, got "
                    f"{len(query)}"
                )
            found = self._encodings([passage.text for passage in passages], most)
            return [self._row(query, encoding) for encoding in found]

    def _row(self, query: Any, passage: Any) -> TokenizedPassage:
        """Join a query and a passage, both cut to their lengths."""
        side = self._tokenizer.truncation_side
        most = self._passage_length
        is_shortened = most is not None and len(passage) > most
        if is_shortened:
            passage.truncate(most, direction=side)
        num_left_out = max(0, len(query) + len(passage) - self._room)
        if num_left_out:
            of_query, of_passage = lengths(len(query), len(passage), self._room)
            passage.truncate(of_passage, direction=side)
            if of_query < len(query):
                (query,) = self._encodings([self._query], self._room)
                query.truncate(of_query, direction=side)
        pair = self._tokenizer.backend_tokenizer.post_process(query, passage)
        ids = np.array(pair.ids, np.int32)
        return TokenizedPassage(
            ids,
            len(ids) + num_left_out,
            types=self._types(pair.type_ids) if self._has_types else None,
            is_shortened=is_shortened,
        )

    def _types(self, found: list[int]) -> Ints:
        known = getattr(self._model.config, "type_vocab_size", None)
        if known and max(found, default=0) >= known:  # 0: the model ignores them (DeBERTa)
            raise JobFailed(
                f"model: type_vocab_size of config.json must be above {max(found)}, the token "
                f"types of its tokenizer, got {known}"
            )
        return np.array(found, np.int32)

    # The model.

    def _scores(self, rows: Sequence[TokenizedPassage]) -> Floats:
        sizes = [len(row.ids) for row in rows]
        inputs = {"input_ids": self._pad([row.ids for row in rows], self._pad_id or 0)}
        if self._has_types:
            types = [row.types for row in rows if row.types is not None]
            inputs["token_type_ids"] = self._pad(types, 0)
        if min(sizes) < max(sizes):
            mask = torch.arange(max(sizes)) < torch.tensor(sizes).unsqueeze(1)
            inputs["attention_mask"] = mask.to(self._device)
        with torch.inference_mode(), fast_kernels():
            logits = self._model(**inputs).logits.float()
            scores = _ACTIVATIONS[self.activation](logits)
        found: Floats = scores.cpu().numpy()
        return found


def lengths(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many tokens two texts keep in `room`: the longer one is cut first.

    The rule longest_first of the library tokenizers, which other users of cross-encoders have.
    """
    short, long = sorted((first, second))
    long = max(short, room - short)
    if short + long > room:
        short = room // 2
        long = room - short
    return (short, long) if first <= second else (long, short)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    IDENTITY: lambda logits: logits,
    SIGMOID: torch.sigmoid,
}
