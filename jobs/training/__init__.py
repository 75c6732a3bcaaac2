"""Parts shared by all training kinds: options, the Trainer, exact checkpoints, their comparison.

The trainer of a kind is a subclass of `trainer.JobTrainer`, which emits step events and writes
checkpoints. Resume is bit-exact: a checkpoint holds everything that the next step depends on. The
package knows no kind.
"""
