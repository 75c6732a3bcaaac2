"""Gathering nodes for a job of several nodes, as the worker that has popped it.

The job has not begun: it is queued, and popped for this worker. It begins when all nodes have come;
if they do not come in time, they are released, and the job is set aside.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from ...configs.labels import Labels, num_nodes
from ...jobs.errors import WarmdError
from ..lifecycle.follow import Publisher
from ..queue import keys
from ..queue.gangs import Gangs
from ..queue.jobs import JobStore
from ..queue.stream import StreamWriter
from ..runs.events import EventLog
from ..runs.rundir import RunDir

log = logging.getLogger(__name__)

_LOG_LOCK_TIMEOUT_S = 1.0  # for another process to finish writing an event


@dataclass
class Gathering:
    """A popped job for which nodes are gathered."""

    popped: bytes
    token: str
    needs: Labels  # of the job, and the software of this node
    deadline: float
    num_joined: int = 0  # nodes, without this one; -1: the job does not wait here any more

    @property
    def job_id(self) -> str:
        return keys.text(self.popped)


class Gatherer:
    """Gathers nodes for one job at a time."""

    def __init__(
        self,
        store: JobStore,
        worker: str,
        node: str,
        address: str | None,
        software: Labels,
        *,
        wait_s: float,
    ) -> None:
        """`node`: the name of this node. `address`: where its ranks listen; None: it has none.

        `software`: the label that the other nodes must have too. `wait_s`: for nodes to come.
        """
        self.gathering: Gathering | None = None
        self._store = store
        self._gangs = Gangs(store.connection)
        self._worker = worker
        self._node = node
        self._address = address
        self._software = software
        self._wait_s = wait_s
        self._warned: dict[str, int] = {}  # nodes that came, by job, as of the latest event

    def may_gather(self, needs: Labels) -> bool:
        """Whether a job with these needs can be gathered for now."""
        return self._address is not None and self._gangs.may_gather({**needs, **self._software})

    def gather(self, popped: bytes, needs: Labels) -> bool:
        """Begin to gather nodes for a job; False while another job gathers."""
        if self.gathering is not None:
            return False
        needs = {**needs, **self._software}
        token = self._gangs.open(keys.text(popped), self._worker, self._node, needs)
        if token is None:
            return False
        deadline = time.monotonic() + self._wait_s
        self.gathering = Gathering(popped, token, needs, deadline)
        log.info("%s: %s: gathers %d nodes", keys.text(popped), self._worker, num_nodes(needs))
        return True

    def gathered(self) -> tuple[Gathering, bool] | None:
        """Return the gathering if it is over, and whether all nodes came."""
        now, gathering = time.monotonic(), self.gathering
        if gathering is None:
            return None
        found = self._gangs.close(gathering.job_id, gathering.token)
        gathering.num_joined = found
        if found == num_nodes(gathering.needs) - 1:
            self.gathering = None
            return gathering, True
        if found >= 0 and now < gathering.deadline:
            return None
        self.gathering = None
        if found < 0:
            self._gangs.dissolve(gathering.job_id, gathering.token)
        else:
            self._gangs.give_up(
                gathering.job_id, gathering.token, gathering.needs, pause_s=self._wait_s
            )
        return gathering, False

    def warn(self, gathering: Gathering, runs: Path, writer: StreamWriter) -> None:
        """Log an event about the nodes that are missing, unless the latest one was the same."""
        came, wanted = gathering.num_joined + 1, num_nodes(gathering.needs)
        if self._warned.get(gathering.job_id) == came:
            return
        self._warned[gathering.job_id] = came
        try:
            path = RunDir.open(runs, gathering.job_id).events
            with EventLog(
                path,
                execution=self._store.num_executions(gathering.job_id),
                clock_offset_s=self._store.shared_clock.latest_offset_s,
                publish=Publisher(writer, gathering.job_id, path).publish,
                patience_s=_LOG_LOCK_TIMEOUT_S,
            ) as events:
                events.emit(
                    "warning",
                    message=f"nodes: {came} of {wanted} were free within {self._wait_s:g} s: the "
                    "job waits, and others may pass",
                )
        except (OSError, WarmdError) as error:
            log.warning("%s: event not written: %s", gathering.job_id, error)

    def drop(self) -> None:
        """Release the nodes that came: the job goes back to the queue."""
        gathering, self.gathering = self.gathering, None
        if gathering is not None:
            self._gangs.dissolve(gathering.job_id, gathering.token)

    def dissolve(self, gathering: Gathering) -> None:
        """Release all nodes: the job has not begun."""
        self._gangs.dissolve(gathering.job_id, gathering.token)
