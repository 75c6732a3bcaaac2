"""How a job is queued, apart from its options: declared here alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from ...jobs.durations import parse_duration
from ...jobs.errors import SpecError
from ...jobs.files import records
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
        """Read what `to_json` has returned, also in an earlier version: parts may be missing.

        Raises ValueError.
        """
        # Earlier versions wrote null for some defaults, and what a Python caller gave: 1 for True.
        found = {k: v for k, v in stored.items() if v is not None}
        if isinstance(front := found.get("front"), int | float):
            found["front"] = bool(front)
        if isinstance(retries := found.get("retries"), bool | float):
            found["retries"] = int(retries)
        if isinstance(timeout := found.get("timeout_s"), str):
            found["timeout_s"] = _seconds(timeout)
        return records.convert(found, cls)


def _seconds(text: str) -> float:
    """Read `30` or `1h`, as RQ does. Raises ValueError."""
    try:
        return float(text) if text.isdigit() else parse_duration("timeout_s", text)
    except SpecError as error:
        raise ValueError(str(error)) from None


AT_ONCE = Queueing()
