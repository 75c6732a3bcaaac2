"""Experiment trackers (`report_to`): tensorboard, Weights & Biases, trackio, mlflow.

A run has the name of the job, and a resumed job continues it. A failing tracker causes a warning
event and never ends the job.

The Trainer of transformers leaves the end of a Weights & Biases run to the exit of the interpreter.
A work horse has no such exit: it ends by os._exit, after killing the processes of the job. The
process that writes and uploads the run would be killed, and the run would be lost.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, Self

from ..context import Context

WANDB = "wandb"

log = logging.getLogger(__name__)


class Writer(Protocol):
    """The run of a training in one tracker."""

    def log(self, step: int, metrics: Mapping[str, float], /) -> None:
        """Record the metrics of a step."""

    def end(self) -> None:
        """Send the pending metrics, and end the run."""


class _TensorBoard:
    def __init__(self, ctx: Context, options: Mapping[str, Any]) -> None:
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        folder = os.environ.get("TENSORBOARD_LOGGING_DIR")
        place = Path(folder).expanduser() if folder else ctx.run_dir / "tensorboard"
        self._writer = writer(log_dir=str(place))
        self._writer.add_text("options", str(dict(options)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def end(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, ctx: Context, options: Mapping[str, Any]) -> None:
        wandb = importlib.import_module(WANDB)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "huggingface"),
            name=ctx.job_id,
            id=ctx.job_id,
            resume="allow",
            config=dict(options),
        )
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP, step_sync=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, _STEP: step})

    def end(self) -> None:
        self._run.finish()


class _Trackio:
    def __init__(self, ctx: Context, options: Mapping[str, Any]) -> None:
        self._trackio = importlib.import_module("trackio")
        self._trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "huggingface"),
            name=ctx.job_id,
            resume="allow",
            config=dict(options),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._trackio.log({**metrics, _STEP: step})

    def end(self) -> None:
        self._trackio.finish()


class _Mlflow:
    def __init__(self, ctx: Context, options: Mapping[str, Any]) -> None:
        self._mlflow = importlib.import_module("mlflow")
        found = self._mlflow.search_runs(
            filter_string=f"tags.job = '{ctx.job_id}'", output_format="list", max_results=1
        )
        if found:
            self._mlflow.start_run(run_id=found[0].info.run_id)
            return
        self._mlflow.start_run(run_name=ctx.job_id, tags={"job": ctx.job_id})
        self._mlflow.log_params(dict(options))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step)

    def end(self) -> None:
        self._mlflow.end_run()


_STEP = "train/global_step"
_WRITERS: Mapping[str, Callable[[Context, Mapping[str, Any]], Writer]] = {
    "tensorboard": _TensorBoard,
    WANDB: _Wandb,
    "trackio": _Trackio,
    "mlflow": _Mlflow,
}


class Trackers:
    """The runs of a training in its trackers; a context manager that ends them."""

    def __init__(self, names: Collection[str], ctx: Context, options: Mapping[str, Any]) -> None:
        self._ctx = ctx
        self._writers: dict[str, Writer] = {}
        for name in names:
            if name == "none" or ctx.ranks.rank > 0:
                continue
            with self._warning_of(name, "not started"):
                self._writers[name] = _WRITERS[name](ctx, options)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of a step, as `train/NAME`."""
        found = {
            f"train/{name}": float(value)
            for name, value in metrics.items()
            if isinstance(value, int | float)
        }
        for name, writer in list(self._writers.items()):
            with self._warning_of(name, "not continued"):
                writer.log(step, found)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for name, writer in list(self._writers.items()):
            with self._warning_of(name, "not ended"):
                writer.end()

    @contextmanager
    def _warning_of(self, name: str, what: str) -> Iterator[None]:
        """Turn an error of a tracker into a warning; the tracker gets nothing more."""
        try:
            yield
        except Exception as error:  # network and services raise dozens of types
            self._writers.pop(name, None)
            log.warning("report_to: the run of %s could be %s", name, what, exc_info=True)
            reason = str(error).partition("\n")[0] or type(error).__name__
            self._ctx.emit("warning", message=f"report_to: {name}: its run is {what}: {reason}")
