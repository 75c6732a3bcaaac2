"""The GRPO kind: samples a group of completions per prompt and trains on their rewards.

`options` (no torch) -> `kind.run` -> `trainer`, which samples by `rollout`, scores by `rewards`,
and computes loss and gradients without padding (`packed_trainer`, `scoring`).
Source: Shao et al. 2024, arXiv:2402.03300; loss variants have TRL's names.
"""
