"""Imports all that a job needs, as a zygote does: the processes of `run_apart` are forked from it."""

import processes  # noqa: F401

from warmd.daemon.fork.libraries import import_libraries

import_libraries()
