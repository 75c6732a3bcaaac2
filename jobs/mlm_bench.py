"""How fast masked learning is on this machine: with stock code, with ours, and at best.

Both sides compute the same loss and its gradients on the same batch, in turn, so that whatever
else the machine does falls on both. The floor is what the arithmetic alone takes at the rate that
the machine's best matrix product has. Imports torch and transformers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from .chains import MASK_ID, MIN_VOCAB_SIZE, Role, train_tokenizer
from .corpus import as_pretrained
from .encoder import CodeGraphConfig, new_encoder
from .kernels import fast_kernels
from .masks import Masker
from .mlm_objectives import Batch, GraphObjective, Objective, Row, TextObjective, targets

FIRST_ORDINARY = 6  # the ids below are of special tokens
CODE_SHARE = 0.6  # of the tokens of an example; the rest is its walk, in relations and entities
RELATION, ENTITY = 2, 4  # tokens
LEARNING_RATE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One kind of work; seconds are medians of one forward and backward pass."""

    work: str
    stock_s: float
    ours_s: float
    faster: float  # the median of stock by ours, pair by pair
    floor_s: float
    share: float  # of the floor in what ours takes: 1 is as fast as can be
    optimizer_s: float  # a step of AdamW, the same for both


def measure(
    runs: int, *, seed: int = 0, encoder: CodeGraphConfig | None = None, bert: Any = None
) -> Iterator[dict[str, Any]]:
    """Yield a `Timing` for each kind of work, of so many pairs after one to warm up.

    `encoder` and `bert` are the shapes of the models, None those of the workload.
    """
    rate = product_rate()
    config = encoder or CodeGraphConfig()
    for rows, length in ((1, 111), (8, 128)):
        torch.manual_seed(seed)
        model = new_encoder(config)
        objective = GraphObjective(Masker(seed=seed, mask_id=MASK_ID), has_constraint=True)
        batch = _batch(objective, [_graph_example(config, length, i) for i in range(rows)])
        work = f"code-graph encoder, {rows} x {length}"
        step = _step(model, objective, batch)
        yield asdict(_timing(work, model, batch, step, step, runs=runs, rate=rate))
    torch.manual_seed(seed)
    bert = bert or BertConfig(num_hidden_layers=4)
    masked_lm = BertForMaskedLM(bert)
    tokenizer = as_pretrained(train_tokenizer([], MIN_VOCAB_SIZE))
    text = TextObjective(masked_lm, tokenizer, Masker(seed=seed, mask_id=MASK_ID))
    batch = _batch(text, [{"ids": _ids(bert.vocab_size, 128, i)} for i in range(8)])

    def stock() -> None:
        masked_lm(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            labels=batch["mlm_labels"],
        ).loss.backward()

    work = f"BERT of {bert.num_hidden_layers} layers, 8 x 128"
    ours = _step(masked_lm, text, batch)
    yield asdict(_timing(work, masked_lm, batch, stock, ours, runs=runs, rate=rate))


def product_rate(runs: int = 15) -> float:
    """Return the operations per second of the faster of stock and own products, at its best."""
    a, b = torch.randn(1024, 768), torch.randn(768, 3072)

    def best() -> float:
        return min(_seconds(lambda: a @ b) for _ in range(runs))

    stock = best()
    with fast_kernels():
        ours = best()
    return 2 * a.numel() * b.shape[1] / min(stock, ours)


def _timing(
    work: str,
    model: nn.Module,
    batch: Batch,
    stock: Callable[[], None],
    ours: Callable[[], None],
    *,
    runs: int,
    rate: float,
) -> Timing:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    pairs = []
    of_optimizer = []
    for _ in range(runs + 1):
        stock_s = _seconds(stock)
        with fast_kernels():
            ours_s = _seconds(ours)
        of_optimizer.append(_seconds(optimizer.step))
        # None again, as at the beginning of a step.
        optimizer.zero_grad(set_to_none=True)
        pairs.append((stock_s, ours_s))
    of_stock, of_ours = zip(*pairs[1:], strict=True)
    floor_s = _operations(model, batch) / rate
    return Timing(
        work=work,
        stock_s=median(of_stock),
        ours_s=median(of_ours),
        faster=median(s / o for s, o in pairs[1:]),
        floor_s=floor_s,
        share=floor_s / median(of_ours),
        optimizer_s=median(of_optimizer[1:]),
    )


def _step(model: Any, objective: Objective, batch: Batch) -> Callable[[], None]:
    counts: dict[str, int] = {
        part: len(targets(batch, part)) for part in ("mlm", "mnm") if part in objective.parts
    }
    counts["rows"] = len(batch["input_ids"])

    def step() -> None:
        losses = objective.losses(model, batch, counts)
        cast(Any, sum(losses.values())).backward()

    return step


def _operations(model: nn.Module, batch: Batch) -> float:
    """Count the multiplications and additions of the matrices, forward (1) and backward (2).

    Those of the heads at the labels alone; without the products inside of attention, a few percent.
    """
    tokens = batch["input_ids"].numel()
    total = 0.0
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            rows = tokens
            if name == "mnm_head":
                rows = len(targets(batch, "mnm"))
            elif name == "mlm_head" or name.startswith("cls."):
                rows = len(targets(batch, "mlm"))
            total += 3 * 2.0 * rows * module.weight.numel()
    return total


def _batch(objective: Objective, examples: list[Row]) -> Batch:
    return objective.collate([objective.mask(row, 0, i) for i, row in enumerate(examples)])


def _ids(vocab_size: int, length: int, number: int) -> Any:
    return np.random.default_rng(number).integers(FIRST_ORDINARY, vocab_size, length)


def _graph_example(config: CodeGraphConfig, length: int, number: int) -> Row:
    """Make up an example of the form that `chains` describes."""
    columns = {name: np.zeros(length, np.int64) for name in ("rel_ids", "chain_ids", "depth_ids")}
    role = np.full(length, Role.SPECIAL, np.int64)
    ids = _ids(config.vocab_size, length, number)
    end = int(CODE_SHARE * length)
    role[1:end] = Role.CODE
    begins = range(end + 1, length - RELATION - ENTITY - 2, RELATION + ENTITY + 2)
    for chain, begin in enumerate(begins, start=1):
        relation = slice(begin + 1, begin + 1 + RELATION)  # after [REL]
        entity = slice(relation.stop + 1, relation.stop + 1 + ENTITY)  # after [ENT]
        role[relation], role[entity] = Role.RELATION, Role.ENTITY
        for part in (relation, entity):
            columns["rel_ids"][part] = 1 + chain % (config.num_relations - 1)
        whole = slice(begin, entity.stop)
        columns["chain_ids"][whole], columns["depth_ids"][whole] = chain, 1 + chain % 4
    return {"ids": ids, "role_ids": role, **columns}


def _seconds(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
