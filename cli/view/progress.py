"""The live line of a job: a progress bar, metrics and the ETA."""

from __future__ import annotations

from ...daemon.runs.estimate import Estimate
from . import render

_BAR = 20


class Progress(Estimate):
    """An estimate that can be drawn."""

    def line(self, now: float, width: int) -> str:
        """Draw the live line, with as much on it as `width` allows."""
        if self.phase not in ("starting", "running", "paused"):
            return self.phase[: width - 1]
        if self.steps_total is None or self.activity is not None:
            return self._rows_line(now, width)
        eta_s = self.eta_s(now)
        parts = [f"{self.step}/{self.steps_total}"]
        if eta_s is not None:
            parts.append(f"ETA {render.duration(eta_s)}")
            parts.append(f"done at {render.clock(now + eta_s, now=now)}")
        if self.phase != "running":
            parts.append(self.phase)
        parts += [f"{name} {render.number(value)}" for name, value in self.metrics.items()]
        if self.seconds_per_step is not None:
            parts.append(f"{render.duration(self.seconds_per_step)}/step")
        if self.micro_steps and self.micro_steps_total and self.micro_steps != self.step:
            parts.append(f"{self.micro_steps}/{self.micro_steps_total} micro-steps")
        return _fitting([_bar(self.step / self.steps_total), *parts], width)

    def _rows_line(self, now: float, width: int) -> str:
        """Without steps: the activity, its duration, and how many records are done."""
        parts = [self.activity] if self.activity else []
        if self.rows_done is not None and self.rows_total:
            parts.insert(0, _bar(self.rows_done / self.rows_total))
            parts.append(f"{self.rows_done}/{self.rows_total} {self.unit}")
        elif self.rows_done is not None:
            parts.append(f"{self.rows_done} {self.unit}")
        eta_s = None if self.activity else self.eta_s(now)
        if eta_s is not None:
            parts.append(f"ETA {render.duration(eta_s)}")
            parts.append(f"done at {render.clock(now + eta_s, now=now)}")
        if self.rows_per_s is not None and not self.activity:
            parts.append(f"{self.rows_per_s:.3g} {self.unit}/s")
        elif self.phase_began is not None:
            parts = [*(parts or [self.phase]), render.duration(max(now - self.phase_began, 0))]
        return _fitting(parts or [self.phase], width)


def _fitting(parts: list[str], width: int) -> str:
    """As many parts as there is room for."""
    line = parts[0]
    for part in parts[1:]:
        if len(line) + 2 + len(part) >= width:
            break
        line += "  " + part
    return line[: width - 1]


def _bar(share: float) -> str:
    full = round(min(share, 1.0) * _BAR)
    return "█" * full + "░" * (_BAR - full)
