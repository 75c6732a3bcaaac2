"""Losses: pure functions over tensors, each equal to TRL's of the same name.

- `dpo`: preferences, over pairs of completions

Enter: log-probabilities; leaves: a differentiable loss. Imports torch and the standard library
only.
"""
