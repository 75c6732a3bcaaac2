"""The client: everything that users of the queue do with jobs. Imports no torch.

Each of its base classes has a module: `submitting`, `reading`, `steering` (cancel, kill, pause),
`resuming` and `removing`; `connection` has what they share.
"""

from __future__ import annotations

from .reading import Reading
from .removing import Removing
from .resuming import Resuming
from .submitting import Submitting


class Client(Submitting, Reading, Resuming, Removing):
    """The jobs of one home."""
