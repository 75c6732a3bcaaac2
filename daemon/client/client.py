"""The client: all operations on jobs. Imports no torch.

Each of its base classes has a module: `submitting`, `reading`, `estimating`, `comparison`,
`digest`, `leaderboard`, `sweeping`, `curricula`, `grouping` (cancel, pause, resume, remove) and
`nodes`; `connection` has their common parts. What a job goes through is in the package `lifecycle`.
"""

from __future__ import annotations

from .comparison import Comparing
from .digest import Digesting
from .estimating import Estimating
from .leaderboard import Ranking
from .nodes import Nodes


class Client(Digesting, Estimating, Comparing, Ranking, Nodes):
    """The jobs of one home."""
