"""The client: everything that users of the queue do with jobs. Imports no torch.

Each of its base classes has a module: `submitting`, `reading`, `steering` (cancel, kill, pause),
`resuming`, `labeling`, `comparison`, `digest`, `removing` and `sweeping`; `connection` has what
they share.
"""

from __future__ import annotations

from .comparison import Comparing
from .labeling import Labeling
from .sweeping import Sweeping


class Client(Sweeping, Labeling, Comparing):
    """The jobs of one home."""
