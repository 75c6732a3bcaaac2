"""The live line of a job: how far it is, with a bar and an ETA."""

from __future__ import annotations

from ...daemon.runs.estimate import Estimate
from . import render

_BAR = 20


class Progress(Estimate):
    """An estimate that can be drawn."""

    def line(self, now: float, width: int) -> str:
        """Draw the live line, with as much on it as `width` allows."""
        if self.steps_total is None or self.phase not in ("starting", "running", "paused"):
            return self.phase[: width - 1]
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
        line = _bar(self.step / self.steps_total)
        for part in parts:
            if len(line) + 2 + len(part) >= width:
                break
            line += "  " + part
        return line[: width - 1]


def _bar(share: float) -> str:
    full = round(min(share, 1.0) * _BAR)
    return "█" * full + "░" * (_BAR - full)
