"""The GRPO kind: samples a group of completions per prompt and trains on their rewards.

`options` (no torch) -> `kind.run` -> `task`: in a step, `rollouts` returns `trajectories`, sampled
by `sampler` (`engine.rollouts`) and scored by `judging`; `advantages` and a `batch` give the loss.
Source: Shao et al. 2024, arXiv:2402.03300; loss variants have TRL's names.
"""
