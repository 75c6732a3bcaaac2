"""How a job is queued, apart from its options: declared here alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from ..runs.labels import Labels


@dataclass(frozen=True, kw_only=True)
class Queueing:
    """What a submission may ask for besides the options of its kind.

    Raises SpecError for a wrong name or tag.
    """

    name: str | None = None
    tags: tuple[str, ...] = ()
    front: bool = False  # of its queue
    after: str | None = None  # the job that must finish before it starts
    at: datetime | None = None  # when it is queued; at once by default
    delay_s: float | None = None  # in place of `at`: after this time, by Redis' clock
    retries: int = 0  # how often it is tried again after a failure
    timeout_s: float | None = None  # its longest running time
    needs: Mapping[str, str] = field(default_factory=dict)  # labels of the machine that runs it

    def __post_init__(self) -> None:
        _ = self.labels

    @property
    def labels(self) -> Labels:
        """The name and the tags."""
        return Labels.parse(self.name, self.tags)

    def begun_at(self, now: float) -> Queueing:
        """The same with `at` in place of `delay_s`; `now`: unix seconds by Redis' clock."""
        if self.delay_s is None:
            return self
        return replace(self, at=datetime.fromtimestamp(now + self.delay_s, UTC), delay_s=None)

    def to_json(self) -> dict[str, Any]:
        """What is stored: all but the name and the tags, which labels.json has."""
        found = asdict(self)
        for name in ("name", "tags", "delay_s"):
            del found[name]
        return {**found, "at": None if self.at is None else self.at.isoformat()}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Queueing:
        """Read what `to_json` has returned, also in an earlier version: parts may be missing."""
        at = stored.get("at")
        return cls(
            front=bool(stored.get("front")),
            after=stored.get("after"),
            at=None if at is None else datetime.fromisoformat(at),
            retries=int(stored.get("retries") or 0),
            timeout_s=stored.get("timeout_s"),
            needs=stored.get("needs") or {},
        )


AT_ONCE = Queueing()
