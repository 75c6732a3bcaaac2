"""The MLM benchmark: micro-steps with stock kernels and with warmd's, and the hardware limit.

    python -m warmd.jobs.bench.mlm WORK PAIRS

Both sides compute the same loss and gradients on the same batch, alternately, so that other load on
the machine affects both. The floor is the time of the arithmetic alone, at the machine's GEMM
throughput. Prints one JSON object. Imports torch and transformers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import orjson
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from ..codegraph.encoder import CodeGraphConfig, new_encoder
from ..codegraph.sequences import MASK_ID, MIN_VOCAB_SIZE, Role, train_tokenizer
from ..compute.allocator import keep_freed_memory
from ..compute.aten_overrides import fast_kernels
from ..mlm.corpus import as_pretrained
from ..mlm.masking import Masker
from ..mlm.objectives import Batch, GraphObjective, Objective, Sample, TextObjective, targets
from . import machine
from .works import MLM, MlmWork

FIRST_ORDINARY = 6  # first id that is not a special token
CODE_SHARE = 0.6  # share of code in the tokens of an example; the rest is its walk
RELATION, ENTITY = 2, 4  # tokens of a relation and of an entity
LEARNING_RATE = 1e-5


class Bench:
    """A workload with its model, optimizer and synthetic examples, all of them different."""

    def __init__(self, work: MlmWork) -> None:
        self.work = work
        torch.manual_seed(0)
        masker = Masker(seed=0, mask_id=MASK_ID)
        self.model: Any
        self.objective: Objective
        if work.is_graph:
            self._config = CodeGraphConfig(**work.settings)
            self.model = new_encoder(self._config)
            self.objective = GraphObjective(masker, has_constraint=True)
        else:
            self._vocab_size: int = BertConfig(**work.settings).vocab_size
            self.model = BertForMaskedLM(BertConfig(**work.settings))
            tokenizer = as_pretrained(train_tokenizer([], MIN_VOCAB_SIZE))
            self.objective = TextObjective(self.model, tokenizer, masker)
        self._device = machine.device()
        self.model.to(self._device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)

    def batch(self, number: int) -> Batch:
        """Return the synthetic examples of a micro-step, masked and collated."""
        first = number * self.work.batch_size
        examples = [self._example(first + i) for i in range(self.work.batch_size)]
        masked = [self.objective.mask(each, 0, first + i) for i, each in enumerate(examples)]
        batch = self.objective.collate(masked)
        return {name: values.to(self._device) for name, values in batch.items()}

    def _example(self, number: int) -> Sample:
        if self.work.is_graph:
            return _graph_example(self._config, self.work.length, number)
        return {"ids": _ids(self._vocab_size, self.work.length, number)}

    def stock(self, batch: Batch) -> None:
        """Forward and backward pass without warmd's kernels; BERT also computes its own loss."""
        if self.work.is_graph:
            self._learn(batch)
            return
        self.model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            labels=batch["mlm_labels"],
        ).loss.backward()

    def warmd(self, batch: Batch) -> None:
        """Forward and backward pass as in a job."""
        with fast_kernels():
            self._learn(batch)

    def _learn(self, batch: Batch) -> None:
        counts: dict[str, int] = {
            part: len(targets(batch, part))
            for part in ("mlm", "mnm")
            if part in self.objective.parts
        }
        counts["rows"] = len(batch["input_ids"])
        losses = self.objective.losses(self.model, batch, counts)
        cast(Any, sum(losses.values())).backward()

    def update(self, side: Callable[[Batch], None], number: int) -> None:
        """A whole update: data, forward and backward pass, gradient clipping, AdamW."""
        side(self.batch(number))
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)  # as at the beginning of a step

    def operations(self, batch: Batch) -> float:
        """Count the multiplications and additions of the linear layers, forward and backward.

        A backward pass has twice those of the forward pass. Heads count at labeled tokens only. The
        GEMMs inside attention, a few percent, do not count.
        """
        tokens = batch["input_ids"].numel()
        total = 0.0
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Linear):
                rows = tokens
                if name == "mnm_head":
                    rows = len(targets(batch, "mnm"))
                elif name == "mlm_head" or name.startswith("cls."):
                    rows = len(targets(batch, "mlm"))
                total += 3 * 2.0 * rows * module.weight.numel()
        return total


def measure(work: MlmWork, pairs: int) -> dict[str, Any]:
    """Time `pairs` micro-steps of each side after one for warm-up, then whole updates.

    Returns `stock_s` and `warmd_s`, one number per pair, and `floor_s`; if the workload has
    updates, also `stock_update_s`, one number per pair, `warmd_update_s` and `update_floor_s`.
    """
    rates = machine.measure()
    keep_freed_memory()  # for both sides, as in every work horse
    bench = Bench(work)
    batch = bench.batch(0)
    found: dict[str, Any] = {"stock_s": [], "warmd_s": []}
    for _ in range(pairs + 1):
        found["stock_s"].append(_seconds(lambda: bench.stock(batch)))
        found["warmd_s"].append(_seconds(lambda: bench.warmd(batch)))
        bench.optimizer.step()
        bench.optimizer.zero_grad(set_to_none=True)
    found = {name: seconds[1:] for name, seconds in found.items()}
    found["floor_s"] = bench.operations(batch) / rates.flops
    if work.updates:
        found |= _updates(bench, pairs)
        # AdamW reads four arrays and writes three.
        moved = 7 * sum(weight.nbytes for weight in bench.model.parameters())
        found["update_floor_s"] = found["floor_s"] + moved / rates.bytes_s
    rest = {"device": machine.device().type, "flops": rates.flops, "bytes_s": rates.bytes_s}
    return {**found, **rest}


def _updates(bench: Bench, pairs: int) -> dict[str, list[float]]:
    """Time the workload's updates; the first `pairs` of them alternate with stock updates."""
    stock: list[float] = []
    ours: list[float] = []
    for number in range(bench.work.updates):
        if number < pairs:
            stock.append(_seconds(lambda: bench.update(bench.stock, len(stock) + 1)))
        ours.append(_seconds(lambda: bench.update(bench.warmd, len(ours) + 1)))
    return {"stock_update_s": stock, "warmd_update_s": ours}


def _ids(vocab_size: int, length: int, number: int) -> Any:
    return np.random.default_rng(number).integers(FIRST_ORDINARY, vocab_size, length)


def _graph_example(config: CodeGraphConfig, length: int, number: int) -> Sample:
    """Return a synthetic example in the form that `codegraph.sequences` describes."""
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
    machine.synchronize()
    begun = time.perf_counter()
    work()
    machine.synchronize()
    return time.perf_counter() - begun


if __name__ == "__main__":
    name, pairs = sys.argv[1:]
    sys.stdout.write(orjson.dumps(measure(MLM[name], int(pairs))).decode() + "\n")
