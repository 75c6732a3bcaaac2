"""Log-probabilities of completions by a model's forward passes: over packs, or padded batches.

Packs share prompts and need no padding; padded batches are for models that cannot be packed
exactly. Imports torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..context import ONE_PROCESS, Ranks
from ..models.adapters import unwrapped
from ..sequences.attention import packed_attention
from ..sequences.logprobs import Scores, score_logits
from ..sequences.passes import Embedded, exchange, score_pack
from ..sequences.shared_prompts import Pack, Sample, split

Place: TypeAlias = "tuple[Tensor, Tensor]"  # rows and columns of a table


class Table(NamedTuple):
    """Log-probabilities and entropies of the tokens of B completions: (B, C) float32, in nats."""

    logps: Tensor
    entropies: Tensor

    def put(self, at: Place, scores: Scores) -> Table:
        """Return the table with the scores of some tokens, with their gradients."""
        return Table(
            self.logps.index_put(at, scores.logps),
            self.entropies.index_put(at, scores.entropies),
        )

    def store(self, at: Place, scores: Scores) -> None:
        """Set the scores of some tokens, without gradients."""
        self.logps[at] = scores.logps.detach()
        self.entropies[at] = scores.entropies.detach()


class Padded:
    """Completions as one batch: prompts padded on the left, completions on the right, to T tokens.

    ids, is_token, positions: (B, T) int64. For the K completion tokens, (K,) int64 each: their
    ids, `targets`, and their place in a table, `rows` and `columns`; `padded_rows`, in this batch.
    """

    def __init__(self, samples: Sequence[Sample], pad_id: int, device: Any) -> None:
        prompt = max(len(one.prompt) for one in samples)
        self.longest = max(len(one.completion) for one in samples)
        ids = torch.full((len(samples), prompt + self.longest), pad_id)
        self.is_token = torch.zeros_like(ids)
        places: list[tuple[int, int, int, int]] = []
        for number, one in enumerate(samples):
            first, end = prompt - len(one.prompt), prompt + len(one.completion)
            ids[number, first:end] = torch.tensor((*one.prompt, *one.completion))
            self.is_token[number, first:end] = 1
            for column, token in enumerate(one.completion):
                places.append((number, one.index, column, token))
        self.ids, self.is_token = ids.to(device), self.is_token.to(device)
        self.positions = (self.is_token.cumsum(1) - 1).clamp(min=0)
        table = torch.tensor(places, device=device).view(-1, 4)
        self.padded_rows, self.rows, self.columns, self.targets = table.unbind(1)


Part: TypeAlias = "Pack | Padded"


class Scorer:
    """Scores completions at the temperature of a GRPOConfig.

    `most_tokens`: of a pack; None: padded batches. `balances`: whether the loss that balances a
    mixture of experts is computed, too (of padded batches).
    """

    def __init__(
        self, config: Any, *, most_tokens: int | None, pad_id: int, balances: bool = False
    ) -> None:
        self.most_tokens = most_tokens
        self._config = config
        self._pad_id = pad_id
        self._balances = balances

    def parts(
        self, samples: Sequence[Sample], device: torch.device, ranks: Ranks = ONE_PROCESS
    ) -> list[Part]:
        """Divide completions into the passes of this rank."""
        if self.most_tokens is not None:
            groups = split([(one,) for one in samples], self.most_tokens, ranks)
            return [Pack(group, device) for group in groups]
        size = self._config.per_device_train_batch_size
        micro_batches: dict[int, list[Sample]] = {}
        for one in samples:
            micro_batches.setdefault(one.index // size, []).append(one)
        return [Padded(rows, self._pad_id, device) for rows in micro_batches.values()]

    @contextmanager
    def passes(self, model: Any) -> Iterator[None]:
        """Let the model compute parts within this block."""
        if self.most_tokens is None:
            yield
            return
        with packed_attention(model):
            yield

    def score(
        self,
        model: Any,
        part: Part,
        embedded: Embedded | None = None,
        *,
        has_entropy_gradient: bool = False,
    ) -> tuple[Scores, Tensor | None]:
        """Return the scores of a part's tokens, and the loss that balances experts, if any.

        `embedded`: of a pack, for its backward pass.
        """
        if isinstance(part, Padded):
            return self._of_padded(model, part, has_entropy_gradient=has_entropy_gradient)
        scores = score_pack(
            model,
            part,
            self._config.temperature,
            None if embedded is None else embedded.output,
            is_half=self._config.bf16,
            has_entropy_gradient=has_entropy_gradient,
        )
        return scores, None

    @torch.no_grad()
    def fill(self, table: Table, model: Any, samples: Sequence[Sample], ranks: Ranks) -> None:
        """Set the scores of completions in a table, of all ranks."""
        places = []
        with self.passes(model):
            for part in self.parts(samples, model.device, ranks):
                places.append((part.rows, part.columns))
                table.store(places[-1], self.score(model, part)[0])
        exchange(places, table, ranks)

    def _of_padded(
        self, model: Any, part: Padded, *, has_entropy_gradient: bool
    ) -> tuple[Scores, Tensor | None]:
        balances = self._balances and torch.is_grad_enabled()
        more: dict[str, Any] = {"output_router_logits": True} if balances else {}
        takes = inspect.signature(unwrapped(model).forward).parameters
        given = {"position_ids": part.positions, "logits_to_keep": part.longest + 1}
        more |= {name: value for name, value in given.items() if name in takes}
        with torch.autocast(part.ids.device.type, torch.bfloat16, enabled=self._config.bf16):
            output = model(
                input_ids=part.ids,
                attention_mask=part.is_token,
                use_cache=False,
                **more,
            )
        # The last logits predict what comes after the longest completion.
        logits = output.logits[:, -part.longest - 1 : -1]
        scores = score_logits(
            logits[part.padded_rows, part.columns],
            part.targets,
            self._config.temperature,
            has_entropy_gradient=has_entropy_gradient,
        )
        return scores, output.aux_loss if balances else None
