"""Shared by all training kinds: options, the loop, exact checkpoints, evaluations.

A kind is a task of `loop.Training`: what it computes in a step. Enters: a model, its data and a
Context. Leaves: step events, checkpoints and the final model. Resume is bit-exact: a checkpoint
holds everything that the next step depends on. Knows no kind.
"""
