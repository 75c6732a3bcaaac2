"""Checkpoints of a training, written concurrently with it. Imports torch."""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ..context import RULES, Context, Save, step_of
from ..errors import JobFailed
from ..files.atomic import whole_folder
from .live_tensors import LiveTensors
from .options import TrainingSpec
from .snapshot import Snapshot, TokenizerFiles, link_model, write_model

PATIENCE_S = 1.0  # how long a step waits for a save that is in flight when the next is due


@dataclass(frozen=True)
class Content:
    """What is saved at a step."""

    step: int
    snapshot: Snapshot
    metrics: Mapping[str, Any]  # of the step, by the names of event fields
    about: Mapping[str, Any]  # further entries of the manifest


class Saver:
    """Decides when to save, saves in the background and reports how it went.

    `take` returns the content of the current step; it is called when a save begins.
    """

    def __init__(self, ctx: Context, spec: TrainingSpec, take: Callable[[], Content]) -> None:
        self.latest: Path | None = None  # the checkpoint of the latest save that succeeded
        self.seconds: float | None = None  # the duration of that save, if in this execution
        self._ctx = ctx
        self._spec = spec
        self._take = take
        self._in_flight: Save | None = None
        self._was_due = False  # while another was in flight
        self._must_wait = False  # whether training waits for the next save to succeed
        self._began = time.monotonic()  # of the latest save
        self._live: LiveTensors | None = None  # of the save in flight
        self._lacked_space = False  # whether the latest save failed on a full disk
        self._has_warned = False  # whether a checkpoint lacked the metric of keep_best
        self._blocked_s = 0.0  # how long training was blocked by the save in flight

    def is_due(self, step: int) -> bool:
        """Whether to save at the end of this step, by `save_every`; rank 0 saves for all."""
        if self._ctx.ranks.rank > 0:
            return False
        interval = self._spec.save_interval
        return (
            self._was_due
            or (interval.steps is not None and step % interval.steps == 0)
            or (interval.seconds is not None and time.monotonic() - self._began >= interval.seconds)
        )

    @property
    def waits(self) -> bool:
        """Whether a save was due while another was in flight, and can begin now."""
        return self._was_due and self._in_flight is None

    def save(self, step: int, *, is_last: bool, is_stopped: bool) -> None:
        """Begin a save of this step; where the training is stopped, wait until it is durable.

        `is_last`: no step follows, so that the save of an earlier step is waited for.
        """
        self.settle(patience_s=None if is_last or is_stopped else PATIENCE_S)
        if self._in_flight is not None:
            # The disk is slower than the interval. Two concurrent saves would slow each other down:
            # this one starts at the first step that finds the earlier one done.
            self._was_due = self._in_flight.step != step
        elif not self.is_saved(step):
            self._begin()
        if self._must_wait and not is_stopped:
            self._ctx.patiently(self._save_now, self._ctx.run_dir)
            self._must_wait = False
            self.settle(patience_s=None)
        if is_stopped:
            self.settle(patience_s=None)

    def is_saved(self, step: int) -> bool:
        """Whether the latest checkpoint is of this step."""
        return self.latest is not None and step_of(self.latest) == step

    def release_weights(self) -> None:
        """Wait until the optimizer may change the tensors of the save in progress."""
        if self._live is None:
            return
        began = time.perf_counter()
        # A finished save needs no copies, even if it failed before it read anything.
        if self._in_flight is not None and self._in_flight.outcome() is None:
            self._live.release()
        self._live = None
        self._blocked_s += time.perf_counter() - began

    def settle(self, *, patience_s: float | None = 0) -> None:
        """Report the save in progress if it ends within `patience_s` (None: wait for it).

        Raises JobFailed when it failed and `on_save_error` is stop. On a full disk the next step
        is saved instead, and training waits for that save to succeed.
        """
        failed = self.report(patience_s=patience_s)
        if failed is None or self._spec.on_save_error != "stop":
            return
        if not self._lacked_space:
            raise JobFailed(failed)
        self._was_due = self._must_wait = True

    def report(self, *, patience_s: float | None) -> str | None:
        """Like `settle`, but return the error message of a failed save; otherwise None."""
        if self._in_flight is None:
            return None
        began = time.perf_counter()
        saved = self._in_flight.outcome(patience_s=patience_s)
        if saved is None:
            return None
        step, self._in_flight = self._in_flight.step, None
        self._lacked_space = saved.lacked_space
        self._blocked_s += time.perf_counter() - began
        if saved.error is not None:
            self._ctx.emit("save_failed", step=step, error=saved.error, seconds=saved.seconds)
            return f"step {step}: no checkpoint could be written: {saved.error}"
        self.latest, self.seconds = saved.path, saved.seconds
        self._ctx.emit(
            "checkpoint",
            step=step,
            path=saved.path.name,
            bytes=saved.size_bytes,
            seconds=saved.seconds,
            blocked_s=self._blocked_s,
        )
        return None

    def save_model(self, model: Any, tokenizer: TokenizerFiles, folder: Path, step: int) -> None:
        """Write the trained model to `folder`, atomically; hard links to the last checkpoint."""
        if self._ctx.ranks.rank > 0:
            return
        self.settle(patience_s=None)

        def write() -> None:
            with whole_folder(folder) as staging:
                if not (self.is_saved(step) and link_model(cast(Path, self.latest), staging)):
                    write_model(model, staging)
                    tokenizer.write(staging)

        self._ctx.patiently(write, folder)

    def _begin(self) -> None:
        began = time.perf_counter()
        content = self._take()
        metrics = _numbers(content.metrics)
        self._warn_if_metric_missing(content.step, metrics)
        about = {
            "metrics": metrics,
            "options": self._spec.to_json(),
            "rules": RULES,
            **content.about,
        }
        self._live = content.snapshot.live
        self._in_flight = self._ctx.checkpoints.save(
            content.step, content.snapshot.prepare, about=about
        )
        self._was_due = False
        self._began = time.monotonic()
        self._blocked_s = time.perf_counter() - began

    def _save_now(self) -> None:
        """Complete a save of this step. Raises OSError if the disk is full."""
        if self._in_flight is None:
            self._begin()
        saved = cast(Save, self._in_flight).outcome(patience_s=None)
        if saved is not None and saved.lacked_space:
            self._in_flight = None
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(saved.path))

    def _warn_if_metric_missing(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn once that a checkpoint lacks the metric of keep_best and cannot be the best."""
        name = self._spec.keep_best
        if name is None or name in metrics or self._has_warned:
            return
        self._has_warned = True
        self._ctx.emit(
            "warning",
            step=step,
            message=f"keep_best: step {step} has no {name} to judge its checkpoint by, but "
            f"{', '.join(sorted(metrics))}",
        )


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
