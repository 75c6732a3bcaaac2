"""TRL's DPOTrainer on warm parts: resumes exactly, and measures held-out pairs.

DPO: Rafailov et al. 2023, arXiv:2305.18290. Imports trl: only `run` of the DPO kind imports it.
"""

from __future__ import annotations

import math
import time
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
from trl.trainer.dpo_config import DPOConfig

from ..context import Context
from ..packing.passes import require_one_process, stored_number
from ..packing.shared_prompts import FIXED
from ..training.lora import set_dropout
from ..training.options import TrainingSpec
from ..training.row_trainer import RowTrainer
from ..training.tokens import Examples
from .dataset import SIDES, Example
from .options import REWARDS
from .packed_trainer import PackedDpoTrainer

EVAL_PAIRS = 16  # of one batch of an evaluation


class PreferenceTrainer(RowTrainer, PackedDpoTrainer):
    """A DPOTrainer inside a job. `reference`: the frozen model that rewards are relative to.

    None for a LoRA adapter: the model without it.
    """

    model: Any
    held_out: Examples[Example]

    def __init__(
        self,
        *,
        job: Context,
        spec: TrainingSpec,
        config: DPOConfig,
        model: Any,
        reference: Any | None,
        tokenizer: Any,
        examples: Examples[Example],
        held_out: Examples[Example],
        data: str,
        eval_every: int,
    ) -> None:
        super().__init__(
            job=job,
            spec=spec,
            model=model,
            ref_model=reference,
            args=config,
            processing_class=tokenizer,
            table=_table(examples),
            held_out=held_out,
            data=data,
            eval_every=eval_every,
        )
        if self.most_tokens is not None:
            self.most_tokens = stored_number(
                job.run_dir / "pack_tokens", self.most_tokens, self.ranks
            )
        else:
            require_one_process(self.ranks, model)

        self._has_dropout = spec.lora is not None and spec.lora_dropout > 0
        if self._has_dropout:
            set_dropout(model, spec.lora_dropout)

    def changes_since(self, rules: int) -> list[str]:
        found = super().changes_since(rules)
        if rules < 1:
            found += [] if self.most_tokens is None else [FIXED]
            found += ["lora_dropout has an effect (it had none)"] if self._has_dropout else []
        return found

    def step_fields(self, logs: dict[str, Any]) -> dict[str, Any]:
        return {**super().step_fields(logs), **{name: logs[name] for name in REWARDS}}

    @torch.no_grad()
    def measure(self) -> dict[str, Any] | None:
        """Return the means of loss and rewards over the held-out pairs, or None when stopped."""
        started = time.perf_counter()
        was_training = self.model.training
        self.model.eval()
        sums = dict.fromkeys(("loss", *REWARDS), 0.0)
        by_length = sorted(self.held_out, key=lambda example: example.longest)
        for first in range(0, len(by_length), EVAL_PAIRS):
            if self.job.stop.is_set():
                return None
            pairs = by_length[first : first + EVAL_PAIRS]
            batch = cast(Any, self.data_collator)(
                [
                    {
                        "prompt_ids": pair.prompt,
                        "chosen_ids": pair.chosen,
                        "rejected_ids": pair.rejected,
                    }
                    for pair in pairs
                ]
            )
            loss = cast(Any, self).compute_loss(self.model, self._prepare_inputs(batch))
            found = {name: self._metrics["eval"][name][-1] for name in REWARDS}
            for name, value in {"loss": float(loss), **found}.items():
                sums[name] = math.fsum((sums[name], value * len(pairs)))
        self._metrics["eval"].clear()
        self.model.train(was_training)
        return {
            **{name: total / len(by_length) for name, total in sums.items()},
            "n": len(by_length),
            "eval_s": time.perf_counter() - started,
        }


def _table(examples: Examples[Example]) -> Any:
    """Return the pairs that TRL draws from, as an Arrow table: Python lists take more memory."""
    corpus, end = examples.corpus, examples.corpus.offsets[len(examples)]
    # The examples to train on are the first ones of the corpus.
    ids, side = corpus.columns["ids"][:end], corpus.columns["side"][:end]
    lists = {}
    for number, name in enumerate(SIDES):
        is_of_side = side == number
        counts = np.add.reduceat(is_of_side, corpus.offsets[: len(examples)], dtype=np.int64)
        offsets = np.concatenate(([0], np.cumsum(counts)))
        lists[f"{name}_ids"] = pa.LargeListArray.from_arrays(offsets, pa.array(ids[is_of_side]))
    return pa.table(lists)
