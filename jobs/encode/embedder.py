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
from ..models.text_length import check_length, longest_token
from ..models.vocabulary import Vocabulary
from . import modules
from .journal import Floats
from .modules import AUTO, CLS, MEAN, modules_of
from .passages import Passage

USUAL_LENGTH = 512  # tokens, unless requested otherwise
_MARGIN = 64  # tokens: those near the end of a part of a text may differ from those of the whole
MOST_PADDING = 0.05  # of a batch's tokens
SAMPLE = 8  # texts on which int8 is compared with float32

Ints = NDArray[np.int32]


class TokenizedPassage(NamedTuple):
    """A tokenized passage."""

    ids: Ints  # (T,)
    length: int  # tokens before it was cut, or of as much of it as was tokenized
    example: Example | None = None  # of the code-graph encoder: with all its columns

    @property
    def is_cut(self) -> bool:
        return self.length > len(self.ids)


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
        pooling: str = AUTO,
        normalize: bool | None = None,
        dimensions: int | None = None,
        max_length: int | None,
        truncates: bool = True,
        is_int8: bool,
        device: str,
    ) -> None:
        self._name = warm.name
        self._truncates = truncates
        self._tokenizer = warm.tokenizer
        self._is_code = isinstance(warm.model, CodeGraphEncoder)
        self._model = warm.model
        self._vocabulary = Vocabulary.of(warm.name, warm.model, warm.tokenizer)
        self._device = device
        self.modules = modules_of(warm.path)
        if pooling == AUTO and self.modules.unsupported:
            raise JobFailed(
                "pooling: must be given, as modules.json of the model has what is not supported: "
                f"{self.modules.unsupported}"
            )
        self.pooling = (self.modules.pooling or MEAN) if pooling == AUTO else pooling
        self.normalize = bool(self.modules.normalize) if normalize is None else normalize
        self._shared = _shared.setdefault(warm.model, _Shared(threading.Lock()))
        self.max_length = self._length(max_length)
        self.width: int = dimensions or warm.model.config.hidden_size
        if self.width > warm.model.config.hidden_size:
            raise JobFailed(
                f"dimensions: must be at most {warm.model.config.hidden_size} for this model, got "
                f"{dimensions}"
            )
        if self.pooling == CLS and warm.tokenizer.cls_token_id is None:
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

        Raises JobFailed naming one without tokens, with tokens beyond the model's vocabulary, or
        that would be cut though `truncates` is False.
        """
        if not self._truncates:
            for one in passages:
                size = len(one.text)
                check_length(
                    f"input: [{one.id}]", size, self._tokenizer, self.max_length, self._name
                )
        if passages and passages[0].ids is not None:  # then all have them
            rows = self._rows_of_ids(passages)
        else:
            with self._shared.lock:
                rows = self._code_rows(passages) if self._is_code else self._text_rows(passages)
        for passage, row in zip(passages, rows, strict=True):
            if row.is_cut and not self._truncates:
                raise JobFailed(
                    f"input: [{passage.id}] must have at most {self.max_length} tokens for "
                    f"{self._name}, got {row.length}"
                )
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
        usual = getattr(self._model.config, "trained_length", None) or self.modules.max_length
        usual = usual or (USUAL_LENGTH if self._truncates else limit)
        return min(usual, limit) if requested is None else requested

    # Tokens.

    def _rows_of_ids(self, passages: Sequence[Passage]) -> list[TokenizedPassage]:
        if self._is_code:
            raise JobFailed("tokens: must go with a text encoder, got a code-graph encoder")
        return [
            TokenizedPassage(np.array(ids[: self.max_length], np.int32), len(ids))
            for ids in (passage.ids or () for passage in passages)
        ]

    def _text_rows(self, passages: Sequence[Passage]) -> list[TokenizedPassage]:
        core = self._tokenizer.backend_tokenizer
        room = self.max_length - core.num_special_tokens_to_add(is_pair=False)
        rows = []
        for encoding in self._encodings([passage.text for passage in passages], room):
            num_left_out = max(0, len(encoding) - room)
            encoding.truncate(room, direction=self._tokenizer.truncation_side)
            ids = np.array(core.post_process(encoding).ids, np.int32)
            rows.append(TokenizedPassage(ids, len(ids) + num_left_out))
        return rows

    def _encodings(self, texts: Sequence[str], room: int) -> list[Any]:
        """Tokenize as much of each text as decides its first (or last) `room` tokens.

        Only the last tokens of a word, or of blanks, of many kilobytes may depend on more of it.

        The tokenizer itself must not truncate: that is a setting, and to change it would wait for
        all that others tokenize meanwhile, while no other thread of the process runs.
        """
        found: list[Any] = [None] * len(texts)
        size = (room + _MARGIN) * longest_token(self._tokenizer)
        to_do = list(range(len(texts)))
        while to_do:
            parts = [self._end_of(texts[n], size) for n in to_do]
            encodings = self._tokenizer(parts, add_special_tokens=False, verbose=False).encodings
            for number, encoding in zip(to_do, encodings, strict=True):
                found[number] = encoding
            to_do = [n for n in to_do if size < len(texts[n]) and len(found[n]) < room + _MARGIN]
            size *= 4  # of texts with long blanks, for example
        return found

    def _end_of(self, text: str, size: int) -> str:
        """Return `size` characters of the end of a text that is kept."""
        return text[:size] if self._tokenizer.truncation_side == "right" else text[-size:]

    def _code_rows(self, passages: Sequence[Passage]) -> list[TokenizedPassage]:
        core = self._tokenizer.backend_tokenizer
        if core.truncation is not None:
            core.no_truncation()
        if not core.encode_special_tokens:
            core.encode_special_tokens = True  # text that reads like a special token is text
        room = self.max_length - 2  # [CLS] and [SEP]
        rows = []
        for passage in passages:
            if passage.example is not None:
                ids = passage.example.ids
                rows.append(TokenizedPassage(ids, len(ids), passage.example))
                continue
            text = passage.text[: (room + 1) * CHARACTERS_PER_TOKEN]
            # In a batch, during which other threads run.
            code = core.encode_batch([text], add_special_tokens=False)[0].ids
            ids = np.array([CLS_ID, *code[:room], SEP_ID], np.int32)
            roles = np.full_like(ids, Role.CODE)
            roles[[0, -1]] = Role.SPECIAL
            zeros = np.zeros_like(ids)
            rows.append(
                TokenizedPassage(ids, len(code) + 2, Example(ids, zeros, zeros, zeros, roles))
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
            pooled = self._pooled(hidden, mask)[:, : self.width]
            vectors = F.normalize(pooled, dim=-1) if self.normalize else pooled
        found: Floats = vectors.cpu().numpy()
        return found

    def _pooled(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Return a vector for each text: (B, T, width), (B, T) to (B, width)."""
        match self.pooling:
            case modules.CLS:
                return hidden[:, 0]
            case modules.LAST:
                return hidden[torch.arange(len(hidden), device=mask.device), mask.sum(1) - 1]
            case _:
                weights = mask.to(hidden.dtype).unsqueeze(-1)
                return (hidden * weights).sum(1) / weights.sum(1)

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


def batches(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """Yield batches as numbers of texts, the longest first.

    A batch has at most `size` texts, of such similar lengths that there is little padding, and no
    more tokens than so many of the usual length, unless it is one text.
    """
    batch: list[int] = []
    longest = total = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        longest = longest if batch else lengths[row]
        padded = (len(batch) + 1) * longest
        is_wasteful = padded - total - lengths[row] > MOST_PADDING * padded
        is_full = len(batch) == size or padded > size * USUAL_LENGTH
        if batch and (is_full or is_wasteful):
            yield batch
            batch, total, longest = [], 0, lengths[row]
        batch.append(row)
        total += lengths[row]
    if batch:
        yield batch
