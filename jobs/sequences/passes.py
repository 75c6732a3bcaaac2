"""A model's forward pass over a pack, for the log-probabilities of a loss, and its backward pass.

Imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...configs.units import format_size
from ..compute.device import free_bytes
from ..context import Context, Ranks
from ..errors import JobFailed
from ..files.atomic import write_atomic
from .attention import Attention, hidden_states
from .logprobs import KEPT_BYTES, Scores, score

MOST_TOKENS = 4096  # of a pack: larger packs are not faster and take more memory
MEMORY_SHARE = 0.5  # largest share of the free memory that one pack may take


class Pack(Attention, Protocol):
    """Sequences in one row of N tokens, of which K are scored. All tensors are int64.

    ids, positions: (1, N). predictors: (K,), the index in the row whose output predicts scored
    token k; targets: (K,), the id of that token.
    """

    ids: Tensor
    positions: Tensor
    predictors: Tensor
    targets: Tensor


def score_pack(
    model: Any,
    pack: Pack,
    temperature: float = 1.0,
    embedded: Tensor | None = None,
    *,
    is_half: bool = False,
    wants_top: bool = False,
    has_entropy_gradient: bool = False,
) -> Scores:
    """Return the log-probabilities and the entropies of a pack's K scored tokens (see `score`).

    `embedded`: (1, N, H), replaces the embeddings of the pack's tokens. `is_half`: bfloat16 matrix
    multiplications (autocast), float32 weights and accumulation. Only inside `packed_attention`.
    """
    if embedded is None:
        embedded = model.get_input_embeddings()(pack.ids)
    # Around this pass only: autocast caches casts, and those made under no_grad have no gradient.
    with torch.autocast(embedded.device.type, torch.bfloat16, enabled=is_half):
        states = hidden_states(model, embedded, pack.positions, pack)[0, pack.predictors]
    states = states.bfloat16() if is_half else states
    weight = model.get_output_embeddings().weight
    return score(
        states,
        weight,
        pack.targets,
        temperature=temperature,
        wants_top=wants_top,
        has_entropy_gradient=has_entropy_gradient,
    )


def exchange(
    places: Sequence[tuple[Tensor, Tensor]], tensors: Sequence[Tensor], ranks: Ranks
) -> None:
    """Fill in the values computed by other ranks, in tensors of one shape, in place.

    `places`: of this rank's values; each place belongs to at most one rank. Other places stay.
    """
    if ranks.size == 1:
        return
    is_own = torch.zeros(tensors[0].shape, dtype=torch.bool)
    for at in places:
        is_own[at] = True
    found = torch.stack([is_own.float(), *(torch.where(is_own, t.float(), 0.0) for t in tensors)])
    ranks.sum(found)
    for tensor, values in zip(tensors, found[1:], strict=True):
        tensor.copy_(torch.where(found[0] > 0, values, tensor.float()))


class Embedded:
    """The embeddings of a pack's tokens, (1, N, H), with a sparse gradient for tied weights.

    Autograd would allocate a dense gradient of the embedding and add it to that of the head: 0.5 GB
    of memory traffic, three times, for a 0.5B model.
    """

    def __init__(self, model: Any, ids: Tensor) -> None:
        self._ids = ids
        self._module = model.get_input_embeddings()
        weight = self._module.weight
        # Only with tied weights: the backward pass of the head leaves a gradient to add to.
        self._is_short = (
            type(self._module) is nn.Embedding
            and weight.requires_grad
            and weight is model.get_output_embeddings().weight
        )
        with torch.set_grad_enabled(not self._is_short):
            self.output: Tensor = self._module(ids)
        if self._is_short:
            self.output.requires_grad_()

    def finish(self) -> None:
        """Add the gradient to that of the weights, after the backward pass."""
        if not self._is_short or self.output.grad is None:
            return
        ids, gradient = self._ids[0], self.output.grad[0]
        if self._module.padding_idx is not None:  # nn.Embedding gives it no gradient
            is_trained = ids != self._module.padding_idx
            ids, gradient = ids[is_trained], gradient[is_trained]
        self._module.weight.grad.index_add_(0, ids, gradient)


def tokens_that_fit(
    model: Any, device: torch.device, processes: int = 1, *, samples: bool = False
) -> int:
    """Return the maximum tokens of a pack, by the memory that training leaves free.

    `processes`: the number that train in this memory at once. `samples`: completions are sampled,
    too, for which a GPU keeps another bfloat16 copy of the weights.
    """
    weights = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    free, needed = free_bytes(device) // processes, _training_bytes(weights, device)
    if samples and device.type != "cpu":
        needed += weights // 2
    if device.type != "cpu" and free < needed:
        raise JobFailed(
            f"model: training it takes {format_size(needed)} of GPU memory beyond its weights, and "
            f"{format_size(free)} are free: choose a smaller model, or free memory on the GPU"
        )
    left = (free - needed) * MEMORY_SHARE - KEPT_BYTES
    return int(min(MOST_TOKENS, max(left / _bytes_per_token(model.config), 1)))


def _training_bytes(weights: int, device: torch.device) -> int:
    """Return the memory that training still allocates: gradients, two AdamW moments.

    On a CPU also a copy of the mapped weights; on a GPU, where they are already, bfloat16 copies.
    """
    return 4 * weights if device.type == "cpu" else 3 * weights + weights // 2


def _bytes_per_token(config: Any) -> int:
    """Return an upper estimate of the activation memory per token, in float32.

    In a layer: 12 vectors of hidden size (residuals, norms, queries, keys, values, attention) and 5
    of intermediate size.
    """
    layer = 12 * config.hidden_size + 5 * config.intermediate_size
    return 4 * int(config.num_hidden_layers) * int(layer)


def pack_tokens(model: Any, ctx: Context, *, samples: bool) -> int:
    """Return the most tokens of a pack of this job, the same in all its executions.

    `samples`: see `tokens_that_fit`.
    """
    fitting = tokens_that_fit(model, torch.device(ctx.device), ctx.ranks.size, samples=samples)
    return stored_number(ctx.run_dir / "pack_tokens", fitting, ctx.ranks)


def require_one_process(ranks: Ranks, model: Any) -> None:
    """Raise JobFailed for a job of several processes: only packs can be divided among processes."""
    if ranks.size > 1:
        raise JobFailed(
            f"processes: must be 1 for a {model.config.model_type} of this config, which is "
            f"trained by padded batches, got {ranks.size}"
        )


def stored_number(path: Path, number: int, ranks: Ranks) -> int:
    """Return the number stored at `path` by the first execution of the job; store it if there is
    none.

    The pack size depends on free memory, and rounding depends on the pack size: a job killed before
    its first checkpoint must restart with the same size.
    """

    def stored() -> int:
        if not path.exists():
            write_atomic(path, b"%d" % number)
        return int(path.read_text())

    return ranks.from_first(stored)
