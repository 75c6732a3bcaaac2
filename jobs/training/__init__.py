"""Shared by all training kinds: options, the Trainer, exact checkpoints, evaluations.

The trainer of a kind is a subclass of `trainer.JobTrainer`. Enters: a model, its data and a
Context. Leaves: step events, checkpoints and the final model. Resume is bit-exact: a checkpoint
holds everything that the next step depends on. Knows no kind.
"""
