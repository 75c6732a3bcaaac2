"""Imports all that a job needs, as a zygote does: `run_apart` forks its processes from here."""

import processes  # noqa: F401

from warmd.daemon.fork.libraries import import_libraries

import_libraries()
