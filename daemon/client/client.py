"""The client: all operations on jobs. Imports no torch.

Each of its base classes has a module: `submitting`, `reading`, `steering` (cancel, kill, pause),
`resuming`, `estimating`, `labeling`, `comparison`, `digest`, `leaderboard`, `removing`, `sweeping`,
`curricula`, `grouping` and `nodes`; `connection` has their common parts.
"""

from __future__ import annotations

from .comparison import Comparing
from .digest import Digesting
from .estimating import Estimating
from .labeling import Labeling
from .leaderboard import Ranking
from .nodes import Nodes


class Client(Digesting, Estimating, Labeling, Comparing, Ranking, Nodes):
    """The jobs of one home."""
