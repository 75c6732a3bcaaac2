"""Notes on jobs. Names and tags are given at submission."""

from __future__ import annotations

from ..runs import labels
from ..runs.labels import Labels
from .connection import ClientConnection


class Labeling(ClientConnection):
    """Reads and adds names, tags and notes of a job. Needs no Redis."""

    def labels(self, job_id: str) -> Labels:
        """Return name, tags and notes of a job. Raises NotFound."""
        return labels.read(self.rundir(job_id))

    def add_note(self, job_id: str, text: str) -> Labels:
        """Add a note to a job; return all labels. Raises NotFound and SpecError."""
        added = labels.add_note(self.current_rundir(job_id), text)
        if self.remote is not None:
            self.remote.publish(job_id)
        return added
