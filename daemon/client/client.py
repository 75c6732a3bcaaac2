"""The client: a connection with the jobs, groups and nodes of one home. Imports no torch.

The base classes have a module each: `submitting`, `reader`, `sweeping`, `curricula` and `grouping`
(cancel, pause, resume, remove); `connection` has their common parts. What a job goes through is in
the package `lifecycle`; what is told about several jobs, in `reports`.
"""

from __future__ import annotations

from functools import cached_property

from .grouping import Grouping
from .nodes import Nodes


class Client(Grouping):
    """The jobs of one home."""

    @cached_property
    def nodes(self) -> Nodes:
        """The machines that share the Redis of this home."""
        return Nodes(self)
