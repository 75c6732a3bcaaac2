"""The GRPO kind: samples a group of completions per prompt and trains on their rewards.

`options` (no torch) -> `kind.run` -> `task`: a step samples by `sampler` (`rollout`), scores by
`judging`, and computes `advantages` and the loss of a `batch` (`scoring`, `losses.grpo`).
Source: Shao et al. 2024, arXiv:2402.03300; loss variants have TRL's names.
"""
