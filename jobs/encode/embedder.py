"""From passages to embeddings: tokenization, forward pass and pooling.

Imports torch: only `run` of the encode kind imports it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..codegraph.encoder import CodeGraphEncoder
from ..codegraph.sequences import CHARACTERS_PER_TOKEN, CLS_ID, SEP_ID, Example, Role
from ..compute.aten_overrides import fast_kernels
from ..compute.linear_forms import int8_linear
from ..compute.quantized import SwappedLinears
from ..context import WarmModel
from ..errors import JobFailed
from ..models.architectures import check_can_embed
from . import modules
from .journal import Floats
from .modules import AUTO, CLS, MEAN
from .passages import Passage
from .text_encoder import USUAL_LENGTH, TextEncoder, TokenizedPassage

SAMPLE = 8  # texts on which int8 is compared with float32

# By model, for all jobs of a process.
_int8: WeakKeyDictionary[Any, SwappedLinears] = WeakKeyDictionary()


class Embedder(TextEncoder):
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
        check_can_embed(warm.model)
        super().__init__(warm, max_length=max_length, truncates=truncates, device=device)
        self._is_code = isinstance(warm.model, CodeGraphEncoder)
        if pooling == AUTO and self.modules.unsupported:
            raise JobFailed(
                "pooling: must be given, as modules.json of the model has what is not supported: "
                f"{self.modules.unsupported}"
            )
        self.pooling = (self.modules.pooling or MEAN) if pooling == AUTO else pooling
        self.normalize = bool(self.modules.normalize) if normalize is None else normalize
        self.width = dimensions or warm.model.config.hidden_size
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
    def _usual_length(self) -> int | None:
        return USUAL_LENGTH if self._truncates else None

    @property
    def settings(self) -> dict[str, Any]:
        return {"pooling": self.pooling, "normalize": self.normalize}

    def encode(self, rows: Sequence[TokenizedPassage]) -> Floats:
        """Return the embeddings (n, width) float32 of one batch."""
        return self._encode(rows, self._kernels())

    def prepare(self, sample: Sequence[TokenizedPassage]) -> None:
        """Quantize the weights if int8 is requested, and compare with float32 on `sample`."""
        if not self._is_int8:
            return
        if self._model not in _int8:
            _int8[self._model] = SwappedLinears(self._model, int8_linear)
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
            return _int8[self._model].in_place()  # which `prepare` made
        return fast_kernels()

    # Tokens.

    def _tokenized(self, passages: Sequence[Passage]) -> list[TokenizedPassage]:
        if not self._truncates:
            for passage in passages:
                self._check_characters(f"input: [{passage.id}]", passage.text)
        if passages and passages[0].ids is not None:  # then all have them
            return self._rows_of_ids(passages)
        with self._lock:
            return self._code_rows(passages) if self._is_code else self._text_rows(passages)

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
