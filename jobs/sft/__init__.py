"""The SFT kind: supervised fine-tuning, a decoder learns to continue rows as they stand in a file.

`options` (no torch) -> `kind.run` -> `trainer`; `dataset` reads rows and turns them into tokens,
`packed_trainer` computes TRL's loss without padding.
"""
