"""From passages to embeddings: tokenization, batching, forward pass and pooling.

Imports torch: only `run` of the encode kind imports it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ..codegraph.encoder import CodeGraphEncoder
from ..codegraph.sequences import CHARACTERS_PER_TOKEN, CLS_ID, SEP_ID, Example, Role
from ..compute.aten_overrides import fast_kernels
from ..compute.linear_forms import int8_linear
from ..compute.quantized import SwappedLinears
from ..context import WarmModel
from ..errors import JobFailed
from ..models.context_length import positions
from ..models.vocabulary import Vocabulary
from .journal import Floats
from .passages import Passage

USUAL_LENGTH = 512  # tokens, unless requested otherwise
MOST_PADDING = 0.05  # of a batch's tokens
SAMPLE = 8  # texts on which int8 is compared with float32

Ints = NDArray[np.int32]


class TokenizedPassage(NamedTuple):
    """A tokenized passage."""

    ids: Ints  # (T,)
    is_cut: bool
    example: Example | None = None  # of the code-graph encoder: with all its columns


@dataclass
class _Shared:
    """State per model, shared by all jobs of a process."""

    lock: threading.Lock  # tokenizers are not thread-safe
    int8: SwappedLinears | None = None


_shared: WeakKeyDictionary[Any, _Shared] = WeakKeyDictionary()


class Embedder:
    """Encodes passages with one model. Raises JobFailed for unsupported options."""

    def __init__(
        self,
        warm: WarmModel,
        *,
        pooling: str,
        normalize: bool,
        max_length: int | None,
        is_int8: bool,
        device: str,
    ) -> None:
        self._tokenizer = warm.tokenizer
        self._is_code = isinstance(warm.model, CodeGraphEncoder)
        self._model = warm.model
        self._vocabulary = Vocabulary.of(warm.name, warm.model, warm.tokenizer)
        self._device = device
        self._pooling = pooling
        self._normalize = normalize
        self._shared = _shared.setdefault(warm.model, _Shared(threading.Lock()))
        self.max_length = self._length(max_length)
        self.width: int = warm.model.config.hidden_size
        if pooling == "cls" and warm.tokenizer.cls_token_id is None:
            raise JobFailed("pooling: the tokenizer of this model has no token for cls; take mean")
        self._is_int8 = is_int8
        self._cosines: Floats | None = None  # of int8 to float32, for texts of this job
        if is_int8 and (device != "cpu" or warm.model.dtype != torch.float32):
            raise JobFailed(
                f"dtype: int8 is for a model in float32 on the CPU, this one is in "
                f"{str(warm.model.dtype).removeprefix('torch.')} on {device}"
            )

    @property
    def chains(self) -> tuple[Any, int]:
        """The tokenizer and the length that walks through the graph are made for."""
        return self._tokenizer.backend_tokenizer, self.max_length

    def rows(self, passages: Sequence[Passage]) -> list[TokenizedPassage]:
        """Tokenize passages, each cut to `max_length`.

        Raises JobFailed naming one without tokens, or with tokens beyond the model's vocabulary.
        """
        with self._shared.lock:
            rows = self._code_rows(passages) if self._is_code else self._text_rows(passages)
        for passage, row in zip(passages, rows, strict=True):
            if not len(row.ids):
                raise JobFailed(f"input: {passage.id} has no tokens")
            self._vocabulary.check(f"input: {passage.id}", row.ids.tolist())
        return rows

    def encode(self, rows: Sequence[TokenizedPassage]) -> Floats:
        """Return the embeddings (n, width) float32 of one batch."""
        return self._encode(rows, self._kernels())

    def prepare(self, sample: Sequence[TokenizedPassage]) -> None:
        """Quantize the weights if int8 is requested, and compare with float32 on `sample`."""
        if not self._is_int8:
            return
        self._shared.int8 = self._shared.int8 or SwappedLinears(self._model, int8_linear)
        chosen = [sample[i * len(sample) // SAMPLE] for i in range(min(SAMPLE, len(sample)))]
        pairs = [
            [
                torch.from_numpy(self._encode([row], way))
                for way in (fast_kernels(), self._kernels())
            ]
            for row in chosen
        ]
        self._cosines = np.concatenate(
            [F.cosine_similarity(exact, rounded).numpy() for exact, rounded in pairs]
        )

    def quality(self) -> dict[str, Any] | None:
        """Return the cosine similarity of int8 and float32 embeddings; None without int8."""
        cosines = self._cosines
        if cosines is None:
            return None
        return {
            "cosine_mean": float(cosines.mean()),
            "cosine_min": float(cosines.min()),
            "rows": len(cosines),
        }

    def _kernels(self) -> AbstractContextManager[Any]:
        if self._is_int8:
            assert self._shared.int8 is not None, "prepare comes first"
            return self._shared.int8.in_place()
        return fast_kernels()

    def _length(self, requested: int | None) -> int:
        limits = [self._tokenizer.model_max_length, positions(self._model)]
        limit = min(limit for limit in limits if limit is not None)
        if requested is not None and requested > limit:
            raise JobFailed(f"max_length: must be at most {limit} for this model, got {requested}")
        usual = getattr(self._model.config, "trained_length", None) or USUAL_LENGTH
        return min(usual, limit) if requested is None else requested

    # Tokens.

    def _text_rows(self, passages: Sequence[Passage]) -> list[TokenizedPassage]:
        found = self._tokenizer(
            [passage.text for passage in passages],
            truncation=True,
            max_length=self.max_length,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        return [
            # The tokenizer returns the truncated tokens separately.
            TokenizedPassage(np.array(ids, np.int32), bool(encoding.overflowing))
            for ids, encoding in zip(found["input_ids"], found.encodings, strict=True)
        ]

    def _code_rows(self, passages: Sequence[Passage]) -> list[TokenizedPassage]:
        core = self._tokenizer.backend_tokenizer
        core.no_truncation()
        core.encode_special_tokens = True  # text that reads like a special token is text
        room = self.max_length - 2  # [CLS] and [SEP]
        rows = []
        for passage in passages:
            if passage.example is not None:
                rows.append(TokenizedPassage(passage.example.ids, False, passage.example))
                continue
            text = passage.text[: (room + 1) * CHARACTERS_PER_TOKEN]
            code = core.encode(text, add_special_tokens=False).ids
            ids = np.array([CLS_ID, *code[:room], SEP_ID], np.int32)
            roles = np.full_like(ids, Role.CODE)
            roles[[0, -1]] = Role.SPECIAL
            zeros = np.zeros_like(ids)
            rows.append(
                TokenizedPassage(ids, len(code) > room, Example(ids, zeros, zeros, zeros, roles))
            )
        return rows

    # The model.

    def _encode(
        self, rows: Sequence[TokenizedPassage], kernels: AbstractContextManager[Any]
    ) -> Floats:
        lengths = [len(row.ids) for row in rows]
        mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
        mask = mask.to(self._device)
        with torch.inference_mode(), kernels:
            hidden = self._hidden(rows, mask if min(lengths) < max(lengths) else None).float()
            pooled = hidden[:, 0] if self._pooling == "cls" else _mean(hidden, mask)
            vectors = F.normalize(pooled, dim=-1) if self._normalize else pooled
        found: Floats = vectors.cpu().numpy()
        return found

    def _hidden(self, rows: Sequence[TokenizedPassage], mask: Tensor | None) -> Tensor:
        """Return the last hidden states (B, T, width); `mask` None: nothing is padded."""
        hidden: Tensor
        if not self._is_code:
            pad = self._tokenizer.pad_token_id or 0
            pad = pad if pad < self._vocabulary.size else 0  # any token will do: it is masked
            ids = self._pad([row.ids for row in rows], pad)
            hidden = self._model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
            return hidden
        examples = [row.example for row in rows if row.example is not None]
        columns = [
            self._pad(list(column), 0)  # which is also PAD_ID
            for column in zip(*examples, strict=True)
        ]
        ids, rel_ids, chain_ids, depth_ids, role_ids = columns
        if not rel_ids.any():  # no bias of relations then, and none is computed
            hidden = self._model.encode(ids, mask, role_ids=role_ids)
            return hidden
        hidden = self._model.encode(ids, mask, rel_ids, chain_ids, depth_ids, role_ids)
        return hidden

    def _pad(self, columns: Sequence[Ints], value: int) -> Tensor:
        padded = np.full((len(columns), max(map(len, columns))), value, np.int64)
        for row, column in zip(padded, columns, strict=True):
            row[: len(column)] = column
        return torch.from_numpy(padded).to(self._device)


def _mean(hidden: Tensor, mask: Tensor) -> Tensor:
    weights = mask.to(hidden.dtype).unsqueeze(-1)
    return (hidden * weights).sum(1) / weights.sum(1)


def batches(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """Yield batches as numbers of texts, the longest first.

    A batch has at most `size` texts, of such similar lengths that there is little padding.
    """
    batch: list[int] = []
    longest = total = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        longest = longest if batch else lengths[row]
        padded = (len(batch) + 1) * longest
        is_wasteful = padded - total - lengths[row] > MOST_PADDING * padded
        if batch and (len(batch) == size or is_wasteful):
            yield batch
            batch, total, longest = [], 0, lengths[row]
        batch.append(row)
        total += lengths[row]
    if batch:
        yield batch
