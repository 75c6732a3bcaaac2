"""The options of the GRPO loss, by TRL's names, and their checks. Imports no torch.

The formulas are TRL's (`GRPOTrainer._compute_loss`); `loss_arguments` are the fields of its config.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import SpecError
from ..relations import ABOVE_0, GIVEN, Relation, goes_with, is_in, never_with
from ..spec import Spec, option
from ..training.options import MOST_STEPS

CLIPPED = ("dapo", "bnpo", "grpo", "dr_grpo", "luspo")  # losses that clip the probability ratio
LOSSES = (*CLIPPED[:4], "cispo", "sapo", "luspo", "vespo")
_SUMS = ("bnpo", "dr_grpo", "dapo", "cispo")  # losses that add up the tokens of all completions
SUM_FIRST, NORMALIZE_FIRST = "sum_then_normalize", "normalize_then_sum"


@dataclass(frozen=True, kw_only=True)
class LossSpec(Spec):
    """Options for computing advantages from rewards, and the loss from advantages."""

    relations: ClassVar[tuple[Relation, ...]] = (
        goes_with("delta", loss_type=CLIPPED),
        goes_with("sapo_temperature_pos", "sapo_temperature_neg", loss_type="sapo"),
        goes_with(
            *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
            loss_type="vespo",
        ),
        goes_with("ref_model_sync_steps", "use_bias_correction_kl", beta=ABOVE_0),
        goes_with("ref_model_mixup_alpha", ref_model_sync_steps=GIVEN),
        goes_with(
            *("entropy_coef_delta", "entropy_coef_min", "entropy_coef_max"), entropy_target=GIVEN
        ),
        never_with(
            "scale_rewards",
            when=is_in("batch", "none"),
            multi_objective_aggregation=NORMALIZE_FIRST,
        ),
        never_with("importance_sampling_level", when=is_in("sequence"), loss_type="vespo"),
    )

    scale_rewards: str = option(
        "group",
        "normalization of advantages: by the standard deviation of the group, of the batch, or "
        "none",
        group="reward",
        choices=("group", "batch", "none"),
    )
    multi_objective_aggregation: str = option(
        SUM_FIRST,
        "order in which several rewards are summed and normalized (normalize_then_sum: GDPO)",
        group="reward",
        choices=(SUM_FIRST, NORMALIZE_FIRST),
    )

    loss_type: str = option(
        "dapo", "loss formula, by its name in TRL", group="loss", choices=LOSSES
    )
    beta: float = option(
        0.0,
        "KL coefficient against the reference model, the initial weights (0: no KL term)",
        group="loss",
        minimum=0,
        maximum=1000,
    )
    epsilon: float = option(
        0.2, "clip range of the probability ratio", group="loss", above=0, maximum=1000
    )
    epsilon_high: float | None = option(
        None,
        "upper clip range of the probability ratio (DAPO: 0.28)",
        group="loss",
        default_text="epsilon",
        above=0,
        maximum=1000,
    )
    delta: float | None = option(
        None,
        "upper limit of the probability ratio for negative advantages as well (two-sided "
        "clipping, INTELLECT-2)",
        group="loss",
        default_text="no limit",
        above=0,
        maximum=1000,
    )
    importance_sampling_level: str = option(
        "token",
        "level of the probability ratio: one per token, or one per sequence (GSPO)",
        group="loss",
        choices=("token", "sequence"),
    )
    mask_truncated_completions: bool = option(
        False,
        "no loss on truncated completions, those that reached max_completion_length",
        group="loss",
    )
    top_entropy_quantile: float = option(
        1.0,
        "fraction of the tokens, those with the highest entropy, on which the loss is computed",
        group="loss",
        above=0,
        maximum=1,
    )
    off_policy_mask_threshold: float | None = option(
        None,
        "KL from the sampling policy, in nats per token, above which sequences of negative "
        "advantage are excluded from the loss (DeepSeek-V3.2)",
        group="loss",
        default_text="no limit",
        above=0,
        maximum=1000,
    )
    entropy_coef: float = option(
        0.0,
        "entropy bonus coefficient (0: none); with entropy_target, its initial value",
        group="loss",
        minimum=-1000,
        maximum=1000,
    )
    entropy_target: float | None = option(
        None,
        "target entropy in nats per token: below it, the entropy bonus applies and its "
        "coefficient grows; above it, the coefficient shrinks",
        group="loss",
        default_text="constant coefficient",
        minimum=0,
        maximum=1000,
    )
    entropy_coef_delta: float = option(
        0.005,
        "change of the entropy coefficient per step",
        group="loss",
        above=0,
        maximum=1000,
    )
    entropy_coef_min: float = option(
        0.0,
        "minimum of the entropy coefficient",
        group="loss",
        minimum=-1000,
        maximum=1000,
    )
    entropy_coef_max: float = option(
        1.0,
        "maximum of the entropy coefficient",
        group="loss",
        minimum=-1000,
        maximum=1000,
    )
    ref_model_sync_steps: int | None = option(
        None,
        "steps between updates of the reference model towards the policy",
        group="loss",
        default_text="never",
        minimum=1,
        maximum=MOST_STEPS,
    )
    ref_model_mixup_alpha: float = option(
        0.6,
        "weight of the policy in an update of the reference model",
        group="loss",
        above=0,
        maximum=1,
    )
    use_bias_correction_kl: bool = option(
        True, "KL term multiplied by the probability ratio", group="loss"
    )
    sapo_temperature_pos: float = option(
        1.0,
        "temperature of tokens with positive advantage",
        group="loss",
        above=0,
        maximum=1000,
    )
    sapo_temperature_neg: float = option(
        1.05,
        "temperature of the other tokens",
        group="loss",
        above=0,
        maximum=1000,
    )
    vespo_k_pos: float = option(
        2.0,
        "exponent of the sequence weight for advantages of at least 0",
        group="loss",
        minimum=0,
        maximum=1000,
    )
    vespo_lambda_pos: float = option(
        3.0,
        "decay of the sequence weight for advantages of at least 0",
        group="loss",
        minimum=0,
        maximum=1000,
    )
    vespo_k_neg: float = option(
        3.0,
        "exponent of the sequence weight for negative advantages",
        group="loss",
        minimum=0,
        maximum=1000,
    )
    vespo_lambda_neg: float = option(
        2.0,
        "decay of the sequence weight for negative advantages",
        group="loss",
        minimum=0,
        maximum=1000,
    )

    def check(self) -> None:
        super().check()
        low, high = self.entropy_coef_min, self.entropy_coef_max
        if low > high:
            raise SpecError(
                "entropy_coef_min", f"must be at most {high:g} (entropy_coef_max), got {low:g}"
            )

    def loss_warnings(self) -> list[str]:
        """Return TRL's warnings of combinations that no paper uses."""
        level, loss = self.importance_sampling_level, self.loss_type
        if level == "sequence" and loss in _SUMS:
            return [
                f"importance_sampling_level: with sequence, loss_type {loss} weights a completion "
                "by its length; GSPO has loss_type grpo"
            ]
        if level == "token" and loss == "luspo":
            return ["importance_sampling_level: LUSPO has sequence with loss_type luspo, got token"]
        return []

    def loss_arguments(self) -> dict[str, Any]:
        """Return the fields of TRL's GRPOConfig."""
        same = {name: getattr(self, name) for name in LossSpec.options()}
        sync_steps, target = same.pop("ref_model_sync_steps"), same.pop("entropy_target")
        if sync_steps is not None:
            same |= {"sync_ref_model": True, "ref_model_sync_steps": sync_steps}
        if target is not None:
            same |= {"use_adaptive_entropy": True, "entropy_target": target}
        return same
