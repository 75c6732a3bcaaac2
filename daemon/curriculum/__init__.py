"""Curricula: trainings in stages, each from the weights of the one before, with a gate in between.

`plan` reads the stages of a job file, `folder` holds the state on disk, `stages` runs the jobs and
decides at the gates. `__main__` is the process of all groups: curricula and sweeps.

Terms: a stage has attempts (jobs); a gate compares the model at the end of an attempt with the one
at its beginning, by evaluations (jobs of kind eval) of the same questions.
"""
