"""The client: everything that users of the queue do with jobs. Imports no torch.

Each of its base classes has a module: `submitting`, `reading`, `steering` (cancel, kill, pause),
`resuming`, `estimating`, `labeling`, `comparison`, `digest`, `leaderboard`, `removing` and `nodes`;
`connection` has what they share.
"""

from __future__ import annotations

from .comparison import Comparing
from .digest import Digesting
from .estimating import Estimating
from .labeling import Labeling
from .leaderboard import Ranking
from .nodes import Nodes
from .removing import Removing
from .resuming import Resuming
from .submitting import Submitting


class Client(
    Submitting, Estimating, Digesting, Resuming, Labeling, Comparing, Ranking, Removing, Nodes
):
    """The jobs of one home."""
