"""The DPO kind: direct preference optimization, a decoder learns to prefer chosen completions.

`options` (no torch) -> `kind.run` -> `trainer`; `dataset` reads pairs and turns them into tokens,
`packed_trainer` computes TRL's losses without padding.
"""
