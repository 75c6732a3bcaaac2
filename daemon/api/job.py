"""One job as a Python object, with a view for notebooks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from ...jobs.errors import JobFailed
from ...jobs.ids import kind_of
from ..lifecycle.statuses import ENDED, shown
from ..reports.columns import columns_of
from ..runs import completions, events
from ..runs.completions import Wanted
from ..runs.estimate import Estimate
from .html import job_html
from .progress import show_progress
from .steered import Steered


class Job(Steered):
    """A job of a session."""

    @property
    def kind(self) -> str:
        """The kind of the job: `grpo`, `sft`, …"""
        return kind_of(self.id)

    def info(self) -> dict[str, Any]:
        """Return what `warmd show --json` prints."""
        return self._client.jobs.get(self.id)

    def events(self, *, follow: bool = True, after_seq: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the events of the job until it ends, from the first one on.

        `follow=False`: those so far. `after_seq`: only events with a higher `seq`.
        """
        if not follow:
            yield from events.read(self._client.rundir(self.id).events, after=after_seq)
            return
        for event in self._client.jobs.follow(self.id, after_seq=after_seq):
            if event is not None:
                yield event

    def metrics(self) -> dict[str, list[Any]]:
        """Return the metrics of the steps so far as columns of equal length, one row per step.

        Names are those of the events; metrics of evaluations begin with `eval_`. A missing value
        is None. `pandas.DataFrame(job.metrics())` and `polars.DataFrame(job.metrics())` take it.
        """
        return columns_of(self.events(follow=False))

    def completions(
        self,
        *,
        step: int | None = None,
        row: int | None = None,
        text: str | None = None,
        worst: int | None = None,
        best: int | None = None,
    ) -> list[dict[str, Any]]:
        """Return completions that the job was trained on, as `warmd samples --json` prints them.

        `step`: of this step (default: the latest, or all with `row` or `text`). `row`: of the
        prompt in this row of the data. `text`: with this text. `worst`, `best`: so many by reward.
        """
        wanted = Wanted(step=step, row=row, text=text, worst=worst, best=best)
        return wanted.select(completions.read(self._client.rundir(self.id)))

    def wait(self, *, timeout_s: float | None = None, progress: bool | None = None) -> str:
        """Wait until the job has ended; return its status.

        `progress`: whether to show a progress bar (default: in notebooks). Raises TimeoutError;
        the job continues then.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with show_progress(self, progress) as bar:
            for event in self._client.jobs.follow(self.id):
                bar.update(event)
                if deadline is not None and time.monotonic() > deadline:
                    if self.info()["status"] in ENDED:
                        break
                    raise TimeoutError(f"{self.id} has not ended within {timeout_s:g} s")
        return self.status

    def result(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait until the job has ended and return its result.

        Raises JobFailed, also for a job that was stopped or canceled, and TimeoutError.
        """
        self.wait(timeout_s=timeout_s)
        found = self._client.jobs.result(self.id)
        if found is None:
            info = self.info()
            reason = f": {info['error']}" if info["error"] else ""
            raise JobFailed(f"{self.id} {shown(info)}{reason}")
        return found

    def resume(self, **changes: Any) -> str:
        """Queue an ended job again from its latest checkpoint, with `changes` of options."""
        return self._client.jobs.resume(self.id, changes=changes)

    def now(self) -> float:
        """The time in unix seconds by the clock of the job's events, which is that of Redis."""
        return self._client.now()

    def note(self, text: str) -> None:
        """Add a note."""
        self._client.jobs.add_note(self.id, text)

    def _repr_html_(self) -> str:
        progress = Estimate()
        for event in self.events(follow=False):
            progress.update(event)
        return job_html(self.info(), progress, self.now())
