"""Groups of jobs: sweeps and curricula, each with one id, a plan and a state on disk.

`folder` is what both have on disk; `sweep` and `curriculum` are their plans and states. `grid` and
`ranges` read the options of a sweep, `stage_options` those of a curriculum. `driver` does what is
due: `members` submits jobs, `halving`, `search` and `stages` decide what follows. `actions` are for
a group as a whole. `__main__` is the process that drives all groups of a home, so that no client
needs to stay connected.

Terms: a sweep has points (combinations of values of its options), a point has members (jobs, one
per seed), and a rung is a step at which the points are compared. A curriculum has stages, a stage
has attempts (jobs); a gate compares the model at the end of an attempt with the one at its
beginning, by evaluations (jobs of kind eval) of the same questions.
"""
