"""What every training kind shares: options, the Trainer, exact checkpoints, their comparison.

A kind's trainer enters as a subclass of `trainer.JobTrainer`; step events and checkpoints leave.
Resume is exact to the bit: a checkpoint holds all that the next step depends on. Knows no kind.
"""
