"""The GRPO kind: samples a group of completions per prompt and trains on their rewards.

`options` (no torch) -> `kind.run` -> `step`: `rollouts` returns `trajectories`, sampled by
`sampler` (`engine.rollouts`) and judged; a `batch` of them, with advantages, gives the loss.
Source: Shao et al. 2024, arXiv:2402.03300; loss variants have TRL's names.
"""
