"""The DPO kind: direct preference optimization, a decoder learns to prefer chosen completions.

`options` (no torch) -> `kind.run` -> `task`; `dataset` reads and tokenizes pairs.
Enters: records with chosen and rejected completions.
Leaves: events, checkpoints and the model. Source: Rafailov et al. 2023, arXiv:2305.18290.
"""
