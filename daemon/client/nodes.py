"""The nodes that share a Redis: their list, and draining one."""

from __future__ import annotations

from collections.abc import Mapping

from ...configs.labels import of_node, unmet
from ...configs.queues import QUEUES
from ..queue.gangs import Gangs
from ..queue.nodes import DRAINING, SILENT, Node, NodeRegistry
from .connection import Connection


class Nodes:
    """The nodes of a client's Redis. The methods raise what `Connection.asking` does."""

    def __init__(self, client: Connection) -> None:
        self._client = client

    def all(self) -> list[Node]:
        """Return all nodes by name, without those that have been silent for a day."""
        return self._client.asking(lambda: NodeRegistry(self._client.connection).all())

    def drain(self, text: str) -> Node:
        """Ask the node of a name, or of a unique prefix of one, to leave; return it.

        It takes no more jobs, and leaves when the running ones have ended. Raises NotFound and
        SpecError.
        """

        def drain() -> Node:
            registry = NodeRegistry(self._client.connection)
            node = registry.find(text)
            registry.request_drain(node.name)
            return node

        return self._client.asking(drain)

    def serving(self, queue: str) -> list[Node]:
        """Return the nodes that take jobs from a queue now."""
        away = (SILENT, DRAINING)
        return [n for n in self.all() if queue in n.queues and n.state not in away]

    def unmet_needs(self, needs: Mapping[str, str]) -> dict[str, str]:
        """Return the needs that the best of the present nodes does not meet; empty if one does."""
        labels = [node.labels for queue in QUEUES for node in self.serving(queue)]
        own_needs = of_node(needs)
        return min((unmet(own_needs, own) for own in labels), key=len, default=own_needs)

    def num_suitable(self, needs: Mapping[str, str]) -> int:
        """Return how many nodes may take part in a job of several nodes with these needs."""
        gangs = Gangs(self._client.connection)
        return self._client.asking(lambda: gangs.num_suitable(needs))
