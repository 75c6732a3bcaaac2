"""The client: a connection with the jobs, groups, nodes and models of one home. Imports no torch.

Each part has a module, which is imported when the part is first used: a command takes as long as
its imports. What a job goes through is in the package `lifecycle`; what is told about several jobs,
in `reports`.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from .connection import Connection

if TYPE_CHECKING:
    from .groups import Groups
    from .jobs import Jobs
    from .models import Models
    from .nodes import Nodes


class Client(Connection):
    """What commands, programs and the gateway do with a home."""

    @cached_property
    def jobs(self) -> Jobs:
        from .jobs import Jobs

        return Jobs(self)

    @cached_property
    def groups(self) -> Groups:
        """Sweeps and curricula."""
        from .groups import Groups

        return Groups(self, self.jobs)

    @cached_property
    def nodes(self) -> Nodes:
        """The machines that share the Redis of this home."""
        from .nodes import Nodes

        return Nodes(self)

    @cached_property
    def models(self) -> Models:
        from .models import Models

        return Models(self)
